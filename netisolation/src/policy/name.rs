//! Names in policies.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Policy, PolicyError, Verdict};

/// `example.com`, or `*.example.com`: every name below it, not itself; `*` is every name. Lower case, ASCII (names in
/// other letters become what IDNA makes of them), no final dot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct NamePattern(String);

/// What our resolver does when a sandbox asks for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// It refuses.
    Refused,
    /// It answers; whether the address may be reached is up to the rules.
    Answered,
    /// It answers, and what it answers may be reached: a pattern has the name.
    Pinned,
}

impl NamePattern {
    /// Whether the pattern has a name, which is in lower case and without a final dot.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        match self.0.strip_prefix('*') {
            Some("") => true,
            Some(suffix) => name.len() > suffix.len() && name.ends_with(suffix),
            None => name == self.0,
        }
    }
}

impl Policy {
    /// See [`Naming`]; the name is in lower case and without a final dot. A policy that allows all of IPv4 or all of
    /// IPv6 has every name.
    #[must_use]
    pub fn naming(&self, name: &str) -> Naming {
        let has_internet = |rule: &super::Rule| {
            rule.block.prefix_len() == 0 && matches!(rule.verdict, Verdict::Allow(_))
        };
        if self.names.iter().any(|pattern| pattern.has(name)) {
            Naming::Pinned
        } else if self.rules.iter().any(has_internet) {
            Naming::Answered
        } else {
            Naming::Refused
        }
    }
}

impl FromStr for NamePattern {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let wrong = || PolicyError::Name(text.chars().take(64).collect());
        if text == "*" {
            return Ok(Self(text.into()));
        }
        let (star, labels) = match text.strip_prefix("*.") {
            Some(labels) => ("*.", labels),
            None => ("", text),
        };
        let labels = labels.strip_suffix('.').unwrap_or(labels);
        let labels = idna::domain_to_ascii(labels).map_err(|_| wrong())?;
        let is_number = labels.rsplit('.').next().is_some_and(is_numeric);
        if labels.len() <= 253 && labels.split('.').all(is_label) && !is_number {
            Ok(Self(format!("{star}{labels}")))
        } else {
            Err(wrong())
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

/// No top-level domain is a number, but the last part of a mistyped address is.
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
    fn a_pattern_has_its_name_or_all_below_it() {
        assert!(pattern("Example.COM.").has("example.com"));
        assert!(!pattern("example.com").has("www.example.com"));
        assert!(!pattern("example.com").has("badexample.com"));
        let below = pattern("*.example.com");
        assert!(below.has("a.example.com") && below.has("a.b.example.com"));
        assert!(
            !below.has("example.com") && !below.has(".example.com") && !below.has("badexample.com")
        );
        assert!(pattern("*").has("anything.test"));
        assert!(pattern("bücher.example").has("xn--bcher-kva.example"));
        assert!(pattern("_dmarc.example.com").has("_dmarc.example.com"));
    }

    #[test]
    fn what_is_no_name_is_refused() {
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

    #[test]
    fn names_are_pinned_answered_or_refused() {
        let mut policy = Policy::default();
        assert_eq!(policy.naming("a.test"), Naming::Refused);
        policy.names.push(pattern("a.test"));
        assert_eq!(policy.naming("a.test"), Naming::Pinned);
        assert_eq!(policy.naming("b.test"), Naming::Refused);
        policy.rules = Policy::internet().rules;
        assert_eq!(policy.naming("b.test"), Naming::Answered);
        policy
            .rules
            .iter_mut()
            .for_each(|rule| rule.verdict = Verdict::Deny);
        assert_eq!(policy.naming("b.test"), Naming::Refused);
    }
}
