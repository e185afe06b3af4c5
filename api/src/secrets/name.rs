//! Rules for names, values and labels of secrets.

use std::collections::{BTreeMap, BTreeSet};

use netisolation::NamePattern;

/// Prefix of ids. Names must not start with it.
pub(super) const ID_PREFIX: &str = "sec_";
const MAX_NAME: usize = 128;
/// Maximum size of a value in bytes.
const MAX_VALUE: usize = 64 << 10;
/// E2B's limits on labels: their number, and the bytes of a key, of a value, and of all together.
const MAX_LABELS: usize = 32;
const MAX_LABEL_KEY: usize = 128;
const MAX_LABEL_VALUE: usize = 1024;
const MAX_LABEL_BYTES: usize = 8192;
/// Maximum number of hosts of a secret.
const MAX_HOSTS: usize = 64;

/// A name in lower case: 1 to 128 letters, digits, `-` and `_`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SecretName(String);

impl SecretName {
    /// # Errors
    /// Returns a message that quotes the start of the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let name = text.to_ascii_lowercase();
        let is_good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
        let shown: String = text.chars().take(64).collect();
        if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_good) {
            return Err(format!(
                "{shown:?} is not a secret's name: use 1 to {MAX_NAME} letters, digits, - and _"
            ));
        }
        if name.starts_with(ID_PREFIX) {
            return Err(format!(
                "{shown:?} is not a secret's name: only ids begin with {ID_PREFIX}"
            ));
        }
        Ok(Self(name))
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    #[must_use]
    pub fn into_string(self) -> String {
        self.0
    }
}

/// The hosts to which a value may be sent, in normal form. An empty list means any.
///
/// # Errors
/// Returns a message that quotes the start of the entry.
pub fn check_hosts(hosts: &[String]) -> Result<Vec<String>, String> {
    if hosts.len() > MAX_HOSTS {
        return Err(format!(
            "hosts has {} entries; at most {MAX_HOSTS} are allowed",
            hosts.len()
        ));
    }
    let normal = hosts.iter().map(|host| {
        let pattern = host.parse::<NamePattern>().map(String::from);
        pattern
            .ok()
            .filter(|pattern| pattern != "*")
            .ok_or_else(|| {
                let shown: String = host.chars().take(64).collect();
                format!("hosts has {shown:?}: use host names, or all below one like *.example.com")
            })
    });
    let normal: BTreeSet<_> = normal.collect::<Result<_, _>>()?;
    Ok(normal.into_iter().collect())
}

/// # Errors
/// Returns a message that does not quote the value.
pub fn check_value(value: &str) -> Result<(), String> {
    match value.len() {
        1..=MAX_VALUE => Ok(()),
        length => Err(format!(
            "the value has {length} bytes: use 1 to {MAX_VALUE}"
        )),
    }
}

/// # Errors
/// Returns the limit that the labels exceed.
pub fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), String> {
    if metadata.len() > MAX_LABELS {
        return Err(format!(
            "metadata has {} entries; at most {MAX_LABELS} are allowed",
            metadata.len()
        ));
    }
    let sizes = metadata.iter().map(|(key, value)| (key.len(), value.len()));
    for (key, value) in sizes.clone() {
        if key > MAX_LABEL_KEY || value > MAX_LABEL_VALUE {
            return Err(format!(
                "metadata has a key of {key} bytes with a value of {value} bytes; \
                 at most {MAX_LABEL_KEY} and {MAX_LABEL_VALUE} are allowed"
            ));
        }
    }
    match sizes.map(|(key, value)| key + value).sum::<usize>() {
        all if all > MAX_LABEL_BYTES => Err(format!(
            "metadata takes {all} bytes in all; at most {MAX_LABEL_BYTES} are allowed"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_lower_cased_and_checked() {
        assert_eq!(
            SecretName::parse("OpenAI_Key-1").unwrap().as_str(),
            "openai_key-1"
        );
        let long = "a".repeat(129);
        for bad in ["", "a.b", "a b", "é", "sec_1", "SEC_1", "a}", long.as_str()] {
            let why = SecretName::parse(bad).unwrap_err();
            let shown: String = bad.chars().take(64).collect();
            assert!(why.contains(&format!("{shown:?}")), "{why}");
        }
        assert!(SecretName::parse(&"a".repeat(128)).is_ok());
    }

    #[test]
    fn values_and_labels_have_limits() {
        assert!(check_value("").is_err() && check_value(&"v".repeat(65_537)).is_err());
        assert!(check_value("v").is_ok() && check_value(&"v".repeat(65_536)).is_ok());
        let labels = |count: usize, key: usize, value: usize| {
            let entry = |n: usize| (format!("{n:0key$}"), "v".repeat(value));
            check_metadata(&(0..count).map(entry).collect())
        };
        assert!(labels(32, 2, 254).is_ok());
        assert!(labels(33, 2, 1).unwrap_err().contains("33 entries"));
        assert!(labels(1, 129, 1).unwrap_err().contains("129"));
        assert!(labels(1, 1, 1025).unwrap_err().contains("1025"));
        assert!(labels(8, 1, 1024).unwrap_err().contains("8200 bytes"));
    }
}
