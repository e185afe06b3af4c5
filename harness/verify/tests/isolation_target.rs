//! The isolation suite against a server that the suite did not start, with real guests. The server and the suite are in
//! two network namespaces that are connected by a veth pair.
#![expect(
    clippy::unwrap_used,
    reason = "a missing precondition must fail the test with its reason"
)]

use std::{
    fs::File,
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sched::{CloneFlags, setns, unshare},
    sys::signal::{Signal, kill},
    unistd::{Pid, gettid},
};
use verify::report::{Report, Verdict};

/// Address of the server.
const SERVER: &str = "192.0.2.2:3000";
/// Address of the suite.
const SUITE: &str = "192.0.2.1";
/// Timeout for starting a server and its first sandboxes on a loaded host.
const TIMEOUT: Duration = Duration::from_secs(120);

#[test]
fn kvm_cases_against_a_running_server_pass_only_if_both_ends_are_observed() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: namespaces need root");
        return;
    }
    // Runs in a new thread, because a thread that enters the new namespace stays there.
    thread::spawn(in_namespaces).join().unwrap();
}

fn in_namespaces() {
    // The path is short because addresses of Unix sockets are limited to 107 bytes.
    let dir = tempfile::Builder::new().prefix("it").tempdir_in("/tmp");
    let dir = dir.unwrap();
    let suite = connect_namespaces();
    let (server, key) = Server::start(dir.path());
    let within = |arguments: &[&str]| prove(&suite, &key, dir.path(), arguments);

    let (code, proof) = within(&["--outside", SUITE]);
    let of = |name: &str| proof.cases.iter().find(|case| case.name == name).unwrap();
    println!("{}", proof.terminal());
    assert_eq!(code, Some(5));
    for name in ["outside-tcp-passes", "outside-udp-passes"] {
        assert_eq!(of(name).verdict, Verdict::Pass, "{:?}", of(name));
        assert!(!of(name).evidence["arrived"].starts_with("0 "));
    }
    for name in ["outside-denied-tcp", "outside-denied-udp"] {
        assert_eq!(of(name).verdict, Verdict::Pass, "{:?}", of(name));
    }
    for case in &proof.cases {
        match case.verdict {
            Verdict::Pass => assert!(case.name.starts_with("outside-"), "{case:?}"),
            Verdict::GuestsWord | Verdict::NotTried => {}
            _ => panic!("{case:?}"),
        }
    }
    for name in [
        "closed-gateway-answers-arp",
        "spoof-mac",
        "names-not-listed",
    ] {
        assert_eq!(of(name).verdict, Verdict::GuestsWord, "{:?}", of(name));
    }
    assert_eq!(of("flood-of-many-flows").verdict, Verdict::NotTried);

    // Both ends of these cases are observed, so they pass on their own.
    let both = ["--outside", SUITE, "--case", "outside-tcp-passes"];
    assert_eq!(
        within(&[&both[..], &["--case", "outside-denied-tcp"]].concat()).0,
        Some(0)
    );
    // Without an observation outside, no case passes.
    assert_eq!(within(&["--case", "spoof"]).0, Some(5));
    drop(server);
    let unreachable = cube_verify(&suite, &key, dir.path(), &[]);
    assert_eq!(unreachable.status.code(), Some(7));
}

/// Runs the suite, and returns its exit code and results.
fn prove(suite: &File, key: &str, dir: &Path, arguments: &[&str]) -> (Option<i32>, Report) {
    let done = cube_verify(suite, key, dir, arguments);
    let stderr = String::from_utf8_lossy(&done.stderr);
    let proof = serde_json::from_slice(&done.stdout).unwrap_or_else(|e| panic!("{e}: {stderr}"));
    (done.status.code(), proof)
}

fn cube_verify(suite: &File, key: &str, dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cube-verify"));
    command
        .args(["isolation", "--format", "json"])
        .args(["--target", &format!("http://{SERVER}")])
        .arg("--run-root")
        .arg(dir)
        .arg("--probe")
        .arg(variable("CUBE_BIN").join("cube-netprobe"))
        .args(arguments)
        .env("E2B_API_KEY", key);
    within(suite, || command.output().unwrap())
}

/// Moves this thread into a new namespace for the server, and returns a second namespace for the suite. A veth pair
/// connects the two.
fn connect_namespaces() -> File {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    let server = gettid();
    let suite = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        File::open("/proc/thread-self/ns/net").unwrap()
    });
    let suite = suite.join().unwrap();
    within(&suite, || {
        ip("link set lo up");
        ip(&format!(
            "link add out0 type veth peer name up0 netns {server}"
        ));
        ip(&format!("address add {SUITE}/29 dev out0"));
        ip("link set out0 up");
    });
    ip("link set lo up");
    ip("address add 192.0.2.2/29 dev up0");
    ip("link set up0 up");
    ip(&format!("route add default via {SUITE}"));
    suite
}

fn within<T: Send>(namespace: &File, work: impl FnOnce() -> T + Send) -> T {
    let work = || {
        setns(namespace, CloneFlags::CLONE_NEWNET).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(work).join().unwrap())
}

fn ip(line: &str) {
    let status = Command::new("ip").args(line.split(' ')).status().unwrap();
    assert!(status.success(), "ip {line}: {status}");
}

/// A `cube-api` that the test starts instead of the suite.
struct Server(Child);

impl Server {
    /// Starts the server, and returns it with its key.
    fn start(dir: &Path) -> (Self, String) {
        let state = dir.join("state");
        let program = variable("CUBE_BIN").join("cube-api");
        let made = Command::new(&program)
            .args(["key", "new", "test", "--state"])
            .arg(&state)
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let log = File::create(dir.join("log")).unwrap();
        let child = Command::new(&program)
            .args(["serve", "--on-exit", "kill", "--listen", SERVER])
            .args(["--uplink", "up0", "--warm", "1:1", "--state"])
            .arg(&state)
            .arg("--templates")
            .arg(variable("CUBE_ARTIFACTS").join("templates"))
            .arg("--vmm")
            .arg(variable("CUBE_BIN").join("cube-vmm"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut server = Self(child);
        server.await_answer(&dir.join("log"));
        (
            server,
            String::from_utf8(made.stdout).unwrap().trim().to_owned(),
        )
    }

    fn await_answer(&mut self, log: &Path) {
        let deadline = Instant::now() + TIMEOUT;
        while TcpStream::connect(SERVER).is_err() {
            let is_late = Instant::now() > deadline || self.0.try_wait().unwrap().is_some();
            assert!(!is_late, "{}", std::fs::read_to_string(log).unwrap());
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = Pid::from_raw(i32::try_from(self.0.id()).unwrap());
        // Fails only if the server has already exited.
        let _ = kill(pid, Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

fn variable(name: &str) -> PathBuf {
    let value = std::env::var_os(name);
    value
        .unwrap_or_else(|| panic!("no {name}: `cargo xtask test --tier kvm` sets it"))
        .into()
}
