//! The TAPs of slots. A TAP is taken before its VM is made and released after the VM has exited. The record holds the
//! TAP's index. Two things must never happen: a guest runs before its TAP's policy was read back, or a TAP is given to
//! a second VM while the first still runs.

use netisolation::{Counters, Isolation, TapIndex};

use crate::{
    record::{ProcessName, Record},
    work::WorkError,
};

/// Applies the record's policy. Does nothing without a network.
pub(crate) fn update(network: Option<&Isolation>, record: &Record) -> Result<(), WorkError> {
    match (network, record.tap) {
        (Some(network), Some(tap)) => network
            .update(tap, &record.policy)
            .map_err(|e| WorkError::Network("replace the policy", e)),
        (None, _) | (_, None) => Ok(()),
    }
}

/// Reads the counters of a TAP. Without a network or a TAP, all counters are zero.
pub(crate) fn counters(
    network: Option<&Isolation>,
    tap: Option<TapIndex>,
) -> Result<Counters, WorkError> {
    match (network, tap) {
        (Some(network), Some(tap)) => network
            .counters(tap)
            .map_err(|e| WorkError::Network("read the counters", e)),
        (None, _) | (_, None) => Ok(Counters::default()),
    }
}

/// Verifies that a TAP enforces its policy. Without a network or a TAP, returns an error.
pub(crate) fn verify(network: Option<&Isolation>, tap: Option<TapIndex>) -> Result<(), WorkError> {
    match (network, tap) {
        (Some(network), Some(tap)) => network
            .verify(tap)
            .map_err(|e| WorkError::Network("verify the TAP", e)),
        (None, _) | (_, None) => Err(WorkError::Image("the sandbox has no network".to_owned())),
    }
}

/// Releases the TAP of a VM that has exited, and returns its last counters. If the VMM process still runs, because it
/// could not be killed or watched, the TAP is discarded, so that it is never reused.
pub(crate) fn release(
    network: Option<&Isolation>,
    tap: Option<TapIndex>,
    vmm: Option<ProcessName>,
) -> Counters {
    let last = counters(network, tap).unwrap_or_default();
    if let (Some(network), Some(tap)) = (network, tap) {
        if vmm.is_some_and(|vmm| vmm.is_alive()) {
            network.discard(tap)
        } else {
            network.release(tap)
        }
    }
    last
}

/// Adds counters to a total.
pub(crate) fn add(sum: &mut Counters, more: &Counters) {
    sum.packets_out += more.packets_out;
    sum.bytes_out += more.bytes_out;
    sum.packets_in += more.packets_in;
    sum.bytes_in += more.bytes_in;
    sum.flows += more.flows;
    sum.events_lost += more.events_lost;
    for (reason, packets) in &more.refused {
        *sum.refused.entry(*reason).or_default() += packets;
    }
}

#[cfg(test)]
mod tests {
    use netisolation::Reason;

    use super::*;

    #[test]
    fn counters_add_up() {
        let one = Counters {
            packets_out: 1,
            bytes_out: 2,
            packets_in: 3,
            bytes_in: 4,
            flows: 5,
            refused: [(Reason::Policy, 6)].into(),
            events_lost: 7,
        };
        let mut sum = Counters::default();
        add(&mut sum, &one);
        assert_eq!(sum, one);
        add(&mut sum, &one);
        assert_eq!((sum.bytes_in, sum.events_lost), (8, 14));
        assert_eq!(sum.refused[&Reason::Policy], 12);
    }
}
