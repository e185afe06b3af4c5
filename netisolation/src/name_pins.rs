//! Name pins: addresses that a sandbox may reach because the resolver answered them for an allowed name.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use aya::maps::{HashMap, MapData};

use crate::{
    error::{IsolationError, system},
    layout::{Pin, PinKey},
};

/// Maximum number of pinned addresses per sandbox.
const MAX_PINS: usize = 1024;

pub(crate) struct NamePins {
    map: HashMap<MapData, PinKey, Pin>,
    /// The pins in the map, by TAP.
    by_tap: BTreeMap<u32, BTreeMap<IpAddr, NamePin>>,
}

#[derive(Debug)]
struct NamePin {
    name: String,
    /// CLOCK_MONOTONIC in nanoseconds.
    expires: u64,
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
                    self.remember(key, pin.name(), pin.expires);
                }
                _ => drop(self.map.remove(&key)),
            }
        }
    }

    /// Lets a TAP's sandbox reach an address until `expires` (CLOCK_MONOTONIC in nanoseconds).
    ///
    /// # Errors
    /// Returns [`IsolationError::TooMany`] if the sandbox already has the maximum number of pins, or
    /// [`IsolationError::System`] if the map cannot be written.
    pub(crate) fn pin(
        &mut self,
        tap: u32,
        tenure: u32,
        address: IpAddr,
        name: &str,
        expires: u64,
    ) -> Result<(), IsolationError> {
        let pins = self.by_tap.get(&tap);
        if pins.is_some_and(|pins| pins.len() >= MAX_PINS && !pins.contains_key(&address)) {
            return Err(IsolationError::TooMany {
                what: "addresses of names",
                limit: MAX_PINS,
            });
        }
        let key = key(tap, address);
        let written = self.map.insert(key, Pin::new(expires, tenure, name), 0);
        written.map_err(|e| system("pin an address", e))?;
        self.remember(key, name.to_owned(), expires);
        Ok(())
    }

    /// The name under which an address is pinned for a TAP's sandbox.
    pub(crate) fn name_of(&self, tap: u32, address: IpAddr) -> Option<&str> {
        let pin = self.by_tap.get(&tap)?.get(&address)?;
        Some(&pin.name)
    }

    /// Removes expired pins to which no flow is open.
    pub(crate) fn remove_expired(&mut self, now: u64, open: &BTreeSet<PinKey>) {
        for (tap, pins) in &mut self.by_tap {
            retain(&mut self.map, *tap, pins, |key, pin| {
                pin.expires > now || open.contains(key)
            });
        }
        self.by_tap.retain(|_, pins| !pins.is_empty());
    }

    /// Removes a TAP's pins whose names `keep` rejects.
    pub(crate) fn retain_names(&mut self, tap: u32, keep: impl Fn(&str) -> bool) {
        if let Some(pins) = self.by_tap.get_mut(&tap) {
            retain(&mut self.map, tap, pins, |_, pin| keep(&pin.name));
        }
    }

    /// Removes all pins of a TAP.
    pub(crate) fn remove_all(&mut self, tap: u32) {
        self.retain_names(tap, |_| false);
        self.by_tap.remove(&tap);
    }

    fn remember(&mut self, key: PinKey, name: String, expires: u64) {
        let pins = self.by_tap.entry(key.tap).or_default();
        pins.insert(key.address.ip(), NamePin { name, expires });
    }
}

fn key(tap: u32, address: IpAddr) -> PinKey {
    PinKey {
        tap,
        address: address.into(),
    }
}

/// Removes the pins that `keep` rejects, both from the map and from `pins`.
fn retain(
    map: &mut HashMap<MapData, PinKey, Pin>,
    tap: u32,
    pins: &mut BTreeMap<IpAddr, NamePin>,
    keep: impl Fn(&PinKey, &NamePin) -> bool,
) {
    pins.retain(|address, pin| {
        let key = key(tap, *address);
        let kept = keep(&key, pin);
        if !kept {
            let _absent = map.remove(&key);
        }
        kept
    });
}
