//! DNS queries of sandboxes while the server is replaced.

use std::{net::UdpSocket, sync::atomic::Ordering, thread, time::Duration};

use serde_json::{Value, json};

use crate::{
    outside::with_outside,
    process::{Server, until},
    streams::{self, Load},
};

/// Python program: sends queries, each once, over UDP and TCP and both address families, until a file exists. Keeps
/// below the resolver's limits for a sandbox (rate, pending queries, connections) however long a reload or a pause of
/// this program takes, so that every refusal is a fault. Writes a report: the queries, and those that got no address.
const ASK: &str = r#"
import json, os, select, socket, struct, threading, time
def query(number):
    labels = (b"n%d" % number, b"names", b"test")
    name = b"".join(bytes([len(l)]) + l for l in labels) + b"\0"
    return struct.pack(">6H", number, 0x100, 1, 0, 0, 0) + name + struct.pack(">2H", 1, 1)
def is_good(reply):
    return reply[3] & 15 == 0 and reply[6:8] == b"\0\1"
four, six = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
waiting, bad, refused, threads = set(), [], [], []
def ask_by_tcp(number):
    try:
        s = socket.create_connection(("169.254.0.22", 53), 30)
        message = query(number)
        s.sendall(struct.pack(">H", len(message)) + message)
        reply = b""
        while len(reply) < 2 or len(reply) < 2 + struct.unpack(">H", reply[:2])[0]:
            part = s.recv(4096)
            assert part, "the connection was closed"
            reply += part
        assert is_good(reply[2:]), reply
    except Exception as error:
        refused.append(f"{number}: {error!r}")
def receive(seconds):
    for s in select.select([four, six], [], [], seconds)[0]:
        reply = s.recv(4096)
        number = struct.unpack(">H", reply[:2])[0]
        waiting.discard(number)
        if not is_good(reply):
            bad.append([number, reply[3] & 15])
def is_over():
    return os.path.exists("/tmp/over")
def is_at_a_limit():
    threads[:] = [thread for thread in threads if thread.is_alive()]
    return len(waiting) >= 60 or len(threads) >= 6
number = 0
while not is_over():
    due = time.monotonic() + 0.03
    while not is_over() and ((left := due - time.monotonic()) > 0 or is_at_a_limit()):
        receive(max(left, 0.01))
    number += 1
    if number % 8 == 0:
        threads.append(threading.Thread(target=ask_by_tcp, args=(number,)))
        threads[-1].start()
    else:
        waiting.add(number)
        s, to = (four, "169.254.0.22") if number % 2 else (six, "fdcb::16")
        s.sendto(query(number), (to, 53))
last = time.monotonic() + 30
while waiting and time.monotonic() < last:
    receive(1)
for thread in threads:
    thread.join()
with open("/tmp/report.part", "w") as report:
    json.dump({"asked": number, "lost": sorted(waiting), "bad": bad, "refused": refused}, report)
os.rename("/tmp/report.part", "/tmp/report")
"#;

/// An upstream server that answers every query of type A with one address, after some time, so that queries are in
/// progress at every moment.
pub(crate) fn upstream() -> String {
    const DELAY: Duration = Duration::from_millis(50);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, source)) = socket.recv_from(&mut buffer) {
            let query = buffer[..length].to_vec();
            let socket = socket.try_clone().unwrap();
            thread::spawn(move || {
                thread::sleep(DELAY);
                // The querying process may have exited.
                let _gone = socket.send_to(&reply(&query), source);
            });
        }
    });
    address
}

/// RFC 1035, 4.1: the header, the question, and a record whose name points to the question.
fn reply(query: &[u8]) -> Vec<u8> {
    const HEADER: usize = 12;
    const RECORD: [u8; 16] = [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 1];
    let name = query[HEADER..].iter().position(|byte| *byte == 0).unwrap();
    let question = &query[HEADER..HEADER + name + 5];
    let is_a = question.ends_with(&[0, 1, 0, 1]);
    let counts = [0, 1, 0, u8::from(is_a), 0, 0, 0, 0];
    let mut reply = [&query[..2], &[0x81, 0x80], &counts, question].concat();
    if is_a {
        reply.extend(RECORD);
    }
    reply
}

pub(crate) fn kvm_dns_queries_during_reloads_are_answered_without_a_repeat() {
    with_outside(|| {
        let upstream = upstream();
        let server = Server::with(&[
            "--insecure-loopback",
            "--warm",
            "1:1",
            "--uplink",
            "up0",
            "--dns-server",
            &upstream,
        ]);
        let sandboxes = [(); 2].map(|()| {
            let options = json!({"allow_internet_access": true});
            server.create(&options)
        });
        let load = Load::default();
        let answered = || load.answered.load(Ordering::Relaxed);
        thread::scope(|scope| {
            let (server, load) = (&server, &load);
            for sandbox in &sandboxes {
                server.write_file(sandbox, "/tmp/ask.py", ASK);
                server.sh(sandbox, "setsid python3 /tmp/ask.py > /tmp/errors 2>&1 &");
            }
            let churn = scope.spawn(|| streams::churn(server, load));
            for round in 0..6 {
                let before = answered();
                until("sandboxes are created", || {
                    assert!(!churn.is_finished(), "round {round}");
                    answered() > before + 2
                });
                server.reload().unwrap();
            }
            load.over.store(true, Ordering::Relaxed);
            for sandbox in &sandboxes {
                server.write_file(sandbox, "/tmp/over", "");
                let mut report = None;
                until("the queries have ended", || {
                    assert_eq!(server.read_file(sandbox, "/tmp/errors"), "");
                    let path = "/files?username=root&path=/tmp/report";
                    let answer = server.envd(sandbox, "GET", path, b"");
                    report = (answer.status == 200).then(|| answer.text());
                    report.is_some()
                });
                let found: Value = serde_json::from_str(&report.unwrap()).unwrap();
                for kind in ["lost", "bad", "refused"] {
                    assert_eq!(found[kind], json!([]), "{kind}: {found}");
                }
                assert!(found["asked"].as_u64().unwrap() > 50, "{found}");
            }
        });
    });
}
