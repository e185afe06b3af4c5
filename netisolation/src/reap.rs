//! Removing flows that ended, that nobody uses, or whose sandbox is gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    clock::nanoseconds,
    datapath::FlowMaps,
    layout::{Flow, FlowKey, PinKey, WireKey, mark},
};

/// No answer yet.
const OPENING: Duration = Duration::from_secs(30);
const ESTABLISHED: Duration = Duration::from_secs(3600);
/// One side has ended its half.
const HALF_CLOSED: Duration = Duration::from_secs(60);
/// Both have, or it was reset; stragglers may come.
const CLOSED: Duration = Duration::from_secs(3);
const UDP: Duration = Duration::from_secs(60);
const ICMP: Duration = Duration::from_secs(15);

/// What a scan found.
#[derive(Debug, Default)]
pub(crate) struct Reaped {
    /// Flows removed, by TAP.
    pub(crate) removed: BTreeMap<u32, u64>,
    /// Remote ends of those that stay.
    pub(crate) open: BTreeSet<PinKey>,
}

impl FlowMaps {
    /// Goes through all flows.
    pub(crate) fn reap(&mut self, now: u64) -> Reaped {
        let mut reaped = Reaped::default();
        let mut tenures = BTreeMap::new();
        // Keys first: the walk begins anew if the key it is at is removed.
        let keys: Vec<FlowKey> = self.flows.keys().flatten().collect();
        for key in keys {
            let Ok(flow) = self.flows.get(&key, 0) else {
                continue;
            };
            let tenure = tenures
                .entry(key.tap)
                .or_insert_with(|| self.taps.get(&key.tap, 0).map_or(0, |tap| tap.tenure));
            if flow.tenure == *tenure && !is_over(&key, &flow, now) {
                reaped.open.insert(PinKey {
                    tap: key.tap,
                    address: key.remote,
                });
                continue;
            }
            if self.flows.remove(&key).is_ok() {
                let _absent = self.wires.remove(&wire(&key, &flow));
                *reaped.removed.entry(key.tap).or_default() += 1;
            }
        }
        reaped
    }
}

fn is_over(key: &FlowKey, flow: &Flow, now: u64) -> bool {
    nanoseconds(patience(key.protocol, flow.marks)) < now.saturating_sub(flow.seen)
}

/// How long a flow may be idle.
fn patience(protocol: u8, marks: u16) -> Duration {
    let fins = marks & (mark::FIN_OUT | mark::FIN_IN);
    match protocol {
        6 if marks & mark::RESET != 0 || fins == mark::FIN_OUT | mark::FIN_IN => CLOSED,
        6 if marks & mark::REPLIED == 0 => OPENING,
        6 if fins != 0 => HALF_CLOSED,
        6 => ESTABLISHED,
        17 => UDP,
        _ => ICMP,
    }
}

fn wire(key: &FlowKey, flow: &Flow) -> WireKey {
    WireKey {
        local: flow.local,
        remote: key.remote,
        port: flow.port,
        remote_port: key.remote_port,
        protocol: key.protocol,
        zero: [0; 3],
    }
}
