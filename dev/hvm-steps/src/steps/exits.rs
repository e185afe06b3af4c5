//! KVM's own counts of exits, from debugfs. They are the sums over all VMs that exist, so only steps that end no VM are
//! counted.

use std::{collections::BTreeMap, fs};

/// Names in /sys/kernel/debug/kvm. `exits` includes all others but `pf_fixed`.
const COUNTED: [&str; 7] = [
    "exits",
    "pf_taken",
    "pf_fixed",
    "mmio_exits",
    "io_exits",
    "irq_exits",
    "halt_exits",
];

pub(super) struct Exits(BTreeMap<&'static str, i64>);

impl Exits {
    /// A counter that cannot be read is left out.
    pub(super) fn read() -> Self {
        let count = |name: &'static str| {
            let text = fs::read_to_string(format!("/sys/kernel/debug/kvm/{name}")).ok()?;
            Some((name, text.trim().parse().ok()?))
        };
        Self(COUNTED.into_iter().filter_map(count).collect())
    }

    /// The counts since then, as text.
    pub(super) fn since(&self) -> String {
        let now = Self::read();
        let counts = now.0.iter().zip(self.0.values());
        let counts: Vec<_> = counts
            .map(|((name, now), before)| format!("{name} {}", now - before))
            .collect();
        if counts.iter().any(|count| count.contains('-')) {
            return "not counted: VMs ended".to_owned();
        }
        counts.join(", ")
    }
}
