//! The one owner of TAPs, policies and their entries in the maps. Behind the lock of [`crate::Isolation`].

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
    sync::{Arc, mpsc::SyncSender},
    time::Duration,
};

use model::SandboxId;

use crate::{
    Exception, IsolationConfig, IsolationError, Naming, NetEvent, Policy, Reason, Tap, TapIndex,
    clock::{monotonic_ns, nanoseconds},
    compile,
    datapath::Datapath,
    device::{self, Device},
    error::system,
    is_forbidden,
    layout::{self, PinKey, State},
    records::Records,
    renew::Held,
};

/// Addresses that may be pinned for one sandbox at a time.
const MAX_PINS: usize = 1024;

/// See the module.
pub(crate) struct Owner {
    pub(crate) datapath: Datapath,
    pub(crate) seats: BTreeMap<u32, Seat>,
    pub(crate) records: Records,
    /// Uplinks by device index: name, and their entries in the map.
    pub(crate) uplinks: BTreeMap<u32, (String, layout::Uplink)>,
    limits: Limits,
    exceptions: Vec<Exception>,
    next_index: u32,
    /// Upper half of the next policy in a TAP's entry.
    next_change: u32,
    next_tenure: u32,
    /// Numbers of TAPs in the stock; the last one is taken next.
    ready: VecDeque<u32>,
    /// The porter's, from here on: TAPs that may be used again, and those whose devices are to go.
    released: Vec<Released>,
    discarded: Vec<Held>,
    pub(crate) waiting: Waiting,
    /// Nobody is left who could ask for anything.
    pub(crate) ended: bool,
}

/// Who waits for a TAP.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    pub(crate) callers: usize,
    /// Why there is none, for one of them.
    pub(crate) failure: Option<IsolationError>,
}

/// A TAP whose sandbox is gone, and the number under which that had it.
#[derive(Debug)]
pub(crate) struct Released {
    pub(crate) number: u32,
    pub(crate) held: Held,
}

/// Who may have the device of a TAP that is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Another,
    Nobody,
}

#[derive(Clone, Copy, Debug)]
struct Limits {
    max_taps: u32,
    max_flows: u32,
    bytes_per_s: Option<u64>,
}

impl Limits {
    /// The lower one of the policy's bandwidth and the host's, as the programs read it: 0 is no limit.
    fn bandwidth(&self, policy: &Policy) -> u64 {
        let rates = [policy.bytes_per_s, self.bytes_per_s];
        let lowest = rates.into_iter().flatten().min();
        lowest.map_or(0, |rate| rate.max(1))
    }
}

/// A TAP and who sits on it.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) name: String,
    /// What the map of TAPs has.
    pub(crate) tap: layout::Tap,
    pub(crate) sandbox: Option<(SandboxId, Arc<Policy>)>,
    /// Figures when the sandbox came: what a guest sent while it waited is not the sandbox's.
    pub(crate) before: State,
    /// Names of pinned addresses, and when their answers expire.
    pub(crate) pins: BTreeMap<IpAddr, (String, u64)>,
    /// Refused by the resolver, and how many of these found the queue of events full.
    pub(crate) unanswered: BTreeMap<Reason, u64>,
    pub(crate) untold: u64,
    pub(crate) use_: Use,
}

/// What a TAP is for.
#[derive(Debug)]
pub(crate) enum Use {
    /// Nobody has it.
    Stock(Held),
    /// A VM has it, or a predecessor gave it to one. With a descriptor of ours, the device stays until it is
    /// released: a VMM that dies does not wait for its removal.
    Taken(Option<Held>),
    /// Its device is gone or another's, its flows are about to go.
    Gone,
}

