//! The identity of a clone. All clones of a template resume with the same memory. An identity makes a clone distinct
//! before it responds to any other request.

use serde::{Deserialize, Serialize};

/// Random bytes that seed the guest kernel's random pool, as hex text. `Debug` does not print them.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EntropySeed(String);

impl EntropySeed {
    /// Wraps 32 bytes from the host's random generator.
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes.iter().map(|b| format!("{b:02x}")).collect())
    }

    /// The bytes as lower-case hex; 64 digits for a seed made by [`EntropySeed::new`].
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

/// The values that the agent applies before it reports ready. The wall clock is not among them: the VMM adds it when it
/// sends the request, so that it is correct however long the request was queued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Host name, a DNS label of at most 63 bytes.
    pub hostname: String,
    /// 32 lower-case hex digits for /etc/machine-id.
    pub machine_id: String,
    /// Seed for the guest kernel's random pool.
    pub entropy: EntropySeed,
}
