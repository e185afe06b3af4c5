//! Cases that take more than one attempt. Each tells what got through that must not (a breach), and what was not
//! borne out (a doubt).

mod forged;
mod load;
mod offload;
mod reuse;
mod vmm;

use std::{
    io,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use netprobe::{Action, Finding, Outcome, Probe};
use serde_json::{Map, Value, json};

use super::{
    BLOCKED_MS, ECHO, EVENT_PATIENCE, NetworkEvent, PASS_MS, Stage,
    cases::{Case, Script},
    judge::{Judged, Verdict},
    sandbox::{Guest, SandboxError},
    world::{Finishing, HOST4, Place, Seen},
};

/// Receivers of the scripts; each may or may not be allowed.
const FIRST: &str = "198.51.100.10:5000";
const SECOND: &str = "198.51.100.11:5000";
const THIRD: &str = "198.51.100.12:5000";
/// Not answered by the echoes.
const SILENT: &str = "198.51.100.10:7001";
/// Bound of waits for packets.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the connection that is cut would go on.
const CUT_MS: u64 = 8000;
/// Changes to and fro.
const SWAPS: usize = 12;

/// What a script found.
#[derive(Debug, Default)]
struct Found {
    guest: String,
    breaches: Vec<String>,
    doubts: Vec<String>,
}

/// Why a script could not be gone through.
#[derive(Debug, thiserror::Error)]
enum ScriptError {
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error("a socket or the witness")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Stuck(String),
}

impl Found {
    fn breach_if(&mut self, is_so: bool, what: impl Into<String>) {
        if is_so {
            self.breaches.push(what.into());
        }
    }

    fn doubt_unless(&mut self, is_so: bool, what: impl Into<String>) {
        if !is_so {
            self.doubts.push(what.into());
        }
    }
}

/// Goes through it.
pub(super) fn try_script(stage: &mut Stage, neighbour: &Guest, case: &Case) -> Judged {
    stage.world.witness.forget();
    let name = case.name.as_str();
    let found = match case.script {
        Some(Script::Cut) => cut(stage, name),
        Some(Script::Churn) => churn(stage, name),
        Some(Script::Clear) => clear(stage, name),
        Some(Script::Unsolicited) => unsolicited(stage, name),
        Some(Script::Late) => late(stage, name),
        Some(Script::Reuse) => reuse::device(stage, name),
        Some(Script::Pause) => pause(stage, name),
        Some(Script::Fork) => fork(stage, name),
        Some(Script::Crash) => crash(stage, name),
        Some(Script::Flood) => load::flood(stage, neighbour, name),
        Some(Script::Ports) => load::ports(stage, neighbour, name),
        Some(Script::UnfitFromGuest) => offload::from_guest(stage, name, Finishing::ByHost),
        Some(Script::UnfitFromGuestByCard) => offload::from_guest(stage, name, Finishing::ByUplink),
        Some(Script::UnfitAtTap) => offload::at_tap(stage, name, Finishing::ByHost),
        Some(Script::UnfitAtTapByCard) => offload::at_tap(stage, name, Finishing::ByUplink),
        Some(Script::Forged) => forged::errors(stage, name),
        None => Err(ScriptError::Stuck("it has no script".to_owned())),
    };
    let (verdict, guest, wrong) = match found {
        Err(error) => (Verdict::NotTried, String::new(), vec![model::chain(&error)]),
        Ok(found) if !found.breaches.is_empty() => (Verdict::Breach, found.guest, found.breaches),
        Ok(found) if !found.doubts.is_empty() => (Verdict::Unproven, found.guest, found.doubts),
        Ok(found) => (Verdict::Pass, found.guest, Vec::new()),
    };
    Judged {
        case: case.name.clone(),
        class: case.class,
        why: case.why.clone(),
        verdict,
        tried: format!("script {:?}", case.script),
        guest,
        arrived: [0; 3],
        wrong,
    }
}

/// Options of a create that reaches these addresses and nothing else.
pub(super) fn allowing(addresses: &[&str]) -> Map<String, Value> {
    let mut options = Map::new();
    options.insert("network".to_owned(), only(addresses));
    options
}

/// The same of an update.
fn only(addresses: &[&str]) -> Value {
    json!({ "allowOut": addresses, "denyOut": ["0.0.0.0/0"] })
}

/// An address that is written in this program.
pub(super) fn address(text: &str) -> SocketAddr {
    text.parse().unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)))
}

