//! Enforces policies on TAPs: writes them to the maps, then reads everything back. Closes a TAP that cannot be confined
//! or adopted. Composes the parts that own the maps.

// Translation of a policy for the kernel.
pub(crate) mod compile;
mod limits;
mod policies;

// Owners of one or several maps each.
pub(crate) mod name_pins;
pub(crate) mod refusals;
pub(crate) mod tap_table;
pub(crate) mod uplink;

pub(crate) mod verify;

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, mpsc::SyncSender},
    time::Duration,
};

use model::SandboxId;

use self::{
    name_pins::{NamePins, PinnedName},
    policies::Policies,
    refusals::{Refusals, total_refused},
    tap_table::TapTable,
    uplink::UplinkSet,
    verify::Expected,
};
use crate::{
    config::{IsolationConfig, Uplinks},
    datapath::{
        Datapath, Maps,
        clock::{monotonic_ns, nanoseconds},
        layout::{FlowKey, State},
    },
    error::{IsolationError, system},
    events::event::{Counters, NetEvent},
    handed::HandedFlow,
    policy::{Naming, Policy},
    taps::{
        device::{self, Device},
        tap::TapIndex,
    },
};

pub(crate) struct Enforcement {
    pub(crate) datapath: Datapath,
    pub(crate) taps: TapTable,
    pub(crate) policies: Policies,
    pub(crate) pins: NamePins,
    uplinks: UplinkSet,
    /// Index and name of the resolver's device.
    resolver: Option<(u32, String)>,
    pub(crate) refusals: Refusals,
}

impl Enforcement {
    /// Takes over the TAPs, policies and pins of a predecessor.
    pub(crate) fn new(
        config: &IsolationConfig,
        datapath: Datapath,
        maps: Maps,
        events: SyncSender<NetEvent>,
    ) -> Result<Self, IsolationError> {
        let mut enforcement = Self {
            datapath,
            taps: TapTable::new(maps.indices, maps.taps, maps.states, config.max_taps),
            policies: Policies::new(maps.rules, config),
            pins: NamePins::new(maps.pins),
            uplinks: UplinkSet::new(maps.uplinks),
            resolver: None,
            refusals: Refusals::new(maps.records, maps.refusals, events),
        };
        enforcement.take_over()?;
        Ok(enforcement)
    }

    /// Attaches the programs to the resolver's device and to the uplinks.
    pub(crate) fn attach(
        &mut self,
        resolver_device: &Device,
        uplinks: &Uplinks,
    ) -> Result<(), IsolationError> {
        self.datapath.attach_resolver(resolver_device)?;
        self.resolver = Some((resolver_device.index, resolver_device.name.clone()));
        self.uplinks.attach(uplinks, &self.datapath)?;
        self.refresh_addresses()
    }

    fn take_over(&mut self) -> Result<(), IsolationError> {
        let found = self.taps.take_over(&self.datapath)?;
        for (index, _) in self.taps.iter() {
            let reported = total_refused(&self.taps.state(index)?);
            self.refusals.begin(index, State::default(), reported);
        }
        let used: Vec<u32> = self.taps.iter().map(|(_, a)| a.entry.rule_set()).collect();
        self.pins
            .take_over(|tap| self.taps.any(tap).map(|a| a.entry.tenure));
        self.policies.take_over(&found, &used)
    }

    /// Assigns a number to a new device and writes entries that deny everything.
    pub(crate) fn register(&mut self, device: &Device) -> Result<u32, IsolationError> {
        let index = self.taps.add(device)?;
        self.refusals.begin(index, State::default(), 0);
        Ok(index)
    }

    /// Starts a sandbox on a TAP. On any failure, nothing passes.
    pub(crate) fn confine(
        &mut self,
        index: u32,
        sandbox: &SandboxId,
        policy: &Policy,
    ) -> Result<(), IsolationError> {
        let tenure = self.policies.new_tenure();
        self.pins.remove_all(index);
        let applied = self
            .begin_counting(index)
            .and_then(|()| self.apply(index, sandbox, policy, tenure));
        self.verify_or_close(index, applied)
    }

    fn begin_counting(&mut self, index: u32) -> Result<(), IsolationError> {
        self.flush_refusals(index);
        let state = self.taps.state(index)?;
        self.taps.get_mut(index)?;
        self.refusals.begin(index, state, total_refused(&state));
        Ok(())
    }

    /// Continues a sandbox of a predecessor. The sandbox's open flows continue if the policy allows them. On any
    /// failure, nothing passes.
    pub(crate) fn adopt(
        &mut self,
        index: u32,
        sandbox: &SandboxId,
        policy: &Policy,
    ) -> Result<(), IsolationError> {
        let tenure = self.taps.get(index)?.entry.tenure;
        if tenure == 0 {
            return self.confine(index, sandbox, policy);
        }
        self.pins.apply_policy(index, policy, monotonic_ns());
        let applied = self.apply(index, sandbox, policy, tenure);
        self.verify_or_close(index, applied)
    }

    /// Replaces the policy of a sandbox. If writing fails, the old policy stays in force, without the pins of names
    /// that only it allows. If only the verification fails, the new policy was written.
    pub(crate) fn update(&mut self, index: u32, policy: &Policy) -> Result<(), IsolationError> {
        let attachment = self.taps.get(index)?;
        let tenure = attachment.entry.tenure;
        let Some((sandbox, former)) = attachment.sandbox.clone() else {
            return Err(IsolationError::Unknown(TapIndex(index)));
        };
        // An open flow is evaluated once for each policy, and must then find the pins of the new one.
        self.pins.apply_policy(index, policy, monotonic_ns());
        if let Err(error) = self.apply(index, &sandbox, policy, tenure) {
            self.pins.apply_policy(index, &former, monotonic_ns());
            return Err(error);
        }
        self.verify(index)
    }