impl Owner {
    pub(crate) fn new(
        config: &IsolationConfig,
        datapath: Datapath,
        events: SyncSender<NetEvent>,
    ) -> Result<Self, IsolationError> {
        let mut owner = Self {
            datapath,
            seats: BTreeMap::new(),
            records: Records::new(events),
            uplinks: BTreeMap::new(),
            limits: Limits {
                max_taps: config.max_taps,
                max_flows: config.max_flows,
                bytes_per_s: config.bytes_per_s,
            },
            exceptions: config.exceptions.clone(),
            next_index: 1,
            next_change: 1,
            next_tenure: 1,
            ready: VecDeque::new(),
            released: Vec::new(),
            discarded: Vec::new(),
            waiting: Waiting::default(),
            ended: false,
        };
        owner.take_over()?;
        Ok(owner)
    }

    /// Goes on with the TAPs of a predecessor whose devices live, and clears away the rest.
    fn take_over(&mut self) -> Result<(), IsolationError> {
        for (index, ifindex) in self.datapath.linked_taps() {
            match device::name(ifindex) {
                Ok(name) if index >= 1 && index <= self.limits.max_taps => {
                    self.seat_survivor(index, ifindex, name)?
                }
                _ => self.datapath.forget_tap(index, ifindex),
            }
        }
        for index in 1..=self.limits.max_taps {
            let tap = self.datapath.taps.get(&index, 0).unwrap_or_default();
            self.next_tenure = self.next_tenure.max(tap.tenure.wrapping_add(1));
            let change = u32::try_from(tap.policy >> 32).unwrap_or(0);
            self.next_change = self.next_change.max(change.wrapping_add(1));
            if tap != layout::Tap::default() && !self.seats.contains_key(&index) {
                self.write_tap(index, &layout::Tap::default())?;
            }
        }
        let live: BTreeSet<u32> = self.seats.values().map(|seat| seat.tap.ifindex).collect();
        let indexed: Vec<u32> = self.datapath.indices.keys().flatten().collect();
        for ifindex in indexed.into_iter().filter(|i| !live.contains(i)) {
            let _absent = self.datapath.indices.remove(&ifindex);
        }
        self.take_over_pins();
        let used: Vec<u32> = self.seats.values().map(|seat| seat.tap.number()).collect();
        let rules = self.datapath.rules.take_over(&used);
        rules.map_err(|e| system("take over the rules of a predecessor", e))
    }

    /// A TAP with a link. Without an entry in the maps (another layout), it is denied everything until adopted.
    fn seat_survivor(
        &mut self,
        index: u32,
        ifindex: u32,
        name: String,
    ) -> Result<(), IsolationError> {
        let mut tap = self.datapath.taps.get(&index, 0).unwrap_or_default();
        if tap.ifindex != ifindex {
            tap = layout::Tap {
                ifindex,
                ..layout::Tap::default()
            };
            self.write_tap(index, &tap)?;
        }
        self.write_index(ifindex, index)?;
        if self.datapath.replace_tap(index, ifindex).is_err() {
            self.datapath.forget_tap(index, ifindex);
            return Ok(());
        }
        let refused = self.state(index)?.refused.iter().sum();
        self.records.begin(index, refused);
        self.seats
            .insert(index, Seat::new(name, tap, Use::Taken(None)));
        Ok(())
    }

    fn take_over_pins(&mut self) {
        let keys: Vec<PinKey> = self.datapath.pins.keys().flatten().collect();
        for key in keys {
            let seat = self.seats.get_mut(&key.tap);
            match (seat, self.datapath.pins.get(&key, 0)) {
                (Some(seat), Ok(pin)) if pin.tenure == seat.tap.tenure => {
                    seat.pins
                        .insert(key.address.ip(), (pin.name(), pin.expires));
                }
                _ => drop(self.datapath.pins.remove(&key)),
            }
        }
    }

    /// From the stock, verified; nothing if it is empty.
    pub(crate) fn take(&mut self) -> Result<Option<Tap>, IsolationError> {
        let Some(index) = self.next_ready() else {
            return Ok(None);
        };
        let seat = self.seat_mut(index)?;
        let Use::Stock(ours) = std::mem::replace(&mut seat.use_, Use::Taken(None)) else {
            return Ok(None);
        };
        let copy = ours.descriptor();
        seat.use_ = Use::Taken(Some(ours));
        let fd = copy.map_err(|e| system("copy a descriptor", e))?;
        self.verify(index)?;
        let index = TapIndex(index);
        Ok(Some(Tap { index, fd }))
    }

