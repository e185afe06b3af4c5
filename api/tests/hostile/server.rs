//! A server whose VMs are stand-ins, and helpers that observe it from outside.

use std::{
    fs::{self, File, Permissions},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use model::{Bytes, FileSum, MANIFEST_NAME, Platform, TEMPLATE_FORMAT, TemplateManifest};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::http::{self, Answer};

/// Timeout of every wait; generous, for busy hosts.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
pub(crate) const MIB: u64 = 1 << 20;

/// A running server. Dropping it stops the server, which kills its sandboxes.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: SocketAddr,
    dir: TempDir,
}

impl Server {
    /// Starts a server that has a template named after each behaviour in `conducts`, and the template `good`.
    pub(crate) fn start(conducts: &[&str], options: &[&str]) -> Self {
        Self::with_log(conducts, options, "info")
    }

    /// Like `start`, with this log filter.
    pub(crate) fn with_log(conducts: &[&str], options: &[&str], filter: &str) -> Self {
        // The path is short because unix socket addresses are limited to 108 bytes.
        let mut private = tempfile::Builder::new();
        let private = private.permissions(Permissions::from_mode(0o755));
        let dir = private.prefix("hg").tempdir_in("/tmp").unwrap();
        for conduct in conducts.iter().copied().chain(["good"]) {
            write_template(&dir.path().join("templates").join(conduct), conduct);
        }
        let address = free_address();
        let child = spawn(dir.path(), address, options, filter);
        let mut server = Self {
            child,
            address,
            dir,
        };
        until("the server answers", || {
            let ended = server.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", server.log());
            TcpStream::connect(address).is_ok() && server.get("/health").status == 200
        });
        server
    }

    /// The log of the server.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    /// The standard error of all VMMs.
    pub(crate) fn said(&self) -> String {
        let sandboxes = fs::read_dir(self.dir.path().join("s/sandboxes")).unwrap();
        let files = sandboxes.map(|entry| entry.unwrap().path().join("vmm.stderr"));
        files
            .filter_map(|file| fs::read_to_string(file).ok())
            .collect()
    }

    /// The value of a metric of the server.
    pub(crate) fn figure(&self, name: &str) -> u64 {
        let metrics = self.get("/metrics").expect(200).text();
        let mut lines = metrics.lines();
        let line = lines.find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {metrics}"))
            .parse()
            .unwrap()
    }

    /// The server's peak memory since the last [`Server::forget_peak`].
    pub(crate) fn peak_bytes(&self) -> u64 {
        let status = fs::read_to_string(self.proc("status")).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
        let kib = line.unwrap().trim().strip_suffix(" kB").unwrap();
        kib.parse::<u64>().unwrap() << 10
    }

    /// Resets [`Server::peak_bytes`] to the server's current memory, and returns it.
    pub(crate) fn forget_peak(&self) -> u64 {
        // proc_pid_clear_refs(5): writing 5 resets the peak.
        fs::write(self.proc("clear_refs"), "5").unwrap();
        self.peak_bytes()
    }

