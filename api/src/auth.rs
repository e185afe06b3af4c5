//! API keys: scopes, storage as hashes, and a rate limit for each key.
//!
//! The server has one tenant: every key gives access to every sandbox, as the keys of one E2B team do. The scopes of a
//! key limit the routes that it can use. If the key file cannot be read, every key is rejected.

mod authenticator;
mod bucket;
mod keys;
mod random;

pub use authenticator::{Auth, AuthError, Authenticator, watch_keys};
pub use bucket::{Bucket, Rate};
pub use keys::{KeyError, KeyFile, KeyRecord, Scope, now_unix_s};
pub use random::random_hex;
