//! The real server with real hosts, on this machine. Cells are bash, which every machine has. Python and JavaScript are
//! tested in guests, which have their packages.

#![expect(
    clippy::unwrap_used,
    reason = "a test fails by panicking, also in its helpers"
)]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

/// Time limit of a single response, on a machine that may be building at the same time.
const PATIENCE: Duration = Duration::from_secs(60);

#[path = "server/java.rs"]
mod java;

struct Server {
    child: Child,
    address: SocketAddr,
    state: tempfile::TempDir,
}

impl Server {
    fn start() -> Self {
        Self::start_with(&[])
    }

    fn start_with(flags: &[&str]) -> Self {
        Self::start_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("hosts"), flags)
    }

    /// Starts a server with the hosts in another directory.
    fn start_in(hosts: &Path, flags: &[&str]) -> Self {
        let state = tempfile::tempdir().unwrap();
        // A port that is free now, which the server binds soon after.
        let address = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_cube-interpreter"))
            .args(flags)
            .args(["--listen", &address.to_string()])
            .args(["--hosts".as_ref(), hosts.as_os_str()])
            .args(["--state".as_ref(), state.path().as_os_str()])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self {
            child,
            address,
            state,
        };
        until("the server listens", || TcpStream::connect(address).is_ok());
        server
    }

    fn client(&self) -> Client {
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Client {
            reader: BufReader::new(socket),
        }
    }

    /// Runs a bash cell. Returns its events.
    fn bash(&self, code: &str) -> Vec<Value> {
        self.client()
            .run(&json!({"code": code, "language": "bash"}))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Client {
    reader: BufReader<TcpStream>,
}

impl Client {
    fn send(&mut self, method: &str, path: &str, body: &str) {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let socket = self.reader.get_mut();
        socket
            .write_all(format!("{head}{body}").as_bytes())
            .unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        line
    }

    /// Reads a head. Returns the status, and the length of the body; `None` if it is chunked.
    fn head(&mut self) -> (u16, Option<usize>) {
        let status = self.line().split(' ').nth(1).unwrap().parse().unwrap();
        let mut length = None;
        loop {
            let line = self.line().to_ascii_lowercase();
            if line == "\r\n" {
                return (status, length);
            }
            if let Some(value) = line.strip_prefix("content-length:") {
                length = Some(value.trim().parse().unwrap());
            }
        }
    }

    /// Reads one chunk; `None` at the end.
    fn chunk(&mut self) -> Option<Vec<u8>> {
        let len = usize::from_str_radix(self.line().trim(), 16).unwrap();
        let mut bytes = vec![0; len + 2];
        self.reader.read_exact(&mut bytes).unwrap();
        bytes.truncate(len);
        (len > 0).then_some(bytes)
    }

    /// Reads the response up to the chunk that contains `mark`.
    fn read_until(&mut self, mark: &str) -> String {
        self.head();
        let mut seen = String::new();
        while !seen.contains(mark) {
            seen.push_str(&String::from_utf8(self.chunk().unwrap()).unwrap());
        }
        seen
    }

    fn ask(&mut self, method: &str, path: &str, body: &str) -> (u16, String) {
        self.send(method, path, body);
        let (status, length) = self.head();
        let mut bytes = Vec::new();
        match length {
            Some(length) => {
                bytes.resize(length, 0);
                self.reader.read_exact(&mut bytes).unwrap();
            }
            None => {
                while let Some(chunk) = self.chunk() {
                    bytes.extend(chunk);
                }
            }
        }
        (status, String::from_utf8(bytes).unwrap())
    }

    fn run(&mut self, request: &Value) -> Vec<Value> {
        let (status, body) = self.ask("POST", "/execute", &request.to_string());
        assert_eq!(status, 200, "{body}");
        assert!(!body.contains("\n\n"), "a blank line: {body:?}");
        let events: Vec<Value> = body
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(events.last().unwrap()["type"], "end_of_execution");
        events
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::yield_now();
    }
}

fn of_type<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events
        .iter()
        .filter(|event| event["type"] == kind)
        .collect()
}

