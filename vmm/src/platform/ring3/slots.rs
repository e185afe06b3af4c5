//! The parts of guest memory for which KVM has slots. On hosts of this platform KVM allocates ten bytes per page of a
//! slot, whether the page is accessed or not. Therefore a clone starts with slots for the chunks that it is expected to
//! touch, and gets slots for further chunks when it touches them.
//!
//! A read or write of other memory leaves the guest as an MMIO exit with a part of its instruction: the chunk becomes a
//! slot, and the VMM performs the access. Instructions that lie in such memory, and instructions that access it and
//! that KVM cannot emulate, raise #UD, and the monitor requests the memory from the VMM
//! (`monitor::layout::Shared::deferred`). KVM walks page tables itself, so chunks with page tables have slots from the
//! start (`tables`).

use kvm_ioctls::VmFd;
use monitor::layout::{CHUNK_BYTES, DEFERRED_BYTES};

use crate::sys;

/// Words in a list of chunks, which has one bit per chunk.
pub(super) const WORDS: usize = DEFERRED_BYTES / 8;
/// Gaps of up to this many chunks between expected chunks are filled: a slot costs time, a chunk only 10 KiB.
const GAP: usize = 1;
/// Number of adjacent chunks that are registered when one of them is touched, since others are likely to follow.
const TOGETHER: usize = 4;

/// The chunks of guest memory that have slots.
#[derive(Debug)]
pub(super) struct Slots {
    /// Host address of guest-physical address 0.
    host: *mut u8,
    /// Length of guest memory in bytes.
    bytes: u64,
    /// Whether each chunk has a slot.
    known: Vec<bool>,
    /// Number of the next slot.
    next: u32,
}

impl Slots {
    /// For `bytes` of memory at `host` without any slots. `first` is the number of the first slot to use.
    pub(super) fn new(host: *mut u8, bytes: u64, first: u32) -> Self {
        Self {
            host,
            bytes,
            known: vec![false; index(bytes.div_ceil(CHUNK_BYTES))],
            next: first,
        }
    }

    /// Registers all memory except the chunks in `deferred` that are outside the `expected` (offset, bytes) ranges.
    /// Fills short gaps between registered chunks (see [`GAP`]).
    ///
    /// # Errors
    /// Returns an error if KVM refuses a slot.
    pub(super) fn begin(
        &mut self,
        vm: &VmFd,
        deferred: &[u64; WORDS],
        expected: impl Iterator<Item = (u64, u64)>,
    ) -> Result<(), kvm_ioctls::Error> {
        self.know_runs(vm, begin_with(self.known.len(), deferred, expected))
    }

    /// Registers all memory.
    ///
    /// # Errors
    /// Returns an error if KVM refuses a slot.
    pub(super) fn all(&mut self, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
        self.know_runs(vm, vec![true; self.known.len()])
    }

    /// Registers the chunk that contains an address, and its aligned group of [`TOGETHER`] chunks. Returns false, and
    /// does nothing, if the chunk already had a slot or the address is outside guest memory.
    ///
    /// # Errors
    /// Returns an error if KVM refuses a slot.
    pub(super) fn one(&mut self, vm: &VmFd, at: u64) -> Result<bool, kvm_ioctls::Error> {
        let chunk = index(at / CHUNK_BYTES);
        let unknown = self.known.get(chunk).is_some_and(|known| !known);
        if unknown {
            let first = chunk - chunk % TOGETHER;
            let wanted = (0..self.known.len()).map(|i| (first..first + TOGETHER).contains(&i));
            self.know_runs(vm, wanted.collect())?;
        }
        Ok(unknown)
    }

    /// Adds a slot for each run of wanted chunks without one.
    fn know_runs(&mut self, vm: &VmFd, mut wanted: Vec<bool>) -> Result<(), kvm_ioctls::Error> {
        for (wanted, known) in wanted.iter_mut().zip(&self.known) {
            *wanted &= !known;
        }
        for (first, n) in runs(&wanted) {
            let at = first as u64 * CHUNK_BYTES;
            let bytes = (n as u64 * CHUNK_BYTES).min(self.bytes - at);
            sys::set_slot(
                vm,
                self.next,
                at,
                self.host.wrapping_add(index(at)),
                bytes,
                0,
            )?;
            self.next += 1;
            self.known[first..first + n].fill(true);
        }
        Ok(())
    }

