//! Reads back a TAP's device, programs and map entries from the kernel and compares them with what this server wrote.

use std::net::{IpAddr, Ipv6Addr};

use nix::libc::IFF_UP;

use crate::{
    datapath::{
        Datapath, programs_on, programs_on_egress,
        rule_sets::{FOR_ALL, Prefix, RuleSets},
    },
    enforcement::{
        name_pins::NamePins,
        tap_table::{Attachment, TapTable},
        uplink::UplinkSet,
    },
    error::{IsolationError, system},
    taps::{device, tap::TapIndex},
};

/// The state that this server wrote and that the checks expect in the kernel.
pub(crate) struct Expected<'a> {
    pub(crate) datapath: &'a Datapath,
    pub(crate) taps: &'a TapTable,
    pub(crate) rules: &'a RuleSets,
    pub(crate) pins: &'a NamePins,
    pub(crate) uplinks: &'a UplinkSet,
    /// The resolver's device.
    pub(crate) resolver: Option<&'a (u32, String)>,
}

/// A difference between the kernel's state and the expected state, or `None`.
type Difference = Option<String>;

impl Expected<'_> {
    /// Checks everything on which the isolation of a TAP depends.
    ///
    /// # Errors
    /// Returns [`IsolationError::Unknown`] if the TAP does not exist, [`IsolationError::Mismatch`] with the first
    /// difference, or [`IsolationError::System`] if the kernel's state cannot be read.
    pub(crate) fn check(&self, index: u32) -> Result<(), IsolationError> {
        let attachment = self.taps.get(index)?;
        let checks = [Self::check_device, Self::check_programs, Self::check_maps];
        for check in checks {
            if let Some(what) = check(self, index, attachment)? {
                return Err(IsolationError::Mismatch {
                    index: TapIndex(index),
                    what,
                });
            }
        }
        Ok(())
    }

    /// The device must exist in this namespace, be up, and have no address.
    fn check_device(
        &self,
        _index: u32,
        attachment: &Attachment,
    ) -> Result<Difference, IsolationError> {
        let (name, expected) = (&attachment.name, attachment.entry.ifindex);
        let failed = |e| system(format!("read {name}"), e);
        match device::index(name) {
            Ok(ifindex) if ifindex == expected => {}
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
        let found = v6.iter().find(|a| a.ifindex == expected);
        Ok(found.map(|a| format!("{name} has the address {}", a.address)))
    }

    /// Our program must be the first one on the TAP and on the egress of the resolver's device, and attached to every
    /// uplink. Uplinks may have other programs.
    fn check_programs(
        &self,
        _index: u32,
        attachment: &Attachment,
    ) -> Result<Difference, IsolationError> {
        let programs = |name: &str, ifindex: u32| {
            programs_on(ifindex).map_err(|e| system(format!("read the programs of {name}"), e))
        };
        let (name, expected) = (&attachment.name, self.datapath.from_guest_id);
        let first = programs(name, attachment.entry.ifindex)?.first().copied();
        if first != Some(expected) {
            return Ok(Some(format!(
                "the first program of {name} is {first:?}, expected {expected}"
            )));
        }
        for (ifindex, name) in self.uplinks.iter() {
            if !programs(name, ifindex)?.contains(&self.datapath.from_wire_id) {
                return Ok(Some(format!("the uplink {name} lacks its program")));
            }
        }
        let Some((ifindex, name)) = self.resolver else {
            return Ok(None);
        };
        let programs = programs_on_egress(*ifindex);
        let programs = programs.map_err(|e| system(format!("read the programs of {name}"), e))?;
        let (first, expected) = (programs.first().copied(), self.datapath.from_resolver_id);
        if first == Some(expected) {
            return Ok(None);
        }
        Ok(Some(format!(
            "the first program of {name} is {first:?}, expected {expected}"
        )))
    }

    /// The maps must contain what the policy compiles to.
    fn check_maps(
        &self,
        index: u32,
        attachment: &Attachment,
    ) -> Result<Difference, IsolationError> {
        let expected = attachment.entry;
        let mapped = self.taps.index_in_kernel(expected.ifindex);
        if mapped != Some(index) {
            return Ok(Some(format!("its device is mapped to TAP {mapped:?}")));
        }
        let found = self.taps.entry_in_kernel(index);
        if found != Some(expected) {
            return Ok(Some(format!(
                "its entry is {found:?}, expected {expected:?}"
            )));
        }
        // A TAP without a policy has only the rules for all sandboxes.
        let own = Some(expected.rule_set()).filter(|number| *number != FOR_ALL);
        for number in own.into_iter().chain([FOR_ALL]) {
            if let Some(what) = self.check_rules(number)? {
                return Ok(Some(what));
            }
        }
        let changed = self.pins.changed(index);
        Ok(changed.map(|address| format!("the name pin of {address} was changed")))
    }

    /// A rule set must contain the rules that were written, and no others.
    fn check_rules(&self, number: u32) -> Result<Difference, IsolationError> {
        let Some(expected) = self.rules.expected(number) else {
            return Ok(Some(format!("rule set {number} does not exist")));
        };
        // One entry more than expected, to detect an added rule.
        let found = self.rules.map.read(number, expected.len() + 1);
        let found = found.map_err(|e| system("read rules back", e))?;
        if found == *expected {
            return Ok(None);
        }
        let differing = expected
            .iter()
            .find(|(prefix, rule)| found.get(prefix) != Some(rule));
        let added = found.keys().find(|prefix| !expected.contains_key(prefix));
        Ok(Some(match (differing, added) {
            (Some((prefix, rule)), _) => {
                let (block, found) = (block(prefix), found.get(prefix));
                format!("the rule for {block} is {found:?}, expected {rule:?}")
            }
            (None, Some(prefix)) => {
                format!("another program added a rule for {}", block(prefix))
            }
            (None, None) => "its rules cannot be compared".to_owned(),
        }))
    }
}

/// The block of a prefix in CIDR notation.
fn block((bits, address): &Prefix) -> String {
    match address.ip() {
        IpAddr::V4(v4) if *bits >= 96 => format!("{v4}/{}", bits - 96),
        _ => format!("{}/{bits}", Ipv6Addr::from(address.0)),
    }
}
