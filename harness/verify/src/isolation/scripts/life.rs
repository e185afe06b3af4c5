//! A sandbox's policy across a pause, a fork, and the death of the server.

use std::time::Instant;

use netprobe::{Action, Outcome};

use super::{
    outcome::ScriptError,
    traffic::{FIRST, SECOND, TIMEOUT, address, allowing, host_of, numbered, probe, summary, to},
};
use crate::{
    isolation::{
        observed::Observed,
        stage::Stage,
        timing::{BLOCKED_MS, PASS_MS},
        world::Seen,
    },
    sandbox::Sandbox,
};

/// The policy still holds after pause and resume.
pub(super) fn pause(stage: &mut Stage, name: &str) -> Result<Observed, ScriptError> {
    let mut found = Observed::default();
    let guest = stage.customer.create(&allowing(&[&host_of(FIRST)]))?;
    guest.pause_and_resume()?;
    check_policy(stage, &guest, name, &mut found)?;
    Ok(found)
}

/// The policy holds for a fork, and still for its source.
pub(super) fn fork(stage: &mut Stage, name: &str) -> Result<Observed, ScriptError> {
    let mut found = Observed::default();
    let guest = stage.customer.create(&allowing(&[&host_of(FIRST)]))?;
    let copy = guest.fork_once()?;
    check_policy(stage, &copy, &format!("{name}-copy"), &mut found)?;
    check_policy(stage, &guest, &format!("{name}-source"), &mut found)?;
    Ok(found)
}

/// The policy holds while the server is dead, while a new server takes over, and afterwards.
pub(super) fn crash(stage: &mut Stage, name: &str) -> Result<Observed, ScriptError> {
    let mut found = Observed::default();
    let guest = stage.customer.create(&allowing(&[&host_of(FIRST)]))?;
    guest.start_probes(&[
        numbered(&format!("{name}-open"), FIRST, 120_000),
        numbered(&format!("{name}-shut"), SECOND, 120_000),
    ])?;
    let capture = &mut stage.world.capture;
    if !capture.await_seen(20, Instant::now() + TIMEOUT, to(FIRST)) {
        return Err(ScriptError::Failed(
            "the guest does not reach the address that its policy allows".to_owned(),
        ));
    }
    stage.server.kill()?;
    capture.settle()?;
    capture.forget();
    let flows_on = capture.await_seen(100, Instant::now() + TIMEOUT, to(FIRST));
    found.doubt_unless(
        flows_on,
        "the guest's allowed flow stopped with the server, so nothing shows that the guest tried the denied one",
    );
    let denied = |seen: &[Seen]| seen.iter().filter(|seen| to(SECOND)(seen)).count();
    let orphaned = denied(capture.seen());
    found.breach_if(
        orphaned > 0,
        format!("{orphaned} denied packets passed while no server ran"),
    );
    stage
        .server
        .restart()
        .map_err(|error| ScriptError::Failed(model::chain(&error)))?;
    let capture = &mut stage.world.capture;
    capture.settle()?;
    let taken_over = denied(capture.seen());
    found.breach_if(
        taken_over > orphaned,
        "denied packets passed while the new server took over",
    );
    check_policy(stage, &guest, name, &mut found)?;
    Ok(found)
}

/// Tries a receiver that the policy allows and one that it denies.
fn check_policy(
    stage: &mut Stage,
    guest: &Sandbox,
    name: &str,
    found: &mut Observed,
) -> Result<(), ScriptError> {
    stage.world.capture.forget();
    let allowed = probe(format!("{name}-open"), Action::Tcp(address(FIRST)), PASS_MS);
    let denied = probe(
        format!("{name}-shut"),
        Action::Tcp(address(SECOND)),
        BLOCKED_MS,
    );
    let findings = guest.probe(&[allowed, denied])?;
    stage.world.capture.settle()?;
    let outcome = |suffix: &str| {
        let name = format!("{name}-{suffix}");
        findings
            .iter()
            .find(|finding| finding.name == name)
            .map(|finding| finding.outcome)
    };
    found.breach_if(
        outcome("shut") == Some(Outcome::Ok),
        "the guest reached an address that its policy denies",
    );
    let arrived = stage
        .world
        .capture
        .seen()
        .iter()
        .filter(|seen| to(SECOND)(seen))
        .count();
    found.breach_if(
        arrived > 0,
        format!("{arrived} packets arrived at an address that the policy denies"),
    );
    let was_tried = |outcome: Option<Outcome>| outcome.is_some_and(|o| o != Outcome::Failed);
    found.doubt_unless(
        was_tried(outcome("shut")),
        "the guest could not try the denied address",
    );
    found.doubt_unless(
        outcome("open") == Some(Outcome::Ok),
        "the guest does not reach the address that its policy allows",
    );
    found.guest += &summary(&findings);
    Ok(())
}
