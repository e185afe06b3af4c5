//! Name pins: addresses that the resolver returned to a sandbox, with the names that resolved to them.
//!
//! The programs read one entry for each address ([`Pin`]): the latest expiry and the marks of all its names, and the
//! last name. The other names, each with its own expiry, are only in this process, for the proxy
//! ([`crate::HandedFlow`]). After a restart, a server thus begins with the last name of each address, and learns the
//! others when the guest queries them again.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use aya::maps::{HashMap, MapData};

use crate::{
    datapath::{
        clock::nanoseconds,
        layout::{Pin, PinKey, pin_mark},
    },
    error::{IsolationError, system},
    policy::{Naming, Policy},
};

/// Maximum number of pinned addresses per sandbox.
const MAX_PINS: usize = 1024;
/// Maximum number of names of one address, and of all addresses of a sandbox. At either limit, a further name replaces
/// the name of its address that expires first. The first name of an address always has room.
const MAX_NAMES_OF_ADDRESS: usize = 64;
const MAX_NAMES: usize = 2048;
/// How long a flow's name remains readable after its expiry, because the proxy requests it some time after the flow was
/// opened.
const GRACE: Duration = Duration::from_secs(60);

pub(crate) struct NamePins {
    pub(crate) map: HashMap<MapData, PinKey, Pin>,
    /// The pins in the map, by TAP.
    by_tap: BTreeMap<u32, BTreeMap<IpAddr, NamePin>>,
}

/// The names of one address.
#[derive(Clone, Debug)]
struct NamePin {
    tenure: u32,
    /// Never empty, in the order of pinning.
    names: Vec<PinnedName>,
    /// Expiry and marks in the map.
    written: (u64, u32),
}

#[derive(Clone, Debug)]
pub(crate) struct PinnedName {
    name: String,
    /// From [`pin_mark`].
    marks: u32,
    /// CLOCK_MONOTONIC in nanoseconds.
    expires: u64,
}

impl PinnedName {
    pub(crate) fn new(name: &str, policy: &Policy, expires: u64) -> Self {
        Self {
            name: name.to_owned(),
            marks: marks(policy, name),
            expires,
        }
    }
}

impl NamePins {
    pub(crate) fn new(map: HashMap<MapData, PinKey, Pin>) -> Self {
        Self {
            map,
            by_tap: BTreeMap::new(),
        }
    }

    /// Takes over the predecessor's pins for the current tenures of TAPs, and removes all other pins.
    pub(crate) fn take_over(&mut self, tenure_of: impl Fn(u32) -> Option<u32>) {
        let keys: Vec<PinKey> = self.map.keys().flatten().collect();
        for key in keys {
            match (tenure_of(key.tap), self.map.get(&key, 0)) {
                (Some(tenure), Ok(pin)) if pin.tenure == tenure => {
                    let pins = self.by_tap.entry(key.tap).or_default();
                    pins.insert(key.address.ip(), NamePin::of(&pin));
                }
                _ => drop(self.map.remove(&key)),
            }
        }
    }

    /// Pins an address for a name of a TAP's sandbox until the name's expiry. `now`: CLOCK_MONOTONIC in nanoseconds.
    ///
    /// # Errors
    /// Returns [`IsolationError::TooMany`] if the sandbox already has the maximum number of pins, or
    /// [`IsolationError::System`] if the map cannot be written.
    pub(crate) fn pin(
        &mut self,
        tap: u32,
        tenure: u32,
        address: IpAddr,
        name: PinnedName,
        now: u64,
    ) -> Result<(), IsolationError> {
        let pins = self.by_tap.entry(tap).or_default();
        let all: usize = pins.values().map(|pin| pin.names.len()).sum();
        let mut pin = match pins.get(&address) {
            Some(pin) => pin.clone(),
            None if pins.len() >= MAX_PINS => {
                return Err(IsolationError::TooMany {
                    what: "addresses of names",
                    limit: MAX_PINS,
                });
            }
            None => NamePin {
                tenure,
                names: Vec::new(),
                written: (0, 0),
            },
        };
        pin.add(name, all >= MAX_NAMES);
        let written = self.map.insert(key(tap, address), pin.entry(now), 0);
        written.map_err(|e| system("pin an address", e))?;
        pins.insert(address, pin);
        Ok(())
    }

    /// The name for which an address was pinned last for a TAP's sandbox.
    pub(crate) fn name_of(&self, tap: u32, address: IpAddr) -> Option<&str> {
        let pin = self.by_tap.get(&tap)?.get(&address)?;
        Some(&pin.names.last()?.name)
    }

