//! Build stages: each output is rebuilt only when one of its inputs changes.
//!
//! A [`Recipe`] lists the inputs of a stage; their hash is the stage's key. The output is built in a directory of
//! `tmp/` together with [`RECORD_NAME`], which lists its inputs, and renamed to its final name when it is complete. A
//! directory under a final name is therefore always complete. One version of each output is kept.
//!
//! A stage that uses another stage's output has that stage's *digest* as an input: a hash over the output files.
//! The key would not be enough, because the same inputs can give different files on another day, when the package
//! archive has changed.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use template::sparse_sum;

use crate::progress::Progress;

/// Name of the record in a stage's directory.
pub(crate) const RECORD_NAME: &str = "stage.json";

/// The name and the inputs of a stage.
#[derive(Debug, Clone)]
pub(crate) struct Recipe {
    name: &'static str,
    inputs: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    key: String,
    digest: String,
    /// One line per input. Not read by code, but shows why a stage was rebuilt.
    inputs: Vec<String>,
    seconds: f64,
}

/// The output of a stage.
#[derive(Debug, Clone)]
pub(crate) struct Built {
    pub(crate) dir: PathBuf,
    /// Hash over the names and contents of its files.
    pub(crate) digest: String,
}

/// The directory that holds all outputs, logs and temporary files.
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

    /// Adds a text as an input.
    pub(crate) fn text(mut self, label: &str, text: &str) -> Self {
        self.inputs.push(format!("{label}: {text:?}"));
        self
    }

    /// Adds the content of a file or directory tree as an input.
    pub(crate) fn path(self, label: &str, path: &Path) -> Result<Self> {
        let sum = digest(path)?;
        Ok(self.text(label, &sum))
    }

    /// Adds the output of another stage as an input.
    pub(crate) fn stage(self, label: &str, built: &Built) -> Self {
        self.text(label, &built.digest)
    }

    fn key(&self) -> String {
        let mut hash = Sha256::new();
        for part in std::iter::once(self.name).chain(self.inputs.iter().map(String::as_str)) {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        model::hex(&hash.finalize())
    }
}

impl Store {
    /// Opens the store and empties `tmp/`, where an interrupted run may have left files. The caller must hold the lock.
    pub(crate) fn open(root: &Path, progress: Progress) -> Result<Self> {
        let store = Self {
            root: root.to_owned(),
            progress,
        };
        let tmp = store.tmp();
        crate::stages::mounts::detach_below(&tmp)?;
        remove_tree(&tmp)?;
        fs::create_dir_all(&tmp).with_context(|| format!("cannot create {}", tmp.display()))?;
        Ok(store)
    }

    fn tmp(&self) -> PathBuf {
        self.root.join("tmp")
    }

    /// The output at `place`, a path relative to the store, if it was built from exactly these inputs.
    pub(crate) fn fresh(&self, recipe: &Recipe, place: &str) -> Option<Built> {
        let dir = self.root.join(place);
        let record = fs::read(dir.join(RECORD_NAME)).ok()?;
        let record: Record = serde_json::from_slice(&record).ok()?;
        (record.key == recipe.key()).then_some(Built {
            dir,
            digest: record.digest,
        })
    }

    /// Removes the output at `place`, so that the next build starts from scratch.
    pub(crate) fn forget(&self, place: &str) -> Result<()> {
        remove_tree(&self.root.join(place))
    }

    /// Returns the output at `place`. If it is not up to date, `make` builds it first; its arguments are an empty
    /// directory and the path of the stage's log.
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
        built.with_context(|| format!("stage {} failed (log: {})", recipe.name, log.display()))
    }

    /// Creates an empty log file for a stage.
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

/// Renames `out` to `to` atomically. If `to` exists, the two are exchanged and the old directory is removed.
fn swap_in(out: &Path, to: &Path) -> Result<()> {
    let failed = || format!("cannot rename {} to {}", out.display(), to.display());
    if !to.exists() {
        return fs::rename(out, to).with_context(failed);
    }
    renameat2(AT_FDCWD, out, AT_FDCWD, to, RenameFlags::RENAME_EXCHANGE).with_context(failed)?;
    remove_tree(out)
}

pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// A hash over a file, or over the names, kinds, contents and executable bits of everything below a directory. The
/// other permissions depend on the umask.
fn digest(path: &Path) -> Result<String> {
    let mut entries = Vec::new();
    walk(path, Path::new(""), &mut entries)?;
    entries.sort();
    Ok(model::hex(&Sha256::digest(entries.concat())))
}

fn walk(path: &Path, name: &Path, entries: &mut Vec<String>) -> Result<()> {
    let failed = || format!("cannot read {}", path.display());
    let meta = fs::symlink_metadata(path).with_context(failed)?;
    let kind = meta.file_type();
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
        // The executable bit is part of the output. The other bits depend on the umask.
        let executable = meta.permissions().mode() & 0o100 != 0;
        format!(
            "{} {}",
            if executable { "x" } else { "-" },
            sparse_sum(path)?
        )
    };
    entries.push(format!("{} {what}\n", name.display()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn store(dir: &Path) -> Store {
        Store::open(dir, Progress::silent()).unwrap()
    }

    #[test]
    fn a_stage_is_rebuilt_only_when_an_input_changes() {
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
    fn a_failed_build_leaves_the_previous_output_and_nothing_else() {
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
    fn an_output_with_a_damaged_record_is_rebuilt() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let recipe = Recipe::new("t");
        store.build(&recipe, "t", |_, _| Ok(())).unwrap();
        fs::write(dir.path().join("t").join(RECORD_NAME), "{").unwrap();
        assert!(store.fresh(&recipe, "t").is_none());
    }

    #[test]
    fn the_key_separates_inputs_and_stage_names() {
        let a = Recipe::new("t").text("x", "1").text("y", "2");
        let b = Recipe::new("t").text("x", "1\ny: 2");
        assert_ne!(a.key(), b.key());
        assert_ne!(Recipe::new("t").key(), Recipe::new("u").key());
    }

    #[test]
    fn a_digest_depends_on_names_links_contents_and_executable_bits() {
        let dir = tempfile::tempdir().unwrap();
        let all = || digest(dir.path()).unwrap();
        let mut seen = vec![all()];
        fs::write(dir.path().join("a"), "1").unwrap();
        seen.push(all());
        fs::rename(dir.path().join("a"), dir.path().join("b")).unwrap();
        seen.push(all());
        std::os::unix::fs::symlink("b", dir.path().join("l")).unwrap();
        seen.push(all());
        let program = fs::Permissions::from_mode(0o755);
        fs::set_permissions(dir.path().join("b"), program).unwrap();
        seen.push(all());
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 5);
    }
}
