//! Sandbox ids.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// `i` followed by 19 lower-case letters or digits, the format of E2B. It is valid as a DNS label and as a directory
/// name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct SandboxId(String);

/// The text is not a sandbox id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a sandbox id: i and 19 lower-case letters or digits")]
pub struct SandboxIdError(String);

const LENGTH: usize = 20;
const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";

impl SandboxId {
    /// Makes an id from 19 random bytes. Because bytes above 251 are accepted, the first four letters of the alphabet
    /// are slightly more likely than the others. A caller that needs a uniform distribution must pass bytes below 252.
    /// Either way, the id has at least 94 bits of entropy.
    #[must_use]
    pub fn from_random(bytes: [u8; LENGTH - 1]) -> Self {
        let letters = bytes
            .iter()
            .map(|b| char::from(ALPHABET[usize::from(*b) % ALPHABET.len()]));
        Self(std::iter::once('i').chain(letters).collect())
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SandboxId {
    type Err = SandboxIdError;

    fn from_str(text: &str) -> Result<Self, SandboxIdError> {
        let is_id = text.len() == LENGTH
            && text.starts_with('i')
            && text.bytes().all(|b| ALPHABET.contains(&b));
        if is_id {
            Ok(Self(text.to_owned()))
        } else {
            Err(SandboxIdError(text.chars().take(64).collect()))
        }
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<SandboxId> for String {
    fn from(id: SandboxId) -> Self {
        id.0
    }
}

impl TryFrom<String> for SandboxId {
    type Error = SandboxIdError;

    fn try_from(text: String) -> Result<Self, SandboxIdError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_that_is_not_a_dns_label_is_refused() {
        for wrong in [
            "",
            "i",
            "iabcdefghij012345678",
            "Iabcdefghij01234567",
            "iabcdefghij01234567-",
            "../../../etc/passwd0",
        ] {
            let expected = wrong == "iabcdefghij012345678";
            assert_eq!(wrong.parse::<SandboxId>().is_ok(), expected, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn random_ids_parse_back(bytes: [u8; 19]) {
            let id = SandboxId::from_random(bytes);
            prop_assert_eq!(id.as_str().parse(), Ok(id.clone()));
        }
    }
}
