//! Text for shells.

/// The text as one word of a shell, without expansions.
pub(crate) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
