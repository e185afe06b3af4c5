//! Refusals: turns the programs' records of refused packets into events, and counts them for each TAP.
//!
//! The first refused packet of a flow is reported immediately, later ones in periodic totals.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::mpsc::{SyncSender, TrySendError},
    time::SystemTime,
};

use aya::maps::{HashMap, MapData, RingBuf};

use crate::{
    datapath::{
        clock::wall_time,
        layout::{Address, Record, Refusal, State},
    },
    enforcement::{compile::protocol, name_pins::NamePins, tap_table::TapTable},
    events::event::{Counters, Direction, NetEvent, Reason},
};

/// Maximum number of refused flows, across all TAPs, whose packets after the first are reported in totals. Equal to the
/// capacity of the programs' map of refusals.
const MAX_FOLLOWED: usize = 1 << 14;
/// A flow without packets in this many consecutive totals is no longer followed. Its next packet is reported
/// immediately.
const MAX_QUIET_SUMS: u8 = 10;

pub(crate) struct Refusals {
    /// First packets of refused flows, written by the programs.
    records: RingBuf<MapData>,
    /// Packets per refused flow, counted by the programs.
    packets: HashMap<MapData, Refusal, u64>,
    events: SyncSender<NetEvent>,
    followed: BTreeMap<Refusal, Followed>,
    tallies: BTreeMap<u32, Tally>,
}

/// A refused flow whose first packet was reported.
#[derive(Debug)]
struct Followed {
    /// Packets reported so far.
    reported: u64,
    /// Consecutive totals without a packet.
    quiet_sums: u8,
}

/// Counts of one TAP.
#[derive(Debug)]
struct Tally {
    /// State when the sandbox received the TAP: packets before that moment are not the sandbox's.
    baseline: State,
    /// Refused packets that need no further event: an event reported them, or they precede the baseline.
    reported: u64,
    /// Queries refused by the resolver.
    refused_queries: BTreeMap<Reason, u64>,
    /// Refused queries whose event was dropped because the queue was full.
    dropped_queries: u64,
}

impl Refusals {
    pub(crate) fn new(
        records: RingBuf<MapData>,
        packets: HashMap<MapData, Refusal, u64>,
        events: SyncSender<NetEvent>,
    ) -> Self {
        Self {
            records,
            packets,
            events,
            followed: BTreeMap::new(),
            tallies: BTreeMap::new(),
        }
    }

    /// The ring buffer, whose descriptor is readable when there are records.
    pub(crate) fn ring(&self) -> &RingBuf<MapData> {
        &self.records
    }

    /// Starts the counts of a TAP. `baseline`: the state to subtract from later counters. `reported`: number of refused
    /// packets in the TAP's state that need no event.
    pub(crate) fn begin(&mut self, tap: u32, baseline: State, reported: u64) {
        let tally = Tally {
            baseline,
            reported,
            refused_queries: BTreeMap::new(),
            dropped_queries: 0,
        };
        self.tallies.insert(tap, tally);
    }

    /// Forgets a TAP and its refused flows.
    pub(crate) fn end(&mut self, tap: u32) {
        self.tallies.remove(&tap);
        self.followed.retain(|refusal, _| {
            let keep = refusal.tap != tap;
            if !keep {
                let _absent = self.packets.remove(refusal);
            }
            keep
        });
    }

    /// Reports the records that the programs wrote since the last call.
    pub(crate) fn drain(&mut self, taps: &TapTable, pins: &NamePins) {
        let mut records = Vec::new();
        while let Some(item) = self.records.next() {
            records.extend(Record::read(&item));
        }
        for record in records {
            self.report(&record.refusal, 1, wall_time(record.time), taps, pins);
            if self.followed.len() < MAX_FOLLOWED {
                let followed = Followed {
                    reported: 1,
                    quiet_sums: 0,
                };
                self.followed.insert(record.refusal, followed);
            }
        }
    }

    /// Reports all packets of one TAP that have not been reported yet.
    pub(crate) fn flush(&mut self, tap: u32, taps: &TapTable, pins: &NamePins) {
        self.drain(taps, pins);
        let first = |tap| Refusal {
            tap,
            ..Refusal::default()
        };
        let of_tap = self
            .followed
            .range(first(tap)..first(tap.saturating_add(1)));
        let keys: Vec<Refusal> = of_tap.map(|(refusal, _)| *refusal).collect();
        for refusal in keys {
            self.sum(&refusal, taps, pins);
        }
    }

    /// Reports the packets of all followed flows since the last total, and stops following quiet flows.
    pub(crate) fn sum_all(&mut self, taps: &TapTable, pins: &NamePins) {
        let keys: Vec<Refusal> = self.followed.keys().copied().collect();
        for refusal in keys {
            let new_packets = self.sum(&refusal, taps, pins);
            let Some(flow) = self.followed.get_mut(&refusal) else {
                continue;
            };
            flow.quiet_sums = if new_packets > 0 {
                0
            } else {
                flow.quiet_sums + 1
            };
            if flow.quiet_sums >= MAX_QUIET_SUMS {
                self.followed.remove(&refusal);
                let _absent = self.packets.remove(&refusal);
            }
        }
    }

