//! The file of a secret. The format number is checked before anything else.

use std::{collections::BTreeMap, io};

use base64::{Engine, engine::general_purpose::STANDARD};
use model::hex;
use netisolation::NamePattern;
use ring::aead::{NONCE_LEN, Nonce};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::name::{ID_PREFIX, SecretName, check_hosts, check_metadata};

const FORMAT: u32 = 1;
/// Leaves room for later versions, and is exact in JSON.
pub(super) const MAX_VERSION: u64 = 1 << 53;
/// Maximum file size in bytes: a value of 64 KiB in base64, and 8 KiB of labels in which every character may be
/// escaped.
pub(super) const MAX_RECORD: u64 = 256 << 10;

/// A secret without its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret {
    /// `sec_` and 20 hex digits.
    pub id: String,
    pub name: String,
    /// Number of values that the secret has had, from 1.
    pub version: u64,
    pub metadata: BTreeMap<String, String>,
    /// The hosts to which the value may be sent, in normal form: names, or all names below one (`*.example.com`).
    /// Empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// Milliseconds since 1970.
    pub created_at_ms: u64,
    /// Milliseconds since 1970.
    pub updated_at_ms: u64,
}

impl Secret {
    /// Whether the value may be sent to a host, or to all hosts of a pattern. As a text, `*.b.c` is below `b.c`.
    #[must_use]
    pub fn may_go_to(&self, host: &str) -> bool {
        let allows = |entry: &String| {
            let pattern = entry.parse::<NamePattern>();
            pattern.is_ok_and(|pattern| pattern.matches(host))
        };
        self.hosts.is_empty() || self.hosts.iter().any(allows)
    }
}

/// A secret with its encrypted value.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Sealed {
    pub(super) secret: Secret,
    pub(super) nonce: [u8; NONCE_LEN],
    /// Ciphertext and tag.
    pub(super) sealed: Vec<u8>,
    /// SHA-256 of the secret with its value, in hex. Not stored in the file.
    pub(super) sum: String,
}

#[derive(Deserialize)]
struct Header {
    format: u32,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    format: u32,
    secret: Secret,
    nonce: String,
    sealed: String,
}

impl Sealed {
    pub(super) fn render(&self) -> io::Result<Vec<u8>> {
        let stored = Stored {
            format: FORMAT,
            secret: self.secret.clone(),
            nonce: STANDARD.encode(self.nonce),
            sealed: STANDARD.encode(&self.sealed),
        };
        Ok(serde_json::to_vec(&stored)?)
    }

    /// # Errors
    /// Returns a description of the defect.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let malformed = |why: serde_json::Error| format!("it is not the JSON of a secret: {why}");
        let Header { format } = serde_json::from_slice(bytes).map_err(malformed)?;
        if format != FORMAT {
            return Err(format!(
                "it has format {format}; this server reads {FORMAT}"
            ));
        }
        let stored: Stored = serde_json::from_slice(bytes).map_err(malformed)?;
        let secret = stored.secret;
        check(&secret)?;
        let decode = |text: &str| STANDARD.decode(text).ok();
        let nonce = decode(&stored.nonce).and_then(|nonce| nonce.try_into().ok());
        let sealed = decode(&stored.sealed);
        match (nonce, sealed) {
            (Some(nonce), Some(sealed)) => Ok(Self {
                secret,
                nonce,
                sealed,
                sum: String::new(),
            }),
            _ => Err("its encrypted value is malformed".to_owned()),
        }
    }

    /// Sort key of several secrets with one name. The name refers to the first.
    pub(super) fn age(&self) -> (u64, &str) {
        (self.secret.created_at_ms, &self.secret.id)
    }

    pub(super) fn nonce(&self) -> Nonce {
        Nonce::assume_unique_for_key(self.nonce)
    }
}

/// Checks a secret that was not created by this server.
///
/// # Errors
/// Returns a description of the defect.
pub(super) fn check(secret: &Secret) -> Result<(), String> {
    let name = SecretName::parse(&secret.name);
    let is_canonical = name.is_ok_and(|name| name.as_str() == secret.name);
    let is_version = (1..MAX_VERSION).contains(&secret.version);
    let has_hosts = check_hosts(&secret.hosts).is_ok_and(|hosts| hosts == secret.hosts);
    let is_valid =
        is_canonical && is_version && has_hosts && check_metadata(&secret.metadata).is_ok();
    if is_valid && is_id(&secret.id) {
        Ok(())
    } else {
        Err("its id, name, version, metadata or hosts are invalid".to_owned())
    }
}

/// The hash of a secret with its value. Equal on all nodes, whatever key they encrypt with.
pub(super) fn sum_of(secret: &Secret, value: &[u8]) -> serde_json::Result<String> {
    let mut sum = Sha256::new_with_prefix(serde_json::to_vec(secret)?);
    sum.update(value);
    Ok(hex(&sum.finalize()))
}

/// Ids are lower-case hex, as in recorded deletions: a secret whose id differs in case could not be deleted.
fn is_id(text: &str) -> bool {
    let is_digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    text.strip_prefix(ID_PREFIX)
        .is_some_and(|rest| rest.len() == 20 && rest.bytes().all(is_digit))
}
