//! SHA-256 digests as OCI writes them: `sha256:` and 64 lower-case hex digits.

use std::{fmt, fs::File, io, os::unix::fs::FileExt, str::FromStr};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

const PREFIX: &str = "sha256:";

/// The SHA-256 of a blob, a manifest or an unpacked layer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest([u8; 32]);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DigestError {
    #[error("digest {0:?} uses another algorithm than sha256")]
    Algorithm(String),
    #[error("digest {0:?} is not sha256: and 64 lower-case hex digits")]
    Form(String),
}

impl Digest {
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Hashes the file from its beginning, whatever the position of its descriptor.
    ///
    /// # Errors
    /// Returns the error of a read.
    pub fn of_file(file: &File) -> io::Result<Self> {
        let mut hasher = Hasher::default();
        let mut buffer = vec![0; 256 << 10];
        let mut at = 0;
        loop {
            match file.read_at(&mut buffer, at) {
                Ok(0) => return Ok(hasher.finish()),
                Ok(read) => {
                    hasher.update(&buffer[..read]);
                    at += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The 64 hex digits without the prefix: the name of a file in the store.
    #[must_use]
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Computes a digest incrementally.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hasher(Sha256);

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let form = || DigestError::Form(shorten(text));
        let Some(hex) = text.strip_prefix(PREFIX) else {
            return Err(match text.split_once(':') {
                Some(_) => DigestError::Algorithm(shorten(text)),
                None => form(),
            });
        };
        let mut bytes = [0; 32];
        if hex.len() != 2 * bytes.len() {
            return Err(form());
        }
        for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().chunks(2)) {
            let digit = |c: u8| match c {
                b'0'..=b'9' => Some(c - b'0'),
                b'a'..=b'f' => Some(c - b'a' + 10),
                _ => None,
            };
            let (Some(high), Some(low)) = (digit(pair[0]), digit(pair[1])) else {
                return Err(form());
            };
            *byte = high << 4 | low;
        }
        Ok(Self(bytes))
    }
}

/// Truncates to 100 characters, because the text comes from a client or a registry.
fn shorten(text: &str) -> String {
    text.chars().take(100).collect()
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_canonical_form_of_a_digest_is_accepted() {
        let text = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Digest::of(b"abc").to_string(), text);
        assert_eq!(text.parse(), Ok(Digest::of(b"abc")));
        for bad in [
            "",
            "sha256:",
            "sha256:BA7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
            "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015a",
            "sha256:../../../../../../../../../../../../../../../../../../etc/passwd",
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        ] {
            let error = bad.parse::<Digest>().unwrap_err();
            assert!(matches!(error, DigestError::Form(_)), "{bad}: {error}");
        }
        let other = "sha512:00".parse::<Digest>().unwrap_err();
        assert!(matches!(other, DigestError::Algorithm(_)), "{other}");
    }
}
