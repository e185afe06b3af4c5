//! The key file `<state>/keys.json`: mode 0600, always replaced as a whole. It contains hashes of keys, never the keys
//! themselves.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    str::FromStr,
    time::{SystemTime, UNIX_EPOCH},
};

use journal::durable::{Durability, replace, sync_dir};
use model::hex;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::random::random_hex;

const FILE: &str = "keys.json";
/// Version of the file format.
const FORMAT: u32 = 1;
/// Maximum size of the key file in bytes. A larger file is refused without being read.
const MAX_FILE: u64 = 4 << 20;

/// A permission of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Scope {
    /// View sandboxes, their metrics and logs.
    #[serde(rename = "sandboxes:read")]
    SandboxesRead,
    /// Create, change and kill sandboxes.
    #[serde(rename = "sandboxes:write")]
    SandboxesWrite,
    /// Get the access tokens of existing sandboxes. [`Scope::SandboxesWrite`] includes it.
    #[serde(rename = "sandboxes:exec")]
    SandboxesExec,
    /// List secrets, without their values.
    #[serde(rename = "secrets:read")]
    SecretsRead,
    /// Create, update and delete secrets.
    #[serde(rename = "secrets:write")]
    SecretsWrite,
    /// View templates and snapshots.
    #[serde(rename = "templates:read")]
    TemplatesRead,
    /// Delete templates and snapshots.
    #[serde(rename = "templates:write")]
    TemplatesWrite,
    /// Read the server's own metrics.
    #[serde(rename = "metrics:read")]
    MetricsRead,
    /// View nodes, cordon and uncordon them.
    #[serde(rename = "nodes:admin")]
    NodesAdmin,
}

impl Scope {
    pub const ALL: [Self; 9] = [
        Self::SandboxesRead,
        Self::SandboxesWrite,
        Self::SandboxesExec,
        Self::SecretsRead,
        Self::SecretsWrite,
        Self::TemplatesRead,
        Self::TemplatesWrite,
        Self::MetricsRead,
        Self::NodesAdmin,
    ];

    /// The name in the key file and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SandboxesRead => "sandboxes:read",
            Self::SandboxesWrite => "sandboxes:write",
            Self::SandboxesExec => "sandboxes:exec",
            Self::SecretsRead => "secrets:read",
            Self::SecretsWrite => "secrets:write",
            Self::TemplatesRead => "templates:read",
            Self::TemplatesWrite => "templates:write",
            Self::MetricsRead => "metrics:read",
            Self::NodesAdmin => "nodes:admin",
        }
    }
}

impl FromStr for Scope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|scope| scope.name() == text);
        let names = || Self::ALL.map(Self::name).join(", ");
        found.ok_or_else(|| format!("unknown scope {text:?}: use one of {}", names()))
    }
}

/// The scopes that a request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted(u16);

impl Granted {
    /// The scopes of requests to a server without authentication.
    pub const ALL: Self = Self(u16::MAX);

    #[must_use]
    pub fn has(self, scope: Scope) -> bool {
        self.0 & Self::bit(scope) != 0
    }

    fn bit(scope: Scope) -> u16 {
        1 << (scope as u16)
    }
}

impl FromIterator<Scope> for Granted {
    fn from_iter<I: IntoIterator<Item = Scope>>(scopes: I) -> Self {
        let bits = scopes.into_iter().map(Self::bit);
        Self(bits.fold(0, |all, bit| all | bit))
    }
}

/// The stored form of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyRecord {
    /// The first eight hex digits of `sha256`. Identifies the key on the command line.
    pub id: String,
    /// The purpose of the key, as described by its creator. Need not be unique.
    pub name: String,
    /// SHA-256 of the key, in hex.
    pub sha256: String,
    pub scopes: Vec<Scope>,
    /// Whether `scopes` lists the scopes of secrets separately. Records of older releases do not: there,
    /// `sandboxes:read` includes `secrets:read`, and `sandboxes:write` includes `secrets:write`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub names_secrets: bool,
    /// Creation time in seconds since 1970.
    pub created_unix_s: u64,
    /// Revocation time in seconds since 1970. `None`: the key is live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_unix_s: Option<u64>,
}

impl KeyRecord {
    /// The scopes of the key, including those implied by others.
    #[must_use]
    pub fn granted(&self) -> Granted {
        let with_included = self.scopes.iter().flat_map(|scope| {
            let included: &[Scope] = match scope {
                Scope::SandboxesRead if !self.names_secrets => &[Scope::SecretsRead],
                Scope::SandboxesWrite if self.names_secrets => &[Scope::SandboxesExec],
                Scope::SandboxesWrite => &[Scope::SandboxesExec, Scope::SecretsWrite],
                _ => &[],
            };
            included.iter().chain([scope]).copied()
        });
        with_included.collect()
    }

