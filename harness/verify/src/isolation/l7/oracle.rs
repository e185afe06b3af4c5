//! Runs the same attempts through mitmproxy, with the same policy as a script, to compare its results with those of
//! `cube-egress`. The client runs on the host here, because mitmproxy runs in front of a single server, not behind
//! a resolver.

use std::{
    fs,
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use super::{
    attempts::{Attempt, Attempts, PROGRAM},
    findings,
    judge::{Outcome, Seen, outcome},
};
use crate::{
    isolation::world::World,
    setup::{VerifyError, at},
};
use testbed::server::free_port;

/// mitmproxy's script: the rule of `l7.toml`, and its names.
const SCRIPT: &str = r#"
from mitmproxy import http
import os

RULED = {"ruled.l7.test", "h2.l7.test", "xn--bcher-kva.l7.test"}
NAMES = RULED | {"other.l7.test", "h2other.l7.test"}

def request(flow):
    name = flow.request.pretty_host.lower().rstrip(".")
    wanted = (flow.client_conn.sni or name).lower().rstrip(".")
    if name not in NAMES or name != wanted:
        flow.response = http.Response.make(421)
    elif name in RULED:
        flow.request.headers["X-Api-Key"] = os.environ["L7_SECRET"]
"#;
/// Servers of the attempts: mitmproxy's mode, the name that leads to the server, and the port.
const SERVERS: [(&str, &[&str], u16); 3] = [
    (
        "reverse:https://198.51.100.60:443",
        &["ruled.l7.test", "xn--bcher-kva.l7.test"],
        443,
    ),
    ("reverse:https://198.51.100.62:443", &["h2.l7.test"], 443),
    (
        "reverse:http://198.51.100.60:80",
        &["ruled.l7.test", "other.l7.test"],
        80,
    ),
];
const START: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// A running mitmproxy.
struct Running {
    child: Child,
    port: u16,
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Prints how the outcomes differ. Without the program, prints how many cases are not compared.
pub(super) fn compare(
    world: &World,
    dir: &Path,
    program: &Path,
    attempts: &Attempts,
    ours: &Seen,
    secret: &str,
) -> Result<(), VerifyError> {
    let mut proxies = Vec::new();
    for (number, (mode, ..)) in SERVERS.iter().enumerate() {
        match start(
            &dir.join(format!("oracle-{}-{number}", attempts.cases.len())),
            program,
            mode,
            secret,
        ) {
            Ok(proxy) => proxies.push(proxy),
            Err(error) => {
                let count = attempts.cases.len();
                let program = program.display();
                println!(
                    "oracle: skipped, {count} cases not compared: cannot start {program} ({error}); Debian has it in the package mitmproxy"
                );
                return Ok(());
            }
        }
    }
    let place = |case: &Attempt| {
        let is_here = |(_, names, port): &(&str, &[&str], u16)| {
            names.contains(&&*case.to) && *port == case.port && !case.follow
        };
        let number = SERVERS.iter().position(is_here)?;
        Some(("127.0.0.1".to_owned(), proxies.get(number)?.port))
    };
    let order = dir.join("oracle.json");
    fs::write(&order, attempts.order_to(place).to_string()).map_err(at(&order))?;
    let script = dir.join("l7.py");
    fs::write(&script, PROGRAM).map_err(at(&script))?;
    world.origins.take();
    let python = Path::new("python3");
    let output = Command::new(python).arg(&script).arg(&order).output();
    let output = output.map_err(at(python))?;
    let theirs = Seen {
        findings: findings(&output.stdout)?,
        arrivals: world.origins.take(),
        refusals: Vec::new(),
    };
    let compared = attempts.cases.iter().filter(|case| place(case).is_some());
    print(compared, ours, &theirs, secret);
    Ok(())
}

fn start(dir: &Path, program: &Path, mode: &str, secret: &str) -> std::io::Result<Running> {
    fs::create_dir(dir)?;
    let script = dir.join("policy.py");
    fs::write(&script, SCRIPT)?;
    let port = free_port()?;
    let set =
        |name: &str, value: &dyn std::fmt::Display| ["--set".to_owned(), format!("{name}={value}")];
    let child = Command::new(program)
        .args([
            "--quiet",
            "--mode",
            mode,
            "--listen-host",
            "127.0.0.1",
            "--listen-port",
        ])
        .arg(port.to_string())
        .args(set("confdir", &dir.display()))
        // mitmproxy addresses the server by IP address, for which there is no certificate.
        .args(set("ssl_insecure", &"true"))
        .args(set("keep_host_header", &"true"))
        .args(set("connection_strategy", &"lazy"))
        .arg("--scripts")
        .arg(&script)
        .env("L7_SECRET", secret)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let mut running = Running { child, port };
    let deadline = Instant::now() + START;
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        if let Some(status) = running.child.try_wait()? {
            return Err(std::io::Error::other(format!("it ended: {status}")));
        }
        if Instant::now() > deadline {
            return Err(std::io::Error::other("it does not listen"));
        }
        std::thread::sleep(POLL);
    }
    Ok(running)
}

fn print<'a>(cases: impl Iterator<Item = &'a Attempt>, ours: &Seen, theirs: &Seen, secret: &str) {
    let (mut equal, mut stricter, mut laxer) = (0, 0, 0);
    println!("| attempt | cube-egress | mitmproxy | |\n|---|---|---|---|");
    for case in cases {
        let [own, other] = [ours, theirs].map(|seen| outcome(case, seen, secret));
        let said = match (own, other) {
            _ if own == other => {
                equal += 1;
                ""
            }
            (Outcome::Refused, _) => {
                stricter += 1;
                "cube-egress is stricter"
            }
            _ => {
                laxer += 1;
                "mitmproxy is stricter"
            }
        };
        println!(
            "| `{}` | {} | {} | {said} |",
            case.name,
            own.name(),
            other.name()
        );
    }
    println!("oracle: {equal} equal, cube-egress stricter in {stricter}, mitmproxy in {laxer}");
}
