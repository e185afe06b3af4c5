//! Network policies, tested from inside sandboxes.

use std::{
    fs,
    hash::{BuildHasher, RandomState},
    thread,
    time::{Duration, Instant},
};

use envd::{ENVD_PORT, EnvdClient, ExecOutput, ExecRequest};
use serde_json::{Value, json};

use crate::{
    outside::{BULK, FAR, NEAR, PORT, SIX, ip, tap_of, taps_of_vmms, with_outside},
    process::{PATIENCE, Sandbox, Server, until},
};

/// Python program: prints the answer of the peer, or fails after three seconds.
const TRY: &str = r#"
import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)
s.sendall(b"hello")
print(s.recv(9).decode())
"#;
/// Python program: prints those of the addresses whose peers answer within three seconds.
const TRY_ALL: &str = r#"
import socket, sys, threading
def attempt(address):
    try:
        s = socket.create_connection((address, int(sys.argv[1])), 3)
        s.sendall(b"hello")
        if s.recv(9) == b"hello":
            sys.stdout.write(address + "\n")
    except OSError:
        pass
threads = [threading.Thread(target=attempt, args=[address]) for address in sys.argv[2:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"#;
/// Python program: opens a connection, confirms that it works, and tests it again once a file exists.
const TRY_AGAIN: &str = r#"
import os, socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)
s.settimeout(3)
def talk():
    s.sendall(b"hello")
    return s.recv(9) == b"hello"
assert talk()
open("/tmp/open", "w").close()
while not os.path.exists("/tmp/again"):
    time.sleep(0.05)
try:
    print("open" if talk() else "over")
except OSError:
    print("cut")
"#;

/// Python program: sends and receives the given numbers of bytes.
const TRANSFER: &str = r#"
import socket, sys
out, back = int(sys.argv[3]), int(sys.argv[4])
s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 30)
s.sendall(out.to_bytes(8, "big") + back.to_bytes(8, "big"))
block = bytes(1 << 20)
for _ in range(out >> 20):
    s.sendall(block)
got = 0
while part := s.recv(1 << 20):
    got += len(part)
assert got == back, got
"#;

fn server() -> Server {
    Server::with(&["--insecure-loopback", "--warm", "0:1", "--uplink", "up0"])
}

/// Runs Python in a sandbox, bypassing the server.
fn python(server: &Server, sandbox: &Sandbox, code: &str, address: &str) -> ExecOutput {
    python_with(server, sandbox, code, &[address, &PORT.to_string()])
}

fn python_with(server: &Server, sandbox: &Sandbox, code: &str, arguments: &[&str]) -> ExecOutput {
    let vsock = server.state.path().join("sandboxes").join(&sandbox.id);
    let vsock = vsock.join("vsock.sock");
    let mut agent = EnvdClient::connect(&vsock, ENVD_PORT, PATIENCE).unwrap();
    agent.set_access_token(Some(sandbox.token.clone()));
    let arguments = [&["-c", code], arguments].concat();
    let request = ExecRequest::new("/usr/bin/python3", &arguments);
    agent.exec(&request, PATIENCE).unwrap()
}

/// The subset of addresses that respond to a sandbox, tried concurrently: each of the others costs three seconds.
fn reached<'a>(server: &Server, sandbox: &Sandbox, addresses: &[&'a str]) -> Vec<&'a str> {
    let port = PORT.to_string();
    let arguments = [&[port.as_str()], addresses].concat();
    let output = python_with(server, sandbox, TRY_ALL, &arguments);
    assert_eq!(output.exit_code, 0, "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut reached = addresses.to_vec();
    reached.retain(|address| said.lines().any(|line| line == *address));
    reached
}

fn reaches(server: &Server, sandbox: &Sandbox, address: &str) -> bool {
    !reached(server, sandbox, &[address]).is_empty()
}

fn assert_reaches(server: &Server, sandbox: &Sandbox, wanted: &[&str]) {
    assert_eq!(reached(server, sandbox, &[NEAR, FAR, SIX]), wanted);
}

fn only(allowed: &[&str]) -> Value {
    json!({"allowOut": allowed, "denyOut": ["0.0.0.0/0"]})
}

fn refused(server: &Server, sandbox: &Sandbox) -> Vec<Value> {
    let events = server.get(&sandbox.path("/network/events")).expect(200);
    events.json().as_array().unwrap().clone()
}