    /// Reports one flow's packets since its last total and returns their number. Stops following a flow that the
    /// programs' map has evicted.
    fn sum(&mut self, refusal: &Refusal, taps: &TapTable, pins: &NamePins) -> u64 {
        let Some(flow) = self.followed.get_mut(refusal) else {
            return 0;
        };
        let Ok(count) = self.packets.get(refusal, 0) else {
            self.followed.remove(refusal);
            return 0;
        };
        let new_packets = count.saturating_sub(flow.reported);
        if new_packets > 0 {
            flow.reported = count;
            self.report(refusal, new_packets, SystemTime::now(), taps, pins);
        }
        new_packets
    }

    /// Sends an event for `count` refused packets. Packets of a TAP without a sandbox, or of an earlier sandbox, are
    /// not reported; [`Self::counters`] counts them as lost events.
    fn report(
        &mut self,
        refusal: &Refusal,
        count: u64,
        time: SystemTime,
        taps: &TapTable,
        pins: &NamePins,
    ) {
        let Some(attachment) = taps.any(refusal.tap) else {
            return;
        };
        let is_current = attachment.entry.tenure == refusal.tenure;
        let Some((sandbox, _)) = attachment.sandbox.as_ref().filter(|_| is_current) else {
            return;
        };
        let Some(reason) = reason(refusal.reason) else {
            return;
        };
        let socket =
            |address: Address, port: u16| SocketAddr::new(address.ip(), u16::from_be(port));
        let direction = match refusal.direction {
            0 => Direction::Out,
            _ => Direction::In,
        };
        let source = socket(refusal.source, refusal.source_port);
        let destination = socket(refusal.destination, refusal.destination_port);
        let remote = match direction {
            Direction::Out => destination.ip(),
            Direction::In => source.ip(),
        };
        let event = NetEvent {
            sandbox: sandbox.clone(),
            time,
            direction,
            protocol: protocol(refusal.protocol),
            source,
            destination,
            reason,
            name: pins.name_of(refusal.tap, remote).map(str::to_owned),
            count,
        };
        if self.send(event)
            && let Some(tally) = self.tallies.get_mut(&refusal.tap)
        {
            tally.reported += count;
        }
    }

    /// Counts and reports queries that the resolver refused.
    pub(crate) fn record_query(&mut self, tap: u32, event: NetEvent) {
        let (reason, count) = (event.reason, event.count);
        let is_sent = self.send(event);
        if let Some(tally) = self.tallies.get_mut(&tap) {
            *tally.refused_queries.entry(reason).or_default() += count;
            tally.dropped_queries += if is_sent { 0 } else { count };
        }
    }

    /// The counters of a TAP's sandbox. `state` must have been read before the last flush, so that it contains no
    /// packet that is yet to be reported.
    pub(crate) fn counters(&self, tap: u32, state: &State) -> Counters {
        let Some(tally) = self.tallies.get(&tap) else {
            return Counters::default();
        };
        let baseline = &tally.baseline;
        let differences = state.refused.iter().zip(baseline.refused);
        let mut refused: BTreeMap<Reason, u64> = (0_u8..)
            .zip(differences.map(|(now, before)| now - before))
            .filter(|(_, count)| *count > 0)
            .filter_map(|(number, count)| Some((reason(number)?, count)))
            .collect();
        for (reason, count) in &tally.refused_queries {
            *refused.entry(*reason).or_default() += count;
        }
        let unreported = total_refused(state).saturating_sub(tally.reported);
        Counters {
            packets_out: state.packets_out - baseline.packets_out,
            bytes_out: state.bytes_out - baseline.bytes_out,
            packets_in: state.packets_in - baseline.packets_in,
            bytes_in: state.bytes_in - baseline.bytes_in,
            flows: state.opened - baseline.opened,
            refused,
            events_lost: unreported + tally.dropped_queries,
        }
    }

    /// Queues an event. Returns `false` if the queue is full or its receiver is gone.
    fn send(&self, event: NetEvent) -> bool {
        match self.events.try_send(event) {
            Ok(()) => true,
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => false,
        }
    }
}

/// Packets that the programs refused, for all reasons.
pub(crate) fn total_refused(state: &State) -> u64 {
    state.refused.iter().sum()
}

/// The reason with a number of `enum reason` in `bpf/layout.h`.
pub(crate) fn reason(number: u8) -> Option<Reason> {
    const ALL: [Reason; 18] = [
        Reason::Policy,
        Reason::Forbidden,
        Reason::Host,
        Reason::Spoofed,
        Reason::NotIp,
        Reason::Fragment,
        Reason::Options,
        Reason::Malformed,
        Reason::Protocol,
        Reason::Dns,
        Reason::Name,
        Reason::Rebinding,
        Reason::Unsolicited,
        Reason::Bandwidth,
        Reason::Flows,
        Reason::NoRoute,
        Reason::Internal,
        Reason::Offload,
    ];
    ALL.get(usize::from(number).checked_sub(1)?).copied()
}
