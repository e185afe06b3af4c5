//! A running `cube-api`, and helpers for requests to it.

use std::{
    fs::Permissions,
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use envd::{EnvdClient, ExecRequest};
use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::http::{self, Answer};

/// Number of TAPs that a server keeps ready; must equal the constant in `api::network`.
pub(crate) const STOCK: usize = 64;
/// Timeout of every wait; generous, for busy hosts.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Content type of the control plane's bodies.
pub(crate) const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];

/// The first requirement of this case that this host does not meet, if any.
pub(crate) fn lack(case: &str) -> Option<String> {
    let template = if case.contains("interpreter_") {
        "templates/code-interpreter-v1"
    } else {
        "templates/base"
    };
    test_cases::lack_for_vms(&[("CUBE_ARTIFACTS", template), ("CUBE_BIN", "cube-vmm")])
}

pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

/// A server with its own state directory. When dropped, it is killed together with its sandboxes.
pub(crate) struct Server {
    child: Child,
    /// The process that serves after a reload; 0: `child`.
    serving: AtomicU32,
    /// The program to start. Later processes start it again by this path.
    pub(crate) program: PathBuf,
    pub(crate) address: SocketAddr,
    pub(crate) state: TempDir,
    options: Vec<String>,
}

impl Server {
    /// Starts a server without authentication and without warm slots.
    pub(crate) fn open() -> Self {
        Self::with(&["--insecure-loopback", "--warm", "0:0"])
    }

    pub(crate) fn with(options: &[&str]) -> Self {
        Self::of_program(env!("CARGO_BIN_EXE_cube-api").into(), options)
    }

    pub(crate) fn of_program(program: PathBuf, options: &[&str]) -> Self {
        Self::started_at(program, free_address(), options)
    }

    pub(crate) fn started_at(program: PathBuf, address: SocketAddr, options: &[&str]) -> Self {
        // The path is short because unix socket addresses are limited to 108 bytes.
        let mut private = tempfile::Builder::new();
        let private = private.permissions(Permissions::from_mode(0o700));
        let state = private.prefix("api").tempdir_in("/tmp").unwrap();
        let options: Vec<_> = options.iter().map(|o| (*o).to_owned()).collect();
        let child = start(&program, state.path(), address, &options);
        let mut server = Self {
            child,
            serving: AtomicU32::new(0),
            program,
            address,
            state,
            options,
        };
        server.ready();
        server
    }

    fn ready(&mut self) {
        until("the server answers", || {
            self.assert_running();
            if self.options.contains(&"--tls-cert".to_owned()) {
                return TcpStream::connect(self.address).is_ok();
            }
            // A killed process that is still exiting may refuse or reset connections.
            let health = http::try_send(self.address, "GET", "/health", &[], b"");
            health.is_ok_and(|answer| answer.starts_with(b"HTTP/1.1 200"))
        });
    }

    /// Kills the process with SIGKILL. It may already have ended.
    pub(crate) fn kill(&mut self) {
        let pid = Pid::from_raw(i32::try_from(self.pid()).unwrap());
        let sent = kill(pid, Signal::SIGKILL);
        assert!(matches!(sent, Ok(()) | Err(Errno::ESRCH)), "{sent:?}");
        self.wait();
    }

    /// Waits until the process that serves has exited, and kills a predecessor that still has connections.
    fn wait(&mut self) {
        let serving = self.serving.swap(0, Ordering::Relaxed);
        if serving != 0 {
            let _ = self.child.kill();
            until("the process exits", || !is_running(serving));
        }
        let _ = self.child.wait();
    }

    /// Runs `cube-api reload`. Returns the process id of the new server, or the message of the command.
    pub(crate) fn reload(&self) -> Result<u32, String> {
        let output = Command::new(env!("CARGO_BIN_EXE_cube-api"))
            .args(["reload", "--state"])
            .arg(self.state.path())
            .output()
            .unwrap();
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        let pid = String::from_utf8(output.stdout).unwrap();
        let pid = pid.trim().parse().unwrap();
        self.serving.store(pid, Ordering::Relaxed);
        Ok(pid)
    }

    /// A process that took over without [`Self::reload`].
    pub(crate) fn adopt_serving(&self, pid: u32) {
        self.serving.store(pid, Ordering::Relaxed);
    }

