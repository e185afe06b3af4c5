//! Quoting for shells.

/// Quotes text as one shell word without expansions.
#[must_use]
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
