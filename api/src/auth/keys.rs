//! The file of keys: `<state>/keys.json`, mode 0600, replaced as a whole. A key itself is in no file.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    str::FromStr,
    time::{SystemTime, UNIX_EPOCH},
};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{hex, random_hex};

/// Version of the file.
const FORMAT: u32 = 1;
/// A file that is larger is none of ours.
const MAX_FILE: u64 = 4 << 20;

/// What a key may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Scope {
    /// Look at sandboxes, their figures and logs.
    #[serde(rename = "sandboxes:read")]
    SandboxesRead,
    /// Create, change and end sandboxes.
    #[serde(rename = "sandboxes:write")]
    SandboxesWrite,
    /// Look at templates and snapshots.
    #[serde(rename = "templates:read")]
    TemplatesRead,
    /// Remove templates and snapshots.
    #[serde(rename = "templates:write")]
    TemplatesWrite,
    /// Read the server's own figures.
    #[serde(rename = "metrics:read")]
    MetricsRead,
}

impl Scope {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::SandboxesRead,
        Self::SandboxesWrite,
        Self::TemplatesRead,
        Self::TemplatesWrite,
        Self::MetricsRead,
    ];

    /// As it is written.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SandboxesRead => "sandboxes:read",
            Self::SandboxesWrite => "sandboxes:write",
            Self::TemplatesRead => "templates:read",
            Self::TemplatesWrite => "templates:write",
            Self::MetricsRead => "metrics:read",
        }
    }
}

impl FromStr for Scope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|scope| scope.name() == text);
        let names = || Self::ALL.map(Self::name).join(", ");
        found.ok_or_else(|| format!("no scope is called {text:?}; there are {}", names()))
    }
}

/// A key as it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyRecord {
    /// Eight hex digits, to name it by.
    pub id: String,
    /// What it is for.
    pub name: String,
    /// SHA-256 of the key, in hex.
    pub sha256: String,
    /// What it may do.
    pub scopes: Vec<Scope>,
    /// When it was made, seconds since 1970.
    pub created_unix_s: u64,
    /// When it was revoked; absent: it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_unix_s: Option<u64>,
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

/// Why keys cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file or the directory above it.
    #[error("cannot use the key file {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is no key file of this version.
    #[error("{} is not a key file of format {FORMAT}: {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// No key of this id or name, or more than one of this name.
    #[error("{found} keys are called {wanted:?}; `key list` shows them")]
    NotOne {
        /// What was asked for.
        wanted: String,
        /// How many there are.
        found: usize,
    },
    /// No random numbers.
    #[error("no random numbers for a key")]
    Random(#[from] getrandom::Error),
}

/// The file of keys of a state directory.
#[derive(Clone, Debug)]
pub struct KeyFile {
    path: PathBuf,
}

impl KeyFile {
    /// That of this state directory; it need not exist.
    #[must_use]
    pub fn of(state: &Path) -> Self {
        Self {
            path: state.join("keys.json"),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All keys, revoked ones too; none if there is no file.
    ///
    /// # Errors
    /// [`KeyError::Io`], [`KeyError::Malformed`].
    pub fn read(&self) -> Result<Vec<KeyRecord>, KeyError> {
        let text = match fs::metadata(&self.path) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(why) => return Err(self.io(why)),
            Ok(meta) if meta.len() > MAX_FILE => return Err(self.malformed("it is too large")),
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

    /// A new key. It is returned here and kept nowhere.
    ///
    /// # Errors
    /// [`KeyError::Io`], [`KeyError::Malformed`].
    pub fn add(&self, name: &str, scopes: Vec<Scope>, now: u64) -> Result<String, KeyError> {
        let key = format!("e2b_{}", random_hex::<20>()?);
        let sha256 = hash(&key);
        let record = KeyRecord {
            id: sha256[..8].to_owned(),
            name: name.to_owned(),
            sha256,
            scopes,
            created_unix_s: now,
            revoked_unix_s: None,
        };
        let _lock = self.lock()?;
        let mut keys = self.read()?;
        keys.push(record);
        self.write(keys)?;
        Ok(key)
    }

    /// Revokes the key of this id, or the only live one of this name.
    ///
    /// # Errors
    /// [`KeyError::NotOne`], [`KeyError::Io`], [`KeyError::Malformed`].
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

    /// Held while the file is read, changed and replaced.
    fn lock(&self) -> Result<Flock<File>, KeyError> {
        let path = self.path.with_extension("lock");
        let file = private().truncate(false).open(&path);
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
        let draft = self.path.with_extension("json.new");
        let replace = || {
            let mut file = private().truncate(true).open(&draft)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&draft, &self.path)
        };
        replace().map_err(|why| self.io(why))
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

/// For files that only their owner reads.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true).mode(0o600);
    options
}

/// SHA-256 of a key in hex.
pub(super) fn hash(key: &str) -> String {
    hex(&Sha256::digest(key.as_bytes()))
}

/// The wall clock in seconds, for commands.
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
    fn a_key_is_shown_once_kept_as_a_hash_and_can_be_revoked() {
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
    fn another_format_or_garbage_is_an_error() {
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