    /// Whether the first process of this server has exited.
    pub(crate) fn first_has_exited(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Kills the process with SIGKILL and starts a new one on the same state directory.
    pub(crate) fn crash_and_restart(&mut self) {
        self.kill();
        self.restart();
    }

    pub(crate) fn pid(&self) -> u32 {
        match self.serving.load(Ordering::Relaxed) {
            0 => self.child.id(),
            pid => pid,
        }
    }

    /// Process id of a sandbox's VMM, according to its record.
    pub(crate) fn vmm_of(&self, sandbox: &Sandbox) -> u32 {
        let dir = self.state.path().join("sandboxes").join(&sandbox.id);
        let record = std::fs::read(dir.join("record.json")).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        u32::try_from(record["vmm"]["pid"].as_u64().unwrap()).unwrap()
    }

    /// Number of open descriptors of the process.
    pub(crate) fn descriptors(&self) -> usize {
        let fds = format!("/proc/{}/fd", self.pid());
        std::fs::read_dir(fds).unwrap().count()
    }

    /// Number of open TAPs of the process.
    pub(crate) fn taps(&self) -> usize {
        let infos = std::fs::read_dir(format!("/proc/{}/fdinfo", self.pid())).unwrap();
        // A descriptor may have been closed since the directory was listed.
        let texts = infos.filter_map(|info| std::fs::read_to_string(info.ok()?.path()).ok());
        let is_tap = |text: &String| text.lines().any(|line| line.starts_with("iff:"));
        texts.filter(is_tap).count()
    }

    /// The ids of all sandboxes, according to the control plane.
    pub(crate) fn list(&self) -> Vec<String> {
        let mut ids = Vec::new();
        let mut next = String::new();
        loop {
            let page = self.get(&format!("/v2/sandboxes?limit=100&nextToken={next}"));
            let page = page.expect(200);
            let listed = page.json();
            let listed = listed.as_array().unwrap().iter();
            ids.extend(listed.map(|s| s["sandboxID"].as_str().unwrap().to_owned()));
            match page.header("x-next-token") {
                Some(token) if !token.is_empty() => next = token.to_owned(),
                _ => return ids,
            }
        }
    }

    pub(crate) fn restart(&mut self) {
        self.begin_restart();
        self.ready();
    }

    /// Starts a new process without waiting for it.
    pub(crate) fn begin_restart(&mut self) {
        self.child = start(
            &self.program,
            self.state.path(),
            self.address,
            &self.options,
        );
    }

    /// Panics if the process has exited by itself.
    pub(crate) fn assert_running(&mut self) {
        let ended = self.child.try_wait().unwrap();
        assert!(ended.is_none(), "the server exited: {ended:?}");
    }

    /// Like `restart`, with changed values for these options, given as pairs of name and value.
    pub(crate) fn restart_with(&mut self, options: &[&str]) {
        for option in options.chunks(2) {
            let before = self.options.iter().position(|o| o == option[0]);
            if let Some(at) = before {
                self.options.drain(at..at + option.len());
            }
            self.options.extend(option.iter().map(|o| (*o).to_owned()));
        }
        self.restart();
    }

    /// Stops the process with SIGTERM.
    pub(crate) fn stop(&mut self) {
        self.signal(Signal::SIGTERM);
        if self.serving.load(Ordering::Relaxed) != 0 {
            return self.wait();
        }
        until("the server stops", || {
            self.child.try_wait().unwrap().is_some_and(|status| {
                assert!(status.success(), "{status}");
                true
            })
        });
    }

    /// Runs `cube-api end` with the options of the stopped process.
    pub(crate) fn end(&self) {
        let mut end = command(&self.program, "end", self.state.path(), &self.options);
        assert!(end.status().unwrap().success());
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.signal_to(self.pid(), signal);
    }

    /// Sends a signal to a process of this server or of its sandboxes.
    pub(crate) fn signal_to(&self, pid: u32, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(pid).unwrap());
        kill(pid, signal).unwrap();
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        http::send(self.address, "GET", path, &[], b"")
    }

    pub(crate) fn delete(&self, path: &str) -> Answer {
        http::send(self.address, "DELETE", path, &[], b"")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        http::send(self.address, "POST", path, &JSON, body.as_bytes())
    }

    pub(crate) fn put(&self, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        http::send(self.address, "PUT", path, &JSON, body.as_bytes())
    }

    /// Creates a sandbox with these options.
    pub(crate) fn create(&self, options: &Value) -> Sandbox {
        Sandbox::of(&self.ask(options).expect(201).json())
    }

    /// Requests a sandbox with these options.
    pub(crate) fn ask(&self, options: &Value) -> Answer {
        let mut body = json!({"templateID": "base", "timeout": 300});
        for (key, value) in options.as_object().unwrap() {
            body[key] = value.clone();
        }
        self.post("/v2/sandboxes", &body)
    }

    /// Sends a request to the agent of a sandbox.
    pub(crate) fn envd(&self, sandbox: &Sandbox, method: &str, path: &str, body: &[u8]) -> Answer {
        let headers = [
            ("E2b-Sandbox-Id", sandbox.id.as_str()),
            ("E2b-Sandbox-Port", "49983"),
            ("X-Access-Token", sandbox.token.as_str()),
            ("Content-Type", "application/octet-stream"),
        ];
        http::send(self.address, method, path, &headers, body)
    }