pub(crate) fn kvm_a_sandbox_reaches_what_its_policy_allows() {
    with_outside(|| {
        let server = server();
        let shut = server.create(&json!({}));
        assert_reaches(&server, &shut, &[]);
        let sandbox = server.create(&json!({"network": only(&[NEAR, SIX])}));
        let detail = server.get(&sandbox.path("")).expect(200).json();
        assert_eq!(detail["network"]["allowOut"], json!([NEAR, SIX]));
        assert_reaches(&server, &sandbox, &[NEAR, SIX]);
        // The host itself is unreachable under every policy.
        assert!(!reaches(&server, &sandbox, "203.0.113.2"));
        let to_far = |event: &Value| {
            event["destination"] == format!("{FAR}:{PORT}") && event["reason"] == "policy"
        };
        until("the refusal is reported", || {
            refused(&server, &sandbox).iter().any(to_far)
        });
        let logs = server.get(&sandbox.path("/logs")).expect(200).json();
        let lines = logs["logEntries"].as_array().unwrap();
        let is_reported = |line: &Value| {
            line["level"] == "warn"
                && line["fields"]["logger"] == "network"
                && line["message"].as_str().unwrap().contains(FAR)
        };
        assert!(lines.iter().any(is_reported), "{logs}");
        let metrics = server.get("/metrics").expect(200).text();
        let count = metrics
            .lines()
            .find_map(|line| line.strip_prefix("cube_network_refused_total{reason=\"policy\"} "));
        assert!(count.unwrap().parse::<u64>().unwrap() > 0, "{metrics}");
        // The list does not contain packets of other sandboxes.
        assert!(
            refused(&server, &shut)
                .iter()
                .all(|e| e["reason"] != "host"),
            "of another"
        );
        let internet = server.create(&json!({"allow_internet_access": true}));
        assert_reaches(&server, &internet, &[NEAR, FAR, SIX]);
    });
}

/// How long a sandbox takes to send `out_mib` MiB and to receive `back_mib` MiB.
fn transfer(server: &Server, sandbox: &Sandbox, out_mib: u64, back_mib: u64) -> Duration {
    let [port, out, back] = [BULK.into(), out_mib << 20, back_mib << 20].map(|n| n.to_string());
    let began = Instant::now();
    let output = python_with(server, sandbox, TRANSFER, &[NEAR, &port, &out, &back]);
    assert_eq!(output.exit_code, 0, "{output:?}");
    began.elapsed()
}

pub(crate) fn kvm_a_sandbox_has_its_share_of_the_network_each_way() {
    with_outside(|| {
        // Lower bound of the duration: the number of bytes, less a burst of 64 KiB and a tenth of a second's worth of
        // data, divided by the rate.
        let least = |mib: u64, rate_mib_s: u64| {
            let saved = (64 << 10) + (rate_mib_s << 20) / 10;
            Duration::from_millis(((mib << 20) - saved) * 1000 / (rate_mib_s << 20))
        };
        let mut server = server();
        let sandbox = server.create(&json!({"network": only(&[NEAR])}));
        for (out, back) in [(160, 0), (0, 160)] {
            let took = transfer(&server, &sandbox, out, back);
            assert!(took >= least(160, 64), "{out} out, {back} back: {took:?}");
        }
        // The limit is an option of the server. A server that recovers a sandbox applies its own limit, even after a
        // change of the sandbox's policy.
        server.kill();
        server.restart_with(&["--network-rate", "1MiB"]);
        server
            .put(&sandbox.path("/network"), &only(&[NEAR, FAR]))
            .expect(204);
        let took = transfer(&server, &sandbox, 2, 2);
        assert!(took >= 2 * least(2, 1), "{took:?}");
        until("the loss is reported", || {
            let is_bandwidth = |event: &Value| event["reason"] == "bandwidth";
            refused(&server, &sandbox).iter().any(is_bandwidth)
        });
    });
}

pub(crate) fn kvm_a_sandbox_that_does_nothing_sends_nothing() {
    with_outside(|| {
        let server = server();
        let sandbox = server.create(&json!({}));
        server.read_file(&sandbox, "/etc/hostname");
        // Time for packets that kernels send on their own: multicast reports, router solicitations.
        thread::sleep(Duration::from_secs(4));
        assert_eq!(refused(&server, &sandbox), Vec::<Value>::new());
    });
}

pub(crate) fn kvm_a_policy_is_replaced_while_the_sandbox_runs() {
    with_outside(|| {
        let server = server();
        let sandbox = server.create(&json!({"network": only(&[NEAR])}));
        let output = thread::scope(|scope| {
            let connection = scope.spawn(|| python(&server, &sandbox, TRY_AGAIN, NEAR));
            until("the connection is open", || {
                let open = "/files?username=root&path=/tmp/open";
                server.envd(&sandbox, "GET", open, b"").status == 200
            });
            server
                .put(&sandbox.path("/network"), &only(&[FAR]))
                .expect(204);
            server.write_file(&sandbox, "/tmp/again", "");
            connection.join().unwrap()
        });
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "cut\n",
            "{output:?}"
        );
        assert_reaches(&server, &sandbox, &[FAR]);
        let refusal = server.put(&sandbox.path("/network"), &json!({"denyOut": ["a.test"]}));
        refusal.expect(400);
        assert_reaches(&server, &sandbox, &[FAR]);
        server
            .put(&sandbox.path("/network"), &json!({}))
            .expect(204);
        assert_reaches(&server, &sandbox, &[]);
    });
}

