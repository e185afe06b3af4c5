//! Verification of a whole template against its manifests.

use std::{fs::File, path::Path};

use model::{FileSum, TemplateManifest};
use vmm_control::files::{self, FileRole, TemplateFile};

use super::directory::{Directory, measure};
use super::error::{SnapshotError, damaged};
use super::manifest::read_manifest;
use super::sums::{sparse_sum, sum};
use super::template::{open_base, read_extents, root_image};

/// Reads every byte of a template, of its root image and of its base, and compares all hashes with the manifests.
///
/// # Errors
/// Returns [`SnapshotError`] for the first file that differs or cannot be read.
pub fn verify(dir: &Path) -> Result<TemplateManifest, SnapshotError> {
    let (mut files, _) = files::of_template(dir, files::Places::default())?;
    let own = Directory::take(dir, FileRole::Template, &mut files);
    let manifest = read_manifest(&own)?.manifest;
    let root = root_image(&manifest, &mut files)?;
    compare(&root, &manifest.root, sum, &manifest.root_sum)?;
    verify_files(&own, &manifest)?;
    if let Some(named) = &manifest.base {
        let base = Directory::take(&named.dir, FileRole::Base, &mut files);
        let whole = open_base(dir, named, &base)?.manifest;
        read_extents(&own, &manifest, named, &whole)?;
        verify_files(&base, &whole).map_err(|source| SnapshotError::Base {
            diff: dir.to_owned(),
            base: named.dir.clone(),
            source: Box::new(source),
        })?;
    }
    Ok(manifest)
}

type Summed = fn(&File, &Path) -> Result<FileSum, SnapshotError>;

fn verify_files(dir: &Directory, manifest: &TemplateManifest) -> Result<(), SnapshotError> {
    let files: [(_, Summed, _); 3] = [
        (TemplateFile::State, sum, &manifest.state_sum),
        (TemplateFile::Memory, sparse_sum, &manifest.memory_sum),
        (TemplateFile::Layer, sparse_sum, &manifest.layer_sum),
    ];
    for (name, sum, expected) in files {
        compare(dir.file(name)?, &dir.path(name), sum, expected)?;
    }
    Ok(())
}

fn compare(file: &File, path: &Path, sum: Summed, expected: &FileSum) -> Result<(), SnapshotError> {
    measure(file, path, expected)?;
    if sum(file, path)? == *expected {
        return Ok(());
    }
    Err(damaged(path, "its SHA-256 differs from the manifest's"))
}