/// Lets a sandbox ask an echo with this word until its ear has heard the answer. An ear may open late.
pub(super) fn speak_until(is_heard: impl Fn() -> bool, guest: &Guest, word: String) {
    let speak = [probe(word, Action::Udp(address(ECHO)), PASS_MS)];
    for _ in 0..30 {
        // If it cannot be sent, the ear does not hear it and says so.
        let _ = guest.probe(&speak);
        thread::sleep(Duration::from_millis(50));
        if is_heard() {
            return;
        }
    }
}

fn host_of(text: &str) -> String {
    address(text).ip().to_string()
}

fn probe(name: String, action: Action, within_ms: u64) -> Probe {
    Probe {
        name,
        first: Vec::new(),
        action,
        within_ms,
    }
}

fn numbered(name: &str, to: &str, within_ms: u64) -> Probe {
    let action = Action::Numbered {
        to: address(to),
        every_ms: 10,
    };
    probe(name.to_owned(), action, within_ms)
}

/// Packets outside, to this receiver.
fn to(text: &'static str) -> impl Fn(&Seen) -> bool {
    let to = address(text);
    move |seen| {
        seen.place == Place::Outside && seen.to == Some(to.ip()) && seen.port == Some(to.port())
    }
}

/// Tries one that must pass and one that must not.
fn still_confined(
    stage: &mut Stage,
    guest: &Guest,
    name: &str,
    found: &mut Found,
) -> Result<(), ScriptError> {
    stage.world.witness.forget();
    let allowed = probe(format!("{name}-open"), Action::Tcp(address(FIRST)), PASS_MS);
    let denied = probe(
        format!("{name}-shut"),
        Action::Tcp(address(SECOND)),
        BLOCKED_MS,
    );
    let findings = guest.probe(&[allowed, denied])?;
    stage.world.witness.settle()?;
    let outcome = |suffix: &str| {
        let name = format!("{name}-{suffix}");
        findings
            .iter()
            .find(|finding| finding.name == name)
            .map(|finding| finding.outcome)
    };
    found.breach_if(
        outcome("shut") == Some(Outcome::Ok),
        "the guest reached what is denied",
    );
    let arrived = stage
        .world
        .witness
        .seen()
        .iter()
        .filter(|seen| to(SECOND)(seen))
        .count();
    found.breach_if(
        arrived > 0,
        format!("{arrived} packets arrived at what is denied"),
    );
    let has = |outcome: Option<Outcome>| outcome.is_some_and(|o| o != Outcome::Failed);
    found.doubt_unless(has(outcome("shut")), "it could not be tried");
    found.doubt_unless(
        outcome("open") == Some(Outcome::Ok),
        "what is allowed is not reached",
    );
    found.guest += &summary(&findings);
    Ok(())
}

fn summary(findings: &[Finding]) -> String {
    let words = findings
        .iter()
        .map(|f| format!("{}: {} ({}) ", f.name, f.outcome.name(), f.said));
    words.collect()
}

fn told(guest: &Guest, is_it: impl Fn(&NetworkEvent) -> bool) -> Result<bool, ScriptError> {
    let deadline = Instant::now() + EVENT_PATIENCE;
    let events = guest.await_events(deadline, |events| events.iter().any(&is_it))?;
    Ok(events.iter().any(is_it))
}

fn cut(stage: &mut Stage, name: &str) -> Result<Found, ScriptError> {
    let mut found = Found::default();
    let guest = stage
        .customer
        .create(&allowing(&[&host_of(FIRST), &host_of(SECOND)]))?;
    let action = Action::Stream {
        to: address(FIRST),
        every_ms: 10,
    };
    let open = probe(format!("{name}-open"), action, CUT_MS);
    let steady = numbered(&format!("{name}-steady"), SECOND, CUT_MS);
    let witness = &mut stage.world.witness;
    let findings = thread::scope(|scope| {
        let probing = scope.spawn(|| guest.probe(&[open, steady]));
        let flowed = witness.await_seen(20, Instant::now() + PATIENCE, to(FIRST));
        let updated = guest.update(&only(&[&host_of(SECOND)]));
        let changed = witness.settle();
        let findings = probing
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, ScriptError>((flowed, updated?, changed?, findings?))
    })?;
    let (flowed, (), changed, findings) = findings;
    witness.settle()?;
    let after = &witness.seen()[changed..];
    let passed = after.iter().filter(|seen| to(FIRST)(seen)).count();
    found.breach_if(
        passed > 0,
        format!("{passed} packets of the open connection passed after the change"),
    );
    let steady = after.iter().filter(|seen| to(SECOND)(seen)).count();
    found.doubt_unless(flowed, "the connection never carried anything");
    found.doubt_unless(steady > 0, "what stays allowed stopped as well");
    let about =
        |event: &NetworkEvent| event.reason == "policy" && event.destination == address(FIRST);
    found.doubt_unless(told(&guest, about)?, "no event tells of the cut");
    found.guest = summary(&findings);
    Ok(found)
}

