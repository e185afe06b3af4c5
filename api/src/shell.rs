//! Quoting for shells.

/// Quotes text as one shell word without expansions.
pub(crate) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
