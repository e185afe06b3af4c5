//! What is being written, beside its place: a template, or a layer alone. It is renamed when it is whole.

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

/// A template being written. Dropped before [`Draft::finish`], it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Draft {
    temporary: PathBuf,
    place: PathBuf,
    content: SnapshotContent,
    finished: bool,
}

impl Draft {
    /// Begins a template that will appear at `place`.
    ///
    /// # Errors
    /// The place is taken, or its parent cannot be written.
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

    /// Creates its files, empty.
    ///
    /// # Errors
    /// The disk's.
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

    /// Puts the template in its place, if it names the files that its VM was made from.
    ///
    /// # Errors
    /// [`FilesError::Lineage`], or the disk's.
    pub(crate) fn finish(mut self, lineage: &Lineage) -> Result<(), FilesError> {
        let path = self.temporary.join(MANIFEST_NAME);
        let checked = lineage.check(&path)?;
        // A file of its own: the VMM has a descriptor of the one that it wrote.
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

    /// A diff whose template is gone was written whole.
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

/// A new name beside `place` for which `make` finds nothing there.
fn fresh(place: &Path, make: impl Fn(&Path) -> io::Result<()>) -> Result<PathBuf, FilesError> {
    loop {
        let temporary = temporary_beside(place);
        match make(&temporary) {
            Ok(()) => return Ok(temporary),
            // Of an earlier process of the same number.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(failed("create", &temporary)(e)),
        }
    }
}

/// One file that appears at its place when it is whole, and replaces nothing.
#[derive(Debug)]
pub(crate) struct FileDraft {
    temporary: PathBuf,
    place: PathBuf,
}

impl FileDraft {
    /// Begins a file that will appear at `place`; the file, empty.
    ///
    /// # Errors
    /// The place is taken, or its parent cannot be written.
    pub(crate) fn begin(place: &Path) -> Result<(Self, File), FilesError> {
        if place.exists() {
            return Err(FilesError::Exists(place.to_owned()));
        }
        let temporary = temporary_beside(place);
        let file = create(&temporary)?;
        let place = place.to_owned();
        Ok((Self { temporary, place }, file))
    }

    /// Puts the file in its place. A link, unlike a rename, replaces nothing that came meanwhile.
    ///
    /// # Errors
    /// The place was taken meanwhile, or the disk's.
    pub(crate) fn finish(self) -> Result<(), FilesError> {
        fs::hard_link(&self.temporary, &self.place).map_err(failed("create", &self.place))
    }
}

impl Drop for FileDraft {
    fn drop(&mut self) {
        // Best effort: the next one to the same place sweeps it.
        let _ = fs::remove_file(&self.temporary);
    }
}

/// A name beside `place` that no other process takes.
fn temporary_beside(place: &Path) -> PathBuf {
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    sweep_drafts(place, &name);
    let (pid, number) = (std::process::id(), crate::process::number());
    place.with_file_name(format!(".{name}.{pid}.{number}"))
}

/// Removes what a killed process left of an earlier attempt at the same place.
fn sweep_drafts(place: &Path, name: &str) {
    let siblings = place.parent().and_then(|dir| fs::read_dir(dir).ok());
    for entry in siblings.into_iter().flatten().flatten() {
        let file_name = entry.file_name();
        let owner = file_name
            .to_str()
            .and_then(|text| text.strip_prefix(&format!(".{name}.")))
            .and_then(|rest| rest.split_once('.')?.0.parse::<u32>().ok());
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
    use std::io::Write;

    use super::*;
    use crate::files::Size;

    #[test]
    fn a_draft_of_a_dead_process_is_swept_and_one_that_is_dropped_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("base");
        // No process has this number: it is above the kernel's limit.
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
            // What the VMM writes later changes nothing.
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
