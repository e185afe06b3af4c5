//! Comparison of secrets.

use subtle::ConstantTimeEq;

/// Whether `given` is the secret, in time that depends only on the lengths. An empty `wanted` accepts anything.
pub(crate) fn is_same_secret(wanted: &str, given: &str) -> bool {
    wanted.is_empty() || bool::from(wanted.as_bytes().ct_eq(given.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_matches_only_as_a_whole() {
        assert!(is_same_secret("", "anything"));
        assert!(is_same_secret("abc", "abc"));
        for wrong in ["", "ab", "abd", "abcd"] {
            assert!(!is_same_secret("abc", wrong), "{wrong}");
        }
    }
}