    /// All names for which an address is pinned for a TAP's sandbox, including those that expired just now.
    pub(crate) fn names_of(&self, tap: u32, address: IpAddr, now: u64) -> Vec<String> {
        let pin = self.by_tap.get(&tap).and_then(|pins| pins.get(&address));
        let names = pin.into_iter().flat_map(|pin| &pin.names);
        let recent = names.filter(|name| name.is_recent(now));
        recent.map(|name| name.name.clone()).collect()
    }

    /// Removes expired names, and pins that have no valid name and no open flow.
    pub(crate) fn remove_expired(&mut self, now: u64, open: &BTreeSet<PinKey>) {
        for (tap, pins) in &mut self.by_tap {
            retain(&mut self.map, *tap, pins, now, |key, pin| {
                pin.forget_old(now);
                pin.expires() > now || open.contains(key)
            });
        }
        self.by_tap.retain(|_, pins| !pins.is_empty());
    }

    /// Removes the names of a TAP's pins that `policy` does not pin, and writes the marks of the others.
    pub(crate) fn apply_policy(&mut self, tap: u32, policy: &Policy, now: u64) {
        if let Some(pins) = self.by_tap.get_mut(&tap) {
            retain(&mut self.map, tap, pins, now, |_, pin| {
                pin.names
                    .retain(|name| policy.naming(&name.name) == Naming::Pinned);
                for name in &mut pin.names {
                    name.marks = marks(policy, &name.name);
                }
                !pin.names.is_empty()
            });
        }
    }

    /// Removes all pins of a TAP.
    pub(crate) fn remove_all(&mut self, tap: u32) {
        for address in self.by_tap.remove(&tap).unwrap_or_default().into_keys() {
            let _absent = self.map.remove(&key(tap, address));
        }
    }

    /// The first pin of a TAP whose map entry differs from the written one.
    pub(crate) fn changed(&self, tap: u32) -> Option<IpAddr> {
        let mut pins = self.by_tap.get(&tap).into_iter().flatten();
        let is_changed =
            |address, pin: &NamePin| self.map.get(&key(tap, address), 0).ok() != Some(pin.last());
        pins.find(|(address, pin)| is_changed(**address, pin))
            .map(|(address, _)| *address)
    }
}

impl NamePin {
    /// A predecessor's pin.
    fn of(pin: &Pin) -> Self {
        let name = PinnedName {
            name: pin.name(),
            marks: pin.marks,
            expires: pin.expires,
        };
        Self {
            tenure: pin.tenure,
            names: vec![name],
            written: (pin.expires, pin.marks),
        }
    }

    /// Adds a name, or replaces an earlier answer for it. `is_full` tells whether the sandbox has the maximum number of
    /// names.
    fn add(&mut self, name: PinnedName, is_full: bool) {
        self.names.retain(|other| other.name != name.name);
        if is_full || self.names.len() >= MAX_NAMES_OF_ADDRESS {
            let first = self.names.iter().map(|name| name.expires).min();
            let first = self
                .names
                .iter()
                .position(|name| Some(name.expires) == first);
            first.map(|first| self.names.remove(first));
        }
        self.names.push(name);
    }

    /// Removes the names that expired some time ago. If all of them did, keeps the last one, for an open flow.
    fn forget_old(&mut self, now: u64) {
        let last = self.names.len().saturating_sub(1);
        let has_recent = self.names.iter().any(|name| name.is_recent(now));
        let mut at = 0;
        self.names.retain(|name| {
            let is_last = at == last;
            at += 1;
            name.is_recent(now) || (is_last && !has_recent)
        });
    }

    fn expires(&self) -> u64 {
        let all = self.names.iter().map(|name| name.expires);
        all.max().unwrap_or(0)
    }

    /// The value to write to the map. Expired names do not count, unless all are expired.
    fn entry(&mut self, now: u64) -> Pin {
        let is_expired = self.expires() <= now;
        let valid = self
            .names
            .iter()
            .filter(|name| is_expired || name.expires > now);
        let marks = valid.fold(0, |marks, name| marks | name.marks);
        self.written = (self.expires(), marks);
        self.last()
    }

    /// The value that was last written to the map.
    fn last(&self) -> Pin {
        let (expires, marks) = self.written;
        let name = self.names.last().map_or("", |name| &name.name);
        Pin::new(expires, self.tenure, marks, name)
    }
}

impl PinnedName {
    fn is_recent(&self, now: u64) -> bool {
        self.expires.saturating_add(nanoseconds(GRACE)) > now
    }
}

