//! Guest memory that another vCPU, the rival, changes while the devices work. The changes are deterministic: they
//! happen before accesses that the fuzzer's program selects.
//!
//! [`Contested`] replaces guest memory in fuzzing builds. Each access of the devices, and of the crates that walk their
//! rings, first looks up a region, and the rival acts there. Request data is accessed without a lookup, so
//! [`super::super::buffers`] calls [`act`] itself.

use std::{cell::RefCell, collections::VecDeque, fmt::Debug, sync::Arc};

use super::ENTRIES;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap};

/// Limit on accesses per step: enough for a turn of every queue, each with the largest ring full of the longest chains.
const STEP: u64 = 1 << 22;

/// Guest memory that the rival of this thread can change.
#[derive(Clone, Debug)]
pub struct Contested(GuestMemoryMmap<()>);

/// A write of the rival.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    /// Number of accesses since the previous change.
    pub(super) after: u16,
    pub(super) at: u64,
    pub(super) bytes: [u8; 2],
}

#[derive(Debug, Default)]
struct Rival {
    memory: Option<GuestMemoryMmap<()>>,
    changes: VecDeque<Change>,
    /// Number of accesses before the first of the changes.
    wait: u16,
    /// An available ring that is never empty, and the number of reads of its entries before another entry is added.
    feeds: Option<(u64, u16)>,
    looks: u16,
    accesses: u64,
}

thread_local! {
    static RIVAL: RefCell<Rival> = RefCell::default();
}

impl Contested {
    /// Like [`GuestMemoryMmap::from_ranges`].
    ///
    /// # Errors
    /// Returns the errors of that function.
    pub fn from_ranges(ranges: &[(GuestAddress, usize)]) -> Result<Self, impl Debug + use<>> {
        GuestMemoryMmap::from_ranges(ranges).map(Self)
    }

    /// Like [`GuestMemoryMmap::from_arc_regions`].
    ///
    /// # Errors
    /// Returns the errors of that function.
    pub fn from_arc_regions(
        regions: Vec<Arc<GuestRegionMmap<()>>>,
    ) -> Result<Self, impl Debug + use<>> {
        GuestMemoryMmap::from_arc_regions(regions).map(Self)
    }
}

impl GuestMemoryBackend for Contested {
    type R = GuestRegionMmap<()>;

    fn find_region(&self, addr: GuestAddress) -> Option<&Self::R> {
        access(Some(addr.0));
        self.0.find_region(addr)
    }

    fn iter(&self) -> impl Iterator<Item = &Self::R> {
        self.0.iter()
    }
}

/// Starts a program: the rival gets this memory and no changes.
pub(super) fn begin(memory: &Contested) {
    RIVAL.with_borrow_mut(|rival| {
        *rival = Rival {
            memory: Some(memory.0.clone()),
            ..Rival::default()
        }
    });
}

/// Queues a change.
pub(super) fn change(change: Change) {
    RIVAL.with_borrow_mut(|rival| {
        if rival.changes.is_empty() {
            rival.wait = change.after;
        }
        rival.changes.push_back(change);
    });
}

/// Lets the rival offer another chain after every `every` reads of the entries of a ring with [`ENTRIES`] entries. If
/// it adds chains as fast as the device takes them, the ring never becomes empty; if it adds them faster, the ring
/// becomes faulty.
pub(super) fn feed(avail_ring: u64, every: u16) {
    RIVAL.with_borrow_mut(|rival| rival.feeds = Some((avail_ring, every)));
}

/// Stops the rival.
pub(super) fn rest() {
    RIVAL.with_borrow_mut(|rival| {
        rival.feeds = None;
        rival.changes.clear();
    });
}

/// Ends a step: accesses are counted from zero again.
pub(super) fn step_over() {
    RIVAL.with_borrow_mut(|rival| rival.accesses = 0);
}

/// Called before each access of the devices to request data.
///
/// # Panics
/// If a step makes more accesses than its bounded work needs.
pub(in crate::devices) fn act() {
    access(None);
}

fn access(at: Option<u64>) {
    RIVAL.with(|rival| {
        let Ok(mut rival) = rival.try_borrow_mut() else {
            return;
        };
        rival.accesses += 1;
        assert!(rival.accesses < STEP, "a step makes too many accesses");
        rival.write_next();
        rival.feed_on(at);
    });
}

impl Rival {
    fn write_next(&mut self) {
        while self.wait == 0 {
            let (Some(memory), Some(change)) = (&self.memory, self.changes.pop_front()) else {
                return;
            };
            let _fits = memory.write_slice(&change.bytes, GuestAddress(change.at));
            self.wait = self.changes.front().map_or(u16::MAX, |next| next.after);
        }
        self.wait -= 1;
    }

    fn feed_on(&mut self, at: Option<u64>) {
        let (Some(memory), Some((ring, every))) = (&self.memory, self.feeds) else {
            return;
        };
        let entries = ring + 4..ring + 4 + u64::from(ENTRIES) * 2;
        if !at.is_some_and(|at| entries.contains(&at)) {
            return;
        }
        self.looks += 1;
        if self.looks >= every {
            self.looks = 0;
            let index: u16 = memory.read_obj(GuestAddress(ring + 2)).unwrap_or_default();
            let _fits = memory.write_obj(index.wrapping_add(1), GuestAddress(ring + 2));
        }
    }
}