    fn next_ready(&mut self) -> Option<u32> {
        loop {
            let index = self.ready.pop_back()?;
            // One whose device somebody has removed is none.
            let seat = self.seats.get(&index);
            if seat.is_some_and(|seat| matches!(seat.use_, Use::Stock(_))) {
                return Some(index);
            }
        }
    }

    /// Whether the porter has something to do.
    pub(crate) fn has_work(&self, stock: usize) -> bool {
        let outgoing = !self.released.is_empty() || !self.discarded.is_empty();
        outgoing || (self.waiting.failure.is_none() && self.is_short(stock))
    }

    /// Whether there are fewer TAPs than are to be kept ready, and there can be more; or fewer than are waited for.
    pub(crate) fn is_short(&self, stock: usize) -> bool {
        let ready = self.stock();
        ready < self.waiting.callers || (ready < stock && self.has_number())
    }

    /// How many TAPs are ready.
    pub(crate) fn stock(&self) -> usize {
        let waits = |seat: &&Seat| matches!(seat.use_, Use::Stock(_));
        self.seats.values().filter(waits).count()
    }

    /// Gives a new device a number and its entries, which deny everything.
    pub(crate) fn enter(&mut self, device: &Device) -> Result<u32, IsolationError> {
        let index = self.free_index()?;
        let tap = layout::Tap {
            ifindex: device.index,
            ..layout::Tap::default()
        };
        let written = self.datapath.states.set(index, State::default(), 0);
        written.map_err(|e| system("write a TAP's state", e))?;
        self.write_tap(index, &tap)?;
        self.write_index(device.index, index)?;
        self.records.begin(index, 0);
        let seat = Seat::new(device.name.clone(), tap, Use::Taken(None));
        self.seats.insert(index, seat);
        Ok(index)
    }

    /// Puts a new TAP whose program is attached into the stock: it is taken after those that were used before, which
    /// caches still know.
    pub(crate) fn store(&mut self, index: u32, held: Held) -> Result<(), IsolationError> {
        self.seat_mut(index)?.use_ = Use::Stock(held);
        self.ready.push_front(index);
        Ok(())
    }

    /// Puts a TAP that was made ready again into the stock, verified and under a new number: what its last sandbox had in
    /// the maps is under the old one, which goes like that of a device that is gone.
    ///
    /// # Errors
    /// The TAP, which has to go.
    pub(crate) fn renumber(&mut self, from: u32, held: Held) -> Result<(), Held> {
        let Ok(to) = self.enter(&held.device) else {
            return Err(held);
        };
        let ifindex = held.device.index;
        let moved = self.datapath.move_link(from, to, ifindex);
        if moved.is_err() || self.verify(to).is_err() {
            return Err(held);
        }
        if let Some(seat) = self.seats.get_mut(&from) {
            (seat.use_, seat.tap.ifindex) = (Use::Gone, 0);
            let tap = seat.tap;
            // An array's element can always be written.
            let _always = self.write_tap(from, &tap);
        }
        if let Some(seat) = self.seats.get_mut(&to) {
            seat.use_ = Use::Stock(held);
            self.ready.push_back(to);
        }
        Ok(())
    }

    /// Numbers are used again as late as possible: an answer that is still under way finds nobody.
    fn free_index(&mut self) -> Result<u32, IsolationError> {
        for _ in 0..self.limits.max_taps {
            let index = self.next_index;
            self.next_index = index % self.limits.max_taps + 1;
            if !self.seats.contains_key(&index) {
                return Ok(index);
            }
        }
        Err(IsolationError::Exhausted(self.limits.max_taps))
    }

    /// Whether one more TAP can have a number.
    pub(crate) fn has_number(&self) -> bool {
        u32::try_from(self.seats.len()).is_ok_and(|taken| taken < self.limits.max_taps)
    }

