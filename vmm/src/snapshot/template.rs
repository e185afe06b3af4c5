//! Opening a template for a restore.

use std::{fs::File, path::Path};

use model::{Platform, TEMPLATE_FORMAT, TemplateBase, TemplateManifest, hex};
use sha2::{Digest, Sha256};
use vmm_control::files::{FileRole, Files, TemplateFile};

use super::directory::{Directory, measure};
use super::error::{SnapshotError, at, damaged, not_there};
use super::manifest::{Ancestor, Found, read_manifest};
use super::state_file::{MachineState, decode};
use crate::extents::{self, Extents};

const MAX_BODY: u64 = 64 << 20;

/// An opened template. The state, and for a diff the extents and the base's manifest, were checked against the hashes
/// in the template's manifest. Of the other files only the lengths were checked.
#[derive(Debug)]
pub struct Template {
    /// The files of the template's own directory.
    pub own: Directory,
    pub root_image: File,
    pub manifest: TemplateManifest,
    pub state: MachineState,
    /// The whole template that a clone of this one descends from.
    pub root: Ancestor,
    /// For a diff: the content over `root`.
    pub diff: Option<Diff>,
}

impl Template {
    /// The files of the whole template: the template's own, or the files of a diff's base.
    #[must_use]
    pub fn whole(&self) -> &Directory {
        self.diff.as_ref().map_or(&self.own, |diff| &diff.base)
    }
}

/// The positions of a diff's pages and blocks. They were checked against the lengths of the base.
#[derive(Debug)]
pub struct Diff {
    /// The files of the base.
    pub base: Directory,
    pub memory: Extents,
    pub layer: Extents,
}

/// The template to restore.
#[derive(Debug)]
pub struct Source<'a> {
    /// Directory of the template, for messages.
    pub dir: &'a Path,
    /// Directory of a diff's base, if it is not the one in the manifest; for messages.
    pub base: Option<&'a Path>,
    /// Like [`Ancestor::home`].
    pub home: &'a Path,
}

/// Opens a template. `host` returns the host's platform; it receives the template's platform, which can make a probe of
/// the host unnecessary.
///
/// # Errors
/// Returns [`SnapshotError`] if a file is missing or fails a check, and the error of `host`.
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

/// Reads the manifest of a diff's base and checks that it is the template that the diff was made from.
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

/// The positions of a diff's pages and blocks, before they are combined with the base's files.
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
