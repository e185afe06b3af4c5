//! The warm stock of one template: measurements, decisions, and its memory in huge pages.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use vmm_control::template::LoadedTemplate;

use crate::{
    config::WarmMarks,
    policy::{self, Creates},
};

/// Whether a template's memory is loaded into huge pages, from which clones start fastest.
#[derive(Clone, Debug, Default)]
pub(crate) enum Memory {
    /// Not loaded, because no fill has needed it yet, or because it cannot be: see [`Template::is_loadable`].
    ///
    /// [`Template::is_loadable`]: library::template::Template::is_loadable
    #[default]
    OnDisk,
    /// The memory is being copied.
    Loading,
    Loaded(Arc<LoadedTemplate>),
    /// Loading failed, and is not tried again. Clones read the memory from the template's directory.
    Unloadable,
}

#[derive(Debug, Default)]
pub(crate) struct Supply {
    pub(crate) memory: Memory,
    /// The copy that was loaded last. VMs may still use it after the template has been unloaded.
    pub(crate) copy: Weak<LoadedTemplate>,
    pub(crate) creates: Creates,
    /// Time at which a caller last got a sandbox of the template, in CLOCK_MONOTONIC nanoseconds. `None` if this has
    /// not happened since the pool was opened.
    pub(crate) used_ns: Option<u64>,
    /// The same for sandboxes of diffs of the template.
    pub(crate) diff_used_ns: Option<u64>,
    /// Slots that configuration and demand require, before the budget is divided.
    pub(crate) wanted: u32,
    /// Whether neither configuration nor demand requires the slots: they are spare.
    pub(crate) is_spare: bool,
    /// The marks of its warm stock, within the budget.
    pub(crate) marks: WarmMarks,
    /// Whether its memory may be loaded, within the budget.
    pub(crate) loads: bool,
    /// See [`crate::policy::Stock::refilling`].
    pub(crate) refilling: bool,
    /// Number of consecutive failed fills.
    pub(crate) failures: u32,
    /// No fill begins before this time (CLOCK_MONOTONIC).
    pub(crate) not_before_ns: u64,
    /// Number of consecutive loads that failed for lack of disk space.
    pub(crate) load_failures: u32,
    /// No load begins before this time (CLOCK_MONOTONIC).
    pub(crate) load_not_before_ns: u64,
    /// Creates served by a warm slot, and creates for which a VM was made.
    pub(crate) hits: u64,
    pub(crate) misses: u64,
}

impl Supply {
    /// Whether the template has been unused for at least `idle`. Uses of a diff do not count, because they need no
    /// sandbox of this template.
    pub(crate) fn is_idle(&self, now_ns: u64, idle: Duration) -> bool {
        is_idle(self.used_ns, now_ns, idle)
    }

    /// Whether the template's memory has been unused for at least `idle`. Uses of diffs count, because they map it.
    pub(crate) fn is_memory_idle(&self, now_ns: u64, idle: Duration) -> bool {
        is_idle(self.memory_used_ns(), now_ns, idle)
    }

    /// Forgets the state of the template's previous files, and returns their memory.
    pub(crate) fn files_replaced(&mut self) -> Memory {
        (self.failures, self.not_before_ns) = (0, 0);
        self.copy = Weak::new();
        std::mem::take(&mut self.memory)
    }

    pub(crate) fn memory_used_ns(&self) -> Option<u64> {
        self.used_ns.max(self.diff_used_ns)
    }
}

fn is_idle(used_ns: Option<u64>, now_ns: u64, idle: Duration) -> bool {
    used_ns.is_none_or(|used_ns| policy::is_idle(used_ns, now_ns, idle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diff_keeps_the_memory_of_its_base_in_use_but_not_the_base() {
        let idle = Duration::from_nanos(10);
        let is_idle = |supply: &Supply, now_ns| {
            (
                supply.is_idle(now_ns, idle),
                supply.is_memory_idle(now_ns, idle),
            )
        };
        let mut supply = Supply::default();
        assert_eq!(is_idle(&supply, 0), (true, true));
        supply.diff_used_ns = Some(5);
        assert_eq!(is_idle(&supply, 5), (true, false));
        supply.used_ns = Some(3);
        assert_eq!(is_idle(&supply, 12), (false, false));
        assert_eq!(is_idle(&supply, 13), (true, false));
        assert_eq!(is_idle(&supply, 15), (true, true));
    }
}
