//! Installed templates by content, so that existing sandboxes keep their files when a template is reinstalled.
//!
//! ```text
//! <state>/images/<SHA-256 of the manifest>/   manifest.json  memory  state  layer  …
//!                                             root  vmlinux  initramfs.cpio
//! <state>/images/root-<random>/               root, the image of a disk template
//! <state>/images/<SHA-256 of all three>/      root  vmlinux  initramfs.cpio   of a sandbox that booted on another server
//! ```
//! A build of templates, kernels or root images replaces files under the same paths. Diffs, pauses and cold boots need
//! the old ones. The pool therefore links the files of an installed template into a directory that is named by the
//! checksum of the manifest, which contains the checksums of the other files, and uses only these links. They take no
//! space until the template is replaced. If the state directory is on another file system, the template is used in
//! place.

use std::{
    collections::BTreeSet,
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use model::{MANIFEST_NAME, is_sha256, template_file};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    durable::{
        DRAFT, link_or_copy, name_content, private_dir, read_bounded, remove_dir, sync_dir,
        sync_files,
    },
    host,
    manifest::{Base, MAX_FILE, Manifest},
};

pub const ROOT: &str = "root";
const KERNEL: &str = "vmlinux";
const INITRD: &str = "initramfs.cpio";
/// The files from which a template boots, its root image first.
pub const GUEST: [&str; 3] = [ROOT, KERNEL, INITRD];
/// The files of a template that clones need. Warm-up requests are read from the installed directory instead.
pub const FILES: [&str; 5] = [
    MANIFEST_NAME,
    template_file::STATE,
    template_file::MEMORY,
    template_file::LAYER,
    template_file::WORKING_SET,
];

/// The files from which a sandbox boots when its memory was not kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootFiles {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub root: PathBuf,
}

impl BootFiles {
    #[must_use]
    pub fn exist(&self) -> bool {
        self.paths().iter().all(|file| file.is_file())
    }

    #[must_use]
    pub fn paths(&self) -> [PathBuf; 3] {
        [self.kernel.clone(), self.initrd.clone(), self.root.clone()]
    }
}

/// The directory `<state>/images`.
#[derive(Clone, Debug, Default)]
pub struct Images(PathBuf);

