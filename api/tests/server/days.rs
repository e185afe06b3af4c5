//! A day of pauses and resumes in minutes: the server's clocks run ahead of the host's.

use std::time::Duration;

use envd::Timestamp;
use serde_json::json;
use test_cases::found;

use crate::{
    churn::is_clean,
    clock::Clock,
    process::{Sandbox, Server, until},
};

const DAY: Duration = Duration::from_secs(24 * 3600);
const STEP: Duration = Duration::from_secs(600);
/// Timeouts of the sandboxes, in seconds. They pause at their deadlines, and traffic resumes them.
const TIMEOUTS: [u32; 6] = [300, 900, 1700, 3500, 7000, 20_000];
/// Every so many steps, a sandbox is created that ends at its deadline.
const MORTAL: u64 = 12;
/// Every so many steps, the server is killed, and is absent while the clock advances.
const KILL: u64 = 24;
/// Maximum difference between a guest's clock and the server's: far less than [`STEP`], far more than a busy host
/// needs.
const SLACK: Duration = Duration::from_secs(30);

/// A sandbox that lives all day, and its expected state.
struct Sleeper {
    sandbox: Sandbox,
    timeout_s: u32,
    /// By the server's clock, since 1970.
    deadline: Duration,
    /// Number of visits to the guest.
    visits: usize,
    uptime_s: f64,
    boot_id: String,
}

pub(crate) fn soak_a_day_of_pauses_and_resumes() {
    let mut clock = Clock::new();
    let options = ["--insecure-loopback", "--warm", "0:1"];
    let mut server = Server::of_program(clock.server(), &options);
    let mut sleepers: Vec<Sleeper> = TIMEOUTS
        .iter()
        .map(|timeout_s| sleeper(&server, &clock, *timeout_s))
        .collect();
    let (mut pauses, mut resumes, mut ends, mut kills) = (0, 0, 0, 0);
    for step in 1..=DAY.as_secs() / STEP.as_secs() {
        let mortal = (step % MORTAL == 0).then(|| server.create(&json!({"timeout": 60})));
        let is_killed = step % KILL == 0;
        if is_killed {
            server.kill();
        }
        clock.advance(STEP);
        if is_killed {
            server.restart();
            kills += 1;
        }
        if let Some(mortal) = mortal {
            until("the sandbox ends at its deadline", || {
                server.get(&mortal.path("")).status == 404
            });
            ends += 1;
        }
        for sleeper in &mut sleepers {
            if sleeper.deadline > clock.now() + SLACK {
                assert_eq!(server.state_of(&sleeper.sandbox), "running");
            } else if sleeper.deadline + SLACK < clock.now() {
                until("the sandbox is paused", || {
                    server.state_of(&sleeper.sandbox) == "paused"
                });
                pauses += 1;
                visit(&server, &clock, sleeper);
                resumes += 1;
            }
        }
    }
    for sleeper in &sleepers {
        server.delete(&sleeper.sandbox.path("")).expect(204);
    }
    until("nothing is left", || is_clean(&server));
    // The sandbox with the shortest timeout pauses at each step.
    assert!(pauses > DAY.as_secs() / STEP.as_secs(), "{pauses} pauses");
    found!(
        "24 hours: {pauses} pauses at deadlines, {resumes} resumes by traffic, {ends} ends, {kills} kills of the \
         server; guests' clocks, uptimes and files as expected"
    );
}

fn sleeper(server: &Server, clock: &Clock, timeout_s: u32) -> Sleeper {
    let auto = json!({"timeout": timeout_s, "autoPause": true, "autoResume": {"enabled": true}});
    let sandbox = server.create(&auto);
    let boot_id = server.boot_id(&sandbox).trim().to_owned();
    let mut sleeper = Sleeper {
        sandbox,
        timeout_s,
        deadline: Duration::ZERO,
        visits: 0,
        uptime_s: 0.0,
        boot_id,
    };
    visit(server, clock, &mut sleeper);
    sleeper
}

/// Runs a command in a sandbox, which resumes it if it is paused. The guest has the server's time, the same boot, an
/// uptime that continues, and its file in memory. The sandbox has its timeout again.
fn visit(server: &Server, clock: &Clock, sleeper: &mut Sleeper) {
    let before = clock.now();
    let script = "echo >> /dev/shm/visits; date +%s; wc -l < /dev/shm/visits; cut -d' ' -f1 /proc/uptime; \
                  cat /proc/sys/kernel/random/boot_id";
    let output = server.sh(&sleeper.sandbox, script);
    let after = clock.now();
    let lines: Vec<&str> = output.lines().collect();
    let [time, visits, uptime, boot_id] = lines[..] else {
        panic!("{output}");
    };
    let time = Duration::from_secs(time.parse().unwrap());
    assert!(
        before <= time + SLACK && time <= after + SLACK,
        "the guest's clock is {time:?}, the server's was {before:?} and is {after:?}"
    );
    sleeper.visits += 1;
    assert_eq!(visits.parse(), Ok(sleeper.visits));
    let uptime_s: f64 = uptime.parse().unwrap();
    // The guest does not notice a pause: its uptime grows by the time that it ran, not by the length of the day.
    let grown = uptime_s - sleeper.uptime_s;
    let most = Duration::from_secs_f64(f64::max(grown, 0.0));
    assert!(grown >= 0.0, "uptime {uptime_s} after {}", sleeper.uptime_s);
    assert!(
        sleeper.visits == 1 || most < STEP,
        "the uptime grew by {most:?}"
    );
    sleeper.uptime_s = uptime_s;
    assert_eq!(boot_id, sleeper.boot_id);
    let detail = server.get(&sleeper.sandbox.path("")).expect(200).json();
    let end = Timestamp::parse(detail["endAt"].as_str().unwrap()).unwrap();
    sleeper.deadline = Duration::from_nanos(end.unix_ns());
    let timeout = Duration::from_secs(u64::from(sleeper.timeout_s));
    assert!(
        before + timeout <= sleeper.deadline + SLACK && sleeper.deadline <= after + timeout + SLACK,
        "the deadline is {:?} at {after:?} with a timeout of {timeout:?}",
        sleeper.deadline
    );
}
