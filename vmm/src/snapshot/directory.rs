//! The files of a template's directory, which the client opened and sent.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use model::{FileSum, TemplateManifest};
use vmm_control::files::{FileRole, Files, TemplateFile};

use super::error::{SnapshotError, at, damaged, not_there};
use crate::sys::length;

/// The files of a template's directory.
#[derive(Debug)]
pub struct Directory {
    /// For messages only.
    pub(super) dir: PathBuf,
    files: BTreeMap<TemplateFile, File>,
}

impl Directory {
    /// Takes the files with this role from `files`.
    #[must_use]
    pub fn take(dir: &Path, role: fn(TemplateFile) -> FileRole, files: &mut Files) -> Self {
        let taken = TemplateFile::ALL
            .into_iter()
            .filter_map(|name| Some((name, files.take(role(name))?.into())));
        Self {
            dir: dir.to_owned(),
            files: taken.collect(),
        }
    }

    /// Path of a file, for messages.
    #[must_use]
    pub fn path(&self, name: TemplateFile) -> PathBuf {
        self.dir.join(name.name())
    }

    /// The descriptor of a file that the template must have.
    ///
    /// # Errors
    /// Returns [`SnapshotError::File`] if the client did not send it.
    pub fn file(&self, name: TemplateFile) -> Result<&File, SnapshotError> {
        let missing = || at("read", &self.path(name))(not_there());
        self.files.get(&name).ok_or_else(missing)
    }

    /// The descriptor of a file, if the client sent it.
    #[must_use]
    pub fn optional(&self, name: TemplateFile) -> Option<&File> {
        self.files.get(&name)
    }

    pub(super) fn read(&self, name: TemplateFile, limit: u64) -> Result<Vec<u8>, SnapshotError> {
        read_limited(self.file(name)?, &self.path(name), limit)
    }

    pub(super) fn measure(
        &self,
        name: TemplateFile,
        expected: &FileSum,
    ) -> Result<(), SnapshotError> {
        measure(self.file(name)?, &self.path(name), expected)
    }

    pub(super) fn measure_all(&self, manifest: &TemplateManifest) -> Result<(), SnapshotError> {
        self.measure(TemplateFile::Memory, &manifest.memory_sum)?;
        self.measure(TemplateFile::State, &manifest.state_sum)?;
        self.measure(TemplateFile::Layer, &manifest.layer_sum)
    }
}

pub(super) fn measure(file: &File, path: &Path, expected: &FileSum) -> Result<(), SnapshotError> {
    let found = length(file).map_err(at("read", path))?;
    if found == expected.bytes {
        return Ok(());
    }
    let what = format!(
        "it has {found} bytes, but the manifest says {}",
        expected.bytes
    );
    Err(damaged(path, what))
}

/// Reads a whole file from its start, independent of the descriptor's offset.
pub(super) fn read_limited(file: &File, path: &Path, limit: u64) -> Result<Vec<u8>, SnapshotError> {
    let mut bytes = Vec::new();
    FromStart { file, at: 0 }
        .take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(at("read", path))?;
    if bytes.len() as u64 > limit {
        return Err(damaged(path, format!("it is longer than {limit} bytes")));
    }
    Ok(bytes)
}

/// A reader with its own offset. The offset of the descriptor is shared by all its copies.
struct FromStart<'a> {
    file: &'a File,
    at: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(into, self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}
