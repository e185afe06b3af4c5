//! The file of a secret. The format number is checked before anything else.

use std::{collections::BTreeMap, io};

use base64::{Engine, engine::general_purpose::STANDARD};
use ring::aead::{NONCE_LEN, Nonce};
use serde::{Deserialize, Serialize};

use super::name::{ID_PREFIX, SecretName, check_metadata};

const FORMAT: u32 = 1;
/// Longest file in bytes: a value of 64 KiB in base64, with 8 KiB of labels whose characters may all be escaped.
pub(super) const MAX_RECORD: u64 = 256 << 10;

/// A secret without its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret {
    /// `sec_` and 20 hex digits.
    pub id: String,
    pub name: String,
    /// Counts the values that the secret has had, from 1.
    pub version: u64,
    pub metadata: BTreeMap<String, String>,
    /// Milliseconds since 1970.
    pub created_at_ms: u64,
    /// Milliseconds since 1970.
    pub updated_at_ms: u64,
}

/// A secret with its value, encrypted.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Sealed {
    pub(super) secret: Secret,
    pub(super) nonce: [u8; NONCE_LEN],
    /// Ciphertext and tag.
    pub(super) sealed: Vec<u8>,
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
    /// Returns what is wrong with the file.
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
        let is_canonical =
            SecretName::parse(&secret.name).is_ok_and(|name| name.as_str() == secret.name);
        if !is_canonical || !is_id(&secret.id) || check_metadata(&secret.metadata).is_err() {
            return Err("its id, name or metadata is invalid".to_owned());
        }
        let decode = |text: &str| STANDARD.decode(text).ok();
        let nonce = decode(&stored.nonce).and_then(|nonce| nonce.try_into().ok());
        let sealed = decode(&stored.sealed);
        match (nonce, sealed) {
            (Some(nonce), Some(sealed)) => Ok(Self {
                secret,
                nonce,
                sealed,
            }),
            _ => Err("its encrypted value is malformed".to_owned()),
        }
    }

    pub(super) fn nonce(&self) -> Nonce {
        Nonce::assume_unique_for_key(self.nonce)
    }
}

fn is_id(text: &str) -> bool {
    text.strip_prefix(ID_PREFIX)
        .is_some_and(|rest| rest.len() == 20 && rest.bytes().all(|b| b.is_ascii_hexdigit()))
}
