//! Places for starts. If more starts run at the same time than the host has CPUs for, all of them are late.

/// The cause of a start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StartFor {
    /// A create or a fork.
    #[default]
    Create,
    /// A resume by a client with a key.
    Resume,
    /// A resume by traffic, which anyone may cause.
    Wake,
    /// A build VM, for which no user waits.
    Build,
}

/// The number of places, and how many of them each kind of start holds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Places {
    /// Number of places; at least two.
    pub(crate) all: u32,
    pub(crate) creates: u32,
    pub(crate) resumes: u32,
    pub(crate) wakes: u32,
    pub(crate) builds: u32,
}

impl Places {
    /// Counts a place as held by a start.
    pub(crate) fn hold(&mut self, start: StartFor) {
        match start {
            StartFor::Create => self.creates += 1,
            StartFor::Resume => self.resumes += 1,
            StartFor::Wake => self.wakes += 1,
            StartFor::Build => self.builds += 1,
        }
    }

    /// Whether a start may have a place. All resumes and builds together leave one place for creates. Resumes by
    /// traffic hold at most half of all places, and so do builds: a boot is slow, and an unresponsive guest even
    /// slower.
    pub(crate) fn has_one_for(&self, start: StartFor) -> bool {
        let others = self.resumes + self.wakes + self.builds;
        let is_free = self.creates + others < self.all;
        let leaves_one = is_free && others + 1 < self.all;
        match start {
            StartFor::Create => is_free,
            StartFor::Resume => leaves_one,
            StartFor::Wake => leaves_one && self.wakes < self.all / 2,
            StartFor::Build => leaves_one && self.builds < self.all / 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_kind_of_start_takes_more_places_than_it_may(
            all in 2..64_u32,
            starts in prop::collection::vec(0..4_u8, 0..200),
        ) {
            let mut places = Places { all, ..Places::default() };
            for start in starts {
                let start = match start {
                    0 => StartFor::Create,
                    1 => StartFor::Resume,
                    2 => StartFor::Wake,
                    _ => StartFor::Build,
                };
                if places.has_one_for(start) {
                    places.hold(start);
                }
                let Places { creates, resumes, wakes, builds, .. } = places;
                let others = resumes + wakes + builds;
                prop_assert!(creates + others <= all);
                prop_assert!(others < all && wakes <= all / 2 && builds <= all / 2);
            }
        }
    }
}