/// The whole output of a stream.
fn text(events: &[Value], stream: &str) -> String {
    of_type(events, stream)
        .iter()
        .map(|event| event["text"].as_str().unwrap())
        .collect()
}

#[test]
fn health_and_errors_follow_the_api() {
    let server = Server::start();
    let mut client = server.client();
    assert_eq!(client.ask("GET", "/health", ""), (200, "\"OK\"".into()));
    assert_eq!(client.ask("GET", "/nothing", "").0, 404);
    assert_eq!(client.ask("PUT", "/execute", "").0, 405);
    assert_eq!(client.ask("POST", "/execute", "{").0, 422);
    let both = r#"{"code":"1","context_id":"a","language":"bash"}"#;
    let (status, body) = client.ask("POST", "/execute", both);
    assert_eq!(
        (status, body.as_str()),
        (400, "Only one of context_id or language can be provided")
    );
    let (status, body) = client.ask("POST", "/execute", r#"{"code":"1","context_id":"abc"}"#);
    assert_eq!((status, body.as_str()), (404, "Context abc not found"));
    let (status, body) = client.ask("POST", "/execute", r#"{"code":"1","language":"cobol"}"#);
    assert_eq!(status, 500);
    assert!(body.contains("'cobol' is not installed"), "{body}");
    assert_eq!(client.ask("DELETE", "/contexts/abc", "").0, 404);
    assert_eq!(client.ask("POST", "/contexts/abc/restart", "").0, 404);
    let missing = r#"{"language":"bash","cwd":"/does/not/exist"}"#;
    assert_eq!(client.ask("POST", "/contexts", missing).0, 500);
}

#[test]
fn a_language_that_is_missing_or_does_not_start_has_a_cure() {
    let hosts = tempfile::tempdir().unwrap();
    let java = hosts.path().join("java");
    std::fs::create_dir(&java).unwrap();
    let server = Server::start_in(hosts.path(), &[]);
    let mut client = server.client();
    let cell = r#"{"code":"1","language":"java"}"#;
    let (status, body) = client.ask("POST", "/execute", cell);
    assert_eq!(status, 500, "{body}");
    let missing = "the language 'java' is not installed in this sandbox: use a sandbox of the template code-interpreter-v1";
    assert!(body.contains(missing), "{body}");
    assert_eq!(
        client.ask("POST", "/contexts", r#"{"language":"java"}"#),
        (500, body)
    );
    // Once the files exist, no restart is needed. Here the host ends at once, as it does without a JDK.
    std::fs::write(java.join("host.jar"), "").unwrap();
    std::fs::write(java.join("build.sh"), "").unwrap();
    let events = client.run(&serde_json::from_str(cell).unwrap());
    let error = of_type(&events, "error")[0]["value"].as_str().unwrap();
    assert!(error.contains("the host of java does not start"), "{error}");
    assert!(
        error.contains("apt-get install -y default-jdk-headless && sh "),
        "{error}"
    );
}

#[test]
fn a_cell_streams_its_output_in_order_and_keeps_state() {
    let server = Server::start();
    let events = server.bash("x=5; echo hällo; echo oops >&2");
    assert_eq!(
        events[0],
        json!({"type": "number_of_executions", "execution_count": 1})
    );
    assert_eq!(text(&events, "stdout"), "hällo\n");
    assert_eq!(text(&events, "stderr"), "oops\n");
    let stamp = of_type(&events, "stdout")[0]["timestamp"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(stamp.contains('T') && stamp.ends_with('Z'), "{stamp}");
    let events = server.bash("echo $x");
    assert_eq!(events[0]["execution_count"], 2);
    assert_eq!(text(&events, "stdout"), "5\n");
    let events = server.bash("(exit 3)");
    assert_eq!(of_type(&events, "error")[0]["value"], "3");
}

#[test]
fn a_chunked_request_is_read() {
    let server = Server::start();
    let mut client = server.client();
    let body = r#"{"code":"echo chunked","language":"bash"}"#;
    let (first, second) = body.split_at(7);
    let wire = format!(
        "POST /execute HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n7\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\n\r\n",
        second.len()
    );
    client.reader.get_mut().write_all(wire.as_bytes()).unwrap();
    assert_eq!(client.head(), (200, None));
    let mut all = Vec::new();
    while let Some(chunk) = client.chunk() {
        all.extend(chunk);
    }
    assert!(String::from_utf8(all).unwrap().contains("chunked\\n"));
}

#[test]
fn output_appears_while_the_cell_runs() {
    let server = Server::start();
    let dir = tempfile::tempdir().unwrap();
    let gate = dir.path().join("gate");
    let mut client = server.client();
    let code = format!(
        "echo first; while [ ! -e {} ]; do :; done; echo second",
        gate.display()
    );
    client.send(
        "POST",
        "/execute",
        &json!({"code": code, "language": "bash"}).to_string(),
    );
    let mut seen = client.read_until("first");
    assert!(!seen.contains("second"));
    std::fs::write(&gate, "").unwrap();
    while let Some(chunk) = client.chunk() {
        seen.push_str(&String::from_utf8(chunk).unwrap());
    }
    assert!(seen.contains("second") && seen.ends_with("{\"type\": \"end_of_execution\"}\n"));
}

#[test]
fn a_silent_cell_sends_keepalives() {
    let server = Server::start();
    let mut client = server.client();
    client.send(
        "POST",
        "/execute",
        r#"{"code":"sleep 1000","language":"bash"}"#,
    );
    client.read_until("keepalive");
}

#[test]
fn cells_of_a_context_run_one_after_another() {
    let server = Server::start();
    server.bash("n=0");
    let mut clients: Vec<Client> = (0..8).map(|_| server.client()).collect();
    for client in &mut clients {
        let body = json!({"code": "m=$n; sleep 0.02; n=$((m+1)); echo $n", "language": "bash"});
        client.send("POST", "/execute", &body.to_string());
    }
    let mut seen: Vec<String> = Vec::new();
    for client in &mut clients {
        client.head();
        let mut all = Vec::new();
        while let Some(chunk) = client.chunk() {
            all.extend(chunk);
        }
        let all = String::from_utf8(all).unwrap();
        let events: Vec<Value> = all
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        seen.push(text(&events, "stdout"));
    }
    seen.sort();
    let wanted: Vec<String> = (1..=8).map(|n| format!("{n}\n")).collect();
    assert_eq!(seen, wanted);
}

#[test]
fn disconnecting_interrupts_the_cell() {
    let server = Server::start();
    server.bash("x=kept");
    let mut leaving = server.client();
    leaving.send(
        "POST",
        "/execute",
        // The output of a program shows that it runs: an interrupt between two programs would have no effect.
        r#"{"code":"sh -c 'echo started; exec sleep 1000'","language":"bash"}"#,
    );
    leaving.read_until("started");
    drop(leaving);
    assert_eq!(text(&server.bash("echo $x"), "stdout"), "kept\n");
}

#[test]
fn a_cell_of_several_commands_is_interrupted_until_it_ends() {
    let server = Server::start();
    server.bash("x=kept");
    let mut leaving = server.client();
    let code = "sh -c 'echo started; exec sleep 1000'; sleep 1000";
    let body = json!({"code": code, "language": "bash"}).to_string();
    leaving.send("POST", "/execute", &body);
    leaving.read_until("started");
    drop(leaving);
    // The first interrupt ends only one command. A replaced shell would not have the variable.
    assert_eq!(text(&server.bash("echo $x"), "stdout"), "kept\n");
}

#[test]
fn a_shell_that_ignores_the_interrupt_is_replaced() {
    let server = Server::start();
    let mut leaving = server.client();
    leaving.send(
        "POST",
        "/execute",
        r#"{"code":"echo started; while :; do :; done","language":"bash"}"#,
    );
    leaving.head();
    while !String::from_utf8(leaving.chunk().unwrap())
        .unwrap()
        .contains("started")
    {}
    drop(leaving);
    let events = server.bash("echo back");
    assert_eq!(text(&events, "stdout"), "back\n");
    assert_eq!(
        of_type(&events, "number_of_executions")[0]["execution_count"],
        1
    );
}

#[test]
fn a_dying_host_is_reported_and_replaced() {
    let server = Server::start();
    let events = server.bash("echo last words; kill -9 $$");
    assert_eq!(text(&events, "stdout"), "last words\n");
    assert_eq!(
        of_type(&events, "error")[0]["name"],
        "UnexpectedEndOfExecution"
    );
    let events = server.bash("echo again");
    assert_eq!(text(&events, "stdout"), "again\n");
}

/// Any program that reaches the port may create contexts, without the sandbox's token.
#[test]
fn contexts_are_limited_and_run_no_code_when_created() {
    let server = Server::start();
    let mut client = server.client();
    let mark = server.state.path().join("mark");
    let code = format!("touch {}", mark.display());
    for wrong in [
        json!({"language": "../../../../tmp"}),
        json!({"language": code}),
        json!({"language": "bash", "cwd": code}),
    ] {
        let (status, text) = client.ask("POST", "/contexts", &wrong.to_string());
        assert_eq!(status, 500, "{text}");
    }
    let more =
        json!({"language": "bash", "cwd": "/", "code": code, "env_vars": {"BASH_ENV": code}});
    let mut made = Vec::new();
    let refusal = loop {
        let (status, text) = client.ask("POST", "/contexts", &more.to_string());
        match status {
            200 => made.push(serde_json::from_str::<Value>(&text).unwrap()),
            _ => break (status, text),
        }
    };
    // Two contexts exist from the start.
    assert_eq!(made.len(), 30);
    assert_eq!(
        refusal,
        (500, "Failed to create context: too many contexts".into())
    );
    assert!(!mark.exists());
    let id = made[0]["id"].as_str().unwrap();
    assert_eq!(client.ask("DELETE", &format!("/contexts/{id}"), "").0, 200);
    assert_eq!(client.ask("POST", "/contexts", &more.to_string()).0, 200);
}

#[test]
fn contexts_are_created_listed_restarted_and_removed() {
    let server = Server::start();
    let dir = tempfile::tempdir().unwrap();
    let cwd = dir.path().canonicalize().unwrap();
    let mut client = server.client();
    let body = json!({"language": "bash", "cwd": cwd}).to_string();
    let (status, made) = client.ask("POST", "/contexts", &body);
    assert_eq!(status, 200, "{made}");
    let made: Value = serde_json::from_str(&made).unwrap();
    assert_eq!(made["language"], "bash");
    let list = |client: &mut Client| -> Vec<Value> {
        serde_json::from_str(&client.ask("GET", "/contexts", "").1).unwrap()
    };
    let all = list(&mut client);
    assert_eq!(
        (all[0]["language"].as_str(), all[1]["language"].as_str()),
        (Some("python"), Some("javascript"))
    );
    assert_eq!(all.last(), Some(&made));
    let id = made["id"].as_str().unwrap();
    let run =
        |client: &mut Client, code: &str| client.run(&json!({"code": code, "context_id": id}));
    assert_eq!(
        text(&run(&mut client, "x=1; pwd"), "stdout").trim(),
        cwd.to_str().unwrap()
    );
    assert_eq!(
        client.ask("POST", &format!("/contexts/{id}/restart"), ""),
        (200, "null".into())
    );
    assert_eq!(text(&run(&mut client, "echo [$x]"), "stdout"), "[]\n");
    assert_eq!(client.ask("DELETE", &format!("/contexts/{id}"), "").0, 200);
    assert!(!list(&mut client).contains(&made));
    assert_eq!(
        client
            .ask(
                "POST",
                "/execute",
                &json!({"code": "1", "context_id": id}).to_string()
            )
            .0,
        404
    );
}

#[test]
fn a_restart_ends_the_running_cell() {
    let server = Server::start();
    let mut client = server.client();
    let made: Value = serde_json::from_str(
        &client
            .ask("POST", "/contexts", r#"{"language":"bash","cwd":"/"}"#)
            .1,
    )
    .unwrap();
    let id = made["id"].as_str().unwrap();
    let mut running = server.client();
    running.send(
        "POST",
        "/execute",
        &json!({"code": "echo started; sleep 1000", "context_id": id}).to_string(),
    );
    let mut seen = running.read_until("started");
    assert_eq!(
        client.ask("POST", &format!("/contexts/{id}/restart"), "").0,
        200
    );
    while let Some(chunk) = running.chunk() {
        seen.push_str(&String::from_utf8(chunk).unwrap());
    }
    assert!(seen.contains("ContextRestarting"), "{seen}");
}

#[test]
fn variables_of_sandbox_and_cell_are_set() {
    let server = Server::start();
    let envs = server.state.path().join("envs");
    std::fs::write(&envs, r#"{"GLOBAL":"from the sandbox","BOTH":"sandbox"}"#).unwrap();
    let mut client = server.client();
    let code = "echo $GLOBAL,$BOTH,$CELL";
    let request = json!({"code": code, "language": "bash", "env_vars": {"CELL": "a b'c\"$d", "BOTH": "cell"}});
    assert_eq!(
        text(&client.run(&request), "stdout"),
        "from the sandbox,cell,a b'c\"$d\n"
    );
    assert_eq!(
        text(&server.bash(code), "stdout"),
        "from the sandbox,sandbox,\n"
    );
    std::fs::write(&envs, r#"{"BOTH":"now"}"#).unwrap();
    assert_eq!(text(&server.bash(code), "stdout"), ",now,\n");
}

#[test]
fn a_new_identity_reseeds_the_shell() {
    let server = Server::start();
    let boot_id = server.state.path().join("boot-id");
    let identity = |digit: char| format!("{}\n", digit.to_string().repeat(36));
    std::fs::write(&boot_id, identity('1')).unwrap();
    server.bash("RANDOM=1");
    let same = text(
        &server.bash("RANDOM=1; echo $RANDOM$RANDOM$RANDOM"),
        "stdout",
    );
    server.bash("RANDOM=1");
    assert_eq!(
        text(&server.bash("echo $RANDOM$RANDOM$RANDOM"), "stdout"),
        same
    );
    server.bash("RANDOM=1");
    std::fs::write(&boot_id, identity('2')).unwrap();
    assert_ne!(
        text(&server.bash("echo $RANDOM$RANDOM$RANDOM"), "stdout"),
        same
    );
}

#[test]
fn large_output_waits_for_its_reader() {
    let server = Server::start();
    let events = server.bash("head -c 20000000 /dev/zero | tr '\\0' x");
    assert_eq!(text(&events, "stdout").len(), 20_000_000);
}

#[test]
fn a_killed_server_is_restarted() {
    let server = Server::start_with(&["--supervise"]);
    let events = server.bash("echo $PPID");
    let pid: i32 = text(&events, "stdout").trim().parse().unwrap();
    let pid = nix::unistd::Pid::from_raw(pid);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    // The hosts of the killed server end with it, and the supervisor starts another server.
    until("a new server", || {
        let Ok(socket) = TcpStream::connect(server.address) else {
            return false;
        };
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        drop(socket);
        nix::sys::signal::kill(pid, None).is_err()
    });
    until("it listens", || TcpStream::connect(server.address).is_ok());
    assert_eq!(text(&server.bash("echo new"), "stdout"), "new\n");
}
