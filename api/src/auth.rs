//! API keys: scopes, storage as hashes, and a rate limit for each key.
//!
//! The server has one tenant: every key gives access to every sandbox, like the keys of one E2B team. The scopes of a
//! key determine which routes it can use. If a running server cannot read a changed key file, it rejects every key.

mod authenticator;
mod bucket;
mod keys;
mod random;

pub use authenticator::{Auth, AuthError, Authenticator, watch_keys};
pub(crate) use authenticator::{presented_sum, remove_keys};
pub use bucket::{Bucket, Rate};
pub use keys::{Granted, KeyError, KeyFile, KeyRecord, Scope, now_unix_s};
pub use random::random_hex;
