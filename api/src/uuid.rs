//! Identifiers of events and templates.

/// A UUID of version 8 (RFC 9562, section 5.8) with these 32 or more hex digits, of which two are replaced.
pub(crate) fn uuid(hex: &str) -> String {
    format!(
        "{}-{}-8{}-a{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[13..16],
        &hex[17..20],
        &hex[20..32]
    )
}