impl Images {
    /// Creates the directory, and removes directories that a killed server did not complete.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be created or read.
    pub fn open(dir: &Path) -> io::Result<Self> {
        private_dir(dir)?;
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(DRAFT) {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(Self(dir.canonicalize()?))
    }

    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// Links the files of the template in `dir`, and returns the directory of the links. If the template is already
    /// linked, only returns the directory.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::CrossesDevices`] if `dir` is on another file system, and an error if a file is missing,
    /// or the length of the root image differs from the manifest.
    pub fn keep(&self, dir: &Path, manifest: &Manifest) -> io::Result<PathBuf> {
        let sum = sum_of_manifest(dir)?;
        let place = self.0.join(&sum);
        if place.is_dir() {
            return Ok(place);
        }
        // Checked first, to avoid useless writes at every start.
        if fs::metadata(dir)?.dev() != fs::metadata(&self.0)?.dev() {
            return Err(io::ErrorKind::CrossesDevices.into());
        }
        let draft = self.0.join(format!("{DRAFT}{sum}"));
        DirBuilder::new().mode(0o700).create(&draft)?;
        let linked = link_all(dir, manifest, &draft)
            .and_then(|()| sync_dir(&draft))
            .and_then(|()| name_content(&draft, &place));
        if linked.is_err() {
            let _ = fs::remove_dir_all(&draft);
        }
        linked.map(|()| place)
    }

    /// Puts a root image into a new directory, where it survives a crash of the host, and returns its path. An image
    /// that is already in the directory of images is left there.
    ///
    /// # Errors
    /// Returns an error if the image cannot be read, linked or copied.
    pub(crate) fn add_root(&self, from: &Path) -> io::Result<PathBuf> {
        let real = from.canonicalize()?;
        if real.starts_with(&self.0) {
            return Ok(real);
        }
        let name = format!("{ROOT}-{}", model::hex(&host::random::<16>()?));
        let draft = self.0.join(format!("{DRAFT}{name}"));
        DirBuilder::new().mode(0o700).create(&draft)?;
        let place = self.0.join(name);
        let added = link_or_copy(&real, &draft.join(ROOT))
            .and_then(|()| sync_files(&draft))
            .and_then(|()| fs::rename(&draft, &place))
            .and_then(|()| sync_dir(&self.0));
        if added.is_err() {
            let _ = fs::remove_dir_all(&draft);
        }
        added.map(|()| place.join(ROOT))
    }

    /// Creates the directory in which one template at a time is rebuilt. Its name is short, because it contains
    /// sockets, whose paths have a length limit.
    ///
    /// # Errors
    /// Returns an error if the leftovers of a previous rebuild cannot be removed, or the directory cannot be created.
    pub fn begin_rebuild(&self) -> io::Result<PathBuf> {
        let draft = self.0.join(format!("{DRAFT}rebuild"));
        remove_dir(&draft)?;
        DirBuilder::new().mode(0o700).create(&draft)?;
        Ok(draft)
    }

    /// Moves a rebuilt template to its final directory, where it survives a crash of the host.
    ///
    /// # Errors
    /// Returns an error if the template cannot be synced or moved.
    pub fn publish(&self, template: &Path) -> io::Result<PathBuf> {
        let sum = sum_of_manifest(template)?;
        self.place(template, &sum)
    }

    /// Moves files to the directory `name`, where they survive a crash of the host. Removes them if the directory
    /// exists.
    ///
    /// # Errors
    /// Returns an error if they cannot be synced, moved or removed.
    pub fn place(&self, files: &Path, name: &str) -> io::Result<PathBuf> {
        sync_files(files)?;
        let place = self.0.join(name);
        name_content(files, &place)?;
        Ok(place)
    }

    /// The directories of all complete templates.
    pub fn all(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        entries
            .filter(|entry| !entry.file_name().to_string_lossy().starts_with(DRAFT))
            .map(|entry| entry.path())
            .collect()
    }

    /// The root images. Each has its own directory.
    pub fn roots(&self) -> Vec<PathBuf> {
        let roots = self.all().into_iter().map(|dir| dir.join(ROOT));
        roots.filter(|root| root.is_file()).collect()
    }

    /// Whether `dir` is one of the directories of images.
    pub fn has(&self, dir: &Path) -> bool {
        dir.parent() == Some(self.0.as_path())
    }

    /// The directory of a diff's base: the directory that the diff names, or the links to the same template if the diff
    /// was made before the pool had linked it.
    pub fn base(&self, named: &Base) -> PathBuf {
        let linked = self.0.join(&named.manifest_sha256);
        if !self.has(&named.dir) && is_sha256(&named.manifest_sha256) && linked.is_dir() {
            linked
        } else {
            named.dir.clone()
        }
    }

    /// The root image of the template in `whole`, or of a diff whose base is in `whole`: the link in `whole` if it
    /// exists, otherwise the file that the manifest names.
    pub fn root(&self, whole: &Path, manifest: &Manifest) -> PathBuf {
        if self.has(whole) {
            whole.join(ROOT)
        } else {
            manifest.root.clone()
        }
    }

    /// The files with which a VM boots from this root image. Kernel and initramfs are expected in the same directory.
    pub fn boot_files(root: &Path) -> Option<BootFiles> {
        let guest = root.parent()?;
        Some(BootFiles {
            kernel: guest.join(KERNEL),
            initrd: guest.join(INITRD),
            root: root.to_owned(),
        })
    }

    /// The directories that contain none of the paths in `used`.
    pub fn unused(&self, used: &BTreeSet<PathBuf>) -> Vec<PathBuf> {
        let all = self.all().into_iter();
        all.filter(|dir| !used.iter().any(|path| path.starts_with(dir)))
            .collect()
    }
}

/// SHA-256 of the manifest of the template in `dir`, which identifies the template.
pub fn sum_of_manifest(dir: &Path) -> io::Result<String> {
    let bytes = read_bounded(&dir.join(MANIFEST_NAME), MAX_FILE)?;
    Ok(model::hex(&Sha256::digest(&bytes)))
}

fn link_all(dir: &Path, manifest: &Manifest, to: &Path) -> io::Result<()> {
    for name in FILES {
        match link(&dir.join(name), &to.join(name)) {
            // The template was made without a working set.
            Err(e) if name == template_file::WORKING_SET && e.kind() == io::ErrorKind::NotFound => {
            }
            linked => linked?,
        }
    }
    link_guest(&manifest.root, to)?;
    let root = &manifest.root;
    let (found, wanted) = (fs::metadata(to.join(ROOT))?.len(), manifest.root_sum.bytes);
    if found != wanted {
        let root = root.display();
        let why = format!("{root} has {found} bytes, but the template was made with {wanted}");
        return Err(io::Error::other(why));
    }
    Ok(())
}

/// Links a root image and the kernel and initramfs in the same directory into `to`.
fn link_guest(root: &Path, to: &Path) -> io::Result<()> {
    link(root, &to.join(ROOT))?;
    for name in [KERNEL, INITRD] {
        match link(&root.with_file_name(name), &to.join(name)) {
            // The template cannot boot, for example because it is used in place.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            linked => linked?,
        }
    }
    Ok(())
}

/// The links in `dir` to the root image, the kernel and the initramfs of a template.
pub fn guest_links(dir: &Path) -> [PathBuf; 3] {
    GUEST.map(|name| dir.join(name))
}

/// Links the file at `from`, with symbolic links resolved.
///
/// # Errors
/// Returns an error that names `from`.
pub fn link(from: &Path, to: &Path) -> io::Result<()> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", from.display()));
    fs::hard_link(from.canonicalize().map_err(named)?, to).map_err(named)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::image;

