//! The attempts that code in a taken-over VMM could make, one module for each kind. Each attempt is a constant with
//! one function that makes it and another that observes its effect.

mod attempt;
mod code;
mod descriptors;
mod devices;
mod files;
mod groups;
mod kernel;
mod memory;
mod namespaces;
mod privileges;
mod processes;
mod settings;
mod signals;
mod sockets;

#[cfg(test)]
pub(super) use attempt::Refusal;
pub(super) use attempt::{Attempt, Change, Class};

/// All attempts, in the order of their classes.
pub(super) fn all() -> Vec<&'static Attempt> {
    [
        files::ATTEMPTS,
        memory::ATTEMPTS,
        sockets::ATTEMPTS,
        signals::ATTEMPTS,
        processes::ATTEMPTS,
        code::ATTEMPTS,
        devices::ATTEMPTS,
        groups::ATTEMPTS,
        settings::ATTEMPTS,
        descriptors::ATTEMPTS,
        privileges::ATTEMPTS,
        namespaces::ATTEMPTS,
        kernel::ATTEMPTS,
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn every_class_has_attempts_with_unique_names() {
        let mut names = BTreeSet::new();
        let mut classes: BTreeMap<Class, u32> = BTreeMap::new();
        for attempt in all() {
            let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
            assert!(attempt.name.bytes().all(is_plain), "{}", attempt.name);
            assert!(
                names.insert(attempt.name),
                "two attempts are called {}",
                attempt.name
            );
            assert!(attempt.why.ends_with('.'), "{}", attempt.name);
            assert!(!attempt.refusals.is_empty(), "{}", attempt.name);
            *classes.entry(attempt.class).or_default() += 1;
        }
        assert!(names.len() >= 40, "{}", names.len());
        assert_eq!(classes.len(), 15, "{classes:?}");
        assert!(classes.values().all(|count| *count >= 2), "{classes:?}");
    }
}
