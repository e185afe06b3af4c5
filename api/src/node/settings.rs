//! The directory of a node's cluster settings, `cluster` in the state directory. Written by `cube-api cluster init` and
//! `join`, read by `cube-api serve --cluster`.
//!
//! | file | content |
//! |---|---|
//! | `cluster.json` | names, addresses, the key of home tags |
//! | `ca.crt` | certificate of the cluster's authority |
//! | `ca.key` | the authority's key; only on the node that founded the cluster |
//! | `node.pem` | this node's certificate, the authority's certificate, and the node's key |
//! | `etcd.crt`, `etcd.key` | for the etcd of the founder's host |
//! | `etcd-root.pem` | certificate and key of etcd's user `root`; only on the node that founded the cluster |
//! | `tokens/` | SHA-256 of unused join tokens |
//! | `deleted-templates.json` | ids of templates that no node copies again |
//! | `deleted-secrets.json` | ids of secrets that no node accepts again |
//! | `peer-keys.json` | API keys of the other nodes (hashes), as last seen |
//!
//! All files except certificates have mode 0600.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use cluster::{HomeKey, Member, NodeId};
use pool::durable::{Durability, private_dir, read_bounded, replace};
use ring::hmac;
use serde::{Deserialize, Serialize};

/// In format 1, member records had no keys.
const FORMAT: u32 = 2;
const FILE: &str = "cluster.json";
const MAX_FILE: u64 = 64 << 10;

/// Certificate and key of etcd's user `root`.
pub(crate) const ETCD_ROOT: &str = "etcd-root.pem";
/// Name of the directory in the state directory.
pub const DIRECTORY: &str = "cluster";

/// An error in the settings.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error(
        "{} has no cluster settings: run `cube-api cluster init` or `cube-api cluster join`",
        .0.display()
    )]
    None(PathBuf),
    #[error("{} already has cluster settings: remove the directory to leave that cluster", .0.display())]
    Exists(PathBuf),
    #[error("cannot access {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} has no valid cluster settings: {why}", path.display())]
    Malformed { path: PathBuf, why: String },
}

/// `cluster.json`.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    format: u32,
    /// A UUID.
    pub cluster: String,
    pub node: NodeId,
    /// Random. Distinguishes this host from another one of the same name.
    pub identity: String,
    /// The address on which this node listens and other nodes reach it.
    pub address: SocketAddr,
    /// Endpoints of etcd.
    pub etcd: Vec<String>,
    /// The key of home tags, in hex.
    home_key: String,
    /// This node's record in etcd. Absent: this node founds the cluster on its first start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<Member>,
}

impl std::fmt::Debug for Settings {
    /// Omits the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings")
            .field("cluster", &self.cluster)
            .field("node", &self.node)
            .field("address", &self.address)
            .field("etcd", &self.etcd)
            .finish_non_exhaustive()
    }
}

#[derive(Deserialize)]
struct Header {
    format: u32,
}

/// Settings that all nodes of a cluster share.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shared {
    pub cluster: String,
    pub etcd: Vec<String>,
    pub home_key: String,
}

impl Settings {
    #[must_use]
    pub fn new(shared: Shared, node: NodeId, identity: String, address: SocketAddr) -> Self {
        Self {
            format: FORMAT,
            cluster: shared.cluster,
            node,
            identity,
            address,
            etcd: shared.etcd,
            home_key: shared.home_key,
            member: None,
        }
    }

    #[must_use]
    pub fn shared(&self) -> Shared {
        Shared {
            cluster: self.cluster.clone(),
            etcd: self.etcd.clone(),
            home_key: self.home_key.clone(),
        }
    }

    /// The key of home tags, or `None` if the text is malformed.
    #[must_use]
    pub fn home_key(&self) -> Option<HomeKey> {
        bytes_of(&self.home_key).map(|bytes| HomeKey::new(&bytes))
    }

    /// The key of texts in sandbox records. All nodes have the same one, because sandboxes move. Derived from the key
    /// of home tags with HMAC-SHA-256.
    pub(crate) fn text_key(&self) -> Option<[u8; 32]> {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &bytes_of(&self.home_key)?);
        hmac::sign(&key, b"texts in records")
            .as_ref()
            .try_into()
            .ok()
    }
}

/// How a node reaches etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EtcdLink {
    Tls,
    /// Plain HTTP on loopback. Without users in etcd, every program on the host can change its records.
    Loopback,
}

impl EtcdLink {
    /// `None` if the URL is neither https nor on a loopback address, because others could read and modify the traffic.
    #[must_use]
    pub fn of(url: &str) -> Option<Self> {
        if url.starts_with("https://") {
            return Some(Self::Tls);
        }
        let address: SocketAddr = url.strip_prefix("http://")?.parse().ok()?;
        address.ip().is_loopback().then_some(Self::Loopback)
    }
}

/// Reads 64 hex digits.
fn bytes_of(hex: &str) -> Option<[u8; 32]> {
    let digits: Option<Vec<u8>> = hex
        .chars()
        .map(|c| c.to_digit(16).and_then(|d| u8::try_from(d).ok()))
        .collect();
    let digits = digits.filter(|digits| digits.len() == 64)?;
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Some(bytes)
}

/// The directory of settings.
#[derive(Clone, Debug)]
pub struct Dir(PathBuf);

