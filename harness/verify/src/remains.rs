//! Leftovers of an ended server: processes, and cgroups of its state directory.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use testbed::leftovers;

/// Mount point of the cgroup hierarchies.
const CGROUPS: &str = "/sys/fs/cgroup";

/// The cgroups of one server.
#[derive(Debug, Default)]
pub(crate) struct Remains {
    /// Prefix of the names of its cgroups. Empty: unknown.
    prefix: String,
}

impl Remains {
    /// Derives the names of the cgroups from the lock in the state directory, as `pool::cgroup` describes it.
    pub(crate) fn watch(&mut self, state: &Path) {
        if let Ok(lock) = fs::metadata(state.join("lock")) {
            self.prefix = format!("cube-{:x}-{:x}", lock.dev(), lock.ino());
        }
    }

    /// Finds and removes leftovers below `dir` and in the hierarchies; one line each.
    pub(crate) fn find(&self, dir: &Path) -> Vec<String> {
        let mut found = Vec::new();
        for pid in leftovers::processes_of(dir) {
            found.push(format!("the server left process {pid} behind"));
            if let Err(error) = leftovers::kill_and_wait(pid) {
                found.push(format!("cannot end process {pid}: {error}"));
            }
        }
        for group in self.groups() {
            found.push(format!("the server left cgroup {} behind", group.display()));
            remove(&group);
        }
        found
    }

    /// The cgroups of these sandboxes.
    pub(crate) fn groups_of(&self, sandboxes: &[&str]) -> Vec<PathBuf> {
        let inner = self.groups().into_iter().flat_map(|group| entries(&group));
        let is_of = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            sandboxes.contains(&&*name)
        };
        inner.filter(is_of).collect()
    }

    fn groups(&self) -> Vec<PathBuf> {
        if self.prefix.is_empty() {
            return Vec::new();
        }
        let mounts = entries(Path::new(CGROUPS));
        let roots = std::iter::once(PathBuf::from(CGROUPS)).chain(mounts);
        let groups = roots.flat_map(|root| entries(&root));
        let is_ours = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&self.prefix)
        };
        let mut groups: Vec<PathBuf> = groups.filter(is_ours).collect();
        groups.sort();
        groups.dedup();
        groups
    }
}

impl Drop for Remains {
    fn drop(&mut self) {
        for group in self.groups() {
            remove(&group);
        }
    }
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

/// Removes a cgroup and its children. A cgroup that contains a process remains.
fn remove(group: &Path) {
    for inner in entries(group) {
        remove(&inner);
    }
    let _ = fs::remove_dir(group);
}