    pub(crate) fn read_file(&self, sandbox: &Sandbox, path: &str) -> String {
        let answer = self.envd(
            sandbox,
            "GET",
            &format!("/files?username=root&path={path}"),
            b"",
        );
        answer.expect(200).text()
    }

    pub(crate) fn write_file(&self, sandbox: &Sandbox, path: &str, text: &str) {
        let path = format!("/files?username=root&path={path}");
        self.envd(sandbox, "POST", &path, text.as_bytes())
            .expect(200);
    }

    /// Runs a shell script in a sandbox, which must succeed. Returns its output.
    pub(crate) fn sh(&self, sandbox: &Sandbox, script: &str) -> String {
        let mut client = EnvdClient::over(TcpStream::connect(self.address).unwrap(), PATIENCE);
        let headers = [
            ("E2b-Sandbox-Id", sandbox.id.as_str()),
            ("E2b-Sandbox-Port", "49983"),
        ];
        client.set_route(&self.address.to_string(), &headers);
        client.set_access_token(Some(sandbox.token.clone()));
        let request = ExecRequest::new("/bin/sh", &["-c", script]);
        let output = client.exec(&request, PATIENCE).unwrap();
        assert_eq!(output.exit_code, 0, "{script}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn boot_id(&self, sandbox: &Sandbox) -> String {
        self.read_file(sandbox, "/proc/sys/kernel/random/boot_id")
    }

    /// Whether the sandbox is running, according to the data plane. Panics unless the agent answers, or the answer is
    /// the "was not found" that clients expect for an ended sandbox.
    pub(crate) fn is_up(&self, sandbox: &Sandbox) -> bool {
        let health = self.envd(sandbox, "GET", "/health", b"");
        if health.status == 204 {
            return true;
        }
        assert_eq!(health.status, 502, "{}", health.text());
        assert!(health.text().contains("was not found"), "{}", health.text());
        false
    }

    /// The state according to the control plane.
    pub(crate) fn state_of(&self, sandbox: &Sandbox) -> String {
        let detail = self.get(&format!("/sandboxes/{}", sandbox.id)).expect(200);
        detail.json()["state"].as_str().unwrap().to_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A new server on this state directory kills the sandboxes that the test left behind.
        if is_running(self.pid()) {
            self.signal(Signal::SIGKILL);
        }
        self.wait();
        self.program = env!("CARGO_BIN_EXE_cube-api").into();
        let mut options = self.options.clone();
        if !options.contains(&"--on-exit".to_owned()) {
            options.extend(["--on-exit".into(), "kill".into()]);
        }
        self.child = start(&self.program, self.state.path(), self.address, &options);
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect(self.address).is_err()
            && Instant::now() < deadline
            && matches!(self.child.try_wait(), Ok(None))
        {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.signal(Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

/// Whether a process exists that has not ended. A zombie has closed its descriptors when its last thread has exited.
pub(crate) fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    stat.is_ok_and(|stat| threads > 1 || !stat.contains(") Z "))
}

fn start(program: &Path, state: &Path, address: SocketAddr, options: &[String]) -> Child {
    let mut command = command(program, "serve", state, options);
    command.args(["--listen", &address.to_string()]);
    command.spawn().unwrap()
}

fn command(program: &Path, name: &str, state: &Path, options: &[String]) -> Command {
    let vmm = variable("CUBE_BIN").unwrap().join("cube-vmm");
    let mut command = Command::new(program);
    command.arg(name);
    if !options.iter().any(|option| option == "--templates") {
        command.arg("--templates").arg(templates());
    }
    command
        .arg("--state")
        .arg(state)
        .arg("--vmm")
        .arg(vmm)
        .args(options)
        .stdin(Stdio::null());
    command
}

/// Directory of the installed templates.
pub(crate) fn templates() -> PathBuf {
    variable("CUBE_ARTIFACTS").unwrap().join("templates")
}

/// A loopback address with a port that was free a moment ago.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

/// Waits for a condition; panics with its name after the timeout.
pub(crate) fn until(what: &str, condition: impl FnMut() -> bool) {
    assert!(happens(PATIENCE, condition), "never: {what}");
}

/// Whether a condition becomes true within this time.
pub(crate) fn happens(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + timeout;
    while !condition() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// The answer of a create request.
#[derive(Clone, Debug)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    pub(crate) token: String,
    pub(crate) traffic_token: Option<String>,
}

impl Sandbox {
    pub(crate) fn of(answer: &Value) -> Self {
        let text = |key: &str| answer[key].as_str().map(str::to_owned);
        for key in ["templateID", "clientID", "envdVersion"] {
            assert!(text(key).is_some(), "{key} is missing in {answer}");
        }
        Self {
            id: text("sandboxID").unwrap(),
            token: text("envdAccessToken").unwrap_or_default(),
            traffic_token: text("trafficAccessToken"),
        }
    }

    pub(crate) fn path(&self, rest: &str) -> String {
        format!("/sandboxes/{}{rest}", self.id)
    }
}
