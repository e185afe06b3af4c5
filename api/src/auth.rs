//! API keys: scopes, storage as hashes, and a rate limit for each key.
//!
//! The server has one tenant: every key gives access to every sandbox, as the keys of one E2B team do. The scopes of a
//! key limit the routes that it can use. If the key file cannot be read, every key is rejected.

mod authenticator;
mod bucket;
mod keys;

pub use authenticator::{Auth, AuthError, Authenticator, watch_keys};
pub use bucket::{Bucket, Rate};
pub use keys::{KeyError, KeyFile, KeyRecord, Scope, now_unix_s};

/// `N` random bytes in lower-case hex.
///
/// # Errors
/// Returns an error if the kernel provides no randomness.
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
