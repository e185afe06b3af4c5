//! The copies of templates' memory in huge pages.

use std::sync::{Arc, Weak};

use vmm_control::template::LoadedTemplate;

/// Copies that are being made, and those that a template or a VM uses. Sizes are in bytes.
#[derive(Debug)]
pub(super) struct Copies<T = LoadedTemplate> {
    /// The sizes of those that are being made.
    under_way: Vec<u64>,
    made: Vec<(Weak<T>, u64)>,
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
    pub(super) fn begun(&mut self, size: u64) {
        self.under_way.push(size);
    }

    /// Records the end of a load, and the copy that it has made.
    pub(super) fn ended(&mut self, size: u64, copy: Option<&Arc<T>>) {
        if let Some(at) = self.under_way.iter().position(|other| *other == size) {
            self.under_way.swap_remove(at);
        }
        self.made.retain(|(copy, _)| copy.strong_count() > 0);
        self.made
            .extend(copy.map(|copy| (Arc::downgrade(copy), size)));
    }

    pub(super) fn is_loading(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Memory of all copies.
    pub(super) fn bytes(&self) -> u64 {
        let made = self.made.iter().filter(|(copy, _)| copy.strong_count() > 0);
        let sizes = made.map(|(_, size)| size).chain(&self.under_way);
        sizes.fold(0, |sum, size| sum.saturating_add(*size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_load_under_way_and_each_copy_in_use_counts() {
        let mut copies = Copies::default();
        // The template of the first load is removed meanwhile, and another one is loaded.
        copies.begun(100);
        copies.begun(30);
        assert_eq!(copies.bytes(), 130);
        let second = Arc::new(());
        copies.ended(30, Some(&second));
        assert!(copies.is_loading(), "the first load goes on");
        assert_eq!(copies.bytes(), 130);
        let first = Arc::new(());
        copies.ended(100, Some(&first));
        assert!(!copies.is_loading());
        assert_eq!(copies.bytes(), 130);
        drop(first);
        assert_eq!(copies.bytes(), 30);
        copies.begun(7);
        copies.ended(7, None);
        assert_eq!(copies.bytes(), 30, "nothing is left of a failed load");
    }
}
