//! The key that encrypts values on disk (AES-256-GCM), and where it comes from.

use std::{
    env, fmt, io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use pool::durable::{Durability, read_bounded, replace};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use zeroize::Zeroizing;

use super::record::{Sealed, Secret, sum_of};

const KEY_LEN: usize = 32;
/// The key in base64 or hex.
const VARIABLE: &str = "CUBE_SECRETS_KEY";
/// Directory of the credentials that systemd passes (systemd.exec(5), "CREDENTIALS").
const CREDENTIALS: &str = "CREDENTIALS_DIRECTORY";
const CREDENTIAL: &str = "cube-secrets-key";
const GENERATED: &str = "key";
/// Longest text of a key: 64 hex digits, and space around them.
const MAX_KEY_FILE: u64 = 256;

/// Where the key comes from. Its text is 64 hex digits, or base64 of 32 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A file that only its owner may access.
    File(PathBuf),
    Variable,
    /// A credential of the systemd unit, in this file.
    Credential(PathBuf),
    /// Made by the first server of the state directory, beside the secrets.
    Generated,
    /// No secret is read or made: `cube-api end` runs where the key may be absent.
    Unused,
}

impl KeySource {
    /// The source of this process: the named file, `CUBE_SECRETS_KEY`, the credential `cube-secrets-key`, or else a
    /// generated key.
    #[must_use]
    pub fn of_process(file: Option<PathBuf>) -> Self {
        let credential = env::var_os(CREDENTIALS)
            .map(|dir| Path::new(&dir).join(CREDENTIAL))
            .filter(|path| path.exists());
        match (file, env::var_os(VARIABLE), credential) {
            (Some(path), ..) => Self::File(path),
            (None, Some(_), _) => Self::Variable,
            (None, None, Some(path)) => Self::Credential(path),
            (None, None, None) => Self::Generated,
        }
    }
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Variable => f.write_str(VARIABLE),
            Self::Credential(path) => write!(f, "the systemd credential {}", path.display()),
            Self::Generated => f.write_str("the file `key` beside them"),
            Self::Unused => f.write_str("no source"),
        }
    }
}

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("cannot read the key of the secrets from {from}")]
    Io {
        from: KeySource,
        #[source]
        source: io::Error,
    },
    #[error(
        "the key of the secrets from {0} must be 64 hex digits or base64 of 32 bytes: make one with `openssl rand -hex 32`"
    )]
    Malformed(KeySource),
    #[error("other users can access the key of the secrets {} (mode {mode:o}): chmod it to 600", path.display())]
    Open { path: PathBuf, mode: u32 },
    #[error("cannot make a key for the secrets: the kernel provides no random numbers")]
    Random(#[from] getrandom::Error),
}

/// Encrypts and decrypts values. Id, name, version and hosts are authenticated with a value, so that the value of one secret
/// cannot be put into the file of another, and its hosts cannot be changed there.
pub(super) struct SealKey(LessSafeKey);

impl SealKey {
    /// `dir`: where a generated key is.
    pub(super) fn load(source: &KeySource, dir: &Path) -> Result<Self, KeyError> {
        let bytes = match source {
            KeySource::File(path) => {
                check_private(path, source)?;
                read(path, source)?
            }
            KeySource::Credential(path) => read(path, source)?,
            KeySource::Variable => {
                let text = Zeroizing::new(env::var(VARIABLE).unwrap_or_default());
                decode(&text).ok_or_else(|| KeyError::Malformed(source.clone()))?
            }
            KeySource::Generated => generated(dir)?,
            KeySource::Unused => {
                let mut bytes = Zeroizing::new([0; KEY_LEN]);
                getrandom::fill(&mut *bytes)?;
                bytes
            }
        };
        Self::new(&bytes).ok_or_else(|| KeyError::Malformed(source.clone()))
    }

    pub(super) fn new(bytes: &[u8; KEY_LEN]) -> Option<Self> {
        let key = UnboundKey::new(&AES_256_GCM, bytes).ok()?;
        Some(Self(LessSafeKey::new(key)))
    }

    /// Encrypts a value with a new random nonce: 96 bits do not repeat in the lifetime of a key.
    pub(super) fn seal(&self, secret: Secret, value: &[u8]) -> io::Result<Sealed> {
        let mut nonce = [0; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(io::Error::other)?;
        let mut sealed = value.to_vec();
        self.0
            .seal_in_place_append_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(bound(&secret)),
                &mut sealed,
            )
            .map_err(|_| io::Error::other("the value cannot be encrypted"))?;
        Ok(Sealed {
            sum: sum_of(&secret, value)?,
            secret,
            nonce,
            sealed,
        })
    }

