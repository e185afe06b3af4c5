//! Control groups for VMMs beside a server's, like those of its sandboxes.
//!
//! The scheduler shares CPUs out between groups first, and wakes processes on other CPUs when they are of different
//! groups. A VMM that is in the harness's own group is therefore not to be compared with one that has a group of its own.
//!
//! ```text
//! <hierarchy>/…/cube-TAG/SANDBOX/            what the server made
//! <hierarchy>/…/cube-bench-PID/beside/       ours, with the same parent and the same controllers
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
/// Controllers of a group's children, in version 2.
const CONTROLLERS: &str = "cgroup.subtree_control";

/// A group in each hierarchy in which the server has groups. Dropping it removes them; who is in them has to be gone.
#[derive(Debug, Default)]
pub(crate) struct Groups(Vec<PathBuf>);

impl Groups {
    /// Like those of a sandbox's VMM. None where that is in the same group as this process.
    ///
    /// # Errors
    /// They cannot be read or made.
    pub(crate) fn like(pid: u32) -> io::Result<Self> {
        let theirs = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let mut groups = Self::default();
        for (hierarchy, path) in differing(&theirs, &own) {
            groups.add(&directory(hierarchy), Path::new(path))?;
        }
        Ok(groups)
    }

    /// A VMM is in them from now on.
    ///
    /// # Errors
    /// It is gone, or a group is.
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
                "{} is no group in a group",
                like.display()
            )));
        };
        let below = |path: &Path| hierarchy.join(path.strip_prefix("/").unwrap_or(path));
        let above = below(above);
        remove_left(&above);
        let ours = above.join(format!("{PREFIX}{}", process::id()));
        fs::create_dir_all(&ours)?;
        let member = ours.join(MEMBER);
        self.0.push(member.clone());
        // Version 1 has no such file: there a hierarchy is its controllers.
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

/// What cannot be removed now is removed by the next run.
fn remove(ours: &Path) {
    let _ = fs::remove_dir(ours.join(MEMBER));
    let _ = fs::remove_dir(ours);
}

/// Groups of runs that were killed.
fn remove_left(above: &Path) {
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            remove(&entry.path());
        }
    }
}

/// Hierarchy and path of each line of one `/proc/PID/cgroup` that another has not.
fn differing<'a>(theirs: &'a str, own: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    theirs
        .lines()
        .filter(move |line| !own.lines().any(|ours| ours == *line))
        .filter_map(|line| {
            let (hierarchy, path) = line.split_once(':')?.1.split_once(':')?;
            Some((hierarchy, path))
        })
}

/// Where a hierarchy is mounted, by the controllers that `/proc/PID/cgroup` names; version 2 has no names there.
fn directory(controllers: &str) -> PathBuf {
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
    fn only_hierarchies_with_groups_of_the_server_count() {
        let own = "2:cpu,cpuacct:/\n1:name=systemd:/\n0::/user.slice\n";
        let theirs = "2:cpu,cpuacct:/cube-a/i1\n1:name=systemd:/\n0::/user.slice/cube-a/i1\n";
        let found: Vec<_> = differing(theirs, own).collect();
        let expected = [("cpu,cpuacct", "/cube-a/i1"), ("", "/user.slice/cube-a/i1")];
        assert_eq!(found, expected);
        assert_eq!(directory("cpu,cpuacct"), Path::new(ROOT).join("cpu"));
        assert_eq!(differing(own, own).count(), 0);
    }

    #[test]
    fn a_group_beside_has_the_depth_and_the_controllers_of_the_other_and_goes() {
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
        assert!(!left.exists(), "of a process that is gone");
        drop(groups);
        assert!(!ours.exists() && pool.join("i1").exists());
        assert!(
            Groups::default()
                .add(root.path(), Path::new("/i1"))
                .is_err()
        );
    }
}