    pub(crate) fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.child.id()))
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        http::send(self.address, "GET", path, &[], b"")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        let json = [("Content-Type", "application/json")];
        let body = body.to_string();
        http::send(self.address, "POST", path, &json, body.as_bytes())
    }

    /// Sends a create request.
    pub(crate) fn try_create(&self, template: &str, options: &Value) -> Answer {
        let mut body = json!({"templateID": template, "timeout": 300});
        for (key, value) in options.as_object().unwrap() {
            body[key] = value.clone();
        }
        self.post("/v2/sandboxes", &body)
    }

    /// Creates a sandbox and returns its id.
    pub(crate) fn create(&self, template: &str, options: &Value) -> String {
        let created = self.try_create(template, options).expect(201).json();
        created["sandboxID"].as_str().unwrap().to_owned()
    }

    pub(crate) fn delete(&self, path: &str) -> Answer {
        http::send(self.address, "DELETE", path, &[], b"")
    }

    pub(crate) fn kill(&self, id: &str) {
        self.delete(&format!("/sandboxes/{id}")).expect(204);
    }

    pub(crate) fn pause(&self, id: &str, options: &Value) -> Answer {
        self.post(&format!("/sandboxes/{id}/pause"), options)
    }

    /// Sends `GET /` to a port of a sandbox, without credentials.
    pub(crate) fn knock(&self, id: &str, port: u16) -> Answer {
        let port = port.to_string();
        let headers = [("E2b-Sandbox-Id", id), ("E2b-Sandbox-Port", &port)];
        http::send(self.address, "GET", "/", &headers, b"")
    }

    /// Median duration of a neighbour's life: create, one request, kill.
    pub(crate) fn neighbour(&self) -> Duration {
        let mut lives: Vec<_> = (0..9)
            .map(|_| {
                let begun = Instant::now();
                let id = self.create("good", &json!({}));
                assert_eq!(self.knock(&id, 49_983).status, 204);
                self.kill(&id);
                begun.elapsed()
            })
            .collect();
        lives.sort_unstable();
        lives[lives.len() / 2]
    }

    /// Checks that all lines of the log are short and begin with the server's prefix, and that there are at most
    /// `lines_max`.
    #[track_caller]
    pub(crate) fn check_log(&self, lines_max: usize) {
        let log = self.log();
        for line in log.lines() {
            let start: String = line.chars().take(200).collect();
            let date = line.get(..11).unwrap_or_default();
            let is_own = date.starts_with("20") && date.ends_with('T');
            assert!(is_own && !line.starts_with("2026-01-01"), "{start}");
            assert!(!line.contains(char::is_control), "{start}");
            assert!(line.len() < 2000, "{} bytes: {start}", line.len());
        }
        let lines = log.lines().count();
        assert!(
            lines <= lines_max,
            "the log has {lines} lines; expected at most {lines_max}"
        );
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        // The server kills its sandboxes and exits.
        let _ = kill(pid, Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

fn spawn(dir: &Path, address: SocketAddr, options: &[&str], filter: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_cube-api"))
        .arg("serve")
        .args(["--listen", &address.to_string()])
        .arg("--state")
        .arg(dir.join("s"))
        .arg("--templates")
        .arg(dir.join("templates"))
        .arg("--vmm")
        .arg(stand_in())
        .args(["--insecure-loopback", "--network", "none"])
        .args(["--on-exit", "kill", "--memory-reserve", "64MiB"])
        .args(options)
        .env("CUBE_LOG", filter)
        .stdin(Stdio::null())
        .stderr(File::create(dir.join("log")).unwrap())
        .spawn()
        .unwrap()
}

/// The path of the stand-in. Cargo builds examples together with the tests, in a directory beside the binaries.
fn stand_in() -> PathBuf {
    let server = Path::new(env!("CARGO_BIN_EXE_cube-api"));
    let path = server.with_file_name("examples").join("hostile-guest");
    assert!(
        path.exists(),
        "{} does not exist: run `cargo build -p api --example hostile-guest`",
        path.display()
    );
    path
}

fn write_template(dir: &Path, conduct: &str) {
    fs::create_dir_all(dir).unwrap();
    // A manifest may only name files of the template store.
    let root = dir.join("root");
    fs::write(&root, "").unwrap();
    let manifest = serde_json::to_vec(&manifest(root)).unwrap();
    fs::write(dir.join(MANIFEST_NAME), manifest).unwrap();
    fs::write(dir.join(model::template_file::MEMORY), vec![0; 4096]).unwrap();
    let state = json!({"conduct": conduct}).to_string();
    fs::write(dir.join(model::template_file::STATE), state).unwrap();
}

fn manifest(root: PathBuf) -> TemplateManifest {
    let sum = FileSum {
        bytes: 0,
        sha256: "0".repeat(64),
    };
    TemplateManifest {
        format: TEMPLATE_FORMAT,
        platform: Platform::Ring3,
        memory: Bytes::mib(1024),
        vcpus: 1,
        hypercalls: None,
        taken_at_unix_ns: 0,
        root,
        root_sum: sum.clone(),
        kernel_sum: sum.clone(),
        base: None,
        memory_sum: sum.clone(),
        state_sum: sum.clone(),
        layer_sum: sum,
    }
}

/// A loopback address with a port that was free a moment ago.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

/// Waits for a condition; panics with its name after the timeout.
#[track_caller]
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
