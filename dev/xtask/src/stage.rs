//! Built things and when they are fresh.
//!
//! A [`Recipe`] lists the inputs of one built thing; their hash is its key. The thing is made in a
//! directory of `tmp/` and swapped in by one rename, with [`RECORD_NAME`] inside, so that a directory
//! under its final name is always whole and always says what it was made from. One version is kept.
//!
//! What is made from another stage takes that stage's *digest*, a hash over its files as they came out:
//! the same inputs can give other files on another day (the archive moves), and other inputs the same.

use std::{
    fs,
    io::Read,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, RenameFlags, renameat2},
    unistd::{Whence, lseek},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::progress::Progress;

/// Name of the record in a stage's directory.
const RECORD_NAME: &str = "stage.json";
/// Unit in which a sparse file is looked at.
const BLOCK: usize = 64 << 10;

/// What a thing is made from.
#[derive(Debug, Clone)]
pub(crate) struct Recipe {
    name: &'static str,
    inputs: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    key: String,
    digest: String,
    /// One line per input, for a person who asks why something was built anew.
    inputs: Vec<String>,
    seconds: f64,
}

/// A thing that stands ready.
#[derive(Debug, Clone)]
pub(crate) struct Built {
    pub(crate) dir: PathBuf,
    /// Hash over the names and contents of its files.
    pub(crate) digest: String,
}

/// The place where built things lie.
#[derive(Debug)]
pub(crate) struct Store {
    root: PathBuf,
    progress: Progress,
}

impl Recipe {
    pub(crate) fn new(name: &'static str) -> Self {
        Self {
            name,
            inputs: Vec::new(),
        }
    }

    /// An input that is a text.
    pub(crate) fn text(mut self, label: &str, text: &str) -> Self {
        self.inputs.push(format!("{label}: {text:?}"));
        self
    }

    /// An input that is a file or a directory tree, by content.
    pub(crate) fn path(self, label: &str, path: &Path) -> Result<Self> {
        let sum = digest(path)?;
        Ok(self.text(label, &sum))
    }

    /// An input that another stage made.
    pub(crate) fn stage(self, label: &str, built: &Built) -> Self {
        self.text(label, &built.digest)
    }

    fn key(&self) -> String {
        let mut hash = Sha256::new();
        for part in std::iter::once(self.name).chain(self.inputs.iter().map(String::as_str)) {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hex(&hash.finalize())
    }
}

impl Store {
    /// Opens the store and removes what an interrupted run left in `tmp/`. The caller holds the lock.
    pub(crate) fn open(root: &Path, progress: Progress) -> Result<Self> {
        let store = Self {
            root: root.to_owned(),
            progress,
        };
        let tmp = store.tmp();
        crate::mounts::detach_below(&tmp)?;
        remove_tree(&tmp)?;
        fs::create_dir_all(&tmp).with_context(|| format!("cannot create {}", tmp.display()))?;
        Ok(store)
    }

    fn tmp(&self) -> PathBuf {
        self.root.join("tmp")
    }

    /// The thing at `place` (relative to the store) if it was made from exactly this recipe.
    pub(crate) fn fresh(&self, recipe: &Recipe, place: &str) -> Option<Built> {
        let dir = self.root.join(place);
        let record = fs::read(dir.join(RECORD_NAME)).ok()?;
        let record: Record = serde_json::from_slice(&record).ok()?;
        (record.key == recipe.key()).then_some(Built {
            dir,
            digest: record.digest,
        })
    }

    /// Removes the thing at `place`, so that it is made anew.
    pub(crate) fn forget(&self, place: &str) -> Result<()> {
        remove_tree(&self.root.join(place))
    }