    /// See [`crate::Isolation::confine`].
    pub(crate) fn confine(
        &mut self,
        index: u32,
        sandbox: &SandboxId,
        policy: &Policy,
    ) -> Result<(), IsolationError> {
        let tenure = self.next_tenure;
        self.next_tenure = tenure.wrapping_add(1).max(1);
        self.drop_pins(index, |_| false);
        self.begin_counting(index)?;
        let done = self.apply(index, sandbox, policy, tenure);
        self.verified(index, done)
    }

    fn begin_counting(&mut self, index: u32) -> Result<(), IsolationError> {
        self.records.flush(&mut self.datapath, &self.seats, index);
        let state = self.state(index)?;
        self.records.begin(index, state.refused.iter().sum());
        let seat = self.seat_mut(index)?;
        (seat.before, seat.untold) = (state, 0);
        seat.unanswered.clear();
        Ok(())
    }

    /// See [`crate::Isolation::adopt`]. Flows go on if the policy allows them.
    pub(crate) fn adopt(
        &mut self,
        index: u32,
        sandbox: &SandboxId,
        policy: &Policy,
    ) -> Result<(), IsolationError> {
        let tenure = self.seat(index)?.tap.tenure;
        if tenure == 0 {
            return self.confine(index, sandbox, policy);
        }
        let done = self.apply(index, sandbox, policy, tenure);
        self.drop_pins(index, |name| {
            policy.names.iter().any(|pattern| pattern.has(name))
        });
        self.verified(index, done)
    }

    /// See [`crate::Isolation::update`].
    pub(crate) fn update(&mut self, index: u32, policy: &Policy) -> Result<(), IsolationError> {
        let seat = self.seat(index)?;
        let tenure = seat.tap.tenure;
        let Some((sandbox, _)) = seat.sandbox.clone() else {
            return Err(IsolationError::Unknown(TapIndex(index)));
        };
        self.apply(index, &sandbox, policy, tenure)?;
        self.drop_pins(index, |name| {
            policy.names.iter().any(|pattern| pattern.has(name))
        });
        self.verify(index)
    }

    /// Writes the rules unless they are there, then switches the TAP to them: no packet sees half of them. The entry's
    /// policy is another one even if the rules are the same, so that open flows are judged anew.
    fn apply(
        &mut self,
        index: u32,
        sandbox: &SandboxId,
        policy: &Policy,
        tenure: u32,
    ) -> Result<(), IsolationError> {
        let rules = compile::rules_of(policy)?;
        let before = self.seat(index)?.tap;
        let entered = self.datapath.rules.enter(rules);
        let number = entered.map_err(|e| system("write rules", e))?;
        let change = self.next_change;
        self.next_change = change.wrapping_add(1);
        let tap = layout::Tap {
            bytes_per_s: self.limits.bandwidth(policy),
            flows_per_s: policy.flows_per_s.map_or(0, u64::from),
            max_flows: self.limits.max_flows,
            tenure,
            policy: u64::from(change) << 32 | u64::from(number),
            ..before
        };
        if let Err(error) = self.write_tap(index, &tap) {
            self.datapath.rules.leave(number);
            return Err(error);
        }
        let seat = self.seat_mut(index)?;
        seat.tap = tap;
        seat.sandbox = Some((sandbox.clone(), Arc::new(policy.clone())));
        self.datapath.rules.leave(before.number());
        Ok(())
    }

    /// What was done has to be there; otherwise nothing passes.
    fn verified(
        &mut self,
        index: u32,
        done: Result<(), IsolationError>,
    ) -> Result<(), IsolationError> {
        let outcome = done.and_then(|()| self.verify(index));
        if outcome.is_err() {
            self.deny(index);
        }
        outcome
    }

    /// Nothing passes from now on.
    pub(crate) fn deny(&mut self, index: u32) {
        let Some(seat) = self.seats.get_mut(&index) else {
            return;
        };
        let number = seat.tap.number();
        (seat.tap.policy, seat.tap.tenure) = (0, 0);
        let tap = seat.tap;
        // An array's element can always be written.
        let _always = self.write_tap(index, &tap);
        self.datapath.rules.leave(number);
        self.drop_pins(index, |_| false);
    }

