//! Output that is written next to its final place and moved there when it is complete: a template, or a single file.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use model::MANIFEST_NAME;

use crate::{
    files::{FileRole, Files, FilesError, Lineage, TemplateFile, failed},
    message::SnapshotContent,
};

/// A template that is being written. Dropping it before [`Draft::finish`] removes its files.
#[derive(Debug)]
pub(crate) struct Draft {
    temporary: PathBuf,
    place: PathBuf,
    content: SnapshotContent,
    finished: bool,
}

impl Draft {
    /// Creates a temporary directory for a template that will appear at `place`.
    ///
    /// # Errors
    /// Returns [`FilesError::Exists`] if `place` exists, and [`FilesError::File`] if the temporary directory cannot be
    /// created.
    pub(crate) fn begin(place: &Path, content: SnapshotContent) -> Result<Self, FilesError> {
        if place.exists() {
            return Err(FilesError::Exists(place.to_owned()));
        }
        let temporary = fresh(place, |path| fs::create_dir(path))?;
        Ok(Self {
            temporary,
            place: place.to_owned(),
            content,
            finished: false,
        })
    }

    /// Creates the template's files, empty.
    ///
    /// # Errors
    /// Returns [`FilesError::File`] if a file cannot be created.
    pub(crate) fn files(&self) -> Result<Files, FilesError> {
        let mut names = vec![
            TemplateFile::Manifest,
            TemplateFile::State,
            TemplateFile::Memory,
            TemplateFile::Layer,
        ];
        if self.content == SnapshotContent::Diff {
            names.push(TemplateFile::Extents);
        }
        let mut files = Files::default();
        for name in names {
            let file = create(&self.temporary.join(name.name()))?;
            files.insert(FileRole::Template(name), file);
        }
        Ok(files)
    }

    /// Checks the manifest against `lineage`, and renames the temporary directory to its place.
    ///
    /// # Errors
    /// Returns [`FilesError::Lineage`] if the manifest does not match the lineage, and [`FilesError::File`] if a file
    /// operation fails.
    pub(crate) fn finish(mut self, lineage: &Lineage) -> Result<(), FilesError> {
        let path = self.temporary.join(MANIFEST_NAME);
        let checked = lineage.check(&path)?;
        // The checked bytes go into a new file, because the VMM still has a descriptor of the old one and could change
        // it.
        fs::remove_file(&path).map_err(failed("remove", &path))?;
        create(&path)?
            .write_all_at(&checked, 0)
            .map_err(failed("write", &path))?;
        if self.content == SnapshotContent::Diff {
            self.drop_empty_extents()?;
        }
        fs::rename(&self.temporary, &self.place).map_err(failed("create", &self.place))?;
        self.finished = true;
        Ok(())
    }

    /// Removes the extents file if it is empty: the VMM then wrote a full snapshot instead of a diff.
    fn drop_empty_extents(&self) -> Result<(), FilesError> {
        let path = self.temporary.join(TemplateFile::Extents.name());
        let bytes = fs::metadata(&path).map_err(failed("read", &path))?.len();
        match bytes {
            0 => fs::remove_file(&path).map_err(failed("remove", &path)),
            _ => Ok(()),
        }
    }
}

fn create(path: &Path) -> Result<File, FilesError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(failed("create", path))
}

/// Calls `make` with new names next to `place` until one does not exist yet.
fn fresh(place: &Path, make: impl Fn(&Path) -> io::Result<()>) -> Result<PathBuf, FilesError> {
    loop {
        let temporary = temporary_beside(place);
        match make(&temporary) {
            Ok(()) => return Ok(temporary),
            // An earlier process with the same pid left a draft with this name.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(failed("create", &temporary)(e)),
        }
    }
}

/// A single file that is linked to its place when it is complete. It never replaces an existing file.
#[derive(Debug)]
pub(crate) struct FileDraft {
    temporary: PathBuf,
    place: PathBuf,
}

