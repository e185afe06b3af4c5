//! The policies in force: their rule sets in the kernel and the limits in TAPs' entries.

use std::net::IpAddr;

use ranges::ForbiddenAddresses;

use crate::{
    config::IsolationConfig,
    datapath::{
        layout,
        rule_sets::{RuleMap, RuleSets},
    },
    enforcement::{compile, limits::Limits},
    error::{IsolationError, system},
    policy::Policy,
};

pub(crate) struct Policies {
    pub(crate) rules: RuleSets,
    forbidden: ForbiddenAddresses,
    limits: Limits,
    /// The upper half of `policy` in the next entry, so that a change is visible even if the rule set is the same.
    next_change: u32,
    next_tenure: u32,
}

impl Policies {
    pub(crate) fn new(rules: RuleMap, config: &IsolationConfig) -> Self {
        Self {
            rules: RuleSets::new(rules),
            forbidden: config.forbidden.clone(),
            limits: Limits::of(config),
            next_change: 1,
            next_tenure: 1,
        }
    }

    /// Takes over a predecessor's rule sets. `found` are all entries of the predecessor, whose change and tenure
    /// numbers are not reused. `used` are the rule-set numbers of the TAPs that were taken over.
    pub(crate) fn take_over(
        &mut self,
        found: &[layout::Tap],
        used: &[u32],
    ) -> Result<(), IsolationError> {
        for entry in found {
            let change = u32::try_from(entry.policy >> 32).unwrap_or(0);
            self.next_tenure = self.next_tenure.max(entry.tenure.wrapping_add(1));
            self.next_change = self.next_change.max(change.wrapping_add(1));
        }
        let rules = self.rules.take_over(used);
        rules.map_err(|e| system("take over the rules of a predecessor", e))
    }

    /// Allocates a tenure, the number of a sandbox's stay on a TAP. Never 0, which means no sandbox.
    pub(crate) fn new_tenure(&mut self) -> u32 {
        let tenure = self.next_tenure;
        self.next_tenure = tenure.wrapping_add(1).max(1);
        tenure
    }

    /// Acquires the policy's rule set and returns the entry that puts the policy into force: switching a TAP to this
    /// entry replaces all rules at once. The entry's `policy` is new even if the rules are the same, so that the
    /// programs evaluate open flows again.
    pub(crate) fn acquire(
        &mut self,
        policy: &Policy,
        current: layout::Tap,
        tenure: u32,
    ) -> Result<layout::Tap, IsolationError> {
        let rules = compile::rules_of(policy)?;
        let acquired = self.rules.acquire(rules);
        let rule_set = acquired.map_err(|e| system("write rules", e))?;
        let change = self.next_change;
        self.next_change = change.wrapping_add(1);
        Ok(self.limits.apply(
            policy,
            layout::Tap {
                tenure,
                policy: u64::from(change) << 32 | u64::from(rule_set),
                ..current
            },
        ))
    }

    /// Releases the rule set of an entry that is no longer in force.
    pub(crate) fn release(&mut self, rule_set: u32) {
        self.rules.release(rule_set);
    }

    /// Writes the rules for all sandboxes: the forbidden addresses, the exceptions, and the host's addresses that are
    /// not already forbidden.
    pub(crate) fn set_host_addresses(&mut self, host: &[IpAddr]) -> Result<(), IsolationError> {
        let is_reachable = |address: &&IpAddr| !self.forbidden.forbids(**address);
        let host: Vec<IpAddr> = host.iter().filter(is_reachable).copied().collect();
        let rules = compile::rules_for_all(&self.forbidden, &host)?;
        let written = self.rules.set_for_all(rules);
        written.map_err(|e| system("write the rules for all sandboxes", e))
    }
}
