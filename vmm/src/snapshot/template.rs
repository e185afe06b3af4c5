//! Opening a template for a restore.

use std::{fs::File, path::Path};

use model::{Platform, TEMPLATE_FORMAT, TemplateBase, TemplateManifest};
use sha2::{Digest, Sha256};
use vmm_control::files::{FileRole, Files, TemplateFile};

use super::directory::{Directory, measure};
use super::error::{SnapshotError, at, damaged, not_there};
use super::manifest::{Ancestor, Found, read_manifest};
use super::state_file::{MachineState, decode};
use super::sums::hex;
use crate::extents::{self, Extents};

const MAX_BODY: u64 = 64 << 20;

/// An opened template: manifest and state checked, the large files only measured.
#[derive(Debug)]
pub struct Template {
    /// Its own files.
    pub own: Directory,
    /// Its root image.
    pub root_image: File,
    /// Its manifest.
    pub manifest: TemplateManifest,
    /// CPU and devices.
    pub state: MachineState,
    /// What a clone of it descends from.
    pub root: Ancestor,
    /// What lies over that, in a diff.
    pub diff: Option<Diff>,
}

impl Template {
    /// The files of the whole template: its own, or those of the base of a diff.
    #[must_use]
    pub fn whole(&self) -> &Directory {
        self.diff.as_ref().map_or(&self.own, |diff| &diff.base)
    }
}

/// Where the pages and blocks of a diff belong; checked against the lengths of its base.
#[derive(Debug)]
pub struct Diff {
    /// The files that it is laid over.
    pub base: Directory,
    /// Of the memory.
    pub memory: Extents,
    /// Of the layer.
    pub layer: Extents,
}

/// What is restored: whose files came, and where the whole template really lies.
#[derive(Debug)]
pub struct Source<'a> {
    /// The template's directory.
    pub dir: &'a Path,
    /// The directory of a diff's base, if it is not the one that the manifest names.
    pub base: Option<&'a Path>,
    /// See [`Ancestor::home`].
    pub home: &'a Path,
}

/// Opens a template; `host` is asked for its platform when the template's is known.
///
/// # Errors
/// See [`SnapshotError`]; `E` is the platform probe's.
pub fn open<E: From<SnapshotError>>(
    source: &Source<'_>,
    files: &mut Files,
    host: impl FnOnce(Platform) -> Result<Platform, E>,
) -> Result<Template, E> {
    let own = Directory::take(source.dir, FileRole::Template, files);
    let found = read_manifest(&own)?;
    let host = host(found.manifest.platform)?;
    Ok(open_on(source, files, own, found, host)?)
}

fn open_on(
    source: &Source<'_>,
    files: &mut Files,
    own: Directory,
    found: Found,
    host: Platform,
) -> Result<Template, SnapshotError> {
    let manifest = &found.manifest;
    if manifest.platform != host {
        let found = manifest.platform;
        return Err(SnapshotError::Platform { found, host });
    }
    own.measure_all(manifest)?;
    let root_image = root_image(manifest, files)?;
    let bytes = own.read(TemplateFile::State, MAX_BODY)?;
    let path = own.path(TemplateFile::State);
    if hex(&Sha256::digest(&bytes)) != manifest.state_sum.sha256 {
        return Err(damaged(&path, "its SHA-256 differs from the manifest's"));
    }
    let state = decode(&path, &bytes, host)?;
    let (root, diff) = match &manifest.base {
        None => (found.ancestor(&own, source.home)?, None),
        Some(named) => {
            let at = source.base.unwrap_or(&named.dir);
            let base = Directory::take(at, FileRole::Base, files);
            let root = open_base(source.dir, named, &base)?;
            let diff = read_extents(&own, manifest, named, &root.manifest)?;
            (root.ancestor(&base, source.home)?, Some(diff.over(base)))
        }
    };
    Ok(Template {
        own,
        root_image,
        manifest: found.manifest,
        state,
        root,
        diff,
    })
}

pub(super) fn root_image(
    manifest: &TemplateManifest,
    files: &mut Files,
) -> Result<File, SnapshotError> {
    let path = &manifest.root;
    let missing = || at("read", path)(not_there());
    let file: File = files.take(FileRole::Root).ok_or_else(missing)?.into();
    measure(&file, path, &manifest.root_sum)?;
    Ok(file)
}

/// The manifest of a diff's base, if it is the one that the diff was made from.
pub(super) fn open_base(
    diff: &Path,
    named: &TemplateBase,
    base: &Directory,
) -> Result<Found, SnapshotError> {
    let because = |source| SnapshotError::Base {
        diff: diff.to_owned(),
        base: base.dir.clone(),
        source: Box::new(source),
    };
    let found = read_manifest(base).map_err(because)?;
    if found.sha256 != named.manifest_sha256 {
        return Err(SnapshotError::OtherBase {
            diff: diff.to_owned(),
            base: base.dir.clone(),
        });
    }
    if found.manifest.base.is_some() {
        let path = base.path(TemplateFile::Manifest);
        return Err(because(damaged(&path, "a base is never a diff itself")));
    }
    base.measure_all(&found.manifest).map_err(because)?;
    Ok(found)
}

/// Where the pages and blocks of a diff belong, before its base is known.
pub(super) struct Lists {
    memory: Extents,
    layer: Extents,
}

impl Lists {
    fn over(self, base: Directory) -> Diff {
        let Self { memory, layer } = self;
        Diff {
            base,
            memory,
            layer,
        }
    }
}

pub(super) fn read_extents(
    own: &Directory,
    manifest: &TemplateManifest,
    named: &TemplateBase,
    base: &TemplateManifest,
) -> Result<Lists, SnapshotError> {
    let path = own.path(TemplateFile::Extents);
    own.measure(TemplateFile::Extents, &named.extents_sum)?;
    let bytes = own.read(TemplateFile::Extents, extents::MAX_FILE)?;
    if hex(&Sha256::digest(&bytes)) != named.extents_sum.sha256 {
        return Err(damaged(&path, "its SHA-256 differs from the manifest's"));
    }
    let lengths = (base.memory_sum.bytes, base.layer_sum.bytes);
    let (memory, layer) = extents::decode(&bytes, TEMPLATE_FORMAT, lengths)
        .map_err(|e| damaged(&path, e.to_string()))?;
    let stored = [
        (TemplateFile::Memory, &memory, &manifest.memory_sum),
        (TemplateFile::Layer, &layer, &manifest.layer_sum),
    ];
    for (file, extents, sum) in stored {
        let (listed, bytes) = (extents.bytes(), sum.bytes);
        if listed != bytes {
            let name = file.name();
            let what = format!("it lists {listed} bytes of the {name} file, which has {bytes}");
            return Err(damaged(&path, what));
        }
    }
    Ok(Lists { memory, layer })
}