    /// See [`crate::Isolation::release`]. The link stays while the device does: a TAP without a program would hand
    /// frames to the host.
    pub(crate) fn release(&mut self, index: u32, next: Next) {
        self.records.flush(&mut self.datapath, &self.seats, index);
        self.deny(index);
        let Some(seat) = self.seats.get_mut(&index) else {
            return;
        };
        seat.sandbox = None;
        match (std::mem::replace(&mut seat.use_, Use::Taken(None)), next) {
            (Use::Stock(held) | Use::Taken(Some(held)), Next::Another) => {
                let number = index;
                self.released.push(Released { number, held });
            }
            (Use::Stock(held) | Use::Taken(Some(held)), Next::Nobody) => self.discarded.push(held),
            (Use::Taken(None), _) => {}
            (Use::Gone, _) => seat.use_ = Use::Gone,
        }
    }

    /// What the porter is to see to, without the lock.
    pub(crate) fn outgoing(&mut self) -> (Vec<Released>, Vec<Held>) {
        (
            std::mem::take(&mut self.released),
            std::mem::take(&mut self.discarded),
        )
    }

    /// Leaves what living VMs need; without any, nothing.
    pub(crate) fn end(&mut self) {
        drop(self.outgoing());
        self.seats
            .retain(|_, seat| !matches!(seat.use_, Use::Stock(_)));
        for seat in self.seats.values_mut() {
            if let Use::Taken(ours) = &mut seat.use_ {
                *ours = None;
            }
        }
        let lives = |name: &str| device::index(name).is_ok();
        if !self.seats.values().any(|seat| lives(&seat.name)) {
            self.datapath.remove_pins();
        }
    }

    /// Finds TAPs whose devices are gone, or another's by now, and denies them.
    pub(crate) fn find_gone(&mut self) -> Vec<u32> {
        let is_gone = |seat: &Seat| device::index(&seat.name).ok() != Some(seat.tap.ifindex);
        let gone: Vec<u32> = self
            .seats
            .iter()
            .filter(|(_, seat)| is_gone(seat))
            .map(|(i, _)| *i)
            .collect();
        for index in &gone {
            self.deny(*index);
            if let Some(seat) = self.seats.get_mut(index) {
                seat.use_ = Use::Gone;
            }
        }
        gone
    }

    /// Clears TAPs that were found gone before their flows were removed.
    pub(crate) fn clear(&mut self, gone: &[u32]) {
        for index in gone {
            self.records.flush(&mut self.datapath, &self.seats, *index);
            self.records.end(&mut self.datapath, *index);
            let Some(seat) = self.seats.remove(index) else {
                continue;
            };
            let _absent = self.datapath.indices.remove(&seat.tap.ifindex);
            let _stays_denied = self.write_tap(*index, &layout::Tap::default());
            self.datapath.forget_tap(*index, seat.tap.ifindex);
        }
    }

    /// Counts flows that were removed.
    pub(crate) fn credit(&mut self, removed: &BTreeMap<u32, u64>) {
        for (index, flows) in removed {
            let Some(seat) = self.seats.get_mut(index) else {
                continue;
            };
            seat.tap.closed += flows;
            let tap = seat.tap;
            // It is written again with the next flows.
            let _later = self.write_tap(*index, &tap);
        }
    }

    /// See [`crate::Isolation::pin`].
    pub(crate) fn pin(
        &mut self,
        index: u32,
        sandbox: &SandboxId,
        address: IpAddr,
        name: &str,
        ttl: Duration,
    ) -> Result<(), IsolationError> {
        let expires = monotonic_ns().saturating_add(nanoseconds(ttl));
        let seat = self.seat(index)?;
        let policy = seat.sandbox.as_ref().filter(|(id, _)| id == sandbox);
        let has = |(_, policy): &(_, Arc<Policy>)| policy.naming(name) == Naming::Pinned;
        if !policy.is_some_and(has) {
            return Err(IsolationError::Unknown(TapIndex(index)));
        }
        if seat.pins.len() >= MAX_PINS && !seat.pins.contains_key(&address) {
            return Err(IsolationError::TooMany {
                what: "addresses of names",
                limit: MAX_PINS,
            });
        }
        let key = PinKey {
            tap: index,
            address: address.into(),
        };
        let pin = layout::Pin::new(expires, seat.tap.tenure, name);
        let written = self.datapath.pins.insert(key, pin, 0);
        written.map_err(|e| system("pin an address", e))?;
        self.seat_mut(index)?
            .pins
            .insert(address, (name.to_owned(), expires));
        Ok(())
    }

