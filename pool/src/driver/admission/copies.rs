//! Copies of templates' memory in huge pages.

use std::sync::{Arc, Weak};

use vmm_control::template::LoadedTemplate;

use crate::message::CopySize;

/// Copies that are being made, and copies that a template or a VM uses.
#[derive(Debug)]
pub(in crate::driver) struct Copies<T = LoadedTemplate> {
    /// Sizes of the copies that are being made.
    under_way: Vec<CopySize>,
    made: Vec<(Weak<T>, CopySize)>,
}

impl<T> Default for Copies<T> {
    fn default() -> Self {
        Self {
            under_way: Vec::new(),
            made: Vec::new(),
        }
    }
}

impl<T> Copies<T> {
    pub(in crate::driver) fn begun(&mut self, size: CopySize) {
        self.under_way.push(size);
    }

    /// Records the end of a load, and the copy that it made, if any.
    pub(in crate::driver) fn ended(&mut self, size: CopySize, copy: Option<&Arc<T>>) {
        if let Some(at) = self.under_way.iter().position(|other| *other == size) {
            self.under_way.swap_remove(at);
        }
        self.made.retain(|(copy, _)| copy.strong_count() > 0);
        self.made
            .extend(copy.map(|copy| (Arc::downgrade(copy), size)));
    }

    pub(in crate::driver) fn is_loading(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Memory of all copies, in bytes.
    pub(in crate::driver) fn taken(&self) -> u64 {
        self.sizes().map(|size| size.taken).sum()
    }

    /// Upper bound of the memory of all copies, in bytes.
    pub(in crate::driver) fn length(&self) -> u64 {
        self.sizes().map(|size| size.length).sum()
    }

    /// Memory of the existing copies that `is_among` selects, in bytes.
    pub(in crate::driver) fn taken_by(&self, is_among: impl Fn(*const T) -> bool) -> u64 {
        self.made(is_among).map(|size| size.taken).sum()
    }

    fn sizes(&self) -> impl Iterator<Item = &CopySize> {
        self.made(|_| true).chain(&self.under_way)
    }

    fn made(&self, is_among: impl Fn(*const T) -> bool) -> impl Iterator<Item = &CopySize> {
        let exists = move |copy: &Weak<T>| copy.strong_count() > 0 && is_among(copy.as_ptr());
        let made = self.made.iter().filter(move |(copy, _)| exists(copy));
        made.map(|(_, size)| size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(taken: u64) -> CopySize {
        CopySize {
            length: 2 * taken,
            taken,
        }
    }

    #[test]
    fn each_load_under_way_and_each_copy_in_use_counts() {
        let mut copies = Copies::default();
        // The template of the first load is removed during the load, and another one is loaded.
        copies.begun(size(100));
        copies.begun(size(30));
        assert_eq!((copies.taken(), copies.length()), (130, 2 * 130));
        let second = Arc::new(());
        copies.ended(size(30), Some(&second));
        assert!(copies.is_loading(), "the first load goes on");
        assert_eq!((copies.taken(), copies.length()), (130, 2 * 130));
        let first = Arc::new(());
        copies.ended(size(100), Some(&first));
        assert!(!copies.is_loading());
        assert_eq!((copies.taken(), copies.length()), (130, 2 * 130));
        let is_first = |copy| copy == Arc::as_ptr(&first);
        assert_eq!(copies.taken_by(is_first), 100);
        drop(first);
        assert_eq!((copies.taken(), copies.length()), (30, 2 * 30));
        copies.begun(size(7));
        copies.ended(size(7), None);
        assert_eq!(
            (copies.taken(), copies.length()),
            (30, 2 * 30),
            "nothing is left of a failed load"
        );
    }
}