    /// Like [`KeyRecord::granted`], in the order of [`Scope::ALL`].
    pub fn scopes(&self) -> impl Iterator<Item = Scope> {
        let granted = self.granted();
        Scope::ALL.into_iter().filter(move |s| granted.has(*s))
    }
}

#[derive(Serialize, Deserialize)]
struct Header {
    format: u32,
}

#[derive(Serialize, Deserialize)]
struct Contents {
    format: u32,
    keys: Vec<KeyRecord>,
}

/// Why the key file cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("cannot access the key file {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The file is not a key file, or has another format version.
    #[error("{} is not a key file of format {FORMAT}: {why}", path.display())]
    Malformed {
        path: PathBuf,
        /// The error of the JSON parser, or why the file is rejected.
        why: String,
    },
    /// Not exactly one live key has the given id or name.
    #[error(
        "{found} live keys match {wanted:?}: select one by its id, as listed by `cube-api key list`"
    )]
    NotOne {
        /// The id or name that was given.
        wanted: String,
        /// Number of live keys that match.
        found: usize,
    },
    #[error("cannot generate a key: the kernel provides no random numbers")]
    Random(#[from] getrandom::Error),
}

/// The key file of one state directory.
#[derive(Clone, Debug)]
pub struct KeyFile {
    path: PathBuf,
}

impl KeyFile {
    /// The key file of the state directory `state`. The file need not exist.
    #[must_use]
    pub fn of(state: &Path) -> Self {
        Self {
            path: state.join(FILE),
        }
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All keys, including revoked ones. Empty if the file does not exist.
    ///
    /// # Errors
    /// Returns [`KeyError::Io`] if the file cannot be read, and [`KeyError::Malformed`] if its contents are not valid.
    pub fn read(&self) -> Result<Vec<KeyRecord>, KeyError> {
        let text = match fs::metadata(&self.path) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(why) => return Err(self.io(why)),
            Ok(meta) if meta.len() > MAX_FILE => {
                return Err(self.malformed("it is larger than 4 MiB"));
            }
            Ok(_) => fs::read_to_string(&self.path).map_err(|why| self.io(why))?,
        };
        let malformed = |why: serde_json::Error| self.malformed(&why.to_string());
        let header: Header = serde_json::from_str(&text).map_err(malformed)?;
        if header.format != FORMAT {
            return Err(self.malformed(&format!("its format is {}", header.format)));
        }
        let contents: Contents = serde_json::from_str(&text).map_err(malformed)?;
        Ok(contents.keys)
    }

    /// Creates a key and returns it. Only its hash is stored, so the key cannot be recovered later.
    ///
    /// # Errors
    /// Returns [`KeyError::Io`] or [`KeyError::Malformed`] if the file cannot be read or written, and
    /// [`KeyError::Random`] if the kernel provides no randomness.
    pub fn add(&self, name: &str, scopes: Vec<Scope>, now: u64) -> Result<String, KeyError> {
        let key = format!("e2b_{}", random_hex::<20>()?);
        let sha256 = hash(&key);
        let record = KeyRecord {
            id: sha256[..8].to_owned(),
            name: name.to_owned(),
            sha256,
            scopes,
            names_secrets: true,
            created_unix_s: now,
            revoked_unix_s: None,
        };
        let _lock = self.lock()?;
        let mut keys = self.read()?;
        keys.push(record);
        self.write(keys)?;
        Ok(key)
    }

    /// Revokes the only live key whose id or name is `wanted`.
    ///
    /// # Errors
    /// Returns [`KeyError::NotOne`] unless exactly one live key has the id or name `wanted`, and [`KeyError::Io`] or
    /// [`KeyError::Malformed`] if the file cannot be read or written.
    pub fn revoke(&self, wanted: &str, now: u64) -> Result<KeyRecord, KeyError> {
        let _lock = self.lock()?;
        let mut keys = self.read()?;
        let live = keys.iter_mut().filter(|key| key.revoked_unix_s.is_none());
        let mut meant: Vec<_> = live
            .filter(|key| key.id == wanted || key.name == wanted)
            .collect();
        let found = meant.len();
        let (Some(key), 1) = (meant.pop(), found) else {
            let wanted = wanted.to_owned();
            return Err(KeyError::NotOne { wanted, found });
        };
        key.revoked_unix_s = Some(now);
        let revoked = key.clone();
        self.write(keys)?;
        Ok(revoked)
    }