    /// Writes the policy's rules, then switches the TAP to them, so that every packet is evaluated against a complete
    /// set.
    fn apply(
        &mut self,
        index: u32,
        sandbox: &SandboxId,
        policy: &Policy,
        tenure: u32,
    ) -> Result<(), IsolationError> {
        let before = self.taps.get(index)?.entry;
        let entry = self.policies.acquire(policy, before, tenure)?;
        if let Err(error) = self.taps.switch(index, entry) {
            self.policies.release(entry.rule_set());
            return Err(error);
        }
        self.taps.get_mut(index)?.sandbox = Some((sandbox.clone(), Arc::new(policy.clone())));
        self.policies.release(before.rule_set());
        Ok(())
    }

    /// Verifies a TAP to which a policy was applied. Closes the TAP if applying or verifying failed.
    fn verify_or_close(
        &mut self,
        index: u32,
        applied: Result<(), IsolationError>,
    ) -> Result<(), IsolationError> {
        let outcome = applied.and_then(|()| self.verify(index));
        if outcome.is_err() {
            self.close(index);
        }
        outcome
    }

    /// Compares the kernel's state with the policy. After a mismatch, the TAP's rule set is no longer shared with
    /// further policies.
    pub(crate) fn verify(&mut self, index: u32) -> Result<(), IsolationError> {
        let expected = Expected {
            datapath: &self.datapath,
            taps: &self.taps,
            rules: &self.policies.rules,
            pins: &self.pins,
            uplinks: &self.uplinks,
            resolver: self.resolver.as_ref(),
        };
        let outcome = expected.check(index);
        if matches!(outcome, Err(IsolationError::Mismatch { .. })) {
            let rule_set = self.taps.get(index)?.entry.rule_set();
            self.policies.rules.stop_sharing(rule_set);
        }
        outcome
    }

    /// Makes the programs drop all packets of a TAP, releases its rule set, and removes its pins.
    pub(crate) fn close(&mut self, index: u32) {
        if let Some(rule_set) = self.taps.close(index) {
            self.policies.release(rule_set);
            self.pins.remove_all(index);
        }
    }

    /// Removes a TAP's entries and frees its number, after its device and its flows were removed.
    pub(crate) fn remove(&mut self, index: u32) {
        self.flush_refusals(index);
        self.refusals.end(index);
        if let Some(ifindex) = self.taps.remove(index) {
            self.datapath.remove_tap_link(index, ifindex);
        }
    }

    /// Allows a sandbox to reach an address to which the resolver resolved an allowed name.
    pub(crate) fn pin(
        &mut self,
        index: u32,
        sandbox: &SandboxId,
        address: IpAddr,
        name: &str,
        ttl: Duration,
    ) -> Result<(), IsolationError> {
        let now = monotonic_ns();
        let attachment = self.taps.get(index)?;
        let tenure = attachment.entry.tenure;
        let current = attachment.sandbox.as_ref().filter(|(id, _)| id == sandbox);
        let Some((_, policy)) = current.filter(|(_, p)| p.naming(name) == Naming::Pinned) else {
            return Err(IsolationError::Unknown(TapIndex(index)));
        };
        let name = PinnedName::new(name, policy, now.saturating_add(nanoseconds(ttl)));
        self.pins.pin(index, tenure, address, name, now)
    }

    /// The flow with this key, if its sandbox still has the TAP. `tenure` must match the flow's tenure.
    pub(crate) fn handed(&self, key: &FlowKey, tenure: u32) -> Option<HandedFlow> {
        let attachment = self.taps.get(key.tap).ok()?;
        if attachment.entry.tenure != tenure {
            return None;
        }
        let (sandbox, policy) = attachment.sandbox.as_ref()?;
        let address = key.remote.ip();
        let remote = SocketAddr::new(address, u16::from_be(key.remote_port));
        Some(HandedFlow {
            sandbox: sandbox.clone(),
            remote,
            names: self.pins.names_of(key.tap, address, monotonic_ns()),
            admitted_by_address: policy.allows_tcp(remote),
            is_of_all: policy.hands_all,
        })
    }

    pub(crate) fn counters(&mut self, index: u32) -> Result<Counters, IsolationError> {
        let state = self.taps.state(index)?;
        self.flush_refusals(index);
        self.taps.get(index)?;
        Ok(self.refusals.counters(index, &state))
    }

    /// Reports a TAP's refused packets that have not been reported yet.
    pub(crate) fn flush_refusals(&mut self, index: u32) {
        self.refusals.flush(index, &self.taps, &self.pins);
    }

    /// Reports the records that the programs wrote since the last call.
    pub(crate) fn drain_refusals(&mut self) {
        self.refusals.drain(&self.taps, &self.pins);
    }

    /// Reports the refused packets that were counted since the last total.
    pub(crate) fn sum_refusals(&mut self) {
        self.refusals.sum_all(&self.taps, &self.pins);
    }

    /// Reads the host's addresses and the uplinks' MTUs again and writes the differences to the maps.
    pub(crate) fn refresh_addresses(&mut self) -> Result<(), IsolationError> {
        // Sets forwarding again: any write to net.ipv4.ip_forward resets the loopback device's setting.
        uplink::routing_device()?;
        let all = device::addresses().map_err(|e| system("read the host's addresses", e))?;
        let mut host: Vec<IpAddr> = all.iter().map(|a| a.address).collect();
        host.sort_unstable();
        host.dedup();
        self.policies.set_host_addresses(&host)?;
        self.uplinks.write_addresses(&all)
    }
}
