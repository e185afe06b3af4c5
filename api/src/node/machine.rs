//! Figures of the host from /proc and of its file systems. Unreadable values are zero or empty, because E2B's schema
//! has no other value for them.

use std::{fs, path::Path};

use rest::{DiskMetrics, MachineInfo, NodeMetrics};

/// Ticks of all CPUs since boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticks {
    all: u64,
    idle: u64,
}

impl Ticks {
    pub(super) fn percent_since(self, before: Self) -> u32 {
        let all = self.all.saturating_sub(before.all);
        let idle = self.idle.saturating_sub(before.idle).min(all);
        let percent = ((all - idle) * 100).checked_div(all).unwrap_or(0);
        u32::try_from(percent).unwrap_or(100)
    }
}

pub(super) fn cpu_ticks() -> Option<Ticks> {
    ticks(&fs::read_to_string("/proc/stat").ok()?)
}

/// The first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal (proc(5)); guest time is part of
/// user time.
fn ticks(text: &str) -> Option<Ticks> {
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    let numbers: Vec<u64> = line
        .split_whitespace()
        .take(8)
        .filter_map(|word| word.parse().ok())
        .collect();
    let [_, _, _, idle, iowait, ..] = numbers[..] else {
        return None;
    };
    Some(Ticks {
        all: numbers.iter().sum(),
        idle: idle + iowait,
    })
}

/// The host's processor.
#[must_use]
pub fn info() -> MachineInfo {
    info_of(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

fn info_of(text: &str) -> MachineInfo {
    let first = text.split("\n\n").next().unwrap_or_default();
    let value = |name: &str| {
        let found = first.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        });
        found.unwrap_or_default()
    };
    MachineInfo {
        cpu_family: value("cpu family"),
        cpu_model: value("model"),
        cpu_model_name: value("model name"),
        cpu_architecture: std::env::consts::ARCH.to_owned(),
    }
}

/// CPUs, memory and huge pages of the host; the other figures are zero.
#[must_use]
pub fn memory() -> NodeMetrics {
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    NodeMetrics {
        cpu_count: u32::try_from(cpus).unwrap_or(u32::MAX),
        ..memory_of(&fs::read_to_string("/proc/meminfo").unwrap_or_default())
    }
}

fn memory_of(text: &str) -> NodeMetrics {
    let number = |name: &str| {
        let rest = text.lines().find_map(|line| {
            let (key, rest) = line.split_once(':')?;
            (key == name).then_some(rest)
        });
        let word = rest.and_then(|rest| rest.split_whitespace().next());
        word.and_then(|word| word.parse::<u64>().ok()).unwrap_or(0)
    };
    let kib = |name| number(name).saturating_mul(1024);
    let (total, available) = (kib("MemTotal"), kib("MemAvailable"));
    let (pages, free) = (number("HugePages_Total"), number("HugePages_Free"));
    NodeMetrics {
        memory_total_bytes: total,
        memory_used_bytes: total.saturating_sub(available),
        huge_pages_total: pages,
        huge_pages_used: pages.saturating_sub(free),
        huge_pages_reserved: number("HugePages_Rsvd"),
        huge_page_size_bytes: kib("Hugepagesize"),
        ..NodeMetrics::default()
    }
}

/// The file systems that contain `paths`, without duplicates.
#[must_use]
pub fn disks(paths: &[&Path]) -> Vec<DiskMetrics> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut found: Vec<DiskMetrics> = Vec::new();
    for path in paths {
        let path = path.canonicalize().unwrap_or_else(|_| (*path).to_owned());
        let Some(mount) = mount_of(&mounts, &path) else {
            continue;
        };
        let is_known = |disk: &DiskMetrics| disk.mount_point == mount.mount_point;
        if found.iter().any(is_known) {
            continue;
        }
        if let Ok(stat) = nix::sys::statvfs::statvfs(&path) {
            let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
            let total = bytes(stat.blocks());
            found.push(DiskMetrics {
                used_bytes: total.saturating_sub(bytes(stat.blocks_free())),
                total_bytes: total,
                ..mount
            });
        }
    }
    found
}

/// The last mount with the longest mount point that contains `path`: a later mount hides an earlier one.
fn mount_of(mounts: &str, path: &Path) -> Option<DiskMetrics> {
    let all = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (device, point, kind) = (words.next()?, words.next()?, words.next()?);
        let point = unescaped(point);
        path.starts_with(&point).then(|| DiskMetrics {
            mount_point: point,
            device: unescaped(device),
            filesystem_type: kind.to_owned(),
            used_bytes: 0,
            total_bytes: 0,
        })
    });
    all.max_by_key(|disk| disk.mount_point.len())
}

/// Blanks in names are octal escapes (proc(5)).
fn unescaped(word: &str) -> String {
    word.replace("\\040", " ").replace("\\011", "\t")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_use_of_cpus_is_a_difference() {
        let before = ticks("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3\n").unwrap();
        let now = ticks("cpu  150 0 150 750 150 0 0 0 50 0\n").unwrap();
        assert_eq!(now.percent_since(before), 50);
        assert_eq!(before.percent_since(before), 0);
        assert_eq!(before.percent_since(now), 0);
        assert_eq!(ticks("intr 5\n"), None);
        assert_eq!(ticks("cpu  1 2\n"), None);
    }

    #[test]
    fn the_processor_is_the_first_one() {
        let text = "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Xeon\n\nprocessor\t: 1\nmodel name\t: X\n";
        let info = info_of(text);
        assert_eq!(
            (info.cpu_family.as_str(), info.cpu_model.as_str()),
            ("6", "85")
        );
        assert_eq!(info.cpu_model_name, "Xeon");
        assert_eq!(info_of("").cpu_model_name, "");
    }

    #[test]
    fn memory_is_in_bytes_and_huge_pages_are_counts() {
        let text = "MemTotal: 10 kB\nMemFree: 1 kB\nMemAvailable: 4 kB\nHugePages_Total: 8\nHugePages_Free: 5\n\
                    HugePages_Rsvd: 2\nHugepagesize: 2048 kB\n";
        let metrics = memory_of(text);
        assert_eq!(
            (metrics.memory_total_bytes, metrics.memory_used_bytes),
            (10 << 10, 6 << 10)
        );
        assert_eq!((metrics.huge_pages_total, metrics.huge_pages_used), (8, 3));
        assert_eq!(
            (metrics.huge_pages_reserved, metrics.huge_page_size_bytes),
            (2, 2 << 20)
        );
    }

    #[test]
    fn a_path_is_on_the_innermost_mount() {
        let mounts = "/dev/a / ext4 rw 0 0\ntmpfs /var tmpfs rw 0 0\n/dev/b /var/lib\\040x xfs rw 0 0\n/dev/c /var tmpfs2 rw 0 0\n";
        let kind = |path: &str| mount_of(mounts, Path::new(path)).unwrap().filesystem_type;
        assert_eq!(kind("/etc"), "ext4");
        assert_eq!(kind("/variable"), "ext4");
        assert_eq!(kind("/var/lib/x"), "tmpfs2");
        assert_eq!(kind("/var/lib x/y"), "xfs");
        let own = disks(&[Path::new("/"), Path::new("/etc")]);
        assert!(!own.is_empty() && own[0].total_bytes > 0);
    }
}