fn churn(stage: &mut Stage, name: &str) -> Result<Found, ScriptError> {
    let mut found = Found::default();
    let guest = stage.customer.create(&allowing(&[&host_of(FIRST)]))?;
    let receivers = [FIRST, SECOND, THIRD];
    let probes = receivers.map(|to| numbered(&format!("{name}-{}", host_of(to)), to, 6000));
    let witness = &mut stage.world.witness;
    let mut passed = [0; 2];
    let findings = thread::scope(|scope| {
        let probing = scope.spawn(|| guest.probe(&probes));
        witness.await_seen(5, Instant::now() + PATIENCE, to(FIRST));
        for turn in 0..SWAPS {
            let (open, shut) = if turn % 2 == 0 {
                (SECOND, FIRST)
            } else {
                (FIRST, SECOND)
            };
            guest.update(&only(&[&host_of(open)]))?;
            let (from, until) = (witness.settle()?, witness.settle()?);
            let between = &witness.seen()[from..until];
            let count = |text| between.iter().filter(|seen| to(text)(seen)).count();
            found.breach_if(
                count(shut) > 0,
                format!(
                    "{} packets to {shut} while only {open} is allowed",
                    count(shut)
                ),
            );
            passed[turn % 2] += count(open);
        }
        let findings = probing
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, ScriptError>(findings?)
    })?;
    witness.settle()?;
    let never = witness.seen().iter().filter(|seen| to(THIRD)(seen)).count();
    found.breach_if(
        never > 0,
        format!("{never} packets to {THIRD}, which no policy allowed"),
    );
    found.doubt_unless(
        passed.iter().all(|count| *count > 0),
        format!("what was allowed passed {passed:?} times"),
    );
    found.guest = summary(&findings);
    Ok(found)
}

fn clear(stage: &mut Stage, name: &str) -> Result<Found, ScriptError> {
    let mut found = Found::default();
    let guest = stage
        .customer
        .create(&allowing(&[&host_of(FIRST), &host_of(SECOND)]))?;
    let try_it = |suffix: &str, within| {
        guest.probe(&[probe(
            format!("{name}-{suffix}"),
            Action::Tcp(address(SECOND)),
            within,
        )])
    };
    let before = try_it("before", PASS_MS)?;
    guest.update(&json!({}))?;
    let changed = stage.world.witness.settle()?;
    let after = try_it("after", BLOCKED_MS)?;
    stage.world.witness.settle()?;
    let passed = stage.world.witness.seen()[changed..]
        .iter()
        .filter(|seen| to(SECOND)(seen))
        .count();
    let is_ok = |findings: &[Finding]| {
        findings
            .iter()
            .any(|finding| finding.outcome == Outcome::Ok)
    };
    found.breach_if(
        passed > 0 || is_ok(&after),
        "it still reaches what the old policy allowed",
    );
    found.doubt_unless(is_ok(&before), "it never reached what its policy allowed");
    found.guest = summary(&[before, after].concat());
    Ok(found)
}

fn unsolicited(stage: &mut Stage, name: &str) -> Result<Found, ScriptError> {
    let guest = stage.customer.create(&allowing(&[&host_of(SILENT)]))?;
    let friend = stage.world.socket_at(address(SILENT))?;
    let other_port = stage.world.socket_at(address("198.51.100.10:7003"))?;
    let stranger = stage.world.socket_at(address("203.0.113.9:7002"))?;
    let words = ["port", "strange", "sweep"].map(|word| format!("{name}-{word}"));
    let until = format!("{name}-end");
    let hear = probe(
        name.to_owned(),
        Action::Hear {
            words: words.to_vec(),
            until: until.clone(),
        },
        PASS_MS,
    );
    let speak = numbered(&format!("{name}-own"), SILENT, 6000);
    let findings = thread::scope(|scope| {
        let probing = scope.spawn(|| guest.probe(&[hear, speak]));
        let (_, mapped) = friend.recv_from(&mut [0; 128])?;
        other_port.send_to(words[0].as_bytes(), mapped)?;
        stranger.send_to(words[1].as_bytes(), mapped)?;
        for port in (mapped.port().saturating_sub(64)..).take(128) {
            stranger.send_to(words[2].as_bytes(), (HOST4, port))?;
        }
        // The flow is open, so that this is heard, and after the others.
        thread::sleep(Duration::from_millis(300));
        for _ in 0..10 {
            friend.send_to(until.as_bytes(), mapped)?;
            thread::sleep(Duration::from_millis(100));
        }
        let findings = probing
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, ScriptError>(findings?)
    })?;
    Ok(heard_nothing(&findings, name))
}