    /// Takes the lock that serializes changes to the key file. The lock is released when the result is dropped.
    fn lock(&self) -> Result<Flock<File>, KeyError> {
        let path = self.path.with_extension("lock");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path);
        let file = file.map_err(|why| self.io(why))?;
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, why)| self.io(why.into()))
    }

    fn write(&self, keys: Vec<KeyRecord>) -> Result<(), KeyError> {
        let contents = Contents {
            format: FORMAT,
            keys,
        };
        let text = serde_json::to_vec_pretty(&contents);
        let text = text.map_err(|why| self.malformed(&why.to_string()))?;
        let state = self.path.parent().unwrap_or(&self.path);
        // After a crash of the host, a printed key must exist and a revoked key must stay revoked.
        replace(state, FILE, &text, Durability::Host)
            // The command may have created the state directory.
            .and_then(|()| sync_dir(&state.join("..")))
            .map_err(|why| self.io(why))
    }

    fn io(&self, source: io::Error) -> KeyError {
        let path = self.path.clone();
        KeyError::Io { path, source }
    }

    fn malformed(&self, why: &str) -> KeyError {
        KeyError::Malformed {
            path: self.path.clone(),
            why: why.to_owned(),
        }
    }
}

/// SHA-256 of a key in hex.
pub(super) fn hash(key: &str) -> String {
    hex(&Sha256::digest(key.as_bytes()))
}

/// Wall-clock time in seconds since 1970.
#[must_use]
pub fn now_unix_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_is_stored_as_a_hash_and_can_be_revoked() {
        let dir = tempfile::tempdir().unwrap();
        let file = KeyFile::of(dir.path());
        assert_eq!(file.read().unwrap(), []);
        let key = file.add("ci", vec![Scope::SandboxesRead], 7).unwrap();
        assert_eq!(key.len(), 44);
        assert!(key.starts_with("e2b_"));
        let text = fs::read_to_string(file.path()).unwrap();
        assert!(!text.contains(&key[4..]), "the key itself is in the file");
        assert!(text.contains("sandboxes:read"));
        let mode = fs::metadata(file.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        file.add("ci", vec![], 8).unwrap();
        let two = file.revoke("ci", 9);
        assert!(matches!(two, Err(KeyError::NotOne { found: 2, .. })));
        let id = file.read().unwrap()[0].id.clone();
        assert_eq!(file.revoke(&id, 9).unwrap().revoked_unix_s, Some(9));
        file.revoke("ci", 10).unwrap();
        assert!(matches!(
            file.revoke("ci", 11),
            Err(KeyError::NotOne { found: 0, .. })
        ));
    }

    #[test]
    fn keys_of_former_releases_keep_the_scopes_of_secrets_and_new_ones_name_them() {
        let record = |scopes: &[&str], more: &str| -> KeyRecord {
            let scopes = serde_json::to_string(scopes).unwrap();
            let text = format!(
                r#"{{"id":"i","name":"n","sha256":"s","scopes":{scopes},"created_unix_s":0{more}}}"#
            );
            serde_json::from_str(&text).unwrap()
        };
        let new = r#","names_secrets":true"#;
        for (scopes, more, expected) in [
            (
                &["sandboxes:read"][..],
                "",
                &["sandboxes:read", "secrets:read"][..],
            ),
            (
                &["sandboxes:write"],
                "",
                &["sandboxes:write", "sandboxes:exec", "secrets:write"],
            ),
            (&["sandboxes:read"], new, &["sandboxes:read"]),
            (
                &["sandboxes:write"],
                new,
                &["sandboxes:write", "sandboxes:exec"],
            ),
            (&["sandboxes:exec"], new, &["sandboxes:exec"]),
            (&["secrets:write"], new, &["secrets:write"]),
            (&["metrics:read"], "", &["metrics:read"]),
        ] {
            let granted: Vec<_> = record(scopes, more).scopes().map(Scope::name).collect();
            assert_eq!(granted, expected, "{scopes:?} {more}");
        }
        let dir = tempfile::tempdir().unwrap();
        let file = KeyFile::of(dir.path());
        file.add("k", vec![Scope::SandboxesWrite], 0).unwrap();
        assert!(!file.read().unwrap()[0].granted().has(Scope::SecretsWrite));
    }

    #[test]
    fn a_file_of_another_format_or_with_invalid_contents_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = KeyFile::of(dir.path());
        for bad in [
            "",
            "{}",
            r#"{"format":2,"keys":[]}"#,
            r#"{"format":1,"keys":[{}]}"#,
        ] {
            fs::write(file.path(), bad).unwrap();
            assert!(
                matches!(file.read(), Err(KeyError::Malformed { .. })),
                "{bad}"
            );
        }
    }
}
