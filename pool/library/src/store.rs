//! The files that a template may name. The VMM that wrote a manifest may have been compromised by its guest. The files
//! that a manifest names are therefore opened only if their real paths, with symbolic links resolved, are below the
//! server's configured directories or a directory that a caller added as a template.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{images::Images, manifest::Manifest};

/// Directories of templates and of the images that templates start from.
#[derive(Clone, Debug, Default)]
pub struct Store {
    /// Real paths of the directories, with symbolic links resolved.
    roots: Vec<PathBuf>,
    images: Images,
}

/// A snapshot whose files are in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The real directory of the snapshot, with symbolic links resolved.
    pub dir: PathBuf,
    pub manifest: Manifest,
    /// The directory of the base, if the snapshot is a diff.
    pub base: Option<PathBuf>,
    pub root: PathBuf,
}

impl Store {
    /// Makes a store of these directories.
    ///
    /// # Errors
    /// Returns an error if a directory does not exist.
    pub fn new<'a>(images: Images, dirs: impl IntoIterator<Item = &'a Path>) -> io::Result<Self> {
        let mut store = Self {
            roots: vec![images.dir().to_owned()],
            images,
        };
        for dir in dirs {
            let named = |e: io::Error| io::Error::other(format!("{}: {e}", dir.display()));
            store.roots.push(dir.canonicalize().map_err(named)?);
        }
        Ok(store)
    }

    /// Returns a copy of the store with one more directory. If `dir` does not exist, it is ignored.
    pub fn and(&self, dir: &Path) -> Self {
        let mut roots = self.roots.clone();
        roots.extend(dir.canonicalize());
        Self {
            roots,
            images: self.images.clone(),
        }
    }

    /// Returns the real path of a file, with symbolic links resolved.
    ///
    /// # Errors
    /// Returns a human-readable message if the file does not exist or is outside the store.
    pub fn admit(&self, path: &Path) -> Result<PathBuf, String> {
        let real = path
            .canonicalize()
            .map_err(|e| format!("{}: {e}", path.display()))?;
        if self.roots.iter().any(|root| real.starts_with(root)) {
            Ok(real)
        } else {
            Err(format!(
                "{} is outside the template store (add its directory with --images)",
                real.display()
            ))
        }
    }

    /// Checks that the files of a snapshot, its root image and its base are in the store, and resolves them.
    ///
    /// # Errors
    /// Returns a human-readable message if one of these files does not exist or is outside the store, or if the
    /// directory or the manifest cannot be read.
    pub fn check(&self, dir: &Path) -> Result<Checked, String> {
        let dir = self.admit(dir)?;
        let failed = |e: io::Error| format!("{}: {e}", dir.display());
        for entry in fs::read_dir(&dir).map_err(failed)? {
            self.admit(&entry.map_err(failed)?.path())?;
        }
        let manifest = Manifest::read(&dir)?;
        let base = manifest.base.as_ref().map(|base| self.images.base(base));
        let base = base.map(|base| self.admit(&base)).transpose()?;
        let whole = base.as_ref().unwrap_or(&dir);
        let root = self.admit(&self.images.root(whole, &manifest))?;
        Ok(Checked {
            dir,
            manifest,
            base,
            root,
        })
    }

    /// Links an installed template into the directory of images; see [`Images::keep`].
    ///
    /// # Errors
    /// Returns the errors of [`Images::keep`].
    pub fn keep(&self, checked: &Checked) -> io::Result<PathBuf> {
        self.images.keep(&checked.dir, &checked.manifest)
    }

    pub fn images(&self) -> &Images {
        &self.images
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_file_outside_the_store_is_refused_under_any_name() {
        let root = tempfile::tempdir().unwrap();
        let (inside, outside) = (root.path().join("store"), root.path().join("other"));
        for dir in [&inside, &outside] {
            fs::create_dir(dir).unwrap();
            fs::write(dir.join("image"), "").unwrap();
        }
        symlink(outside.join("image"), inside.join("out")).unwrap();
        symlink("image", inside.join("in")).unwrap();
        let images = || Images::open(&root.path().join("images")).unwrap();
        let store = Store::new(images(), [inside.as_path()]).unwrap();
        assert!(store.admit(&inside.join("image")).is_ok());
        assert_eq!(
            store.admit(&inside.join("in")),
            store.admit(&inside.join("image"))
        );
        for wrong in ["out", "../other/image", "none", ".."] {
            assert!(store.admit(&inside.join(wrong)).is_err(), "{wrong}");
        }
        assert!(store.admit(Path::new("/etc/shadow")).is_err());
        assert!(store.and(&outside).admit(&inside.join("out")).is_ok());
        assert!(Store::new(images(), [Path::new("/no/such/store")]).is_err());
    }
}
