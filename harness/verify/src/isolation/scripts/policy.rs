//! Changes of a policy while packets flow.

use std::{thread, time::Instant};

use netprobe::{Action, Finding, Outcome};
use serde_json::json;

use super::{
    outcome::ScriptError,
    traffic::{
        FIRST, SECOND, THIRD, TIMEOUT, address, allowing, host_of, is_reported, join, numbered,
        only, probe, summary, to,
    },
};
use crate::isolation::{
    observed::Observed,
    sandbox::NetworkEvent,
    stage::Stage,
    timing::{BLOCKED_MS, PASS_MS},
};

/// Time for which the connection would stay open if nothing cut it.
const CUT_MS: u64 = 8000;
/// Policy changes while datagrams flow.
const SWAPS: usize = 12;

/// An update that denies an open connection's receiver stops the connection, and leaves another flow alone.
pub(super) fn cut(stage: &mut Stage, name: &str) -> Result<Observed, ScriptError> {
    let mut found = Observed::default();
    let guest = stage
        .customer
        .create(&allowing(&[&host_of(FIRST), &host_of(SECOND)]))?;
    let action = Action::Stream {
        to: address(FIRST),
        every_ms: 10,
    };
    let open = probe(format!("{name}-open"), action, CUT_MS);
    let steady = numbered(&format!("{name}-steady"), SECOND, CUT_MS);
    let capture = &mut stage.world.capture;
    let findings = thread::scope(|scope| {
        let probing = scope.spawn(|| guest.probe(&[open, steady]));
        let flowed = capture.await_seen(20, Instant::now() + TIMEOUT, to(FIRST));
        let updated = guest.update(&only(&[&host_of(SECOND)]));
        let changed = capture.settle();
        let findings = join(probing);
        Ok::<_, ScriptError>((flowed, updated?, changed?, findings?))
    })?;
    let (flowed, (), changed, findings) = findings;
    capture.settle()?;
    let after = &capture.seen()[changed..];
    let passed = after.iter().filter(|seen| to(FIRST)(seen)).count();
    found.breach_if(
        passed > 0,
        format!("{passed} packets of the open connection passed after the change"),
    );
    let steady = after.iter().filter(|seen| to(SECOND)(seen)).count();
    found.doubt_unless(flowed, "the connection never carried anything");
    found.doubt_unless(steady > 0, "the flow that stays allowed stopped too");
    let about =
        |event: &NetworkEvent| event.reason == "policy" && event.destination == address(FIRST);
    found.doubt_unless(is_reported(&guest, about)?, "no event reports the cut");
    found.guest = summary(&findings);
    Ok(found)
}

/// After each of many changes back and forth, packets reach only the receiver that is allowed at the time.
pub(super) fn churn(stage: &mut Stage, name: &str) -> Result<Observed, ScriptError> {
    let mut found = Observed::default();
    let guest = stage.customer.create(&allowing(&[&host_of(FIRST)]))?;
    let receivers = [FIRST, SECOND, THIRD];
    let probes = receivers.map(|to| numbered(&format!("{name}-{}", host_of(to)), to, 6000));
    let capture = &mut stage.world.capture;
    let mut passed = [0; 2];
    let findings = thread::scope(|scope| {
        let probing = scope.spawn(|| guest.probe(&probes));
        capture.await_seen(5, Instant::now() + TIMEOUT, to(FIRST));
        for turn in 0..SWAPS {
            let (open, shut) = if turn % 2 == 0 {
                (SECOND, FIRST)
            } else {
                (FIRST, SECOND)
            };
            guest.update(&only(&[&host_of(open)]))?;
            let (from, until) = (capture.settle()?, capture.settle()?);
            let between = &capture.seen()[from..until];
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
        let findings = join(probing);
        Ok::<_, ScriptError>(findings?)
    })?;
    capture.settle()?;
    let never = capture.seen().iter().filter(|seen| to(THIRD)(seen)).count();
    found.breach_if(
        never > 0,
        format!("{never} packets to {THIRD}, which no policy allowed"),
    );
    found.doubt_unless(
        passed.iter().all(|count| *count > 0),
        format!("packets to the allowed receivers: {passed:?}; each must get some"),
    );
    found.guest = summary(&findings);
    Ok(found)
}

/// After an empty update, the guest no longer reaches what its old policy allowed.
pub(super) fn clear(stage: &mut Stage, name: &str) -> Result<Observed, ScriptError> {
    let mut found = Observed::default();
    let guest = stage
        .customer
        .create(&allowing(&[&host_of(FIRST), &host_of(SECOND)]))?;
    let connect = |suffix: &str, within| {
        guest.probe(&[probe(
            format!("{name}-{suffix}"),
            Action::Tcp(address(SECOND)),
            within,
        )])
    };
    let before = connect("before", PASS_MS)?;
    guest.update(&json!({}))?;
    let changed = stage.world.capture.settle()?;
    let after = connect("after", BLOCKED_MS)?;
    stage.world.capture.settle()?;
    let passed = stage.world.capture.seen()[changed..]
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
        "the guest still reaches an address that only the old policy allowed",
    );
    found.doubt_unless(
        is_ok(&before),
        "the guest never reached the address that its policy allowed",
    );
    found.guest = summary(&[before, after].concat());
    Ok(found)
}