    /// Returns the thing at `place`, made by `make` if it is not fresh. `make` gets an empty directory
    /// and the log of its stage.
    pub(crate) fn build(
        &self,
        recipe: &Recipe,
        place: &str,
        make: impl FnOnce(&Path, &Path) -> Result<()>,
    ) -> Result<Built> {
        if let Some(built) = self.fresh(recipe, place) {
            self.progress.cached(recipe.name);
            return Ok(built);
        }
        let log = self.log(recipe.name)?;
        let started = Instant::now();
        let built = self.progress.stage(recipe.name, || {
            let out = self.tmp().join(recipe.name);
            fs::create_dir_all(&out)?;
            make(&out, &log)?;
            self.install(recipe, &out, &self.root.join(place), started)
        });
        built.with_context(|| format!("stage {} failed, its log is {}", recipe.name, log.display()))
    }

    /// An empty log file for a stage.
    pub(crate) fn log(&self, name: &str) -> Result<PathBuf> {
        let dir = self.root.join("log");
        fs::create_dir_all(&dir)?;
        let log = dir.join(format!("{name}.log"));
        fs::write(&log, "").with_context(|| format!("cannot write {}", log.display()))?;
        Ok(log)
    }

    fn install(&self, recipe: &Recipe, out: &Path, to: &Path, started: Instant) -> Result<Built> {
        let record = Record {
            key: recipe.key(),
            digest: digest(out)?,
            inputs: recipe.inputs.clone(),
            seconds: started.elapsed().as_secs_f64(),
        };
        fs::write(
            out.join(RECORD_NAME),
            serde_json::to_string_pretty(&record)?,
        )?;
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        swap_in(out, to)?;
        Ok(Built {
            dir: to.to_owned(),
            digest: record.digest,
        })
    }
}

/// Puts `out` at `to` in one step; what stood there is removed afterwards.
fn swap_in(out: &Path, to: &Path) -> Result<()> {
    let failed = || format!("cannot rename {} to {}", out.display(), to.display());
    if !to.exists() {
        return fs::rename(out, to).with_context(failed);
    }
    renameat2(AT_FDCWD, out, AT_FDCWD, to, RenameFlags::RENAME_EXCHANGE).with_context(failed)?;
    remove_tree(out)
}

fn remove_tree(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// SHA-256 of a file in hex.
pub(crate) fn file_sum(path: &Path) -> Result<String> {
    let failed = || format!("cannot read {}", path.display());
    let mut file = fs::File::open(path).with_context(failed)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer).with_context(failed)?;
        if n == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&buffer[..n]);
    }
}

/// A hash over the places and contents of a file's blocks that are not zero. A layer has gigabytes of
/// zeros in holes, and hashing those would take longer than all the rest.
pub(crate) fn sparse_sum(path: &Path) -> Result<String> {
    let failed = || format!("cannot read {}", path.display());
    let file = fs::File::open(path).with_context(failed)?;
    let length = file.metadata().with_context(failed)?.len();
    let mut hash = Sha256::new();
    hash.update(length.to_le_bytes());
    let mut block = vec![0; BLOCK];
    let mut at = 0;
    while let Some(data) = next_data(&file, at).with_context(failed)? {
        at = data - data % BLOCK as u64;
        let n = file.read_at(&mut block, at).with_context(failed)?;
        if block[..n].iter().any(|byte| *byte != 0) {
            hash.update(at.to_le_bytes());
            hash.update(&block[..n]);
        }
        at += BLOCK as u64;
    }
    Ok(hex(&hash.finalize()))
}

