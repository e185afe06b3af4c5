//! The executable of the server under test, which two builds can alternately replace.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::Builds;

/// The executable. Dropping it removes the directory of its copy.
#[derive(Debug)]
pub(super) struct Program {
    path: PathBuf,
    /// Directory of the copy, and the builds. `None`: the program itself is started.
    turns: Option<(PathBuf, Builds)>,
    build: usize,
}

impl Program {
    /// With `builds`, copies the first to a new directory below `dir` that permits execution, and in which the next
    /// build can replace it.
    pub(super) fn install(dir: &Path, program: &Path, builds: Option<&Builds>) -> io::Result<Self> {
        let Some(builds) = builds else {
            return Ok(Self {
                path: program.to_owned(),
                turns: None,
                build: 0,
            });
        };
        let dir = dir.join(format!("restarts-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        let this = Self {
            path: dir.join("cube-api"),
            turns: Some((dir, builds.clone())),
            build: 0,
        };
        this.replace()?;
        Ok(this)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of the build that is installed, 0 or 1.
    pub(super) fn build(&self) -> usize {
        self.build
    }

    /// Installs the other build, as an upgrade does: the old file stays until its last process ends.
    pub(super) fn take_turns(&mut self) -> io::Result<()> {
        if self.turns.is_some() {
            self.build = 1 - self.build;
        }
        self.replace()
    }

    fn replace(&self) -> io::Result<()> {
        let Some((dir, Builds(builds))) = &self.turns else {
            return Ok(());
        };
        let new = dir.join("new");
        fs::copy(&builds[self.build], &new)?;
        fs::rename(&new, &self.path)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some((dir, _)) = &self.turns {
            // The name contains the process id, so a directory that cannot be removed does not affect a later run.
            let _ = fs::remove_dir_all(dir);
        }
    }
}
