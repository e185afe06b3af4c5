//! Jupyter's messages (jupyter_client, "Messaging in Jupyter", protocol 5.3): signatures, framing and types.

use std::{fs::File, io::Read};

use model::hex;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::event;

const DELIMITER: &[u8] = b"<IDS|MSG>";
const VERSION: &str = "5.3";
/// Block size of SHA-256 in bytes.
const BLOCK: usize = 64;

/// A message from a kernel.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) kind: String,
    /// ID of the request that caused it; empty if none did.
    pub(crate) parent: String,
    pub(crate) content: Value,
}

/// A client's session with its kernel: creates and signs the client's messages, and verifies those of the kernel.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) key: String,
    id: String,
    sent: u64,
}

impl Session {
    /// Creates a session with a new random key.
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            key: random_hex()?,
            id: random_hex()?,
            sent: 0,
        })
    }

    /// Creates a request. Returns its ID and the parts of its message.
    pub(crate) fn request(&mut self, kind: &str, content: &Value) -> (String, Vec<Vec<u8>>) {
        self.sent += 1;
        let id = format!("{}_{}", self.id, self.sent);
        let header = json!({
            "msg_id": id, "session": self.id, "username": "cube", "date": event::now(),
            "msg_type": kind, "version": VERSION,
        });
        let body = [&header, &json!({}), &json!({}), content].map(Value::to_string);
        let body = body.map(String::into_bytes);
        let mut parts = vec![DELIMITER.to_vec(), self.sign(&body).into_bytes()];
        parts.extend(body);
        (id, parts)
    }

    /// Reads a message; `None` if it is malformed or not signed with the key.
    pub(crate) fn read(&self, parts: &[Vec<u8>]) -> Option<Message> {
        let start = parts.iter().position(|part| part == DELIMITER)?;
        let signature = parts.get(start + 1)?;
        let body = parts.get(start + 2..start + 6)?;
        if self.sign(body).as_bytes() != signature.as_slice() {
            return None;
        }
        let [header, parent, _, content] = body else {
            return None;
        };
        let text = |json: &[u8], name: &str| {
            let value: Value = serde_json::from_slice(json).ok()?;
            Some(value.get(name)?.as_str()?.to_owned())
        };
        Some(Message {
            kind: text(header, "msg_type")?,
            parent: text(parent, "msg_id").unwrap_or_default(),
            content: serde_json::from_slice(content).ok()?,
        })
    }

    /// HMAC (RFC 2104) with SHA-256, in hexadecimal digits.
    fn sign(&self, body: &[Vec<u8>]) -> String {
        let pad = |with: u8| {
            let mut block = [with; BLOCK];
            // The key is half a block long.
            for (byte, key) in block.iter_mut().zip(self.key.bytes()) {
                *byte ^= key;
            }
            Sha256::new().chain_update(block)
        };
        let inner = body
            .iter()
            .fold(pad(0x36), |hash, part| hash.chain_update(part));
        hex(&pad(0x5c).chain_update(inner.finalize()).finalize())
    }
}

/// For the fuzz target.
#[cfg(any(test, fuzzing))]
impl Session {
    pub(super) fn with_key(key: &str) -> Self {
        Self {
            key: key.to_owned(),
            id: String::new(),
            sent: 0,
        }
    }

    /// Replaces the signature by the correct one.
    pub(super) fn sign_parts(&self, parts: &mut [Vec<u8>]) {
        let Some(start) = parts.iter().position(|part| part == DELIMITER) else {
            return;
        };
        let Some(body) = parts.get(start + 2..start + 6) else {
            return;
        };
        let signature = self.sign(body).into_bytes();
        parts[start + 1] = signature;
    }
}

/// 16 random bytes from the operating system, as hexadecimal digits.
fn random_hex() -> std::io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(hex(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_match_the_test_vectors_of_the_rfc() {
        // RFC 4231, test case 2.
        let session = Session {
            key: "Jefe".to_owned(),
            id: String::new(),
            sent: 0,
        };
        let signature = session.sign(&[b"what do ya want ".to_vec(), b"for nothing?".to_vec()]);
        assert_eq!(
            signature,
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
    }

    #[test]
    fn messages_without_a_valid_signature_are_ignored() {
        let mut session = Session::new().unwrap();
        let (id, mut parts) = session.request("status", &json!({"execution_state": "idle"}));
        // A kernel's message begins with topics and names its parent.
        parts[3] = json!({"msg_id": id}).to_string().into_bytes();
        parts[1] = session.sign(&parts[2..]).into_bytes();
        parts.insert(0, b"topic".to_vec());
        let message = session.read(&parts).unwrap();
        assert_eq!((message.kind.as_str(), message.parent), ("status", id));
        assert_eq!(message.content["execution_state"], "idle");
        assert!(Session::new().unwrap().read(&parts).is_none());
        assert!(session.read(&parts[..5]).is_none());
        assert!(session.read(&[]).is_none());
    }
}
