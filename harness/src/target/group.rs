//! cgroups for the VMMs of comparison rounds, which are compared with the VMMs of a server.
//!
//! The scheduler divides CPU time between cgroups first, and wakes processes of different cgroups on different
//! CPUs. A VMM in the cgroup of the harness is therefore not comparable with a VMM that has its own cgroup.
//!
//! ```text
//! <hierarchy>/…/cube-TAG/SANDBOX/            created by the server
//! <hierarchy>/…/cube-bench-PID/beside/       created here, at the same depth and with the same controllers
//! ```

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
};

const ROOT: &str = "/sys/fs/cgroup";
const PREFIX: &str = "cube-bench-";
const MEMBER: &str = "beside";
const PROCESSES: &str = "cgroup.procs";
/// cgroup v2: the file that enables controllers for child cgroups.
const CONTROLLERS: &str = "cgroup.subtree_control";

/// A cgroup in each hierarchy in which the server has its own cgroups. Dropping this value removes the cgroups;
/// their processes must have ended by then.
#[derive(Debug, Default)]
pub(crate) struct Groups(Vec<PathBuf>);

impl Groups {
    /// Creates cgroups like those of the process `pid`, a VMM of the server. Hierarchies in which that process and this
    /// process share a cgroup are left out.
    ///
    /// # Errors
    /// Returns an error if the cgroups of the process cannot be read or are less than two levels below the root, or if
    /// new cgroups cannot be created.
    pub(crate) fn like(pid: u32) -> io::Result<Self> {
        let theirs = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let mut groups = Self::default();
        for (hierarchy, path) in differing(&theirs, &own) {
            groups.add(&directory(hierarchy), Path::new(path))?;
        }
        Ok(groups)
    }

    /// Moves a VMM into the cgroups.
    ///
    /// # Errors
    /// Returns an error if the process cannot be moved, for example because it has ended.
    pub(crate) fn take(&self, pid: u32) -> io::Result<()> {
        self.0
            .iter()
            .try_for_each(|group| fs::write(group.join(PROCESSES), pid.to_string()))
    }

    fn add(&mut self, hierarchy: &Path, like: &Path) -> io::Result<()> {
        let parent = like
            .parent()
            .and_then(|parent| Some((parent, parent.parent()?)));
        let Some((parent, above)) = parent else {
            return Err(io::Error::other(format!(
                "cgroup {} has no parent besides the root",
                like.display()
            )));
        };
        let below = |path: &Path| hierarchy.join(path.strip_prefix("/").unwrap_or(path));
        let above = below(above);
        remove_stale(&above);
        let ours = above.join(format!("{PREFIX}{}", process::id()));
        fs::create_dir_all(&ours)?;
        let member = ours.join(MEMBER);
        self.0.push(member.clone());
        // cgroup v1 has no such file, because each of its hierarchies has fixed controllers.
        if let Ok(controllers) = fs::read_to_string(below(parent).join(CONTROLLERS)) {
            for name in controllers.split_whitespace() {
                fs::write(ours.join(CONTROLLERS), format!("+{name}"))?;
            }
        }
        fs::create_dir_all(&member)
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        for group in &self.0 {
            remove(group.parent().unwrap_or(group));
        }
    }
}

/// Removes the cgroups of a run. Errors are ignored; the next run tries again.
fn remove(ours: &Path) {
    let _ = fs::remove_dir(ours.join(MEMBER));
    let _ = fs::remove_dir(ours);
}

/// Removes cgroups below `above` whose runs no longer exist.
fn remove_stale(above: &Path) {
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            remove(&entry.path());
        }
    }
}

/// Controllers and path of each line of `theirs` that `own` does not have. Both are contents of `/proc/PID/cgroup`.
fn differing<'a>(theirs: &'a str, own: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    theirs
        .lines()
        .filter(move |line| !own.lines().any(|ours| ours == *line))
        .filter_map(|line| {
            let (hierarchy, path) = line.split_once(':')?.1.split_once(':')?;
            Some((hierarchy, path))
        })
}

/// Mount point of the hierarchy with these controllers, in the notation of `/proc/PID/cgroup`; the list is empty for
/// cgroup v2.
pub(crate) fn directory(controllers: &str) -> PathBuf {
    let root = Path::new(ROOT);
    let first = controllers.split(',').next().unwrap_or_default();
    match first.strip_prefix("name=").unwrap_or(first) {
        "" if root.join(PROCESSES).exists() => root.to_owned(),
        "" => root.join("unified"),
        name => root.join(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_without_cgroups_of_the_server_are_left_out() {
        let own = "2:cpu,cpuacct:/\n1:name=systemd:/\n0::/user.slice\n";
        let theirs = "2:cpu,cpuacct:/cube-a/i1\n1:name=systemd:/\n0::/user.slice/cube-a/i1\n";
        let found: Vec<_> = differing(theirs, own).collect();
        let expected = [("cpu,cpuacct", "/cube-a/i1"), ("", "/user.slice/cube-a/i1")];
        assert_eq!(found, expected);
        assert_eq!(directory("cpu,cpuacct"), Path::new(ROOT).join("cpu"));
        assert_eq!(differing(own, own).count(), 0);
    }

    #[test]
    fn cgroups_are_created_at_the_same_depth_and_removed() {
        let root = tempfile::tempdir().unwrap();
        let pool = root.path().join("slice/cube-a");
        fs::create_dir_all(pool.join("i1")).unwrap();
        let left = root.path().join(format!("slice/{PREFIX}4194999/{MEMBER}"));
        fs::create_dir_all(&left).unwrap();
        let mut groups = Groups::default();
        groups
            .add(root.path(), Path::new("/slice/cube-a/i1"))
            .unwrap();
        let ours = root.path().join(format!("slice/{PREFIX}{}", process::id()));
        assert!(ours.join(MEMBER).is_dir());
        assert!(!left.exists(), "the cgroup of a dead process is removed");
        drop(groups);
        assert!(!ours.exists() && pool.join("i1").exists());
        assert!(
            Groups::default()
                .add(root.path(), Path::new("/i1"))
                .is_err()
        );
    }
}
