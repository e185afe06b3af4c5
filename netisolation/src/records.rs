//! What the programs recorded, as events: the first packet of a refused flow at once, those after it in sums.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::mpsc::{SyncSender, TrySendError},
    time::SystemTime,
};

use crate::{
    Direction, NetEvent, Reason,
    clock::wall_time,
    compile::protocol,
    datapath::Datapath,
    layout::{Address, Record, Refusal},
    owner::Seat,
};

/// Refused flows whose further packets are summed up, of all TAPs: as many as the programs' map has.
const MAX_FOLLOWED: usize = 1 << 14;
/// Sums in a row without a packet after which a flow is forgotten. Its next packet is a first one again.
const QUIET_SUMS: u8 = 10;

/// See the module.
#[derive(Debug)]
pub(crate) struct Records {
    events: SyncSender<NetEvent>,
    followed: BTreeMap<Refusal, Followed>,
    /// Packets that events stood for, by TAP.
    told: BTreeMap<u32, u64>,
}

#[derive(Debug)]
struct Followed {
    told: u64,
    quiet: u8,
}

impl Records {
    pub(crate) fn new(events: SyncSender<NetEvent>) -> Self {
        Self {
            events,
            followed: BTreeMap::new(),
            told: BTreeMap::new(),
        }
    }

    /// A TAP begins, with so many refused packets that are none of ours.
    pub(crate) fn begin(&mut self, tap: u32, refused: u64) {
        self.told.insert(tap, refused);
    }

    /// A TAP is gone.
    pub(crate) fn end(&mut self, datapath: &mut Datapath, tap: u32) {
        self.told.remove(&tap);
        self.followed.retain(|refusal, _| {
            let keep = refusal.tap != tap;
            if !keep {
                let _absent = datapath.refusals.remove(refusal);
            }
            keep
        });
    }

    /// Refused packets of a TAP that events stood for.
    pub(crate) fn told(&self, tap: u32) -> u64 {
        self.told.get(&tap).copied().unwrap_or(0)
    }

    /// Takes what the programs wrote since the last time.
    pub(crate) fn drain(&mut self, datapath: &mut Datapath, seats: &BTreeMap<u32, Seat>) {
        let mut records = Vec::new();
        while let Some(item) = datapath.records.next() {
            records.extend(Record::read(&item));
        }
        for record in records {
            self.tell(&record.refusal, 1, wall_time(record.time), seats);
            if self.followed.len() < MAX_FOLLOWED {
                let followed = Followed { told: 1, quiet: 0 };
                self.followed.insert(record.refusal, followed);
            }
        }
    }

    /// Tells of a TAP's packets since the last sum.
    pub(crate) fn flush(&mut self, datapath: &mut Datapath, seats: &BTreeMap<u32, Seat>, tap: u32) {
        self.drain(datapath, seats);
        let first = |tap| Refusal {
            tap,
            ..Refusal::default()
        };
        let of_tap = self
            .followed
            .range(first(tap)..first(tap.saturating_add(1)));
        let keys: Vec<Refusal> = of_tap.map(|(refusal, _)| *refusal).collect();
        for refusal in keys {
            self.sum(datapath, seats, &refusal);
        }
    }

    /// The same of all TAPs; those flows that have been quiet for long are forgotten.
    pub(crate) fn sum_all(&mut self, datapath: &mut Datapath, seats: &BTreeMap<u32, Seat>) {
        let keys: Vec<Refusal> = self.followed.keys().copied().collect();
        for refusal in keys {
            let more = self.sum(datapath, seats, &refusal);
            let Some(state) = self.followed.get_mut(&refusal) else {
                continue;
            };
            state.quiet = if more > 0 { 0 } else { state.quiet + 1 };
            if state.quiet >= QUIET_SUMS {
                self.followed.remove(&refusal);
                let _absent = datapath.refusals.remove(&refusal);
            }
        }
    }

    /// Tells of one flow's packets since the last sum; how many these are. One that the programs' map has not any
    /// more is forgotten.
    fn sum(&mut self, datapath: &Datapath, seats: &BTreeMap<u32, Seat>, refusal: &Refusal) -> u64 {
        let Some(state) = self.followed.get_mut(refusal) else {
            return 0;
        };
        let Ok(count) = datapath.refusals.get(refusal, 0) else {
            self.followed.remove(refusal);
            return 0;
        };
        let more = count.saturating_sub(state.told);
        if more > 0 {
            state.told = count;
            self.tell(refusal, more, SystemTime::now(), seats);
        }
        more
    }

    fn tell(
        &mut self,
        refusal: &Refusal,
        count: u64,
        time: SystemTime,
        seats: &BTreeMap<u32, Seat>,
    ) {
        let Some(seat) = seats.get(&refusal.tap) else {
            return;
        };
        // A TAP that waits has no sandbox to tell of: its packets are counted as lost.
        let Some((sandbox, _)) = seat
            .sandbox
            .as_ref()
            .filter(|_| seat.tap.tenure == refusal.tenure)
        else {
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
            name: seat.pins.get(&remote).map(|(name, _)| name.clone()),
            count,
        };
        if self.send(event) {
            *self.told.entry(refusal.tap).or_default() += count;
        }
    }

    /// Whether somebody will read it. An event that finds the queue full is lost, and missing in what was told.
    pub(crate) fn send(&self, event: NetEvent) -> bool {
        match self.events.try_send(event) {
            Ok(()) => true,
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => false,
        }
    }
}

/// From its number.
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