impl Dir {
    /// The directory within a state directory.
    #[must_use]
    pub fn of(state: &Path) -> Self {
        Self(state.join(DIRECTORY))
    }

    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Creates the directory, which must not contain settings.
    ///
    /// # Errors
    /// Returns [`SettingsError::Exists`] or [`SettingsError::Io`].
    pub fn create(&self) -> Result<(), SettingsError> {
        if self.path(FILE).symlink_metadata().is_ok() {
            return Err(SettingsError::Exists(self.0.clone()));
        }
        private_dir(&self.0).map_err(|source| self.failed("", source))
    }

    /// # Errors
    /// Returns [`SettingsError`] if there are no settings, or they cannot be read.
    pub fn load(&self) -> Result<Settings, SettingsError> {
        let path = self.path(FILE);
        let bytes = match read_bounded(&path, MAX_FILE) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(SettingsError::None(self.0.clone()));
            }
            Err(source) => return Err(self.failed(FILE, source)),
        };
        let malformed = |why: String| SettingsError::Malformed {
            path: path.clone(),
            why,
        };
        let unread = |why: serde_json::Error| malformed(why.to_string());
        let Header { format } = serde_json::from_slice(&bytes).map_err(unread)?;
        if format != FORMAT {
            return Err(malformed(format!(
                "it has format {format}, and this release uses format {FORMAT}: see \"Upgrade of a cluster\" in docs/operate/cluster.md"
            )));
        }
        let settings: Settings = serde_json::from_slice(&bytes).map_err(unread)?;
        if settings.home_key().is_none() {
            return Err(malformed("its home key is not 64 hex digits".to_owned()));
        }
        Ok(settings)
    }

    /// # Errors
    /// Returns [`SettingsError::Io`] if they cannot be written.
    pub fn store(&self, settings: &Settings) -> Result<(), SettingsError> {
        let bytes = serde_json::to_vec_pretty(settings).map_err(io::Error::other);
        let bytes = bytes.map_err(|source| self.failed(FILE, source))?;
        self.write(FILE, &bytes)
    }

    /// Replaces a file. Only its owner can read it.
    ///
    /// # Errors
    /// Returns [`SettingsError::Io`] if it cannot be written.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), SettingsError> {
        replace(&self.0, name, bytes, Durability::Host).map_err(|source| self.failed(name, source))
    }

    /// # Errors
    /// Returns [`SettingsError::Io`] if it cannot be read.
    pub fn read(&self, name: &str) -> Result<String, SettingsError> {
        let bytes = read_bounded(&self.path(name), MAX_FILE);
        let text = bytes.and_then(|bytes| String::from_utf8(bytes).map_err(io::Error::other));
        text.map_err(|source| self.failed(name, source))
    }

    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    /// Creates and returns a directory below this one.
    ///
    /// # Errors
    /// Returns [`SettingsError::Io`] if it cannot be created.
    pub fn below(&self, name: &str) -> Result<PathBuf, SettingsError> {
        let path = self.path(name);
        private_dir(&path).map_err(|source| self.failed(name, source))?;
        Ok(path)
    }

    /// Removes a file; `false` if it does not exist.
    pub(crate) fn remove(&self, name: &str) -> Result<bool, SettingsError> {
        match fs::remove_file(self.path(name)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(self.failed(name, source)),
        }
    }

    fn failed(&self, name: &str, source: io::Error) -> SettingsError {
        SettingsError::Io {
            path: self.path(name),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        let shared = Shared {
            cluster: "c".to_owned(),
            etcd: vec!["https://10.0.0.1:2379".to_owned()],
            home_key: "0a".repeat(32),
        };
        let address = "10.0.0.1:3001".parse().unwrap();
        Settings::new(shared, "a".parse().unwrap(), "i".to_owned(), address)
    }

    #[test]
    fn settings_are_kept_and_not_overwritten() {
        let state = tempfile::tempdir().unwrap();
        let dir = Dir::of(state.path());
        assert!(matches!(dir.load(), Err(SettingsError::None(_))));
        dir.create().unwrap();
        dir.store(&settings()).unwrap();
        let found = dir.load().unwrap();
        assert_eq!(
            (found.address, found.member.is_none()),
            (settings().address, true)
        );
        assert!(found.home_key().is_some());
        assert!(matches!(dir.create(), Err(SettingsError::Exists(_))));
        assert!(!format!("{found:?}").contains("0a0a"), "{found:?}");
    }

    #[test]
    fn plain_http_to_etcd_is_for_loopback_only() {
        for (url, expected) in [
            ("https://10.0.0.1:2379", Some(EtcdLink::Tls)),
            ("http://127.0.0.1:2379", Some(EtcdLink::Loopback)),
            ("http://[::1]:2379", Some(EtcdLink::Loopback)),
            ("http://10.0.0.1:2379", None),
            ("http://127.0.0.1.evil.example:2379", None),
            ("http://localhost:2379", None),
            ("10.0.0.1:2379", None),
        ] {
            assert_eq!(EtcdLink::of(url), expected, "{url}");
        }
    }

    #[test]
    fn malformed_settings_are_refused() {
        let state = tempfile::tempdir().unwrap();
        let dir = Dir::of(state.path());
        dir.create().unwrap();
        let mut wrong = settings();
        wrong.home_key = "0a".to_owned();
        dir.store(&wrong).unwrap();
        assert!(dir.load().unwrap_err().to_string().contains("64 hex"));
        let mut later = settings();
        later.format = 3;
        dir.store(&later).unwrap();
        assert!(dir.load().unwrap_err().to_string().contains("format 3,"));
        dir.write(FILE, b"{}").unwrap();
        assert!(dir.load().is_err());
    }
}
