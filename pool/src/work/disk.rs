//! The files of a disk template that were made elsewhere: a root image and a layer.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use model::{Bytes, template_file};
use template::Recipe;

use crate::{
    account::SetAside,
    durable::{allocated, copy, link_or_copy, private_dir, sync_dir, sync_files},
    error::PoolError,
    images::Images,
    record::BootFiles,
    templates::{Guest, IMAGE, Size},
};

/// The writable layer of a new disk template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Layer {
    File(PathBuf),
    /// The layer that the recipe of the installed template in [`Guest::installed`] names.
    Empty,
}

#[derive(Debug)]
pub(crate) struct DiskPlan {
    /// The new template's id.
    pub(crate) id: String,
    /// Its directory, which exists.
    pub(crate) home: PathBuf,
    pub(crate) images: Images,
    pub(crate) root: PathBuf,
    pub(crate) layer: Layer,
    /// Minimum size of the layer.
    pub(crate) disk: Bytes,
    pub(crate) guest: Guest,
    pub(crate) size: Size,
    /// Space set aside for copies.
    pub(crate) _room: SetAside,
}

impl DiskPlan {
    /// Links or copies the files, so that they survive a crash of the host.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or written. The template's directory remains, without a record.
    pub(crate) fn run(&self) -> Result<BootFiles, PoolError> {
        let root = self
            .place()
            .map_err(|e| PoolError::of_disk("add a disk template", &e))?;
        Ok(BootFiles {
            kernel: self.guest.kernel.clone(),
            initrd: self.guest.initrd.clone(),
            root,
        })
    }

    fn place(&self) -> io::Result<PathBuf> {
        let layer = match &self.layer {
            Layer::File(layer) => layer.clone(),
            Layer::Empty => empty_layer(&self.guest.installed)?,
        };
        let image = self.home.join(IMAGE);
        private_dir(&image)?;
        let to = image.join(template_file::LAYER);
        if fs::metadata(&layer)?.len() < self.disk.0 {
            copy(&layer, &to)?;
            File::options()
                .write(true)
                .open(&to)?
                .set_len(self.disk.0)?;
        } else {
            link_or_copy(&layer, &to)?;
        }
        sync_files(&image)?;
        sync_dir(&self.home)?;
        self.images.add_root(&self.root)
    }
}

/// Size of the files that are copied, either because the layer grows to `disk`, or because links are impossible: the
/// files are on another file system than the images.
///
/// # Errors
/// Returns a human-readable message if a file cannot be read.
pub(crate) fn bytes_to_copy(
    images: &Images,
    root: &Path,
    layer: &Layer,
    disk: Bytes,
) -> Result<u64, String> {
    let meta = |path: &Path| fs::metadata(path).map_err(|e| format!("{}: {e}", path.display()));
    let here = meta(images.dir())?.dev();
    let layer = match layer {
        Layer::File(layer) => Some(layer.as_path()),
        // Its blocks are negligible.
        Layer::Empty => None,
    };
    let mut sum = 0;
    for file in [Some(root), layer].into_iter().flatten() {
        let meta = meta(file)?;
        let grows = layer == Some(file) && meta.len() < disk.0;
        if grows || meta.dev() != here {
            sum += allocated(file);
        }
    }
    Ok(sum)
}

fn empty_layer(installed: &Path) -> io::Result<PathBuf> {
    let recipe = Recipe::read(installed)?.ok_or_else(|| {
        let installed = installed.display();
        io::Error::other(format!(
            "{installed} has no recipe, which names the empty layer: build the template again"
        ))
    })?;
    Ok(recipe.layer.path)
}