    /// Removes pins whose time is over and to which no flow is open.
    pub(crate) fn expire_pins(&mut self, open: &BTreeSet<PinKey>) {
        let now = monotonic_ns();
        let mut over = Vec::new();
        for (index, seat) in &mut self.seats {
            let key = |address: &IpAddr| PinKey {
                tap: *index,
                address: (*address).into(),
            };
            seat.pins.retain(|address, (_, expires)| {
                let keep = *expires > now || open.contains(&key(address));
                if !keep {
                    over.push(key(address));
                }
                keep
            });
        }
        for key in over {
            let _absent = self.datapath.pins.remove(&key);
        }
    }

    fn drop_pins(&mut self, index: u32, keep: impl Fn(&str) -> bool) {
        let Some(seat) = self.seats.get_mut(&index) else {
            return;
        };
        let mut dropped = Vec::new();
        seat.pins.retain(|address, (name, _)| {
            let kept = keep(name);
            if !kept {
                dropped.push(*address);
            }
            kept
        });
        for address in dropped {
            let _absent = self.datapath.pins.remove(&PinKey {
                tap: index,
                address: address.into(),
            });
        }
    }

    /// Writes what holds for all sandboxes, the host's addresses among it; only differences reach the map.
    pub(crate) fn set_rules_for_all(&mut self, host: &[IpAddr]) -> Result<(), IsolationError> {
        let is_open = |address: &&IpAddr| !is_forbidden(**address, &self.exceptions);
        let host: Vec<IpAddr> = host.iter().filter(is_open).copied().collect();
        let wanted = compile::rules_for_all(&self.exceptions, &host)?;
        let written = self.datapath.rules.set_for_all(wanted);
        written.map_err(|e| system("write the rules for all", e))
    }

    pub(crate) fn state(&self, index: u32) -> Result<State, IsolationError> {
        let state = self.datapath.states.get(&index, 0);
        state.map_err(|e| system("read a TAP's state", e))
    }

    pub(crate) fn seat(&self, index: u32) -> Result<&Seat, IsolationError> {
        let seat = self
            .seats
            .get(&index)
            .filter(|seat| !matches!(seat.use_, Use::Gone));
        seat.ok_or(IsolationError::Unknown(TapIndex(index)))
    }

    pub(crate) fn seat_mut(&mut self, index: u32) -> Result<&mut Seat, IsolationError> {
        self.seats
            .get_mut(&index)
            .ok_or(IsolationError::Unknown(TapIndex(index)))
    }

    fn write_tap(&mut self, index: u32, tap: &layout::Tap) -> Result<(), IsolationError> {
        let written = self.datapath.taps.set(index, tap, 0);
        written.map_err(|e| system("write a TAP's entry", e))
    }

    fn write_index(&mut self, ifindex: u32, index: u32) -> Result<(), IsolationError> {
        let written = self.datapath.indices.insert(ifindex, index, 0);
        written.map_err(|e| system("write a TAP's index", e))
    }
}

impl Waiting {
    /// One more waits. What failed before anybody waited is nobody's.
    pub(crate) fn begin(&mut self) {
        if self.callers == 0 {
            self.failure = None;
        }
        self.callers += 1;
    }
}

impl Seat {
    fn new(name: String, tap: layout::Tap, use_: Use) -> Self {
        Self {
            name,
            tap,
            sandbox: None,
            before: State::default(),
            pins: BTreeMap::new(),
            unanswered: BTreeMap::new(),
            untold: 0,
            use_,
        }
    }
}
