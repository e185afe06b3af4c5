//! The version of the state directory, which prevents an older server from using files that a newer one has written.
//!
//! `<state>/version.json` contains the version of the newest server that has opened the directory. A server refuses a
//! newer version than its own: it could not read the records, and would remove them as unusable. The file is written
//! before anything else that an older server cannot read, so an upgrade that was interrupted earlier can be reverted.

use std::{io, path::Path};

use library::durable::{Durability, read_bounded, replace};
use serde::{Deserialize, Serialize};

/// The version that this server writes. Raise it with every change of the state directory that older servers cannot
/// read. Servers of version 2 and before did not write the file.
const VERSION: u32 = 7;
const FILE: &str = "version.json";
const MAX_FILE: u64 = 1 << 16;

/// Later servers may add fields, so unknown ones are ignored.
#[derive(Serialize, Deserialize)]
struct StateVersion {
    version: u32,
    /// The release that wrote the file, for error messages.
    #[serde(default)]
    release: String,
}

/// Reads the version of the state directory. Returns whether [`raise`] must be called.
///
/// # Errors
/// Returns an error if the version is newer than this server's, or the file cannot be read.
pub(crate) fn check(state: &Path) -> io::Result<Raise> {
    let path = state.join(FILE);
    let failed = |why: String| io::Error::other(format!("{}: {why}", path.display()));
    let bytes = match read_bounded(&path, MAX_FILE) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Raise::Needed),
        Err(e) => return Err(failed(e.to_string())),
        Ok(bytes) => bytes,
    };
    let found: StateVersion = serde_json::from_slice(&bytes).map_err(|e| {
        failed(format!(
            "{e}; if the file is damaged and no newer release has used this directory, remove the file"
        ))
    })?;
    match found.version {
        VERSION => Ok(Raise::NotNeeded),
        older if older < VERSION => Ok(Raise::Needed),
        newer => Err(failed(format!(
            "the directory was used by release {} (state version {newer}), and this server reads up to version \
             {VERSION}: start that release or a later one, or give this server another state directory",
            envd::guest_text(&found.release)
        ))),
    }
}

/// Whether the version in the state directory is older than this server's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Raise {
    Needed,
    NotNeeded,
}

/// Writes this server's version.
///
/// # Errors
/// Returns an error if the file cannot be written. The directory is then unchanged.
pub(crate) fn raise(state: &Path) -> io::Result<()> {
    let version = StateVersion {
        version: VERSION,
        release: env!("CARGO_PKG_VERSION").to_owned(),
    };
    replace(
        state,
        FILE,
        &serde_json::to_vec_pretty(&version)?,
        Durability::Host,
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_older_server_is_refused_with_the_release_that_can_read_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(check(dir.path()).unwrap(), Raise::Needed);
        raise(dir.path()).unwrap();
        assert_eq!(check(dir.path()).unwrap(), Raise::NotNeeded);
        let path = dir.path().join(FILE);
        fs::write(&path, r#"{"version":2}"#).unwrap();
        assert_eq!(check(dir.path()).unwrap(), Raise::Needed);
        let newer = format!(
            r#"{{"version":{},"release":"9.0.0","more":true}}"#,
            VERSION + 1
        );
        fs::write(&path, &newer).unwrap();
        let why = check(dir.path()).unwrap_err().to_string();
        assert!(
            why.contains("release 9.0.0") && why.contains("start that release"),
            "{why}"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), newer);
        fs::write(&path, "{").unwrap();
        assert!(check(dir.path()).is_err());
    }
}