    /// The value; `None` if it is not of this key, id, name and version.
    pub(super) fn open(&self, sealed: &Sealed) -> Option<Zeroizing<Vec<u8>>> {
        let mut bytes = Zeroizing::new(sealed.sealed.clone());
        let aad = Aad::from(bound(&sealed.secret));
        let plain = self.0.open_in_place(sealed.nonce(), aad, &mut bytes);
        let length = plain.ok()?.len();
        bytes.truncate(length);
        Some(bytes)
    }
}

/// What is authenticated with a text that is not a secret's value.
const TEXT: &[u8] = b"text 1";

impl SealKey {
    /// Nonce, ciphertext and tag, in base64.
    pub(super) fn seal_text(&self, text: &str) -> io::Result<String> {
        let mut nonce = [0; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(io::Error::other)?;
        let mut sealed = text.as_bytes().to_vec();
        let unique = Nonce::assume_unique_for_key(nonce);
        let done = self
            .0
            .seal_in_place_append_tag(unique, Aad::from(TEXT), &mut sealed);
        done.map_err(|_| io::Error::other("the text cannot be encrypted"))?;
        Ok(STANDARD.encode([&nonce[..], &sealed].concat()))
    }

    pub(super) fn open_text(&self, sealed: &str) -> Option<Zeroizing<String>> {
        let bytes = STANDARD.decode(sealed).ok()?;
        let (nonce, sealed) = bytes.split_first_chunk::<NONCE_LEN>()?;
        let mut sealed = Zeroizing::new(sealed.to_vec());
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let plain = self
            .0
            .open_in_place(nonce, Aad::from(TEXT), &mut sealed)
            .ok()?;
        let text = std::str::from_utf8(plain).ok()?;
        Some(Zeroizing::new(text.to_owned()))
    }
}

/// What is authenticated with a value. Neither ids nor names nor hosts contain a space.
fn bound(secret: &Secret) -> Vec<u8> {
    let mut bound = format!("secret 1 {} {} {}", secret.id, secret.name, secret.version);
    for host in &secret.hosts {
        bound.push(' ');
        bound.push_str(host);
    }
    bound.into_bytes()
}

fn generated(dir: &Path) -> Result<Zeroizing<[u8; KEY_LEN]>, KeyError> {
    let source = KeySource::Generated;
    let path = dir.join(GENERATED);
    if path.exists() {
        check_private(&path, &source)?;
        return read(&path, &source);
    }
    let mut bytes = Zeroizing::new([0; KEY_LEN]);
    getrandom::fill(&mut *bytes)?;
    let text = Zeroizing::new(STANDARD.encode(*bytes) + "\n");
    let written = replace(dir, GENERATED, text.as_bytes(), Durability::Host);
    written.map_err(|error| KeyError::Io {
        from: source,
        source: error,
    })?;
    Ok(bytes)
}

fn read(path: &Path, source: &KeySource) -> Result<Zeroizing<[u8; KEY_LEN]>, KeyError> {
    let bytes = read_bounded(path, MAX_KEY_FILE).map_err(|error| KeyError::Io {
        from: source.clone(),
        source: error,
    })?;
    let bytes = Zeroizing::new(bytes);
    let key = std::str::from_utf8(&bytes).ok().and_then(decode);
    key.ok_or_else(|| KeyError::Malformed(source.clone()))
}

fn decode(text: &str) -> Option<Zeroizing<[u8; KEY_LEN]>> {
    let text = text.trim();
    if text.len() != 2 * KEY_LEN {
        let bytes = Zeroizing::new(STANDARD.decode(text).ok()?);
        return <[u8; KEY_LEN]>::try_from(&bytes[..])
            .ok()
            .map(Zeroizing::new);
    }
    let digit = |b: u8| {
        char::from(b)
            .to_digit(16)
            .and_then(|d| u8::try_from(d).ok())
    };
    let (pairs, _) = text.as_bytes().as_chunks::<2>();
    let bytes = pairs
        .iter()
        .map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?));
    let bytes = Zeroizing::new(bytes.collect::<Option<Vec<u8>>>()?);
    <[u8; KEY_LEN]>::try_from(&bytes[..])
        .ok()
        .map(Zeroizing::new)
}

fn check_private(path: &Path, source: &KeySource) -> Result<(), KeyError> {
    let meta = std::fs::metadata(path).map_err(|error| KeyError::Io {
        from: source.clone(),
        source: error,
    })?;
    let mode = meta.permissions().mode() & 0o7777;
    let is_private =
        mode & 0o077 == 0 && [0, nix::unistd::geteuid().as_raw()].contains(&meta.uid());
    if is_private {
        Ok(())
    } else {
        Err(KeyError::Open {
            path: path.to_owned(),
            mode,
        })
    }
}
