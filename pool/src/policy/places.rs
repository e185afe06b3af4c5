//! Places for starts: as many at once as the host has use for, more only make all of them late.

/// What a start is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StartFor {
    /// A sandbox that is new.
    #[default]
    Create,
    /// A paused one, because a client with a key asked for it.
    Resume,
    /// A paused one, because of traffic from anywhere.
    Wake,
}

/// Places for starts, and who holds how many.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Places {
    /// In all, at least two.
    pub(crate) all: u32,
    pub(crate) creates: u32,
    pub(crate) resumes: u32,
    pub(crate) wakes: u32,
}

impl Places {
    /// One more start holds a place.
    pub(crate) fn hold(&mut self, start: StartFor) {
        match start {
            StartFor::Create => self.creates += 1,
            StartFor::Resume => self.resumes += 1,
            StartFor::Wake => self.wakes += 1,
        }
    }

    /// Whether a start may have one. Resumes leave one to creates, and those by traffic leave half of all to those
    /// who have a key.
    pub(crate) fn has_one_for(&self, start: StartFor) -> bool {
        let back = self.resumes + self.wakes;
        let is_free = self.creates + back < self.all;
        match start {
            StartFor::Create => is_free,
            StartFor::Resume => is_free && back + 1 < self.all,
            StartFor::Wake => is_free && back + 1 < self.all && self.wakes < self.all / 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_kind_of_start_takes_more_places_than_are_its_own(
            all in 2..64_u32,
            starts in prop::collection::vec(0..3_u8, 0..200),
        ) {
            let mut places = Places { all, ..Places::default() };
            for start in starts {
                let start = match start {
                    0 => StartFor::Create,
                    1 => StartFor::Resume,
                    _ => StartFor::Wake,
                };
                if places.has_one_for(start) {
                    places.hold(start);
                }
                let Places { creates, resumes, wakes, .. } = places;
                prop_assert!(creates + resumes + wakes <= all);
                prop_assert!(resumes + wakes < all && wakes <= all / 2);
            }
        }
    }
}
