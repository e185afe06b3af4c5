//! Two sandboxes on one device, one after the other.

use std::{
    fs, io, thread,
    time::{Duration, Instant},
};

use netprobe::{Action, Outcome};
use nix::sys::signal::{Signal, kill};

use super::{
    ECHO, FIRST, Found, PASS_MS, PATIENCE, SILENT, ScriptError, Stage, address, allowing,
    heard_nothing, host_of, numbered, probe, speak_until, summary, to, vmm::Vmm,
};
use crate::isolation::sandbox::{Customer, Guest};

/// Later sandboxes come in so many turns, of so many at once: more than the server keeps ready, so that each that it
/// makes comes into use, the one with the device among them.
const TURNS: usize = 4;
const AT_ONCE: usize = 4;

/// Predecessors, until one has a successor: a sandbox that is kept ready may have the device and wait for long.
const FIRSTS: usize = 6;

/// The next sandbox on a device gets nothing that was on its way to the last one, and nothing that the last one could
/// reach.
pub(super) fn device(stage: &mut Stage, name: &str) -> Result<Found, ScriptError> {
    for _ in 0..FIRSTS {
        if let Some(found) = one_after_the_other(stage, name)? {
            return Ok(found);
        }
    }
    let mut found = Found::default();
    found.doubt_unless(
        false,
        "no later sandbox was on the device of an earlier one",
    );
    Ok(found)
}

/// Nothing if no later sandbox had the device.
fn one_after_the_other(stage: &mut Stage, name: &str) -> Result<Option<Found>, ScriptError> {
    let first = stage
        .customer
        .create(&allowing(&[&host_of(SILENT), &host_of(ECHO)]))?;
    let fresh = first.datagrams_for_nobody()?;
    let vmm = Vmm::of(&first)?;
    let friend = stage.world.socket_at(address(SILENT))?;
    first.probe(&[
        numbered(&format!("{name}-first"), SILENT, 200),
        probe(format!("{name}-shut"), Action::Udp(address(FIRST)), 200),
    ])?;
    let (_, mapped) = friend.recv_from(&mut [0; 128])?;
    let word = format!("{name}-word");
    // A VMM that stands still leaves them in the queue: until it is full.
    kill(vmm.pid, Signal::SIGSTOP).map_err(io::Error::from)?;
    let (before, deadline) = (lost_at(&vmm.device)?, Instant::now() + PATIENCE);
    while lost_at(&vmm.device)? == before {
        if Instant::now() > deadline {
            return Err(ScriptError::Stuck("its queue is never full".to_owned()));
        }
        friend.send_to(word.as_bytes(), mapped)?;
    }
    drop(first);

    let mut others = Vec::new();
    for _ in 0..TURNS {
        for next in create_at_once(&stage.customer)? {
            if Vmm::of(&next)?.ifindex == vmm.ifindex {
                let speak_late = || friend.send_to(word.as_bytes(), mapped).map(drop);
                return succeeds(stage, &next, fresh, name, &speak_late).map(Some);
            }
            others.push(next);
        }
        // The server may be making TAPs still, and the VMM may be dying.
        thread::sleep(Duration::from_millis(500));
    }
    Ok(None)
}

fn create_at_once(customer: &Customer) -> Result<Vec<Guest>, ScriptError> {
    let create = || customer.create(&allowing(&[&host_of(ECHO)]));
    thread::scope(|scope| {
        let creating: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(create)).collect();
        let created = creating.into_iter().map(|thread| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        Ok(created.collect::<Result<_, _>>()?)
    })
}

/// What the sandbox that has the device now has of its predecessor, and whether it has a network of its own.
fn succeeds(
    stage: &mut Stage,
    next: &Guest,
    fresh: u64,
    name: &str,
    speak_late: &dyn Fn() -> io::Result<()>,
) -> Result<Found, ScriptError> {
    let stray = next.datagrams_for_nobody()?.saturating_sub(fresh);
    let told = next.events()?;
    let until = format!("{name}-end");
    let hear = Action::Hear {
        words: vec![format!("{name}-word")],
        until: until.clone(),
    };
    let hear = probe(name.to_owned(), hear, PASS_MS);
    let heard = thread::scope(|scope| {
        let listening = scope.spawn(|| next.probe(&[hear]));
        for _ in 0..10 {
            speak_late()?;
            thread::sleep(Duration::from_millis(30));
        }
        speak_until(|| listening.is_finished(), next, until);
        let findings = listening
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, ScriptError>(findings?)
    })?;
    let mut found = heard_nothing(&heard, name);
    found.breach_if(
        stray > 0,
        format!("it was given {stray} datagrams of its predecessor's"),
    );
    found.breach_if(
        !told.is_empty(),
        format!(
            "it is told of {} refusals that were not its own",
            told.len()
        ),
    );
    let witness = &mut stage.world.witness;
    witness.settle()?;
    witness.forget();
    let findings = next.probe(&[
        numbered(&format!("{name}-shut"), SILENT, 300),
        probe(format!("{name}-open"), Action::Udp(address(ECHO)), PASS_MS),
    ])?;
    witness.settle()?;
    let passed = witness.seen().iter().filter(|seen| to(SILENT)(seen));
    let passed = passed.count();
    found.breach_if(
        passed > 0,
        format!("{passed} packets passed that its predecessor's policy alone allowed"),
    );
    found.doubt_unless(
        findings.iter().any(|f| f.outcome == Outcome::Ok),
        "what is allowed is not reached",
    );
    found.guest += &summary(&findings);
    Ok(found)
}

/// Frames that a TAP had no room for so far.
fn lost_at(device: &str) -> Result<u64, ScriptError> {
    let table = fs::read_to_string("/proc/thread-self/net/dev")?;
    let named = |line: &&str| line.trim_start().starts_with(&format!("{device}:"));
    let line = table.lines().find(named).and_then(|l| l.split(':').nth(1));
    // Eight columns of what came; of what went: bytes, packets, errors, drops.
    let drops = line.and_then(|l| l.split_whitespace().nth(11)?.parse().ok());
    drops.ok_or_else(|| ScriptError::Stuck(format!("{device} is not counted")))
}
