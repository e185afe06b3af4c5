//! Which files a template may name. A manifest is written by whoever made the snapshot, which can be a VMM that a
//! guest has taken over: what it names is opened only below the directories that the server was told to use, with
//! every symbolic link followed first.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use model::TemplateManifest;

use crate::templates::read_manifest;

/// Directories with templates and with the images that they start from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Store {
    /// Without symbolic links.
    roots: Vec<PathBuf>,
}

impl Store {
    /// # Errors
    /// A directory is not there.
    pub(crate) fn new<'a>(dirs: impl IntoIterator<Item = &'a Path>) -> io::Result<Self> {
        let dirs = dirs.into_iter();
        let roots = dirs
            .map(|dir| {
                let named = |e: io::Error| io::Error::other(format!("{}: {e}", dir.display()));
                dir.canonicalize().map_err(named)
            })
            .collect::<io::Result<_>>()?;
        Ok(Self { roots })
    }

    /// The same with one directory more, if that is there.
    pub(crate) fn and(&self, dir: &Path) -> Self {
        let mut roots = self.roots.clone();
        roots.extend(dir.canonicalize());
        Self { roots }
    }

    /// Where a file really is.
    ///
    /// # Errors
    /// It is outside of the store or not there, in words.
    pub(crate) fn admit(&self, path: &Path) -> Result<PathBuf, String> {
        let real = path
            .canonicalize()
            .map_err(|e| format!("{}: {e}", path.display()))?;
        if self.roots.iter().any(|root| real.starts_with(root)) {
            Ok(real)
        } else {
            Err(format!(
                "{} is outside of the template store (name its directory with --images)",
                real.display()
            ))
        }
    }

    /// The manifest of a snapshot whose every file, root image and base lie in the store.
    ///
    /// # Errors
    /// As [`Store::admit`]; or the manifest cannot be read.
    pub(crate) fn check(&self, dir: &Path) -> Result<TemplateManifest, String> {
        let failed = |e: io::Error| format!("{}: {e}", dir.display());
        for entry in fs::read_dir(dir).map_err(failed)? {
            self.admit(&entry.map_err(failed)?.path())?;
        }
        let manifest = read_manifest(dir)?;
        self.admit(&manifest.root)?;
        if let Some(base) = &manifest.base {
            self.admit(&base.dir)?;
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_lies_outside_is_refused_however_it_is_named() {
        let root = tempfile::tempdir().unwrap();
        let (inside, outside) = (root.path().join("store"), root.path().join("other"));
        for dir in [&inside, &outside] {
            fs::create_dir(dir).unwrap();
            fs::write(dir.join("image"), "").unwrap();
        }
        symlink(outside.join("image"), inside.join("out")).unwrap();
        symlink("image", inside.join("in")).unwrap();
        let store = Store::new([inside.as_path()]).unwrap();
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
        assert!(Store::new([Path::new("/no/such/store")]).is_err());
    }
}
