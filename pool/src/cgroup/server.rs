//! The server's own cgroup, `cube-<tag>-server-<pid>`, a sibling of the pool's group. It contains the process that
//! opened the pool, and programs that this process starts, such as the egress proxy. A new VMM process is in it from
//! its fork until it enters its VM's group, before it runs a guest. Resources of sandboxes are never charged to the
//! server's group.
//!
//! A killed server leaves its group behind, and the memory of templates that VMMs still map remains charged to it. The
//! next server therefore uses a new group, and removes the old one as soon as it is empty. A predecessor that still
//! finishes connections empties its group when it ends.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{Controller, Groups, Hierarchy, Version, make, remove_group};

const SUFFIX: &str = "-server";

/// Whether there may be groups of previous servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FormerServers {
    Left,
    Gone,
}

impl Groups {
    /// Moves this process into a new group that may use `bytes` of memory and no swap. Does nothing if the host has no
    /// memory controller.
    ///
    /// # Errors
    /// Returns an error if the group cannot be created or entered or its limit cannot be set, and
    /// [`crate::MissingLimits::Refuse`] is set.
    pub(crate) fn enter_as_server(&self, bytes: u64) -> io::Result<()> {
        let Some((version, group)) = self.server_group() else {
            // `Groups::open` has already refused or allowed a missing memory controller.
            return Ok(());
        };
        if let Err(error) = remove_former(&group) {
            tracing::warn!(
                group = %group.display(),
                %error,
                "cannot replace the cgroup of a previous server: reusing it"
            );
        }
        self.held(&group, make(&group))?;
        let (file, value) = match version {
            Version::One => ("memory.swappiness", "0"),
            Version::Two => ("memory.swap.max", "0"),
        };
        self.held(&group.join(file), fs::write(group.join(file), value))?;
        self.limit_server(bytes)?;
        let procs = group.join("cgroup.procs");
        let entered = fs::write(&procs, std::process::id().to_string());
        self.held(&procs, entered)
    }

    /// Changes the limit of the server's group.
    ///
    /// # Errors
    /// Returns an error if the limit cannot be set and [`crate::MissingLimits::Refuse`] is set.
    pub(crate) fn limit_server(&self, bytes: u64) -> io::Result<()> {
        let Some((version, group)) = self.server_group() else {
            return Ok(());
        };
        let file = group.join(version.memory_limit());
        let written = fs::write(&file, bytes.to_string());
        self.held(&file, written)
    }

    /// If this process is in the server's group, moves it to the root group and removes the server's group.
    pub(super) fn leave_as_server(&self) {
        let Some((_, group)) = self.server_group() else {
            return;
        };
        let Some(root) = group.parent().filter(|_| contains_this_process(&group)) else {
            return;
        };
        let left = fs::write(root.join("cgroup.procs"), std::process::id().to_string());
        if let Err(error) = left.and_then(|()| remove_group(&group)) {
            tracing::warn!(group = %group.display(), %error, "cannot remove the server's cgroup");
        }
    }

    /// Removes empty groups of previous servers. The others belong to servers that finish their connections after a
    /// reload.
    pub(crate) fn remove_former_servers(&self) -> FormerServers {
        let mut left = FormerServers::Gone;
        let own = self.background_group();
        let own = [self.server_group().map(|(_, group)| group), own];
        for h in &self.hierarchies {
            let (Some(dir), Some(name)) = (h.group.parent(), prefix(h)) else {
                continue;
            };
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                let path = entry.path();
                let is_server = entry.file_name().to_string_lossy().starts_with(&name);
                if !is_server || own.iter().flatten().any(|own| *own == path) {
                    continue;
                }
                let processes = fs::read_to_string(path.join("cgroup.procs"));
                if processes.is_ok_and(|pids| !pids.is_empty()) {
                    left = FormerServers::Left;
                } else if let Err(error) = remove_group(&path) {
                    tracing::warn!(
                        group = %path.display(),
                        %error,
                        "cannot remove the cgroup of a previous server"
                    );
                }
            }
        }
        left
    }

    /// Version and path of the server's group; `None` if the host has no cgroup controller for memory.
    fn server_group(&self) -> Option<(Version, PathBuf)> {
        let memory = self.with(Controller::Memory)?;
        let name = own_name(memory)?;
        Some((memory.version, memory.group.with_file_name(name)))
    }

    /// The hierarchy with a controller.
    pub(super) fn with(&self, controller: Controller) -> Option<&Hierarchy> {
        let mut all = self.hierarchies.iter();
        all.find(|h| h.controllers.contains(&controller))
    }
}

