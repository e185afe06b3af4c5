//! Cache of hashes of immutable files, so that a large file is read once: root images are compared at every copy, and
//! bases are offered with every sandbox.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use super::{CHUNK, list::FileSum};
use tasks::blocking;

/// Maximum number of cached chunks: 32 bytes of memory each, for 512 GiB of files.
const MOST_CHUNKS: usize = 1 << 17;

/// Identifies a file, to find out whether it is the one that was hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

/// The hashes of the most recently used files. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sums(Arc<Mutex<VecDeque<(Identity, FileSum)>>>);

impl Sums {
    /// Like [`FileSum::of`], for a file that is not written any more.
    ///
    /// # Errors
    /// Returns the errors of [`FileSum::of`].
    pub(crate) fn of(&self, name: &str, file: &File) -> io::Result<FileSum> {
        let meta = file.metadata()?;
        let identity = Identity {
            device: meta.dev(),
            inode: meta.ino(),
            bytes: meta.len(),
            changed: (meta.mtime(), meta.mtime_nsec()),
        };
        if let Some(sum) = self.find(identity) {
            return Ok(FileSum {
                name: name.to_owned(),
                ..sum
            });
        }
        let sum = FileSum::of(name, file)?;
        if sum.bytes >= CHUNK {
            self.keep(identity, sum.clone());
        }
        Ok(sum)
    }

    /// Finds, among immutable files, one with the wanted content. Files of another length are not read, and none is
    /// read twice.
    pub(crate) async fn same(
        &self,
        paths: impl IntoIterator<Item = PathBuf>,
        wanted: &FileSum,
    ) -> Option<PathBuf> {
        let (sums, wanted) = (self.clone(), wanted.clone());
        let paths: Vec<_> = paths.into_iter().collect();
        let has_content = move |path: &PathBuf| -> io::Result<bool> {
            let file = File::open(path)?;
            let is_long = file.metadata()?.len() == wanted.bytes;
            Ok(is_long && sums.of(&wanted.name, &file)?.content() == wanted.content())
        };
        let find = move || {
            let mut paths = paths.into_iter();
            Ok(paths.find(|path| has_content(path).unwrap_or(false)))
        };
        blocking(find).await.ok().flatten()
    }

    fn find(&self, identity: Identity) -> Option<FileSum> {
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = sums.iter().position(|(other, _)| *other == identity)?;
        let found = sums.remove(at)?;
        sums.push_back(found.clone());
        Some(found.1)
    }

    fn keep(&self, identity: Identity, sum: FileSum) {
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sums.retain(|(other, _)| *other != identity);
        sums.push_back((identity, sum));
        let count = |sums: &VecDeque<(Identity, FileSum)>| -> usize {
            sums.iter().map(|(_, sum)| sum.chunks.len()).sum()
        };
        while sums.len() > 1 && count(&sums) > MOST_CHUNKS {
            sums.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::fs::FileExt};

    use super::*;

    #[test]
    fn a_file_is_summed_again_only_if_it_is_another_one() {
        let sums = Sums::default();
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * CHUNK).unwrap();
        let before = sums.of("a", &file).unwrap();
        // The cache does not notice a write that keeps the modification time, so this hash comes from memory.
        let time = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(b"x", 0).unwrap();
        file.set_modified(time).unwrap();
        let again = sums.of("b", &file).unwrap();
        assert_eq!((again.content(), &*again.name), (before.content(), "b"));
        let changed = |file: &File| file.set_modified(time + std::time::Duration::from_secs(1));
        changed(&file).unwrap();
        assert_ne!(sums.of("a", &file).unwrap().content(), before.content());
    }
}
