//! Cache keys: equal keys mean equal disks.
//!
//! A key is the digest of the previous key and of everything that a step's result depends on. Every field is preceded
//! by its length, so that no two lists of fields produce the same bytes.

use std::fmt;

use model::is_sha256;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::plan::Step;

/// Increment it when the same steps produce a different disk.
const VERSION: &str = "builds 1";

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(super) struct Key([u8; 32]);

impl Key {
    /// The key of a list of fields.
    pub(super) fn of(fields: &[&str]) -> Self {
        let mut hash = Sha256::new();
        for field in [VERSION].iter().chain(fields) {
            hash.update((field.len() as u64).to_le_bytes());
            hash.update(field.as_bytes());
        }
        Self(hash.finalize().into())
    }

    /// The key after a step.
    pub(super) fn after(self, step: &Step) -> Self {
        let before = self.to_string();
        let mut fields = vec![before.as_str(), step.kind.name()];
        // The number of fields distinguishes an empty field from an absent one. The arguments come last.
        fields.push(if step.files.is_some() { "files" } else { "" });
        fields.push(step.files.as_deref().unwrap_or_default());
        fields.extend(step.args.iter().map(String::as_str));
        Self::of(&fields)
    }

    /// Parses the output of [`fmt::Display`].
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        if !is_sha256(text) {
            return None;
        }
        for (byte, at) in bytes.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(text.get(at..at + 2)?, 16).ok()?;
        }
        Some(Self(bytes))
    }
}

impl From<Key> for String {
    fn from(key: Key) -> Self {
        key.to_string()
    }
}

impl TryFrom<String> for Key {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text).ok_or("a key has 64 hex digits")
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::StepKind;
    use proptest::prelude::*;

    fn step(kind: StepKind, args: &[&str], files: Option<&str>) -> Step {
        Step {
            kind,
            args: args.iter().map(ToString::to_string).collect(),
            files: files.map(str::to_owned),
            force: false,
        }
    }

    #[test]
    fn steps_that_differ_have_different_keys() {
        let base = Key::of(&["base", "x"]);
        let all = [
            step(StepKind::Run, &["a b", "c"], None),
            step(StepKind::Run, &["a", "b c"], None),
            step(StepKind::Run, &["a b c"], None),
            step(StepKind::Run, &["a b c", ""], None),
            step(StepKind::Env, &["a b c"], None),
            step(StepKind::Run, &["a b c"], Some("")),
            step(StepKind::Run, &["a b c"], Some("d")),
            step(StepKind::Run, &["d", "a b c"], None),
        ];
        let mut keys: Vec<_> = all.iter().map(|step| base.after(step)).collect();
        keys.extend(all.iter().map(|step| Key::of(&["base", "y"]).after(step)));
        keys.push(keys[0].after(&all[1]));
        keys.push(keys[1].after(&all[0]));
        let count = keys.len();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), count);
    }

    #[test]
    fn force_is_no_part_of_a_key() {
        let plain = step(StepKind::Run, &["a"], None);
        let forced = Step {
            force: true,
            ..plain.clone()
        };
        assert_eq!(Key::of(&[]).after(&plain), Key::of(&[]).after(&forced));
    }

    proptest! {
        #[test]
        fn a_key_is_read_as_it_was_written(fields in proptest::collection::vec(".*", 0..3)) {
            let fields: Vec<_> = fields.iter().map(String::as_str).collect();
            let key = Key::of(&fields);
            prop_assert_eq!(Key::parse(&key.to_string()), Some(key));
        }

        #[test]
        fn lists_of_fields_have_keys_of_their_own(
            one in proptest::collection::vec("[ab]{0,2}", 0..4),
            other in proptest::collection::vec("[ab]{0,2}", 0..4),
        ) {
            let of = |list: &[String]| Key::of(&list.iter().map(String::as_str).collect::<Vec<_>>());
            prop_assert_eq!(of(&one) == of(&other), one == other);
        }

        #[test]
        fn other_texts_are_no_keys(text in "[0-9a-zA-Zä/.]{0,70}") {
            let is_key = text.len() == 64 && text.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'));
            prop_assert_eq!(Key::parse(&text).is_some(), is_key);
        }
    }
}
