//! Disk templates: a layer, and the files from which it boots. The pool links or copies both from elsewhere.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use ::template::Recipe;
use model::{Bytes, template_file};

use crate::{
    account::SetAside,
    durable::{allocated, copy, link_or_copy, private_dir, sync_dir, sync_files},
    error::LibraryError,
    images::{BootFiles, Images},
    info::{TemplateInfo, TemplateKind},
    record::Size,
    template::{IMAGE, Template, bytes_of},
};

/// Kernel and initramfs of this host's guests, for any root image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    /// The installed directory of the template that provides them. Its recipe names the empty layer.
    pub installed: PathBuf,
}

/// The writable layer of a new disk template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layer {
    File(PathBuf),
    /// The layer that the recipe of the installed template in [`Guest::installed`] names.
    Empty,
}

#[derive(Debug)]
pub struct DiskPlan {
    /// The new template's id.
    pub id: String,
    /// Its directory, which exists.
    pub home: PathBuf,
    pub images: Images,
    pub root: PathBuf,
    pub layer: Layer,
    /// Minimum size of the layer.
    pub disk: Bytes,
    pub guest: Guest,
    pub size: Size,
    /// Space set aside for copies.
    pub _room: SetAside,
}

impl DiskPlan {
    /// Links or copies the files, so that they survive a crash of the host.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or written. The template's directory remains, without a record.
    pub fn run(&self) -> Result<BootFiles, LibraryError> {
        let root = self
            .place()
            .map_err(|e| LibraryError::of_disk("add a disk template", &e))?;
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
pub fn bytes_to_copy(
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

/// Reads the disk template in `dir`.
///
/// # Errors
/// Returns a human-readable message if its layer or its root image cannot be read.
pub(crate) fn read(dir: &Path, id: &str, size: Size, boot: &BootFiles) -> Result<Template, String> {
    let length = |path: &Path| {
        let meta = fs::metadata(path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok::<_, String>(meta.len())
    };
    let disk = length(&dir.join(template_file::LAYER))?;
    length(&boot.root)?;
    let bytes = bytes_of(dir);
    let info = TemplateInfo {
        id: id.to_owned(),
        names: Vec::new(),
        memory: size.memory,
        vcpus: size.vcpus,
        disk: Bytes(disk),
        created_unix_s: 0,
        kind: TemplateKind::Disk,
        source: None,
        spawned: 0,
        warm: 0,
        vmm: None,
        bytes,
    };
    Ok(Template {
        boot: Some(boot.clone()),
        layer_bytes: bytes.0,
        ..Template::new(info, dir.to_owned(), boot.root.clone())
    })
}