/// Where the next data at or after an offset is; `None` behind the last.
fn next_data(file: &fs::File, at: u64) -> Result<Option<u64>> {
    match lseek(file, i64::try_from(at)?, Whence::SeekData) {
        Ok(data) => Ok(Some(u64::try_from(data)?)),
        Err(Errno::ENXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A hash over a file, or over the names, kinds and contents below a directory.
fn digest(path: &Path) -> Result<String> {
    let mut entries = Vec::new();
    walk(path, Path::new(""), &mut entries)?;
    entries.sort();
    Ok(hex(&Sha256::digest(entries.concat())))
}

fn walk(path: &Path, name: &Path, entries: &mut Vec<String>) -> Result<()> {
    let failed = || format!("cannot read {}", path.display());
    let kind = fs::symlink_metadata(path).with_context(failed)?.file_type();
    let what = if kind.is_symlink() {
        format!(
            "link {}",
            fs::read_link(path).with_context(failed)?.display()
        )
    } else if kind.is_dir() {
        for entry in fs::read_dir(path).with_context(failed)? {
            let entry = entry.with_context(failed)?;
            walk(&entry.path(), &name.join(entry.file_name()), entries)?;
        }
        "dir".to_owned()
    } else {
        ensure!(kind.is_file(), "{} is a special file", path.display());
        sparse_sum(path)?
    };
    entries.push(format!("{} {what}\n", name.display()));
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn store(dir: &Path) -> Store {
        Store::open(dir, Progress::silent()).unwrap()
    }

    #[test]
    fn a_thing_is_made_once_and_again_when_an_input_changes() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let made = Cell::new(0);
        let build = |input: &str| {
            store
                .build(
                    &Recipe::new("t").text("input", input),
                    "stages/t",
                    |out, _| {
                        made.set(made.get() + 1);
                        Ok(fs::write(out.join("file"), input)?)
                    },
                )
                .unwrap()
        };
        let first = build("a");
        assert_eq!(build("a").digest, first.digest);
        assert_eq!(made.get(), 1);
        assert_ne!(build("b").digest, first.digest);
        assert_eq!(fs::read(first.dir.join("file")).unwrap(), b"b");
        assert_eq!(made.get(), 2);
    }

    #[test]
    fn a_failure_leaves_the_old_thing_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (
            Recipe::new("t").text("v", "1"),
            Recipe::new("t").text("v", "2"),
        );
        let first = store(dir.path());
        first
            .build(&old, "t", |out, _| Ok(fs::write(out.join("f"), "old")?))
            .unwrap();
        let failed = first.build(&new, "t", |out, _| {
            fs::write(out.join("f"), "half")?;
            anyhow::bail!("stop")
        });
        assert!(failed.is_err());
        assert!(first.fresh(&old, "t").is_some());
        assert!(first.fresh(&new, "t").is_none());
        assert_eq!(fs::read(dir.path().join("t/f")).unwrap(), b"old");
        let again = store(dir.path());
        assert_eq!(fs::read_dir(again.tmp()).unwrap().count(), 0);
    }

    #[test]
    fn a_damaged_record_is_not_fresh() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let recipe = Recipe::new("t");
        store.build(&recipe, "t", |_, _| Ok(())).unwrap();
        fs::write(dir.path().join("t").join(RECORD_NAME), "{").unwrap();
        assert!(store.fresh(&recipe, "t").is_none());
    }

    #[test]
    fn inputs_do_not_run_into_each_other() {
        let a = Recipe::new("t").text("x", "1").text("y", "2");
        let b = Recipe::new("t").text("x", "1\ny: 2");
        assert_ne!(a.key(), b.key());
        assert_ne!(Recipe::new("t").key(), Recipe::new("u").key());
    }

    #[test]
    fn a_sparse_sum_sees_data_and_length_but_not_holes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let sum = || sparse_sum(file.path()).unwrap();
        file.as_file().set_len(1 << 30).unwrap();
        let empty = sum();
        file.as_file().write_at(&[0; 4096], 1 << 20).unwrap();
        assert_eq!(sum(), empty);
        file.as_file().write_at(b"x", 5 << 20).unwrap();
        let one = sum();
        file.as_file().set_len(1 << 31).unwrap();
        let longer = sum();
        assert!(empty != one && one != longer);
    }

    #[test]
    fn a_digest_sees_names_links_and_contents() {
        let dir = tempfile::tempdir().unwrap();
        let all = || digest(dir.path()).unwrap();
        let mut seen = vec![all()];
        fs::write(dir.path().join("a"), "1").unwrap();
        seen.push(all());
        fs::rename(dir.path().join("a"), dir.path().join("b")).unwrap();
        seen.push(all());
        std::os::unix::fs::symlink("b", dir.path().join("l")).unwrap();
        seen.push(all());
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 4);
    }
}
