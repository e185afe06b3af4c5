//! The part of a snapshot's manifest that the host needs. The VMM that made the snapshot checks the rest, so the pool
//! reads manifests of any format. Later releases may add fields, so unknown ones are ignored.

use std::path::{Path, PathBuf};

use model::{Bytes, MANIFEST_NAME};
use serde::Deserialize;

use crate::durable::read_bounded;

/// The latest version of this part. A change that would make older hosts misread it raises the version.
const VERSION: u32 = 0;
/// The longest manifest or record that is read, in bytes.
pub const MAX_FILE: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Manifest {
    /// The format of the files that only VMMs read.
    pub format: u32,
    /// Guest RAM.
    pub memory: Bytes,
    pub vcpus: u8,
    pub taken_at_unix_ns: u64,
    /// Path of the root image.
    pub root: PathBuf,
    pub root_sum: Length,
    pub layer_sum: Length,
    #[serde(default)]
    pub memory_sum: Sum,
    /// The base, if the snapshot is a diff.
    #[serde(default)]
    pub base: Option<Base>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Base {
    pub dir: PathBuf,
    pub manifest_sha256: String,
}

/// The length of a file in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Length {
    pub bytes: u64,
}

/// The checksum of a sparse file: SHA-256 over each block of 64 KiB that is not zero, preceded by its number as LE u64.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Sum {
    pub sha256: String,
}

/// The field that is decoded first.
#[derive(Deserialize)]
struct Header {
    #[serde(default)]
    version: u32,
}

impl Manifest {
    /// Reads the manifest of the snapshot in `dir`.
    ///
    /// # Errors
    /// Returns a human-readable message if the manifest cannot be read, has a later version, or has a memory size
    /// outside the supported range.
    pub fn read(dir: &Path) -> Result<Self, String> {
        let path = dir.join(MANIFEST_NAME);
        let failed = |why: String| format!("{}: {why}", path.display());
        let bytes = read_bounded(&path, MAX_FILE).map_err(|e| failed(e.to_string()))?;
        let Header { version } =
            serde_json::from_slice(&bytes).map_err(|e| failed(e.to_string()))?;
        if version > VERSION {
            return Err(failed(format!(
                "the manifest has version {version}, but this program reads up to version {VERSION}: use a later release"
            )));
        }
        let manifest: Self = serde_json::from_slice(&bytes).map_err(|e| failed(e.to_string()))?;
        let memory = manifest.memory;
        if (model::MIN_MEMORY..=model::MAX_MEMORY).contains(&memory) {
            Ok(manifest)
        } else {
            Err(failed(format!("memory of {memory}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::fixtures::image;

    #[test]
    fn a_manifest_of_another_format_with_more_fields_is_read_and_one_of_a_later_version_is_refused()
    {
        let root = tempfile::tempdir().unwrap();
        image(root.path(), None);
        let path = root.path().join(MANIFEST_NAME);
        let mut json: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        json["format"] = 1000.into();
        json["surprise"] = 1.into();
        fs::write(&path, json.to_string()).unwrap();
        assert_eq!(Manifest::read(root.path()).unwrap().format, 1000);
        json["version"] = 7.into();
        json["memory"] = "a lot".into();
        fs::write(&path, json.to_string()).unwrap();
        let why = Manifest::read(root.path()).unwrap_err();
        assert!(
            why.contains("has version 7") && why.contains("use a later release"),
            "{why}"
        );
    }
}
