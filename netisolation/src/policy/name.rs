//! Name patterns in policies.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// `example.com` matches only this name, `*.example.com` every name below `example.com`, and `*` every name. Stored in
/// lower-case ASCII without a trailing dot; internationalized names are converted with IDNA.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct NamePattern(String);

/// How the resolver treats a query for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// Refuses the query.
    Refused,
    /// Resolves the name. The rules decide whether the addresses can be reached.
    Answered,
    /// Resolves the name and pins the addresses: a pattern of the policy matches the name, or the name has header
    /// rules.
    Pinned,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// Contains the first 64 characters of the rejected text.
    #[error(
        "{0:?} is not a domain name: use labels of letters, digits, `-` and `_` (the last not all digits), optionally \
         after `*.`, or `*` alone"
    )]
    Name(String),
}

impl NamePattern {
    /// Whether the pattern matches `name`, which must be lower case without a trailing dot.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        match self.0.strip_prefix('*') {
            Some("") => true,
            Some(suffix) => name.len() > suffix.len() && name.ends_with(suffix),
            None => name == self.0,
        }
    }
}

impl FromStr for NamePattern {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let invalid = || PolicyError::Name(text.chars().take(64).collect());
        if text == "*" {
            return Ok(Self(text.into()));
        }
        let (star, labels) = match text.strip_prefix("*.") {
            Some(labels) => ("*.", labels),
            None => ("", text),
        };
        let labels = labels.strip_suffix('.').unwrap_or(labels);
        let labels = idna::domain_to_ascii(labels).map_err(|_| invalid())?;
        let is_number = labels.rsplit('.').next().is_some_and(is_numeric);
        if labels.len() <= 253 && labels.split('.').all(is_label) && !is_number {
            Ok(Self(format!("{star}{labels}")))
        } else {
            Err(invalid())
        }
    }
}

fn is_label(label: &str) -> bool {
    (1..=63).contains(&label.len())
        && !label.starts_with('-')
        && !label.ends_with('-')
        && label
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

/// Names whose last label is numeric are rejected: no top-level domain is numeric, but the last part of a mistyped IPv4
/// address is.
fn is_numeric(label: &str) -> bool {
    label.bytes().all(|b| b.is_ascii_digit())
}

impl TryFrom<String> for NamePattern {
    type Error = PolicyError;

    fn try_from(text: String) -> Result<Self, PolicyError> {
        text.parse()
    }
}

impl From<NamePattern> for String {
    fn from(pattern: NamePattern) -> Self {
        pattern.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> NamePattern {
        text.parse().unwrap()
    }

    #[test]
    fn a_pattern_matches_its_name_or_every_name_below_it() {
        assert!(pattern("Example.COM.").matches("example.com"));
        assert!(!pattern("example.com").matches("www.example.com"));
        assert!(!pattern("example.com").matches("badexample.com"));
        let below = pattern("*.example.com");
        assert!(below.matches("a.example.com") && below.matches("a.b.example.com"));
        assert!(
            !below.matches("example.com")
                && !below.matches(".example.com")
                && !below.matches("badexample.com")
        );
        assert!(pattern("*").matches("anything.test"));
        assert!(pattern("bücher.example").matches("xn--bcher-kva.example"));
        assert!(pattern("_dmarc.example.com").matches("_dmarc.example.com"));
    }

    #[test]
    fn text_that_is_not_a_domain_name_is_rejected() {
        let long = format!("{}.com", "a".repeat(64));
        for text in [
            "",
            ".",
            "*.",
            "**",
            "*a.com",
            "a.*.com",
            "a..com",
            "-a.com",
            "a b.com",
            "a/b",
            "http://a.com",
            "a.com:80",
            "1.2.3.4",
            "1.2.3",
            "10.0.0.0/33",
            "::1",
            &long,
        ] {
            assert!(text.parse::<NamePattern>().is_err(), "{text:?}");
        }
    }
}
