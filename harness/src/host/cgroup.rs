//! The cgroups of a process: their directories and the limits that apply to it.
//!
//! The limits of all cgroups from the process's own to the root apply, so the smallest one counts. In a container
//! without a cgroup namespace, `/proc/self/cgroup` names directories that its mount does not contain; the root of
//! the mount is then the cgroup of the container.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Mount point of all hierarchies.
pub(crate) const ROOT: &str = "/sys/fs/cgroup";
/// Version 1 shows this or a larger number if there is no memory limit: the largest multiple of a page is close to
/// 2^63.
const NO_LIMIT: u64 = 1 << 62;

/// CPU quota in cores and memory limit in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Limits {
    /// `None` without a quota.
    pub(crate) cpu_cores: Option<f64>,
    /// `None` without a limit.
    pub(crate) memory_bytes: Option<u64>,
}

/// The limits of this process.
pub(crate) fn own_limits() -> Limits {
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    limits(Path::new(ROOT), &cgroups)
}

fn limits(root: &Path, cgroups: &str) -> Limits {
    let cpu = lineage(root, cgroups, "cpu").into_iter().filter_map(|dir| {
        let v2 = text(&dir, "cpu.max");
        quota(&v2.or_else(|| v1_quota(&dir))?)
    });
    let memory = lineage(root, cgroups, "memory")
        .into_iter()
        .filter_map(|dir| {
            let limit = text(&dir, "memory.max").or_else(|| text(&dir, "memory.limit_in_bytes"));
            limit?.parse().ok()
        });
    Limits {
        cpu_cores: cpu.min_by(f64::total_cmp),
        memory_bytes: memory.filter(|bytes| *bytes < NO_LIMIT).min(),
    }
}

/// Directories from the process's cgroup with this controller up to the root of its hierarchy. `cgroups` is the
/// content of `/proc/PID/cgroup` (cgroups(7)). Directories that do not exist are omitted.
pub(crate) fn lineage(root: &Path, cgroups: &str, controller: &str) -> Vec<PathBuf> {
    let line = |has: &dyn Fn(&str) -> bool| {
        cgroups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            has(controllers).then_some(path)
        })
    };
    let v1 = line(&|controllers| controllers.split(',').any(|name| name == controller));
    let (mount, path) = match v1 {
        Some(path) => (root.join(controller), path),
        None if root.join("cgroup.procs").exists() => {
            (root.to_owned(), line(&str::is_empty).unwrap_or("/"))
        }
        None => (root.join("unified"), line(&str::is_empty).unwrap_or("/")),
    };
    let path = Path::new(path.trim_start_matches('/')).to_owned();
    path.ancestors()
        .map(|part| mount.join(part))
        .filter(|dir| dir.is_dir())
        .collect()
}

fn text(dir: &Path, file: &str) -> Option<String> {
    Some(fs::read_to_string(dir.join(file)).ok()?.trim().to_owned())
}

/// Converts `quota period` of cgroup v2 to cores; `None` for `max`.
fn quota(text: &str) -> Option<f64> {
    let (quota, period) = text.split_once(' ')?;
    Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
}

/// The CPU quota of cgroup v1 in the notation of v2.
fn v1_quota(dir: &Path) -> Option<String> {
    let quota = text(dir, "cpu.cfs_quota_us").filter(|quota| !quota.starts_with('-'))?;
    Some(format!("{quota} {}", text(dir, "cpu.cfs_period_us")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hierarchy(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, value) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{value}\n")).unwrap();
        }
        root
    }

    #[test]
    fn the_smallest_limit_of_the_own_cgroup_and_those_above_it_counts() {
        let root = hierarchy(&[
            ("cgroup.procs", ""),
            ("a/cpu.max", "max 100000"),
            ("a/memory.max", "4096"),
            ("a/b/cpu.max", "150000 100000"),
            ("a/b/memory.max", "max"),
            ("other/cpu.max", "1000 100000"),
        ]);
        let found = limits(root.path(), "0::/a/b\n");
        assert_eq!(found.cpu_cores, Some(1.5));
        assert_eq!(found.memory_bytes, Some(4096));
        // A path that only exists outside of the container.
        assert_eq!(limits(root.path(), "0::/docker/x\n"), Limits::default());
    }

    #[test]
    fn hierarchies_of_version_1_are_read_by_controller() {
        let root = hierarchy(&[
            ("cpu/cpu.cfs_quota_us", "-1"),
            ("cpu/s/cpu.cfs_quota_us", "50000"),
            ("cpu/s/cpu.cfs_period_us", "100000"),
            ("memory/memory.limit_in_bytes", "9223372036854771712"),
            ("memory/m/memory.limit_in_bytes", "8192"),
            ("unified/cgroup.procs", ""),
        ]);
        let cgroups = "4:memory:/m\n2:cpu,cpuacct:/s\n0::/\n";
        let found = limits(root.path(), cgroups);
        assert_eq!(
            (found.cpu_cores, found.memory_bytes),
            (Some(0.5), Some(8192))
        );
        let free = limits(root.path(), "4:memory:/\n1:cpu:/\n0::/\n");
        assert_eq!(free, Limits::default());
    }
}
