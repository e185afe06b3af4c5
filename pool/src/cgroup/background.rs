//! The cgroup of programs that the server runs in the background, `cube-<tag>-server-<pid>-background`: they convert
//! and hash images. It is a sibling of the pool's group, because weights only apply among children of the same group.
//! In version 2, the server's group as a whole has the weight of all sandboxes, whatever the niceness of its processes.

use std::{fs, io, path::PathBuf};

use super::{
    BACKGROUND_WEIGHT, Controller, Groups, Hierarchy, SHARES, Version, WEIGHT, make, remove_group,
    server::own_name,
};

impl Groups {
    /// Creates the group. `memory` limits the memory of its programs, in bytes. In version 1 it has no memory limit,
    /// and the programs stay in the server's group for memory. Returns the file `cgroup.procs`, or `None` if the host
    /// has no controller for CPU time, or the group cannot be made and [`crate::MissingLimits::Allow`] is set.
    ///
    /// # Errors
    /// Returns an error if the group cannot be created or set up, and [`crate::MissingLimits::Refuse`] is set.
    pub(crate) fn open_background(&self, memory: Option<u64>) -> io::Result<Option<PathBuf>> {
        let (Some(h), Some(group)) = (self.with(Controller::Cpu), self.background_group()) else {
            return Ok(None);
        };
        self.held(&group, make(&group))?;
        let (file, value) = low(h.version);
        self.held(&group.join(file), fs::write(group.join(file), value))?;
        let memory = memory.filter(|_| h.controllers.contains(&Controller::Memory));
        if let (Version::Two, Some(bytes)) = (h.version, memory) {
            for (file, value) in [("memory.swap.max", 0), ("memory.max", bytes)] {
                let file = group.join(file);
                self.held(&file, fs::write(&file, value.to_string()))?;
            }
        }
        Ok(group.is_dir().then(|| group.join("cgroup.procs")))
    }

    /// Removes the group. If it still contains a program, the next server removes it.
    pub(super) fn close_background(&self) {
        if let Some(Err(error)) = self.background_group().map(|group| remove_group(&group)) {
            tracing::warn!(%error, "cannot remove the cgroup of background programs");
        }
    }

    pub(super) fn background_group(&self) -> Option<PathBuf> {
        let h: &Hierarchy = self.with(Controller::Cpu)?;
        Some(
            h.group
                .with_file_name(format!("{}-background", own_name(h)?)),
        )
    }
}

/// A tenth of the weight of all sandboxes together. `cpu.idle` would leave no CPU time on a busy host, although users
/// wait for images.
fn low(version: Version) -> (&'static str, String) {
    let weight = u64::from(BACKGROUND_WEIGHT);
    match version {
        Version::One => ("cpu.shares", (weight * SHARES / WEIGHT).to_string()),
        Version::Two => ("cpu.weight", weight.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::groups;
    use crate::{cgroup::FormerServers, config::MissingLimits};

    use super::*;

    #[test]
    fn the_group_of_the_background_is_beside_the_pools_and_has_a_low_weight() {
        for (version, weight, value, memory) in [
            (Version::One, "cpu.shares", "102", None),
            (Version::Two, "cpu.weight", "10", Some("7")),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut groups = groups(version);
            groups.hierarchies[0].group = dir.path().join("cube-a");
            let own = format!("cube-a-server-{}-background", std::process::id());
            let own = dir.path().join(own);
            let read = |file: &str| fs::read_to_string(own.join(file)).ok();
            let procs = groups.open_background(Some(7)).unwrap();
            assert_eq!(procs, Some(own.join("cgroup.procs")));
            assert_eq!(read(weight).as_deref(), Some(value));
            assert_eq!(read("memory.max").as_deref(), memory);
            // The group of a previous server is removed, and this server's remains.
            let former = dir.path().join("cube-a-server-1-background");
            fs::create_dir(&former).unwrap();
            assert_eq!(groups.remove_former_servers(), FormerServers::Gone);
            assert!(!former.exists() && own.exists());
            // A directory in place of the file stands for a kernel that rejects the setting.
            fs::remove_dir_all(&own).unwrap();
            fs::create_dir_all(own.join(weight)).unwrap();
            let why = groups.open_background(None).unwrap_err().to_string();
            assert!(why.contains(weight), "{why}");
            groups.missing = MissingLimits::Allow;
            assert!(groups.open_background(None).unwrap().is_some());
            groups.hierarchies.clear();
            assert_eq!(groups.open_background(None).unwrap(), None);
        }
    }
}