/// Removes the group that a previous server with this process id left behind. Keeps the group of this process: a server
/// that reopens its pool after a failed reload never left it, and the kernel would only return EBUSY.
fn remove_former(group: &Path) -> io::Result<()> {
    if contains_this_process(group) {
        return Ok(());
    }
    remove_group(group)
}

fn contains_this_process(group: &Path) -> bool {
    let own = std::process::id().to_string();
    let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    pids.lines().any(|pid| pid == own)
}

/// Common prefix of the groups of all servers for this state directory.
fn prefix(h: &Hierarchy) -> Option<String> {
    let name = h.group.file_name()?.to_string_lossy();
    Some(format!("{name}{SUFFIX}"))
}

/// The name of this server's group.
pub(super) fn own_name(h: &Hierarchy) -> Option<String> {
    Some(format!("{}-{}", prefix(h)?, std::process::id()))
}

#[cfg(test)]
mod tests {
    use super::super::tests::groups;
    use crate::config::MissingLimits;

    use super::*;

    #[test]
    fn the_servers_group_is_beside_that_of_its_vms_and_has_its_limit() {
        for (version, file) in [
            (Version::One, "memory.limit_in_bytes"),
            (Version::Two, "memory.max"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut groups = groups(version);
            groups.hierarchies[0].group = dir.path().join("cube-a");
            groups.enter_as_server(7 << 20).unwrap();
            let own = dir
                .path()
                .join(format!("cube-a-server-{}", std::process::id()));
            let read = |file: &str| fs::read_to_string(own.join(file)).unwrap();
            assert_eq!(read(file), (7 << 20).to_string());
            assert_eq!(read("cgroup.procs"), std::process::id().to_string());
            groups.limit_server(9 << 20).unwrap();
            assert_eq!(read(file), (9 << 20).to_string());
            // A directory in place of the file stands for a kernel that rejects the limit.
            fs::remove_file(own.join(file)).unwrap();
            fs::create_dir(own.join(file)).unwrap();
            let why = groups.enter_as_server(7 << 20).unwrap_err().to_string();
            assert!(
                why.contains(file) && why.contains("sandbox.allow_missing_limits"),
                "{why}"
            );
            groups.missing = MissingLimits::Allow;
            groups.enter_as_server(7 << 20).unwrap();
        }
    }

    #[test]
    fn a_server_that_opens_its_pool_again_keeps_its_group() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().join("cube-a-server-1");
        fs::create_dir(&group).unwrap();
        let procs = group.join("cgroup.procs");
        fs::write(&procs, format!("1\n{}\n", std::process::id())).unwrap();
        remove_former(&group).unwrap();
        // The directory is not empty, so an attempt to remove it fails.
        fs::write(&procs, "1\n").unwrap();
        assert!(remove_former(&group).is_err());
    }

    #[test]
    fn the_last_server_removes_the_groups_of_predecessors_that_have_ended() {
        let dir = tempfile::tempdir().unwrap();
        let mut groups = groups(Version::One);
        groups.hierarchies[0].group = dir.path().join("cube-a");
        let [ended, busy] = ["1", "2"].map(|pid| dir.path().join(format!("cube-a-server-{pid}")));
        fs::create_dir(&ended).unwrap();
        fs::create_dir(&busy).unwrap();
        fs::write(busy.join("cgroup.procs"), "2\n").unwrap();
        groups.close();
        assert!(!ended.exists() && busy.exists());
    }
}
