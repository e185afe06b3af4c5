//! Two sandboxes that use the same TAP, one after the other.

use std::{
    fs, io, thread,
    time::{Duration, Instant},
};

use netprobe::{Action, Outcome};
use nix::sys::signal::{Signal, kill};

use super::{
    outcome::ScriptError,
    traffic::{
        FIRST, SILENT, TIMEOUT, address, allowing, host_of, join, numbered, probe,
        received_nothing, send_until, summary, to,
    },
    vmm::Vmm,
};
use crate::{
    isolation::{
        observed::Observed,
        sandbox::Customer,
        stage::Stage,
        timing::{ECHO, PASS_MS},
    },
    sandbox::Sandbox,
};

/// Batches of later sandboxes, and sandboxes in a batch. A batch is larger than the server's warm stock, so the stock
/// is used up, including a warm sandbox that holds the device.
const BATCHES: usize = 4;
const BATCH: usize = 4;

/// Attempts to find a successor. An attempt fails if the device is held by a warm sandbox that is not handed out.
const ATTEMPTS: usize = 6;

/// The next sandbox on a device receives no packet that was meant for the previous one, and cannot reach the addresses
/// that only the previous policy allowed.
pub(super) fn device(stage: &mut Stage, name: &str) -> Result<Observed, ScriptError> {
    for _ in 0..ATTEMPTS {
        if let Some(found) = one_after_the_other(stage, name)? {
            return Ok(found);
        }
    }
    let mut found = Observed::default();
    found.doubt_unless(false, "no later sandbox used the device of an earlier one");
    Ok(found)
}

/// One attempt. `None` if no later sandbox got the device.
fn one_after_the_other(stage: &mut Stage, name: &str) -> Result<Option<Observed>, ScriptError> {
    let first = stage
        .customer
        .create(&allowing(&[&host_of(SILENT), &host_of(ECHO)]))?;
    let fresh = first.datagrams_without_socket()?;
    let vmm = Vmm::of(&first)?;
    let peer = stage.world.socket_at(address(SILENT))?;
    first.probe(&[
        numbered(&format!("{name}-first"), SILENT, 200),
        probe(format!("{name}-shut"), Action::Udp(address(FIRST)), 200),
    ])?;
    let (_, mapped) = peer.recv_from(&mut [0; 128])?;
    let payload = format!("{name}-word");
    // A stopped VMM does not read its TAP, so datagrams fill the TAP's queue.
    kill(vmm.pid, Signal::SIGSTOP).map_err(io::Error::from)?;
    let (before, deadline) = (lost_at(&vmm.device)?, Instant::now() + TIMEOUT);
    while lost_at(&vmm.device)? == before {
        if Instant::now() > deadline {
            return Err(ScriptError::Failed(
                "the TAP's queue does not fill up".to_owned(),
            ));
        }
        peer.send_to(payload.as_bytes(), mapped)?;
    }
    drop(first);

    let mut others = Vec::new();
    for _ in 0..BATCHES {
        for next in create_batch(&stage.customer)? {
            if Vmm::of(&next)?.ifindex == vmm.ifindex {
                let send_late = || peer.send_to(payload.as_bytes(), mapped).map(drop);
                return observe_successor(stage, &next, fresh, name, &send_late).map(Some);
            }
            others.push(next);
        }
        // The old VMM may still be exiting, and the server may still be making TAPs.
        thread::sleep(Duration::from_millis(500));
    }
    Ok(None)
}

fn create_batch(customer: &Customer) -> Result<Vec<Sandbox>, ScriptError> {
    let create = || customer.create(&allowing(&[&host_of(ECHO)]));
    thread::scope(|scope| {
        let creating: Vec<_> = (0..BATCH).map(|_| scope.spawn(create)).collect();
        let created: Result<_, _> = creating.into_iter().map(join).collect();
        Ok(created?)
    })
}

/// Checks that the sandbox that now has the device received no packet for its predecessor, and that its own policy
/// applies.
fn observe_successor(
    stage: &mut Stage,
    next: &Sandbox,
    fresh: u64,
    name: &str,
    send_late: &dyn Fn() -> io::Result<()>,
) -> Result<Observed, ScriptError> {
    let stray = next.datagrams_without_socket()?.saturating_sub(fresh);
    let events = next.events()?;
    let until = format!("{name}-end");
    let listen = Action::Hear {
        words: vec![format!("{name}-word")],
        until: until.clone(),
    };
    let listen = probe(name.to_owned(), listen, PASS_MS);
    let heard = thread::scope(|scope| {
        let listening = scope.spawn(|| next.probe(&[listen]));
        for _ in 0..10 {
            send_late()?;
            thread::sleep(Duration::from_millis(30));
        }
        send_until(|| listening.is_finished(), next, until);
        let findings = join(listening);
        Ok::<_, ScriptError>(findings?)
    })?;
    let mut found = received_nothing(&heard, name);
    found.breach_if(
        stray > 0,
        format!("the sandbox received {stray} datagrams that were meant for its predecessor"),
    );
    found.breach_if(
        !events.is_empty(),
        format!(
            "the sandbox's events list {} refusals of its predecessor's packets",
            events.len()
        ),
    );
    let capture = &mut stage.world.capture;
    capture.settle()?;
    capture.forget();
    let findings = next.probe(&[
        numbered(&format!("{name}-shut"), SILENT, 300),
        probe(format!("{name}-open"), Action::Udp(address(ECHO)), PASS_MS),
    ])?;
    capture.settle()?;
    let passed = capture.seen().iter().filter(|seen| to(SILENT)(seen));
    let passed = passed.count();
    found.breach_if(
        passed > 0,
        format!("{passed} packets passed that only the predecessor's policy allowed"),
    );
    found.doubt_unless(
        findings.iter().any(|f| f.outcome == Outcome::Ok),
        "the sandbox does not reach the address that its policy allows",
    );
    found.guest += &summary(&findings);
    Ok(found)
}

/// Frames that the kernel has dropped because the TAP's queue was full.
fn lost_at(device: &str) -> Result<u64, ScriptError> {
    let table = fs::read_to_string("/proc/thread-self/net/dev")?;
    let named = |line: &&str| line.trim_start().starts_with(&format!("{device}:"));
    let line = table.lines().find(named).and_then(|l| l.split(':').nth(1));
    // Eight columns for received frames come first. Those for sent frames begin with bytes, packets, errors, drops.
    let drops = line.and_then(|l| l.split_whitespace().nth(11)?.parse().ok());
    drops
        .ok_or_else(|| ScriptError::Failed(format!("/proc/net/dev has no drop count for {device}")))
}
