//! The effect of one sandbox's flows on another sandbox.

use std::{net::Ipv4Addr, thread};

use netprobe::{Action, Finding, Outcome};

use super::{
    outcome::ScriptError,
    traffic::{address, allowing, host_of, is_reported, join, probe},
};
use crate::{
    isolation::{
        observed::Observed,
        sandbox::NetworkEvent,
        stage::Stage,
        timing::{ECHO, PASS_MS},
    },
    sandbox::Sandbox,
};

/// First address of the flood, which opens one flow for each port of each address.
const FLOODED: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 100);
const FLOOD_ADDRESSES: u32 = 50;
const FLOOD_PORTS: u16 = 2000;
/// Number of requests that the neighbour makes during the flood.
const REQUESTS: u32 = 150;
/// Number of flows that one sandbox opens to one receiver: the maximum for one sandbox.
const BEGUN: u16 = 4096;
/// Flows that its neighbour opens to the same receiver.
const FLOWS: usize = 20;
/// Maximum ratio of the neighbour's median latency during the flood to its latency next to a computing guest, on a
/// host with two CPUs.
const SLOWER: u64 = 50;
/// Maximum growth of the server's memory during the flood, in KiB.
const GROWTH_KIB: u64 = 64 << 10;

/// One sandbox opens a flood of flows while its neighbour makes requests.
pub(super) fn flood(
    stage: &mut Stage,
    neighbour: &Sandbox,
    name: &str,
) -> Result<Observed, ScriptError> {
    let mut found = Observed::default();
    let guest = stage.customer.create(&allowing(&["198.51.100.0/24"]))?;
    let ask = |suffix: &str| {
        let action = Action::Requests {
            to: address(ECHO),
            count: REQUESTS,
        };
        neighbour.probe(&[probe(format!("{name}-{suffix}"), action, 180_000)])
    };
    let memory = stage.server.resident_kib();
    // During the baseline, another guest computes, so that the cost of a busy CPU is the same.
    let computing = guest.compute()?;
    let before = ask("before")?;
    guest.stop_computing(&computing)?;
    let action = Action::Flood {
        to: FLOODED,
        addresses: FLOOD_ADDRESSES,
        ports: FLOOD_PORTS,
    };
    let flood = probe(format!("{name}-flow"), action, 120_000);
    let (flooded, during) = thread::scope(|scope| {
        let flooding = scope.spawn(|| guest.probe(&[flood]));
        let during = ask("during");
        let flooded = join(flooding);
        Ok::<_, ScriptError>((flooded?, during?))
    })?;
    let answered = |findings: &[Finding]| findings.iter().map(|f| f.count).sum::<u64>();
    found.doubt_unless(
        answered(&before) == u64::from(REQUESTS),
        "the neighbour lost requests before the flood, next to a computing guest",
    );
    let lost = u64::from(REQUESTS) - answered(&during).min(u64::from(REQUESTS));
    found.breach_if(
        lost > 0,
        format!("the neighbour lost {lost} of {REQUESTS} requests"),
    );
    let (calm, rough) = (median(&before), median(&during));
    found.breach_if(
        rough > calm.saturating_mul(SLOWER),
        format!("the neighbour's median latency rose from {calm} µs to {rough} µs"),
    );
    let sent = answered(&flooded);
    let all = u64::from(FLOOD_ADDRESSES) * u64::from(FLOOD_PORTS);
    found.doubt_unless(
        sent >= all / 2,
        format!("only {sent} of {all} flows were tried"),
    );
    found.doubt_unless(
        is_reported(&guest, |event| event.reason == "flows")?,
        "no event reports too many flows",
    );
    let grown = stage
        .server
        .resident_kib()
        .zip(memory)
        .map(|(after, before)| after.saturating_sub(before));
    found.breach_if(
        grown.is_some_and(|kib| kib > GROWTH_KIB),
        format!("the server grew by {grown:?} KiB"),
    );
    found.doubt_unless(grown.is_some(), "the server's memory cannot be read");
    found.guest = format!(
        "{sent} flows; the neighbour's median latency: {rough} µs, and {calm} µs next to a computing guest"
    );
    Ok(found)
}

/// One sandbox takes as many translation ports towards a receiver as it can get. Its neighbour must still get some.
pub(super) fn ports(
    stage: &mut Stage,
    neighbour: &Sandbox,
    name: &str,
) -> Result<Observed, ScriptError> {
    let mut found = Observed::default();
    let guest = stage.customer.create(&allowing(&[&host_of(ECHO)]))?;
    let begin = Action::Begin {
        to: address(ECHO),
        count: BEGUN,
    };
    guest.start_probes(&[probe(format!("{name}-begin"), begin, 60_000)])?;
    let is_full = |event: &NetworkEvent| event.destination == address(ECHO);
    found.doubt_unless(
        is_reported(&guest, is_full)?,
        "the sandbox never took all its ports",
    );
    let requests = (0..FLOWS).map(|n| {
        let name = format!("{name}-ask-{n}");
        probe(name, Action::Udp(address(ECHO)), PASS_MS)
    });
    let findings = neighbour.probe(&requests.collect::<Vec<_>>())?;
    let answered = findings.iter().filter(|f| f.outcome == Outcome::Ok).count();
    found.breach_if(
        answered < FLOWS,
        format!("only {answered} of the neighbour's {FLOWS} flows were answered"),
    );
    let flows = |event: &NetworkEvent| event.reason == "flows";
    found.doubt_unless(
        is_reported(&guest, flows)?,
        "no event reports too many flows",
    );
    found.guest = format!("{answered} of the neighbour's {FLOWS} flows were answered");
    Ok(found)
}

/// Median of the findings' figures, in microseconds; zero if there are none.
fn median(findings: &[Finding]) -> u64 {
    let mut figures: Vec<u64> = findings
        .iter()
        .flat_map(|finding| finding.figures.clone())
        .collect();
    figures.sort_unstable();
    figures.get(figures.len() / 2).copied().unwrap_or(0)
}
