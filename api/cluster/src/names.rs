//! Names of nodes and templates for use in etcd keys.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The text cannot be part of a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a valid {kind} name: {rule}")]
pub struct NameError {
    text: String,
    kind: &'static str,
    rule: &'static str,
}

impl NameError {
    fn new(text: &str, kind: &'static str, rule: &'static str) -> Self {
        let text = text.chars().take(80).collect();
        Self { text, kind, rule }
    }
}

/// Name of a node: a DNS label.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct NodeId(String);

/// Name of a template: 1 to 128 characters, without a slash, a space or a control character.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct TemplateId(String);

/// One boot of a host. VMs survive a restart of `cube-api`, but not of the host. A node that returns with the same
/// incarnation still has its sandboxes. One that returns with another has lost those that were running.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Incarnation(String);

impl FromStr for NodeId {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        let is_label = (1..=63).contains(&text.len())
            && text.bytes().all(inner)
            && !text.starts_with('-')
            && !text.ends_with('-');
        if is_label {
            Ok(Self(text.to_owned()))
        } else {
            let rule = "1 to 63 lower-case letters, digits and hyphens, no hyphen at an end";
            Err(NameError::new(text, "node", rule))
        }
    }
}

impl FromStr for TemplateId {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let inner = |c: char| c != '/' && !c.is_whitespace() && !c.is_control();
        if (1..=128).contains(&text.len()) && text.chars().all(inner) {
            Ok(Self(text.to_owned()))
        } else {
            let rule = "1 to 128 bytes without slash, space and control characters";
            Err(NameError::new(text, "template", rule))
        }
    }
}

impl FromStr for Incarnation {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let inner = |b: u8| b.is_ascii_hexdigit() || b == b'-';
        if (1..=64).contains(&text.len()) && text.bytes().all(inner) {
            Ok(Self(text.to_owned()))
        } else {
            let rule = "1 to 64 hex digits and hyphens, such as /proc/sys/kernel/random/boot_id";
            Err(NameError::new(text, "boot", rule))
        }
    }
}

/// Common implementation of the three types.
macro_rules! text {
    ($name:ident) => {
        impl $name {
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;

            fn try_from(text: String) -> Result<Self, NameError> {
                text.parse()
            }
        }
    };
}

text!(NodeId);
text!(TemplateId);
text!(Incarnation);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_their_place_in_a_key_are_refused() {
        for wrong in ["", "-a", "a-", "A", "a/b", "a.b", "ä", &"a".repeat(64)] {
            assert!(wrong.parse::<NodeId>().is_err(), "{wrong:?}");
        }
        for wrong in ["", "a/b", "a b", "a\n", &"a".repeat(129)] {
            assert!(wrong.parse::<TemplateId>().is_err(), "{wrong:?}");
        }
        for wrong in ["", "g", "a/b", &"a".repeat(65)] {
            assert!(wrong.parse::<Incarnation>().is_err(), "{wrong:?}");
        }
        assert!("node-1".parse::<NodeId>().is_ok());
        assert!("base:2026".parse::<TemplateId>().is_ok());
    }
}
