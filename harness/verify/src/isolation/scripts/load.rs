//! What one sandbox's flows cost another.

use std::{net::Ipv4Addr, thread};

use netprobe::{Action, Finding, Outcome};

use super::{Found, ScriptError, address, allowing, host_of, probe, told};
use crate::isolation::{
    ECHO, PASS_MS, Stage,
    sandbox::{Guest, NetworkEvent},
};

/// Of the flood: one flow for each port of each address.
const FLOODED: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 100);
const FLOOD_ADDRESSES: u32 = 50;
const FLOOD_PORTS: u16 = 2000;
/// Requests of the neighbour of a flood.
const REQUESTS: u32 = 150;
/// Flows that one sandbox opens to one end, as many as it may have; and those that its neighbour needs there.
const BEGUN: u16 = 4096;
const FLOWS: usize = 20;
/// Slower by this factor a neighbour may get than it is beside a guest that computes, on a host of two CPUs.
const SLOWER: u64 = 50;
/// Memory that the server may grow by under a flood, in KiB.
const GROWTH_KIB: u64 = 64 << 10;

/// A flood of flows beside a neighbour that asks for something.
pub(super) fn flood(
    stage: &mut Stage,
    neighbour: &Guest,
    name: &str,
) -> Result<Found, ScriptError> {
    let mut found = Found::default();
    let guest = stage.customer.create(&allowing(&["198.51.100.0/24"]))?;
    let ask = |suffix: &str| {
        let action = Action::Requests {
            to: address(ECHO),
            count: REQUESTS,
        };
        neighbour.probe(&[probe(format!("{name}-{suffix}"), action, 180_000)])
    };
    let memory = stage.server.resident_kib();
    // What a guest costs its neighbours by computing alone is the host's affair.
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
        let flooded = flooding
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, ScriptError>((flooded?, during?))
    })?;
    let answered = |findings: &[Finding]| findings.iter().map(|f| f.count).sum::<u64>();
    found.doubt_unless(
        answered(&before) == u64::from(REQUESTS),
        "the neighbour lost requests beside a guest that computes",
    );
    let lost = u64::from(REQUESTS) - answered(&during).min(u64::from(REQUESTS));
    found.breach_if(
        lost > 0,
        format!("the neighbour lost {lost} of {REQUESTS} requests"),
    );
    let (calm, rough) = (median(&before), median(&during));
    found.breach_if(
        rough > calm.saturating_mul(SLOWER),
        format!("the neighbour's median went from {calm} µs to {rough} µs"),
    );
    let sent = answered(&flooded);
    let all = u64::from(FLOOD_ADDRESSES) * u64::from(FLOOD_PORTS);
    found.doubt_unless(
        sent >= all / 2,
        format!("only {sent} of {all} flows were tried"),
    );
    found.doubt_unless(
        told(&guest, |event| event.reason == "flows")?,
        "no event tells of too many flows",
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
        "{sent} flows; the neighbour's median {rough} µs, and {calm} µs beside a guest that computes"
    );
    Ok(found)
}

/// One sandbox takes all ports towards a remote end that it can get, and a neighbour needs some.
pub(super) fn ports(
    stage: &mut Stage,
    neighbour: &Guest,
    name: &str,
) -> Result<Found, ScriptError> {
    let mut found = Found::default();
    let guest = stage.customer.create(&allowing(&[&host_of(ECHO)]))?;
    let begin = Action::Begin {
        to: address(ECHO),
        count: BEGUN,
    };
    guest.probe_unheard(&[probe(format!("{name}-begin"), begin, 60_000)])?;
    let is_full = |event: &NetworkEvent| event.destination == address(ECHO);
    found.doubt_unless(told(&guest, is_full)?, "the ports were never all taken");
    let asks = (0..FLOWS).map(|n| {
        let word = format!("{name}-ask-{n}");
        probe(word, Action::Udp(address(ECHO)), PASS_MS)
    });
    let findings = neighbour.probe(&asks.collect::<Vec<_>>())?;
    let answered = findings.iter().filter(|f| f.outcome == Outcome::Ok).count();
    found.breach_if(
        answered < FLOWS,
        format!("the neighbour got {answered} of {FLOWS} flows"),
    );
    let flows = |event: &NetworkEvent| event.reason == "flows";
    found.doubt_unless(told(&guest, flows)?, "no event tells of too many flows");
    found.guest = format!("{answered} of {FLOWS} flows of the neighbour were answered");
    Ok(found)
}

/// Microseconds; zero without figures.
fn median(findings: &[Finding]) -> u64 {
    let mut figures: Vec<u64> = findings
        .iter()
        .flat_map(|finding| finding.figures.clone())
        .collect();
    figures.sort_unstable();
    figures.get(figures.len() / 2).copied().unwrap_or(0)
}