/// The marks of a name under a policy.
fn marks(policy: &Policy, name: &str) -> u32 {
    let mark = |is_set, mark| if is_set { mark } else { 0 };
    mark(policy.admits_name(name), pin_mark::ADMITS)
        | mark(policy.has_rules_for(name), pin_mark::RULED)
}

fn key(tap: u32, address: IpAddr) -> PinKey {
    PinKey {
        tap,
        address: address.into(),
    }
}

/// Changes pins with `keep`, and writes the changes to the map. Pins that `keep` rejects or that cannot be written are
/// removed both from the map and from `pins`.
fn retain(
    map: &mut HashMap<MapData, PinKey, Pin>,
    tap: u32,
    pins: &mut BTreeMap<IpAddr, NamePin>,
    now: u64,
    keep: impl Fn(&PinKey, &mut NamePin) -> bool,
) {
    pins.retain(|address, pin| {
        let key = key(tap, *address);
        let before = pin.last();
        let kept = keep(&key, pin) && {
            let after = pin.entry(now);
            before == after || map.insert(key, after, 0).is_ok()
        };
        if !kept {
            let _absent = map.remove(&key);
        }
        kept
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str, marks: u32, expires: u64) -> PinnedName {
        PinnedName {
            name: text.to_owned(),
            marks,
            expires,
        }
    }

    fn pin(names: &[PinnedName]) -> NamePin {
        let mut pin = NamePin {
            tenure: 7,
            names: Vec::new(),
            written: (0, 0),
        };
        for name in names {
            pin.add(name.clone(), false);
        }
        pin
    }

    fn names(pin: &NamePin) -> Vec<&str> {
        pin.names.iter().map(|name| name.name.as_str()).collect()
    }

    #[test]
    fn an_entry_has_the_marks_of_valid_names_the_latest_expiry_and_the_last_name() {
        let mut pin = pin(&[
            name("a.test", pin_mark::ADMITS, 100),
            name("b.test", pin_mark::RULED, 300),
            name("c.test", 0, 200),
        ]);
        let both = pin_mark::ADMITS | pin_mark::RULED;
        assert_eq!(pin.entry(99), Pin::new(300, 7, both, "c.test"));
        assert_eq!(pin.entry(100), Pin::new(300, 7, pin_mark::RULED, "c.test"));
        // An open flow keeps its original permission.
        assert_eq!(pin.entry(300), Pin::new(300, 7, both, "c.test"));
        assert_eq!(pin.last(), Pin::new(300, 7, both, "c.test"));
    }

    #[test]
    fn a_later_answer_replaces_the_expiry_of_its_name_only() {
        let mut pin = pin(&[
            name("a.test", 1, 300),
            name("b.test", 1, 200),
            name("a.test", 1, 100),
        ]);
        assert_eq!(names(&pin), ["b.test", "a.test"]);
        assert_eq!(pin.entry(0).expires, 200);
    }

    #[test]
    fn names_are_bounded_and_those_that_expire_first_go_first() {
        let numbered = |n: u64| name(&format!("n{n}.test"), 1, 1000 - n);
        let mut pin = pin(&(0..64).map(numbered).collect::<Vec<_>>());
        assert_eq!(pin.names.len(), MAX_NAMES_OF_ADDRESS);
        pin.add(name("more.test", 1, 1), false);
        assert_eq!(pin.names.len(), MAX_NAMES_OF_ADDRESS);
        assert!(!names(&pin).contains(&"n63.test"));
        pin.add(name("another.test", 1, 2000), true);
        assert_eq!(pin.names.len(), MAX_NAMES_OF_ADDRESS);
        assert!(!names(&pin).contains(&"more.test"));
        // The first name of an address has room even if the sandbox has too many names.
        let mut first = self::pin(&[]);
        first.add(name("a.test", 1, 1), true);
        first.add(name("b.test", 1, 1), true);
        assert_eq!(names(&first), ["b.test"]);
    }

    #[test]
    fn old_names_are_forgotten_except_the_last_one() {
        let grace = nanoseconds(GRACE);
        let all = [name("a.test", 1, 100), name("b.test", 1, 50)];
        let after = |now| {
            let mut pin = pin(&all);
            pin.forget_old(now);
            names(&pin).join(" ")
        };
        assert_eq!(after(49 + grace), "a.test b.test");
        assert_eq!(after(50 + grace), "a.test");
        assert_eq!(after(100 + grace), "b.test");
    }
}
