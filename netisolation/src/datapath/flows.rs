//! The maps of flows, and the removal of flows that have ended, are idle, or belong to a sandbox that is gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use aya::maps::{Array, HashMap, MapData};

use crate::datapath::{
    clock::nanoseconds,
    layout::{Flow, FlowKey, PinKey, Tap, WireKey, mark},
};

// Idle timeouts by the state of a flow.
/// TCP without a reply yet.
const OPENING: Duration = Duration::from_secs(30);
const ESTABLISHED: Duration = Duration::from_secs(3600);
/// TCP with a FIN from one side.
const HALF_CLOSED: Duration = Duration::from_secs(60);
/// TCP with a FIN from both sides or a reset; late segments may still arrive.
const CLOSED: Duration = Duration::from_secs(3);
const UDP: Duration = Duration::from_secs(60);
const ICMP: Duration = Duration::from_secs(15);

/// Longest time between two sweeps of all flows. An empty table needs no sweep, which would take as long as for a full
/// one. Only counters show that it is empty, and a program may have inserted a flow that it has not counted yet.
const FULL_SWEEP_INTERVAL: Duration = Duration::from_secs(10);

/// A sweep's own handles to the maps that it reads and writes, so that it does not need the owner's lock.
pub(crate) struct FlowMaps {
    pub(crate) taps: Array<MapData, Tap>,
    pub(crate) flows: HashMap<MapData, FlowKey, Flow>,
    pub(crate) wires: HashMap<MapData, WireKey, FlowKey>,
    /// CLOCK_MONOTONIC in nanoseconds; 0: the next sweep must be a full one.
    pub(crate) last_full_sweep: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Swept {
    /// Number of flows removed, by TAP.
    pub(crate) removed: BTreeMap<u32, u64>,
    /// TAP and remote address of the flows that stay open.
    pub(crate) open: BTreeSet<PinKey>,
}

impl FlowMaps {
    /// The key and the tenure of the flow that is on the wire between these ends, if it was handed to the proxy there,
    /// and the listener has answered.
    pub(crate) fn find_handed(&self, wire: &WireKey) -> Option<(FlowKey, u32)> {
        let key = self.wires.get(wire, 0).ok()?;
        let flow = self.flows.get(&key, 0).ok()?;
        let is_same = flow.handed == wire.remote_port && wire_key(&key, &flow) == *wire;
        let is_answered = flow.marks & mark::REPLIED != 0;
        (is_same && is_answered).then_some((key, flow.tenure))
    }

    /// Whether all flows must be swept although no TAP has an open one.
    pub(crate) fn is_due(&self, now: u64) -> bool {
        nanoseconds(FULL_SWEEP_INTERVAL) <= now.saturating_sub(self.last_full_sweep)
    }

    /// Checks every flow, and removes it if its idle timeout has passed or its tenure is not the TAP's current one.
    /// `now`: CLOCK_MONOTONIC in nanoseconds.
    pub(crate) fn sweep(&mut self, now: u64) -> Swept {
        self.last_full_sweep = now;
        let mut swept = Swept::default();
        let mut tenures = BTreeMap::new();
        // Collect the keys first: removing the key at which an iteration stands restarts the iteration.
        let keys: Vec<FlowKey> = self.flows.keys().flatten().collect();
        for key in keys {
            let Ok(flow) = self.flows.get(&key, 0) else {
                continue;
            };
            let tenure = tenures
                .entry(key.tap)
                .or_insert_with(|| self.taps.get(&key.tap, 0).map_or(0, |tap| tap.tenure));
            if flow.tenure == *tenure && !is_expired(&key, &flow, now) {
                swept.open.insert(PinKey {
                    tap: key.tap,
                    address: key.remote,
                });
                continue;
            }
            if self.flows.remove(&key).is_ok() {
                let _absent = self.wires.remove(&wire_key(&key, &flow));
                *swept.removed.entry(key.tap).or_default() += 1;
            }
        }
        swept
    }
}

fn is_expired(key: &FlowKey, flow: &Flow, now: u64) -> bool {
    nanoseconds(idle_timeout(key.protocol, flow.marks)) < now.saturating_sub(flow.seen)
}

fn idle_timeout(protocol: u8, marks: u16) -> Duration {
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

/// The flow's key on the wire. The local address of a handed flow is that of its other end, plus the TAP's number.
fn wire_key(key: &FlowKey, flow: &Flow) -> WireKey {
    let (remote, remote_port) = match flow.handed {
        0 => (key.remote, key.remote_port),
        port => (flow.local.before(key.tap), port),
    };
    WireKey {
        local: flow.local,
        remote,
        port: flow.port,
        remote_port,
        protocol: key.protocol,
        zero: [0; 3],
    }
}
