//! Reading back what the kernel has, and comparing it with what it should have.

mod sys;

use std::net::{IpAddr, Ipv6Addr};

use nix::libc::IFF_UP;

use crate::{
    IsolationError, TapIndex,
    compile::{FOR_ALL, Prefix},
    device,
    error::system,
    owner::{Owner, Seat},
};

impl Owner {
    /// See [`crate::Isolation::verify`].
    pub(crate) fn verify(&mut self, index: u32) -> Result<(), IsolationError> {
        let outcome = self.check(index);
        if matches!(outcome, Err(IsolationError::Mismatch { .. })) {
            let number = self.seat(index)?.tap.number();
            self.datapath.rules.distrust(number);
        }
        outcome
    }

    fn check(&self, index: u32) -> Result<(), IsolationError> {
        let seat = self.seat(index)?;
        let checks = [Self::check_device, Self::check_program, Self::check_maps];
        for check in checks {
            if let Some(what) = check(self, index, seat)? {
                return Err(IsolationError::Mismatch {
                    index: TapIndex(index),
                    what,
                });
            }
        }
        Ok(())
    }

    /// Up, in this namespace, and without an address.
    fn check_device(&self, _index: u32, seat: &Seat) -> Result<Option<String>, IsolationError> {
        let name = &seat.name;
        let failed = |e| system(format!("read {name}"), e);
        match device::index(name) {
            Ok(ifindex) if ifindex == seat.tap.ifindex => {}
            Ok(ifindex) => return Ok(Some(format!("{name} is another device ({ifindex})"))),
            Err(error) => return Ok(Some(format!("{name}: {error}"))),
        }
        if device::flags(name).map_err(failed)? & IFF_UP == 0 {
            return Ok(Some(format!("{name} is down")));
        }
        let v4 = device::has_address4(name).map_err(failed)?;
        if let Some(address) = v4 {
            return Ok(Some(format!("{name} has the address {address}")));
        }
        let v6 = device::addresses6().map_err(failed)?;
        let found = v6.iter().find(|a| a.ifindex == seat.tap.ifindex);
        Ok(found.map(|a| format!("{name} has the address {}", a.address)))
    }

    /// Ours is the first program that a frame meets on the TAP, and is on every uplink, where others may be besides.
    fn check_program(&self, _index: u32, seat: &Seat) -> Result<Option<String>, IsolationError> {
        let programs = |name: &str, ifindex: u32| {
            sys::programs(ifindex).map_err(|e| system(format!("read the programs of {name}"), e))
        };
        let (name, wanted) = (&seat.name, self.datapath.from_guest_id);
        let first = programs(name, seat.tap.ifindex)?.first().copied();
        if first != Some(wanted) {
            return Ok(Some(format!(
                "the first program of {name} is {first:?} and not {wanted}"
            )));
        }
        for (ifindex, (name, _)) in &self.uplinks {
            if !programs(name, *ifindex)?.contains(&self.datapath.from_wire_id) {
                return Ok(Some(format!("the uplink {name} is without its program")));
            }
        }
        Ok(None)
    }

    /// The maps have what the policy compiles to.
    fn check_maps(&self, index: u32, seat: &Seat) -> Result<Option<String>, IsolationError> {
        let known = self.datapath.indices.get(&seat.tap.ifindex, 0).ok();
        if known != Some(index) {
            return Ok(Some(format!("its device leads to TAP {known:?}")));
        }
        let tap = self.datapath.taps.get(&index, 0).ok();
        if tap != Some(seat.tap) {
            return Ok(Some(format!("its entry is {tap:?} and not {:?}", seat.tap)));
        }
        // A TAP that waits has no rules of its own.
        let own = (seat.tap.number() != FOR_ALL).then_some(seat.tap.number());
        for number in own.into_iter().chain([FOR_ALL]) {
            if let Some(what) = self.check_rules(number)? {
                return Ok(Some(what));
            }
        }
        Ok(None)
    }

    /// Under the number are the rules that were written there, and nothing else.
    fn check_rules(&self, number: u32) -> Result<Option<String>, IsolationError> {
        let sets = &self.datapath.rules;
        let Some(rules) = sets.of(number) else {
            return Ok(Some(format!("there are no rules of the number {number}")));
        };
        // Room for one that is too many.
        let found = sets.map.read(number, rules.len() + 1);
        let found = found.map_err(|e| system("read rules back", e))?;
        if found == *rules {
            return Ok(None);
        }
        let differs = rules
            .iter()
            .find(|(prefix, rule)| found.get(prefix) != Some(rule));
        let more = found.keys().find(|prefix| !rules.contains_key(prefix));
        Ok(Some(match (differs, more) {
            (Some((prefix, rule)), _) => {
                let (block, found) = (block(prefix), found.get(prefix));
                format!("the rule for {block} is {found:?} and not {rule:?}")
            }
            (None, Some(prefix)) => format!("somebody added a rule for {}", block(prefix)),
            (None, None) => "its rules cannot be compared".to_owned(),
        }))
    }
}

fn block((bits, address): &Prefix) -> String {
    match address.ip() {
        IpAddr::V4(v4) if *bits >= 96 => format!("{v4}/{}", bits - 96),
        _ => format!("{}/{bits}", Ipv6Addr::from(address.0)),
    }
}