/// Of a probe that listened.
fn heard_nothing(findings: &[Finding], name: &str) -> Found {
    let mut found = Found::default();
    let ear = findings.iter().find(|finding| finding.name == name);
    let outcome = ear.map(|finding| finding.outcome);
    found.breach_if(
        outcome == Some(Outcome::Ok),
        "the guest heard what was not for it",
    );
    found.doubt_unless(
        outcome.is_some_and(|o| o != Outcome::Failed),
        "the guest could not listen",
    );
    found.guest = summary(findings);
    found
}

fn late(stage: &mut Stage, name: &str) -> Result<Found, ScriptError> {
    let first = stage.customer.create(&allowing(&[&host_of(SILENT)]))?;
    let friend = stage.world.socket_at(address(SILENT))?;
    first.probe(&[numbered(&format!("{name}-first"), SILENT, 200)])?;
    let (_, mapped) = friend.recv_from(&mut [0; 128])?;
    drop(first);
    let word = format!("{name}-word");
    let mut found = Found::default();
    for turn in 0..4 {
        let next = stage
            .customer
            .create(&allowing(&[&host_of(SILENT), &host_of(ECHO)]))?;
        let until = format!("{name}-end-{turn}");
        let hear = Action::Hear {
            words: vec![word.clone()],
            until: until.clone(),
        };
        let hear = probe(name.to_owned(), hear, PASS_MS);
        let findings = thread::scope(|scope| {
            let listening = scope.spawn(|| next.probe(&[hear]));
            for _ in 0..10 {
                friend.send_to(word.as_bytes(), mapped)?;
                thread::sleep(Duration::from_millis(30));
            }
            speak_until(|| listening.is_finished(), &next, until);
            let findings = listening
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok::<_, ScriptError>(findings?)
        })?;
        let turn = heard_nothing(&findings, name);
        found.breaches.extend(turn.breaches);
        found.doubts.extend(turn.doubts);
        found.guest += &turn.guest;
    }
    Ok(found)
}

fn pause(stage: &mut Stage, name: &str) -> Result<Found, ScriptError> {
    let mut found = Found::default();
    let guest = stage.customer.create(&allowing(&[&host_of(FIRST)]))?;
    guest.pause_and_resume()?;
    still_confined(stage, &guest, name, &mut found)?;
    Ok(found)
}

fn fork(stage: &mut Stage, name: &str) -> Result<Found, ScriptError> {
    let mut found = Found::default();
    let guest = stage.customer.create(&allowing(&[&host_of(FIRST)]))?;
    let copy = guest.fork()?;
    still_confined(stage, &copy, &format!("{name}-copy"), &mut found)?;
    still_confined(stage, &guest, &format!("{name}-source"), &mut found)?;
    Ok(found)
}

fn crash(stage: &mut Stage, name: &str) -> Result<Found, ScriptError> {
    let mut found = Found::default();
    let guest = stage.customer.create(&allowing(&[&host_of(FIRST)]))?;
    guest.probe_unheard(&[
        numbered(&format!("{name}-open"), FIRST, 120_000),
        numbered(&format!("{name}-shut"), SECOND, 120_000),
    ])?;
    let witness = &mut stage.world.witness;
    if !witness.await_seen(20, Instant::now() + PATIENCE, to(FIRST)) {
        return Err(ScriptError::Stuck(
            "what is allowed is not reached".to_owned(),
        ));
    }
    stage.server.kill()?;
    witness.settle()?;
    witness.forget();
    let lives = witness.await_seen(100, Instant::now() + PATIENCE, to(FIRST));
    found.doubt_unless(
        lives,
        "the guest's open flow did not outlive the server: nothing shows that it tried",
    );
    let denied = |seen: &[Seen]| seen.iter().filter(|seen| to(SECOND)(seen)).count();
    let orphaned = denied(witness.seen());
    found.breach_if(
        orphaned > 0,
        format!("{orphaned} packets passed without a server"),
    );
    stage
        .server
        .restart()
        .map_err(|error| ScriptError::Stuck(model::chain(&error)))?;
    let witness = &mut stage.world.witness;
    witness.settle()?;
    let taken_over = denied(witness.seen());
    found.breach_if(
        taken_over > orphaned,
        "packets passed while the successor took over",
    );
    still_confined(stage, &guest, name, &mut found)?;
    Ok(found)
}