impl FileDraft {
    /// Creates an empty file that will appear at `place`.
    ///
    /// # Errors
    /// Returns [`FilesError::Exists`] if `place` exists, and [`FilesError::File`] if the temporary file cannot be
    /// created.
    pub(crate) fn begin(place: &Path) -> Result<(Self, File), FilesError> {
        if place.exists() {
            return Err(FilesError::Exists(place.to_owned()));
        }
        let temporary = temporary_beside(place);
        let file = create(&temporary)?;
        let place = place.to_owned();
        Ok((Self { temporary, place }, file))
    }

    /// Links the file to its place. Unlike a rename, a link fails if another file has appeared there.
    ///
    /// # Errors
    /// Returns [`FilesError::File`] if `place` now exists or the link fails.
    pub(crate) fn finish(self) -> Result<(), FilesError> {
        fs::hard_link(&self.temporary, &self.place).map_err(failed("create", &self.place))
    }
}

impl Drop for FileDraft {
    fn drop(&mut self) {
        // Best effort: once this process has exited, the next draft for the same place removes the file.
        let _ = fs::remove_file(&self.temporary);
    }
}

/// Returns a name next to `place` that no other running process uses. First removes old drafts.
fn temporary_beside(place: &Path) -> PathBuf {
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    sweep_drafts(place, &name);
    let (pid, number) = (std::process::id(), crate::process::number());
    place.with_file_name(format!(".{name}.{pid}.{number}"))
}

/// Removes drafts for the same place that a killed process left behind.
fn sweep_drafts(place: &Path, name: &str) {
    let siblings = place.parent().and_then(|dir| fs::read_dir(dir).ok());
    for entry in siblings.into_iter().flatten().flatten() {
        let file_name = entry.file_name();
        let owner = file_name
            .to_str()
            .and_then(|text| text.strip_prefix(&format!(".{name}.")))
            .and_then(|rest| rest.split_once('.')?.0.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Best effort: a leftover draft does no harm. The entry is either a directory or a file.
            let _ = fs::remove_dir_all(entry.path());
            let _ = fs::remove_file(entry.path());
        }
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished {
            // Best effort: the caller already has an error to report.
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::files::Size;

    #[test]
    fn drafts_of_dead_processes_are_removed_and_a_dropped_draft_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("base");
        // No process has this pid: it is above the kernel's limit.
        fs::create_dir(dir.path().join(".base.4194305.1")).unwrap();
        fs::create_dir(dir.path().join(".other.4194305.1")).unwrap();
        drop(Draft::begin(&place, SnapshotContent::Full).unwrap());
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].file_name(), ".other.4194305.1");
    }

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("layer");
        fs::write(dir.path().join(".layer.4194305.1"), "left").unwrap();
        drop(FileDraft::begin(&place).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let (draft, mut file) = FileDraft::begin(&place).unwrap();
        file.write_all(b"whole").unwrap();
        draft.finish().unwrap();
        let again = FileDraft::begin(&place).unwrap_err();
        assert!(matches!(again, FilesError::Exists(_)), "{again}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(fs::read(place).unwrap(), b"whole");
    }

    #[test]
    fn a_template_of_another_lineage_never_appears() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("t");
        let lineage = Lineage {
            root: "/images/root".into(),
            size: Size::NONE,
            home: None,
        };
        for (root, accepted) in [("/etc/shadow", false), ("/images/root", true)] {
            let draft = Draft::begin(&place, SnapshotContent::Diff).unwrap();
            draft.files().unwrap();
            let json = format!(r#"{{"root":{root:?},"memory":"0B","vcpus":0}}"#);
            let path = draft.temporary.join(MANIFEST_NAME);
            fs::write(&path, &json).unwrap();
            let held = OpenOptions::new().write(true).open(&path).unwrap();
            assert_eq!(draft.finish(&lineage).is_ok(), accepted);
            assert_eq!(place.exists(), accepted);
            // The VMM's later writes do not reach the finished template.
            held.write_all_at(b"later", 0).unwrap();
            if accepted {
                assert_eq!(
                    fs::read(place.join(MANIFEST_NAME)).unwrap(),
                    json.as_bytes()
                );
            }
        }
        assert!(!place.join(TemplateFile::Extents.name()).exists());
    }
}
