//! Settings in a sandbox's map entry that come from its policy and the host's configuration: limits of bandwidth and
//! flows, and whether all flows go to the proxy.

use crate::{config::IsolationConfig, datapath::layout, policy::Policy};

/// The host's limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    max_flows: u32,
    bytes_per_s: Option<u64>,
}

impl Limits {
    pub(crate) fn of(config: &IsolationConfig) -> Self {
        Self {
            max_flows: config.max_flows,
            bytes_per_s: config.bytes_per_s,
        }
    }

    /// The entry with the settings of a policy.
    pub(crate) fn apply(&self, policy: &Policy, entry: layout::Tap) -> layout::Tap {
        layout::Tap {
            bytes_per_s: self.bandwidth(policy),
            flows_per_s: policy.flows_per_s.map_or(0, u64::from),
            max_flows: self.max_flows,
            hands_all: u32::from(policy.hands_all),
            ..entry
        }
    }

    /// The lower of the policy's and the host's bandwidth limits. Returns 0, which means unlimited in a map entry, only
    /// if neither sets a limit.
    fn bandwidth(&self, policy: &Policy) -> u64 {
        let limits = [policy.bytes_per_s, self.bytes_per_s];
        let lowest = limits.into_iter().flatten().min();
        lowest.map_or(0, |limit| limit.max(1))
    }
}
