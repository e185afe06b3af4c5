//! Who may do what: keys with scopes, kept as hashes; a rate for each.
//!
//! There is one tenant: every key sees every sandbox, as the keys of one team do with E2B. What a key may do is its
//! scopes. No request gets past a route whose scope its key lacks, and a key file that cannot be read lets nobody in.

mod bucket;
mod door;
mod keys;

pub use bucket::{Bucket, Rate};
pub use door::{AuthError, Door, watch_keys};
pub use keys::{KeyError, KeyFile, KeyRecord, Scope, now_unix_s};

/// So many random bytes in hex.
///
/// # Errors
/// The kernel gives none.
pub fn random_hex<const N: usize>() -> Result<String, getrandom::Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(hex(&bytes))
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble)]);
    bytes
        .iter()
        .flat_map(|b| [digit(b >> 4), digit(b & 15)])
        .collect()
}