    /// Whether all chunks have slots.
    pub(super) fn complete(&self) -> bool {
        self.known.iter().all(|known| *known)
    }

    /// The list of chunks without slots.
    pub(super) fn deferred(&self) -> [u64; WORDS] {
        list(self.known.iter().map(|known| !known))
    }
}

/// A list in which the bit of each chunk is set if its element is true. Chunks beyond the list's capacity are left out.
pub(super) fn list(chunks: impl Iterator<Item = bool>) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (chunk, yes) in chunks.enumerate().take(WORDS * 64) {
        words[chunk / 64] |= u64::from(yes) << (chunk % 64);
    }
    words
}

/// For each of `chunks` chunks, whether it is registered at the start.
fn begin_with(
    chunks: usize,
    deferred: &[u64; WORDS],
    expected: impl Iterator<Item = (u64, u64)>,
) -> Vec<bool> {
    let deferred = |chunk: usize| {
        deferred
            .get(chunk / 64)
            .is_some_and(|word| word >> (chunk % 64) & 1 == 1)
    };
    let mut wanted: Vec<bool> = (0..chunks).map(|chunk| !deferred(chunk)).collect();
    for (at, bytes) in expected.filter(|(_, bytes)| *bytes > 0) {
        let last = at.saturating_add(bytes - 1) / CHUNK_BYTES;
        let end = index(last).saturating_add(1).min(chunks);
        let first = index(at / CHUNK_BYTES).min(end);
        wanted[first..end].fill(true);
    }
    let unwanted: Vec<bool> = wanted.iter().map(|wanted| !wanted).collect();
    for (first, n) in runs(&unwanted) {
        let inside = first > 0 && first + n < chunks;
        if inside && n <= GAP {
            wanted[first..first + n].fill(true);
        }
    }
    wanted
}

/// Runs of true elements: first index and length.
fn runs(which: &[bool]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for i in (0..which.len()).filter(|i| which[*i]) {
        match runs.last_mut() {
            Some((first, n)) if *first + *n == i => *n += 1,
            _ => runs.push((i, 1)),
        }
    }
    runs
}

/// Cannot fail: host addresses have 64 bits.
fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(wanted: &[bool]) -> Vec<usize> {
        (0..wanted.len()).filter(|i| wanted[*i]).collect()
    }

    #[test]
    fn chunks_that_are_expected_or_not_deferred_are_registered_at_the_start() {
        let deferred = list([false, true, true, true, true, true, true, true, true].into_iter());
        assert_eq!(deferred[0], 0x1fe);
        let begin =
            |expected: &[(u64, u64)]| chunks(&begin_with(10, &deferred, expected.iter().copied()));
        assert_eq!(begin(&[]), [0, 9]);
        assert_eq!(
            begin(&[(4 * CHUNK_BYTES, 1), (5 * CHUNK_BYTES - 1, 2)]),
            [0, 4, 5, 9]
        );
        // A gap of one chunk is filled, a gap of two is not.
        assert_eq!(begin(&[(2 * CHUNK_BYTES, 4096)]), [0, 1, 2, 9]);
        assert_eq!(begin(&[(3 * CHUNK_BYTES, 4096)]), [0, 3, 9]);
        // Ranges outside of memory.
        assert_eq!(
            begin(&[(u64::MAX, u64::MAX), (100 * CHUNK_BYTES, 5), (0, 0)]),
            [0, 9]
        );
        assert_eq!(begin(&[(0, u64::MAX)]), (0..10).collect::<Vec<_>>());
        // Chunks beyond the end of the list.
        let bits = WORDS * 64;
        let known = chunks(&begin_with(bits + 3, &[u64::MAX; WORDS], [].into_iter()));
        assert_eq!(known, [bits, bits + 1, bits + 2]);
    }

    #[test]
    fn a_list_contains_the_chunks_it_was_made_from() {
        let which: Vec<bool> = (0..1000).map(|i| i % 7 == 3).collect();
        let kept = begin_with(1000, &list(which.iter().map(|yes| !yes)), [].into_iter());
        assert_eq!(kept, which);
    }
}
