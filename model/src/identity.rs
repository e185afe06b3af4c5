//! Who a clone is. Every clone of a template wakes up with the same memory; what makes it a machine of
//! its own is handed to it before it may answer.

use serde::{Deserialize, Serialize};

/// Fresh random bytes for the guest kernel's pool, hex in text.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EntropySeed(String);

impl EntropySeed {
    /// Wraps 32 bytes of the host's random generator.
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes.iter().map(|b| format!("{b:02x}")).collect())
    }

    /// The bytes as lower-case hex, 64 digits when made by [`EntropySeed::new`].
    #[must_use]
    pub fn as_hex(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for EntropySeed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EntropySeed(…)")
    }
}

/// What the agent applies before it answers ready. The wall clock is not here: the VMM adds it at the
/// moment of sending, so that it is right however long the request waited.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Host name, a DNS label of at most 63 bytes.
    pub hostname: String,
    /// 32 lower-case hex digits for /etc/machine-id.
    pub machine_id: String,
    /// Credited to the guest kernel's pool.
    pub entropy: EntropySeed,
}