pub(crate) fn kvm_pause_fork_and_kill_take_the_policy_along() {
    with_outside(|| {
        let server = Server::with(&["--insecure-loopback", "--warm", "0:0", "--uplink", "up0"]);
        let sandbox = server.create(&json!({"network": only(&[NEAR])}));
        until("one VMM has a TAP", || taps_of_vmms() == 1);
        for keeps_memory in [true, false] {
            let how = json!({"memory": keeps_memory});
            server.post(&sandbox.path("/pause"), &how).expect(204);
            until("the paused sandbox has no TAP", || taps_of_vmms() == 0);
            let connect = format!("/v2{}", sandbox.path("/connect"));
            server.post(&connect, &json!({"timeout": 300})).expect(201);
            assert_reaches(&server, &sandbox, &[NEAR]);
        }
        server
            .put(&sandbox.path("/network"), &only(&[FAR]))
            .expect(204);
        let forks = server
            .post(&sandbox.path("/fork"), &json!({"count": 2, "timeout": 300}))
            .expect(201)
            .json();
        for fork in forks.as_array().unwrap() {
            assert_reaches(&server, &Sandbox::of(&fork["sandbox"]), &[FAR]);
        }
        for id in server.list() {
            server.delete(&format!("/sandboxes/{id}")).expect(204);
        }
        until("no VMM has a TAP", || taps_of_vmms() == 0);
    });
}

pub(crate) fn kvm_a_killed_server_leaves_the_policy_in_force() {
    with_outside(|| {
        let mut server = server();
        let sandbox = server.create(&json!({"network": only(&[NEAR])}));
        let shut = server.create(&json!({}));
        assert_reaches(&server, &sandbox, &[NEAR]);
        server.kill();
        assert_reaches(&server, &sandbox, &[NEAR]);
        assert_reaches(&server, &shut, &[]);
        server.restart();
        assert_reaches(&server, &sandbox, &[NEAR]);
        assert_reaches(&server, &shut, &[]);
        server
            .put(&sandbox.path("/network"), &only(&[FAR]))
            .expect(204);
        assert_reaches(&server, &sandbox, &[FAR]);
        until("both VMMs have TAPs", || taps_of_vmms() == 2);
        server.delete(&shut.path("")).expect(204);
        until("its TAP is released", || taps_of_vmms() == 1);
        server
            .put(&sandbox.path("/network"), &json!({}))
            .expect(204);
        assert_reaches(&server, &sandbox, &[]);
    });
}

pub(crate) fn kvm_a_sandbox_whose_network_changed_while_no_server_ran_is_never_served() {
    with_outside(|| {
        let mut server = server();
        let changes = ["link set TAP down", "address add 203.0.113.77/32 dev TAP"];
        let changed = changes.map(|change| (change, server.create(&json!({}))));
        let sandbox = server.create(&json!({"network": only(&[NEAR])}));
        server.kill();
        for (change, sandbox) in &changed {
            let dir = server.state.path().join("sandboxes").join(&sandbox.id);
            let record = fs::read(dir.join("record.json")).unwrap();
            let record: Value = serde_json::from_slice(&record).unwrap();
            let tap = tap_of(record["vmm"]["pid"].as_u64().unwrap());
            ip(&change.replace("TAP", &tap));
        }
        server.restart();
        for (change, sandbox) in &changed {
            assert!(!server.is_up(sandbox), "after {change}");
        }
        assert!(server.is_up(&sandbox));
        assert_reaches(&server, &sandbox, &[NEAR]);
        until("their VMMs have ended", || taps_of_vmms() == 1);
        assert_eq!(server.list(), [sandbox.id]);
    });
}

pub(crate) fn kvm_a_server_that_is_killed_while_it_starts_is_followed_by_one_that_starts() {
    with_outside(|| {
        let mut server = server();
        let sandbox = server.create(&json!({"network": only(&[NEAR])}));
        for _ in 0..15 {
            server.kill();
            server.begin_restart();
            let lived_ms = RandomState::new().hash_one(()) % 800;
            eprintln!("killing the server {lived_ms} ms after its start");
            thread::sleep(Duration::from_millis(lived_ms));
            server.assert_running();
        }
        server.crash_and_restart();
        assert_reaches(&server, &sandbox, &[NEAR]);
        let new = server.create(&json!({"network": only(&[FAR])}));
        assert_reaches(&server, &new, &[FAR]);
        let mut ids = server.list();
        ids.sort();
        let mut expected = [sandbox.id, new.id];
        expected.sort();
        assert_eq!(ids, expected);
    });
}

pub(crate) fn kvm_without_a_network_programs_are_told_at_once() {
    let server = Server::with(&["--insecure-loopback", "--warm", "0:0", "--network", "none"]);
    let sandbox = server.create(&json!({"network": {"denyOut": ["0.0.0.0/0"]}}));
    for address in [NEAR, SIX, "169.254.0.22"] {
        let output = python(&server, &sandbox, TRY, address);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("Network is unreachable"), "{address}: {said}");
    }
    let body = json!({"templateID": "base", "network": only(&[NEAR])});
    let refusal = server.post("/v2/sandboxes", &body).expect(501).json();
    assert!(
        refusal["message"]
            .as_str()
            .unwrap()
            .contains("network.mode")
    );
    server
        .put(&sandbox.path("/network"), &only(&[NEAR]))
        .expect(501);
    server
        .put(&sandbox.path("/network"), &json!({}))
        .expect(204);
    assert_eq!(refused(&server, &sandbox), Vec::<Value>::new());
}
