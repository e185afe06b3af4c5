//! What is being written, beside its place: a template, or a layer alone. It is renamed when it is whole.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use model::{MANIFEST_NAME, TemplateManifest};

use super::{SnapshotError, at};

/// A template being written. Dropped before [`Draft::finish`], it leaves nothing behind.
#[derive(Debug)]
pub struct Draft {
    temporary: PathBuf,
    place: PathBuf,
    finished: bool,
}

impl Draft {
    /// Begins a template that will appear at `place`.
    ///
    /// # Errors
    /// The place is taken, or its parent cannot be written.
    pub fn begin(place: &Path) -> Result<Self, SnapshotError> {
        if place.exists() {
            return Err(SnapshotError::Exists(place.to_owned()));
        }
        let temporary = temporary_beside(place);
        fs::create_dir(&temporary).map_err(at("create", &temporary))?;
        Ok(Self {
            temporary,
            place: place.to_owned(),
            finished: false,
        })
    }

    /// Path of one of its files.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.temporary.join(name)
    }

    /// Creates one of its files.
    ///
    /// # Errors
    /// The disk's.
    pub fn create(&self, name: &str) -> Result<File, SnapshotError> {
        let path = self.path(name);
        File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(at("create", &path))
    }

    /// Writes one of its files.
    ///
    /// # Errors
    /// The disk's.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), SnapshotError> {
        let path = self.path(name);
        fs::write(&path, bytes).map_err(at("write", &path))
    }

    /// Writes the manifest and puts the template in its place.
    ///
    /// # Errors
    /// The disk's.
    pub fn finish(mut self, manifest: &TemplateManifest) -> Result<(), SnapshotError> {
        let json =
            serde_json::to_vec_pretty(manifest).map_err(|source| SnapshotError::Manifest {
                path: self.path(MANIFEST_NAME),
                source,
            })?;
        self.write(MANIFEST_NAME, &json)?;
        fs::rename(&self.temporary, &self.place).map_err(at("create", &self.place))?;
        self.finished = true;
        Ok(())
    }
}

/// Writes one file through `write`; it appears at `place` when it is whole, and replaces nothing.
///
/// # Errors
/// The place is taken, its parent cannot be written, or what `write` says; then nothing is left.
pub fn write_file(
    place: &Path,
    write: impl FnOnce(&File) -> io::Result<()>,
) -> Result<(), SnapshotError> {
    if place.exists() {
        return Err(SnapshotError::Exists(place.to_owned()));
    }
    let temporary = temporary_beside(place);
    let mut options = File::options();
    let file = options.write(true).create_new(true).open(&temporary);
    let file = file.map_err(at("create", &temporary))?;
    // A link, unlike a rename, replaces nothing that came meanwhile.
    let written = write(&file)
        .map_err(at("write", &temporary))
        .and_then(|()| fs::hard_link(&temporary, place).map_err(at("create", place)));
    // Best effort: the next one to the same place sweeps it.
    let _ = fs::remove_file(&temporary);
    written
}

/// A name beside `place` that no other process takes.
fn temporary_beside(place: &Path) -> PathBuf {
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    sweep_drafts(place, &name);
    place.with_file_name(format!(".{name}.{}", std::process::id()))
}

/// Removes what a killed process left of an earlier attempt at the same place.
fn sweep_drafts(place: &Path, name: &str) {
    let siblings = place.parent().and_then(|dir| fs::read_dir(dir).ok());
    for entry in siblings.into_iter().flatten().flatten() {
        let file_name = entry.file_name();
        let owner = file_name
            .to_str()
            .and_then(|text| text.strip_prefix(&format!(".{name}.")))
            .and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Best effort: what cannot be removed is in nobody's way. One of the two fits.
            let _ = fs::remove_dir_all(entry.path());
            let _ = fs::remove_file(entry.path());
        }
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished {
            // Best effort: the error that led here is the one to report.
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_of_a_dead_process_is_swept_and_one_that_is_dropped_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("base");
        // No process has this number: it is above the kernel's limit.
        fs::create_dir(dir.path().join(".base.4194305")).unwrap();
        fs::create_dir(dir.path().join(".other.4194305")).unwrap();
        drop(Draft::begin(&place).unwrap());
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].file_name(), ".other.4194305");
    }

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("layer");
        fs::write(dir.path().join(".layer.4194305"), "left").unwrap();
        let refused = write_file(&place, |_| Err(io::ErrorKind::StorageFull.into()));
        assert!(refused.unwrap_err().is_no_space());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let write = |mut file: &File| io::Write::write_all(&mut file, b"whole");
        write_file(&place, write).unwrap();
        let again = write_file(&place, write).unwrap_err();
        assert!(matches!(again, SnapshotError::Exists(_)), "{again}");
        let names: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert_eq!(names.len(), 1);
        assert_eq!(fs::read(place).unwrap(), b"whole");
    }
}
