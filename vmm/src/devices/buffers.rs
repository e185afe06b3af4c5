//! The pieces of guest memory that a driver offers for one transfer.

use vm_memory::VolatileSlice;

/// Limit on descriptors per chain. The longest chain that a driver needs is a block request of 126 data segments with
/// its header and its status byte.
pub(super) const MAX_SEGMENTS: usize = 128;

/// Bounds-checked pieces of guest memory in the driver's order. No piece is empty.
#[derive(Debug, Default)]
pub(super) struct Buffers<'a> {
    slices: Vec<VolatileSlice<'a>>,
    len: usize,
}

impl<'a> Buffers<'a> {
    pub(super) fn push(&mut self, slice: VolatileSlice<'a>) {
        if !slice.is_empty() {
            self.len += slice.len();
            self.slices.push(slice);
        }
    }

    /// Total length of all pieces in bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn segments(&self) -> usize {
        self.slices.len()
    }

    pub(super) fn slices(&self) -> &[VolatileSlice<'a>] {
        &self.slices
    }

    /// Keeps the first `at` bytes and returns the rest. Returns `None`, and changes nothing, if there are fewer bytes.
    pub(super) fn split_off(&mut self, at: usize) -> Option<Buffers<'a>> {
        if at > self.len {
            return None;
        }
        let mut rest = Buffers::default();
        let mut kept = 0;
        let mut index = 0;
        while kept < at {
            kept += self.slices.get(index)?.len();
            index += 1;
        }
        if kept > at {
            let last = self.slices.get_mut(index - 1)?;
            let (head, tail) = last.split_at(last.len() - (kept - at)).ok()?;
            *last = head;
            rest.push(tail);
        }
        for slice in self.slices.drain(index..) {
            rest.push(slice);
        }
        self.len = at;
        Some(rest)
    }

    /// Removes and returns the first `at` bytes. Returns `None`, and changes nothing, if there are fewer bytes.
    pub(super) fn split_front(&mut self, at: usize) -> Option<Buffers<'a>> {
        let rest = self.split_off(at)?;
        Some(std::mem::replace(self, rest))
    }

    /// Copies as many of `bytes` as fit to the start of the pieces. Returns the number of bytes copied.
    pub(super) fn write(&self, bytes: &[u8]) -> usize {
        #[cfg(fuzzing)]
        super::fuzz::act();
        let mut done = 0;
        for slice in &self.slices {
            let piece = &bytes[done..];
            let len = piece.len().min(slice.len());
            slice.copy_from(&piece[..len]);
            done += len;
        }
        done
    }

    /// Copies from the start of the pieces into `bytes`. Returns the number of bytes copied.
    pub(super) fn read(&self, bytes: &mut [u8]) -> usize {
        #[cfg(fuzzing)]
        super::fuzz::act();
        let mut done = 0;
        for slice in &self.slices {
            done += slice.copy_to(&mut bytes[done..]);
        }
        done
    }

    /// Fills everything with zeros.
    pub(super) fn fill_zero(&self) {
        const ZEROS: [u8; 4096] = [0; 4096];
        for slice in &self.slices {
            let mut at = 0;
            while let Ok(rest) = slice.offset(at) {
                let len = rest.len().min(ZEROS.len());
                if len == 0 {
                    break;
                }
                rest.copy_from(&ZEROS[..len]);
                at += len;
            }
        }
    }
}
