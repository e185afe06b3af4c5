//! A clone: its VMM, and connections to its interpreter.

use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::net::UnixStream,
    path::PathBuf,
    time::{Duration, Instant},
};

use envd::{ENVD_PORT, EnvdClient, ExecRequest, InitRequest};
use model::{RestoreSpec, WorkingSetPrefault};
use serde_json::{Value, json};
use vmm_control::{VmProcess, fresh_identity};

const PORT: u16 = 49_999;
/// Time limit of a single response, with many guests running.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// A clone, killed on drop.
pub(crate) struct Clone {
    vm: VmProcess,
    dir: tempfile::TempDir,
}

/// The path in a variable. Panics with a hint if it is not set.
fn variable(name: &str) -> PathBuf {
    let value = std::env::var_os(name);
    PathBuf::from(value.unwrap_or_else(|| {
        panic!(
            "{name} is not set. `cargo xtask test --tier interpreter` prepares what these tests need and sets it; \
             by hand: CUBE_ARTIFACTS=$PWD/target/cube CUBE_BIN=$PWD/target/cube/bin, after \
             `cargo xtask template code-interpreter`"
        )
    }))
}

/// The path of an artefact, given relative to the directory of artefacts.
pub(crate) fn artifact(path: &str) -> PathBuf {
    let path = variable("CUBE_ARTIFACTS").join(path);
    assert!(
        path.exists(),
        "{} is missing: run `cargo xtask template code-interpreter`",
        path.display()
    );
    path
}

impl Clone {
    pub(crate) fn start() -> Self {
        Self::restore(artifact("templates/code-interpreter-v1"))
    }

    /// Forks the clone in its current state. Returns both forks.
    pub(crate) fn fork(mut self) -> [Self; 2] {
        let parent = self.dir.path().join("parent");
        self.vm.control.pause().unwrap();
        self.vm.control.snapshot(&parent).unwrap();
        [(); 2].map(|()| Self::restore(parent.clone()))
    }

    fn restore(template: PathBuf) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("cube-test-")
            .tempdir()
            .unwrap();
        let program = variable("CUBE_BIN").join("cube-vmm");
        let stderr = File::create(dir.path().join("stderr")).unwrap();
        let mut vm = VmProcess::spawn(&program, Some(stderr), Some(PATIENCE)).unwrap();
        let spec = RestoreSpec {
            template,
            base: None,
            root: None,
            vsock: dir.path().join("vsock"),
            console: Some(dir.path().join("console")),
            layer_limit: None,
            prefault: WorkingSetPrefault::On,
        };
        vm.control.restore(spec, None).unwrap();
        vm.control.resume().unwrap();
        vm.control
            .identity(fresh_identity("clone").unwrap(), PATIENCE)
            .unwrap();
        Self { vm, dir }
    }

    /// Starts a clone with these variables as the sandbox's environment.
    pub(crate) fn with_environment(variables: &[(&str, &str)]) -> Self {
        let clone = Self::start();
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let env_vars: BTreeMap<_, _> = variables.iter().map(own).collect();
        let init = InitRequest {
            env_vars,
            ..InitRequest::default()
        };
        clone.agent().init(&init).unwrap();
        clone
    }

    /// The PID of its VMM.
    pub(crate) fn pid(&self) -> u32 {
        self.vm.pid()
    }

    pub(crate) fn agent(&self) -> EnvdClient {
        EnvdClient::connect(&self.dir.path().join("vsock"), ENVD_PORT, PATIENCE).unwrap()
    }

    /// Runs a command as root. Returns its output.
    pub(crate) fn command(&self, script: &str) -> String {
        let request = ExecRequest {
            user: Some("root".to_owned()),
            ..ExecRequest::new("/bin/sh", &["-ec", script])
        };
        let output = self.agent().exec(&request, PATIENCE).unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert_eq!(output.exit_code, 0, "{script}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Whether a process of this name runs.
    pub(crate) fn runs(&self, name: &str) -> bool {
        let names = self.command("cat /proc/[0-9]*/comm 2>/dev/null || true");
        names.lines().any(|running| running == name)
    }

    /// Connects to the interpreter through the agent, as to any port of the guest.
    pub(crate) fn stream(&self) -> UnixStream {
        self.agent().tunnel(PORT).unwrap().stream
    }

    /// Connects to the interpreter on its vsock port, as the API does.
    pub(crate) fn interpreter(&self) -> EnvdClient {
        EnvdClient::connect(&self.dir.path().join("vsock"), PORT, PATIENCE).unwrap()
    }

    /// Waits until the interpreter accepts cells.
    pub(crate) fn until_ready(&self) {
        let deadline = Instant::now() + PATIENCE;
        let ready = || {
            let stream = self.agent().tunnel(PORT).ok()?.stream;
            let answer = EnvdClient::over(stream, PATIENCE).request("GET", "/ready", &[], &[]);
            answer.ok().filter(|answer| answer.status == 200)
        };
        while ready().is_none() {
            assert!(Instant::now() < deadline, "the interpreter is not ready");
        }
    }

    /// Sends a request. Returns the status and the body of the response.
    pub(crate) fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, String) {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let answer = self
            .interpreter()
            .request(method, path, &[], body.as_bytes())
            .unwrap();
        (answer.status, String::from_utf8(answer.body).unwrap())
    }

    /// Runs a cell. Returns its events.
    pub(crate) fn run(&self, request: &Value) -> Vec<Value> {
        let (status, body) = self.ask("POST", "/execute", request);
        assert_eq!(status, 200, "{body}");
        assert!(!body.contains("\n\n"), "a blank line: {body:?}");
        let lines = body.lines();
        let events: Vec<Value> = lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(events.last().unwrap()["type"], "end_of_execution");
        events
    }

    /// Runs a Python cell. Returns its events.
    pub(crate) fn python(&self, code: &str) -> Vec<Value> {
        self.run(&json!({ "code": code }))
    }

    /// Runs a cell of a language. Returns its events.
    pub(crate) fn cell(&self, language: &str, code: &str) -> Vec<Value> {
        self.run(&json!({ "code": code, "language": language }))
    }
}