    #[test]
    fn a_template_that_is_replaced_in_place_stays_as_it_was() {
        let root = tempfile::tempdir().unwrap();
        let (dir, guest) = (root.path().join("base"), root.path().join("guest"));
        image(&dir, None);
        fs::create_dir(&guest).unwrap();
        for name in [ROOT, KERNEL, INITRD] {
            fs::write(guest.join(name), "1").unwrap();
        }
        let named = |root: &Path| {
            let path = dir.join(MANIFEST_NAME);
            let text = fs::read_to_string(&path).unwrap();
            let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
            json["root"] = root.to_str().unwrap().into();
            fs::write(&path, json.to_string()).unwrap();
            Manifest::read(&dir).unwrap()
        };
        for name in [
            template_file::STATE,
            template_file::MEMORY,
            template_file::LAYER,
        ] {
            fs::write(dir.join(name), "old").unwrap();
        }
        let manifest = named(&guest.join(ROOT));
        let images = Images::open(&root.path().join("images")).unwrap();
        let kept = images.keep(&dir, &manifest).unwrap();
        assert_eq!(images.keep(&dir, &manifest).unwrap(), kept);
        for place in [&dir, &guest] {
            fs::remove_dir_all(place).unwrap();
        }
        let files = Images::boot_files(&images.root(&kept, &manifest)).unwrap();
        for path in [&files.kernel, &files.initrd, &files.root] {
            assert_eq!(fs::read(path).unwrap(), b"1");
        }
        assert_eq!(fs::read(kept.join(template_file::MEMORY)).unwrap(), b"old");

        // A diff made before the pool had linked the template names the directory where it was installed.
        let base = |dir: &Path, sum: &str| Base {
            dir: dir.to_owned(),
            manifest_sha256: sum.to_owned(),
        };
        let sum = kept.file_name().unwrap().to_str().unwrap();
        assert_eq!(images.base(&base(&dir, sum)), kept);
        assert_eq!(images.base(&base(&dir, "../..")), dir);
        assert_eq!(images.base(&base(&kept, &"0".repeat(64))), kept);

        assert!(images.unused(&[kept.join(KERNEL)].into()).is_empty());
        assert_eq!(images.unused(&BTreeSet::new()), [kept]);
    }

    #[test]
    fn a_root_image_stays_when_its_file_is_removed_and_goes_when_nothing_uses_it() {
        let root = tempfile::tempdir().unwrap();
        let images = Images::open(&root.path().join("images")).unwrap();
        let file = root.path().join("any.erofs");
        fs::write(&file, "image").unwrap();
        let added = images.add_root(&file).unwrap();
        fs::remove_file(&file).unwrap();
        assert_eq!(fs::read(&added).unwrap(), b"image");
        assert_eq!(images.add_root(&added).unwrap(), added);
        assert!(images.add_root(&file).is_err());
        let images = Images::open(images.dir()).unwrap();
        assert!(images.unused(&[added.clone()].into()).is_empty());
        assert_eq!(images.unused(&BTreeSet::new()), [added.parent().unwrap()]);
    }
}
