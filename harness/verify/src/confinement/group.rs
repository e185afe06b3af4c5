//! A cgroup for the VMM under test, which the VMM must not be able to leave or change.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Mount points of a cgroup hierarchy: version 2, or the pids controller of version 1.
const HIERARCHIES: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/pids"];
const PROCESSES: &str = "cgroup.procs";
/// Limit files that only root may change. Every hierarchy has at least one of them.
const LIMITS: [&str; 2] = ["pids.max", "cgroup.max.descendants"];
const LIMIT: &str = "1000";

/// A cgroup. Dropping it removes the cgroup, so all its processes must have ended.
#[derive(Debug)]
pub(super) struct Group {
    hierarchy: PathBuf,
    pub(super) dir: PathBuf,
}

impl Group {
    pub(super) fn make() -> io::Result<Self> {
        let is_hierarchy = |path: &&Path| path.join(PROCESSES).exists();
        let hierarchy = HIERARCHIES.iter().map(Path::new).find(is_hierarchy);
        let hierarchy =
            hierarchy.ok_or_else(|| io::Error::other("no cgroup hierarchy is mounted"))?;
        let dir = hierarchy.join(format!("cube-confinement-{}", std::process::id()));
        fs::create_dir(&dir)?;
        Ok(Self {
            hierarchy: hierarchy.to_owned(),
            dir,
        })
    }

    /// Moves a process into the cgroup.
    pub(super) fn add(&self, pid: u32) -> io::Result<()> {
        fs::write(self.dir.join(PROCESSES), pid.to_string())
    }

    /// Whether the cgroup contains a process.
    pub(super) fn contains(&self, pid: u32) -> io::Result<bool> {
        let text = fs::read_to_string(self.dir.join(PROCESSES))?;
        Ok(text.lines().any(|line| line == pid.to_string()))
    }

    /// The process list of the root cgroup: a process whose id is written to it leaves this cgroup.
    pub(super) fn root_processes(&self) -> PathBuf {
        self.hierarchy.join(PROCESSES)
    }

    /// File with the limit of the cgroup.
    pub(super) fn limit(&self) -> io::Result<PathBuf> {
        let paths = LIMITS.map(|name| self.dir.join(name));
        let found = paths.into_iter().find(|path| path.exists());
        found.ok_or_else(|| io::Error::other("the cgroup has no limit file"))
    }

    /// Whether the limit is unchanged.
    pub(super) fn is_limited(&self) -> io::Result<bool> {
        Ok(fs::read_to_string(self.limit()?)?.trim() == LIMIT)
    }

    /// Path of the inner cgroup that an attempt tries to create.
    pub(super) fn inner(&self) -> PathBuf {
        self.dir.join("inner")
    }

    /// Restores the limit and removes the inner cgroup.
    pub(super) fn reset(&self) -> io::Result<()> {
        if self.inner().exists() {
            fs::remove_dir(self.inner())?;
        }
        fs::write(self.limit()?, LIMIT)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // If this fails, an empty cgroup remains, which costs nothing.
        let _ = fs::remove_dir(self.inner());
        let _ = fs::remove_dir(&self.dir);
    }
}
