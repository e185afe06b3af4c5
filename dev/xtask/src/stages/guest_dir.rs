//! `target/cube/guest`: the files that the VMM boots from, under stable names.
//!
//! The files are hard links to the outputs of the stages, each put in place by one rename. `manifest.json` lists their
//! checksums and the Debian packages that they were built from.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::{
    stages::{
        archive::Package,
        kernel::Kernel,
        root_image,
        stage::{Built, Recipe, Store},
        userland,
    },
    workspace::Workspace,
};

pub(crate) const MANIFEST: &str = "manifest.json";
/// Version of the manifest's format.
const FORMAT: u32 = 1;

#[derive(Debug, Serialize)]
struct Manifest {
    format: u32,
    built_at_unix_s: u64,
    /// The output of `uname -r` in a guest.
    kernel_release: String,
    kernel_packages: Vec<Package>,
    root_packages: Vec<Package>,
    userland_packages: Vec<Package>,
    artifacts: BTreeMap<String, ArtifactSum>,
}

#[derive(Debug, Serialize)]
struct ArtifactSum {
    bytes: u64,
    /// SHA-256 of the content. If `sparse` is true: SHA-256 over the length of the file and the offsets and contents of
    /// its blocks that are not zero.
    sha256: String,
    sparse: bool,
}

/// Links a built file into `target/cube/guest`, under its own name.
pub(crate) fn publish(workspace: &Workspace, file: &Path) -> Result<()> {
    publish_in(workspace, &workspace.guest(), file)
}

/// Links a built file into `dir`, under its own name.
pub(crate) fn publish_in(workspace: &Workspace, dir: &Path, file: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    let name = file
        .file_name()
        .with_context(|| format!("{} has no file name", file.display()))?;
    let to = dir.join(name);
    let inode = |path: &Path| fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
    if inode(file).is_some() && inode(file) == inode(&to) {
        return Ok(());
    }
    let new = workspace.artifacts().join("tmp").join(name);
    let failed = || format!("cannot link {} to {}", file.display(), to.display());
    fs::hard_link(file, &new).with_context(failed)?;
    fs::rename(&new, &to).with_context(failed)
}

/// Writes the manifest of all published files.
pub(crate) fn write_manifest(
    store: &Store,
    workspace: &Workspace,
    kernel: &Kernel,
    root: &Built,
    userland: &Built,
    others: &[&Built],
) -> Result<()> {
    let mut recipe = Recipe::new("manifest")
        .stage("kernel", &kernel.built)
        .stage("root", root)
        .stage("userland", userland);
    for other in others {
        recipe = recipe.stage("artifact", other);
    }
    let built = store.build(&recipe, "stages/manifest", |out, _| {
        let manifest = Manifest {
            format: FORMAT,
            built_at_unix_s: SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
            kernel_release: kernel.release.clone(),
            kernel_packages: kernel.packages()?,
            root_packages: root_image::packages(root)?,
            userland_packages: userland::packages(userland)?,
            artifacts: sums(&workspace.guest())?,
        };
        let text = serde_json::to_string_pretty(&manifest)?;
        Ok(fs::write(out.join(MANIFEST), text)?)
    })?;
    publish(workspace, &built.dir.join(MANIFEST))
}

fn sums(dir: &Path) -> Result<BTreeMap<String, ArtifactSum>> {
    let mut sums = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name != MANIFEST {
            sums.insert(name, sum(&entry.path())?);
        }
    }
    Ok(sums)
}

fn sum(path: &Path) -> Result<ArtifactSum> {
    let meta = fs::metadata(path)?;
    let sparse = meta.blocks() * 512 < meta.len() / 2;
    let sha256 = if sparse {
        template::sparse_sum(path)?
    } else {
        template::file_sum(path)?
    };
    Ok(ArtifactSum {
        bytes: meta.len(),
        sha256,
        sparse,
    })
}
