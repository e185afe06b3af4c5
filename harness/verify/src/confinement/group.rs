//! A control group that the VMM is put into, to see whether it gets out.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Where a host has a hierarchy: version 2 alone, and one of version 1 beside others.
const HIERARCHIES: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/pids"];
const PROCESSES: &str = "cgroup.procs";
/// A limit of each kind of hierarchy, which root may set.
const LIMITS: [&str; 2] = ["pids.max", "cgroup.max.descendants"];
const LIMIT: &str = "1000";

/// Dropping it removes it; who is in it has to be gone.
#[derive(Debug)]
pub(super) struct Group {
    hierarchy: PathBuf,
    pub(super) dir: PathBuf,
}

impl Group {
    /// Makes it.
    pub(super) fn make() -> io::Result<Self> {
        let is_one = |path: &&Path| path.join(PROCESSES).exists();
        let hierarchy = HIERARCHIES.iter().map(Path::new).find(is_one);
        let hierarchy =
            hierarchy.ok_or_else(|| io::Error::other("no hierarchy of control groups"))?;
        let dir = hierarchy.join(format!("cube-confinement-{}", std::process::id()));
        fs::create_dir(&dir)?;
        Ok(Self {
            hierarchy: hierarchy.to_owned(),
            dir,
        })
    }

    /// A process is in it from now on.
    pub(super) fn take(&self, pid: u32) -> io::Result<()> {
        fs::write(self.dir.join(PROCESSES), pid.to_string())
    }

    /// Whether a process is in it.
    pub(super) fn has(&self, pid: u32) -> io::Result<bool> {
        let text = fs::read_to_string(self.dir.join(PROCESSES))?;
        Ok(text.lines().any(|line| line == pid.to_string()))
    }

    /// Where a process would have to be written for it to be out.
    pub(super) fn way_out(&self) -> PathBuf {
        self.hierarchy.join(PROCESSES)
    }

    /// The file of its limit.
    pub(super) fn limit(&self) -> io::Result<PathBuf> {
        let paths = LIMITS.map(|name| self.dir.join(name));
        let found = paths.into_iter().find(|path| path.exists());
        found.ok_or_else(|| io::Error::other("the control group has no limit"))
    }

    /// Whether its limit is as it was set.
    pub(super) fn is_limited(&self) -> io::Result<bool> {
        Ok(fs::read_to_string(self.limit()?)?.trim() == LIMIT)
    }

    /// The group inside it that an attempt makes.
    pub(super) fn inner(&self) -> PathBuf {
        self.dir.join("inner")
    }

    /// Puts the limit back and removes what an attempt made.
    pub(super) fn reset(&self) -> io::Result<()> {
        if self.inner().exists() {
            fs::remove_dir(self.inner())?;
        }
        fs::write(self.limit()?, LIMIT)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // An empty group that stays costs nothing.
        let _ = fs::remove_dir(self.inner());
        let _ = fs::remove_dir(&self.dir);
    }
}
