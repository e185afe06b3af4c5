//! Reads memory counters: /proc/meminfo for the host, and /proc/PID for each VMM. Values that cannot be read are
//! absent.

use std::{collections::BTreeMap, fs, os::unix::fs::MetadataExt, path::Path};

use model::ProcessStat;

use crate::{
    clock,
    event::{CloneLedger, MemoryPoint},
};

/// Names of the lines of /proc/meminfo that are recorded.
pub const MEMINFO_LINES: [&str; 14] = [
    "MemTotal",
    "MemFree",
    "MemAvailable",
    "Buffers",
    "Cached",
    "AnonPages",
    "Shmem",
    "Slab",
    "SUnreclaim",
    "KernelStack",
    "PageTables",
    "SecPageTables",
    "Percpu",
    "VmallocUsed",
];

/// Name under which the size of the free pages in per-CPU lists is recorded, in addition to the lines of /proc/meminfo.
/// MemFree and MemAvailable do not include these pages. After clones are killed, the lists can contain tens of
/// megabytes. The kernel gives these pages to the next clones first, so those clones would seem to need no memory if
/// the lists were not counted.
pub const CPU_LISTS_FREE: &str = "CpuListsFree";

// Names under which reclaim is recorded.
pub const SCANNED: &str = "pgscan";
pub const STOLEN: &str = "pgsteal";
pub const DAMON_BYTES: &str = "damon_bytes";

/// Identity of a file as in /proc/PID/smaps: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    major: u64,
    minor: u64,
    inode: u64,
}

impl FileId {
    /// Returns the identity of the file at `path`.
    ///
    /// # Errors
    /// Returns an error if `stat` fails.
    pub fn of(path: &Path) -> std::io::Result<Self> {
        let meta = fs::metadata(path)?;
        Ok(Self {
            major: nix::sys::stat::major(meta.dev()),
            minor: nix::sys::stat::minor(meta.dev()),
            inode: meta.ino(),
        })
    }
}

/// Reads /proc/meminfo and /proc/zoneinfo. `group` and `alive` are copied into the result.
#[must_use]
pub fn sample(group: u32, alive: u32) -> MemoryPoint {
    // Makes the kernel fold its per-CPU counters into the totals (admin-guide/sysctl/vm, stat_refresh). This write
    // needs root; if it fails, the totals are off by less than 1 MB.
    let _ = fs::write("/proc/sys/vm/stat_refresh", "1");
    let mut meminfo = parse_meminfo(&fs::read_to_string("/proc/meminfo").unwrap_or_default());
    let zones = fs::read_to_string("/proc/zoneinfo").ok();
    if let Some(bytes) = zones.and_then(|text| cpu_lists_free(&text)) {
        meminfo.insert(CPU_LISTS_FREE.to_owned(), bytes);
    }
    MemoryPoint {
        group,
        alive,
        at_ns: clock::monotonic_ns(),
        meminfo,
        reclaim: reclaim(),
    }
}

/// Pages that the kernel has scanned and reclaimed since boot, for whatever reason, and bytes to which DAMON
/// schemes have been applied.
fn reclaim() -> BTreeMap<String, u64> {
    let mut found = parse_vmstat(&fs::read_to_string("/proc/vmstat").unwrap_or_default());
    if let Some(bytes) = damon_bytes(Path::new("/sys/kernel/mm/damon/admin/kdamonds")) {
        found.insert(DAMON_BYTES.to_owned(), bytes);
    }
    found
}

/// Sums of `pgscan_…` and `pgsteal_…` over the kinds of reclaim. The lines for `anon` and `file` count the same
/// pages by kind of page, and `direct_throttle` counts waits.
fn parse_vmstat(text: &str) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for line in text.lines() {
        let Some((name, value)) = line.split_once(' ') else {
            continue;
        };
        for sum in [SCANNED, STOLEN] {
            let by = name
                .strip_prefix(sum)
                .and_then(|rest| rest.strip_prefix('_'));
            let is_kind = by.is_some_and(|by| !["anon", "file", "direct_throttle"].contains(&by));
            if let (true, Ok(pages)) = (is_kind, value.trim().parse::<u64>()) {
                *sums.entry(sum.to_owned()).or_insert(0) += pages;
            }
        }
    }
    sums
}

/// Sum of `stats/sz_applied` over all DAMON schemes, as last updated by their owner; `None` without schemes.
fn damon_bytes(kdamonds: &Path) -> Option<u64> {
    let inside = |dir: std::path::PathBuf| fs::read_dir(dir).into_iter().flatten().flatten();
    let applied: Vec<u64> = inside(kdamonds.to_owned())
        .flat_map(|kdamond| inside(kdamond.path().join("contexts")))
        .flat_map(|context| inside(context.path().join("schemes")))
        .filter_map(|scheme| fs::read_to_string(scheme.path().join("stats/sz_applied")).ok())
        .filter_map(|text| text.trim().parse().ok())
        .collect();
    (!applied.is_empty()).then(|| applied.iter().sum())
}

/// The sum of all `count:` lines below `pagesets` in /proc/zoneinfo, in bytes; `None` without such lines.
fn cpu_lists_free(zoneinfo: &str) -> Option<u64> {
    let page =
        u64::try_from(nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok()??).ok()?;
    let counts: Vec<u64> = zoneinfo
        .lines()
        .filter_map(|line| line.trim().strip_prefix("count:")?.trim().parse().ok())
        .collect();
    (!counts.is_empty()).then(|| counts.iter().sum::<u64>() * page)
}

/// Share of MemTotal that is not available, 0 to 1.
#[must_use]
pub fn used_share() -> Option<f64> {
    let point = sample(0, 0);
    let total = *point.meminfo.get("MemTotal")? as f64;
    let available = *point.meminfo.get("MemAvailable")? as f64;
    Some(1.0 - available / total)
}

/// MemAvailable in bytes.
#[must_use]
pub fn available_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    parse_meminfo(&text).remove("MemAvailable")
}

fn parse_meminfo(text: &str) -> BTreeMap<String, u64> {
    text.lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            MEMINFO_LINES
                .contains(&name)
                .then(|| Some((name.to_owned(), kib(value)?)))?
        })
        .collect()
}

/// Converts `"   123 kB"` to bytes.
fn kib(text: &str) -> Option<u64> {
    let n: u64 = text.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    n.checked_mul(1024)
}

/// Finds the memory file of the template by its name among the mappings of a VMM that another program started;
/// `None` if the VMM maps no such file or its mappings cannot be read.
#[must_use]
pub fn template_memory(pid: u32) -> Option<FileId> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    maps.lines().find_map(named_memory)
}

/// The file in a line of /proc/PID/maps, if it has the name of a template's memory file.
fn named_memory(line: &str) -> Option<FileId> {
    let path = line.split_ascii_whitespace().nth(5)?;
    let name = Path::new(path).file_name()?;
    (name == model::template_file::MEMORY).then(|| mapping(line))?
}

/// Minor and major page faults of a process since its start, without those of its children. Faults that KVM handles
/// for a guest are included, because they count for the vCPU thread. `None` if the process does not exist.
#[must_use]
pub fn page_faults(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let stat = ProcessStat::parse(&stat)?;
    Some(stat.minor_faults + stat.major_faults)
}

/// Reads the memory of a VMM. `guest` is the memory file of the template. `round` and `arrival` of the result are 0.
#[must_use]
pub fn clone_ledger(pid: u32, guest: Option<FileId>) -> CloneLedger {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let page_tables = status
        .lines()
        .find_map(|line| kib(line.strip_prefix("VmPTE:")?));
    let mut ledger = match fs::read_to_string(format!("/proc/{pid}/smaps")) {
        Ok(smaps) if !smaps.is_empty() => parse_smaps(&smaps, guest),
        _ => CloneLedger::default(),
    };
    ledger.page_tables_bytes = page_tables;
    ledger
}

/// Sums over mappings, in bytes.
#[derive(Default)]
struct Sums {
    anonymous: u64,
    private_dirty: u64,
    rss: u64,
    pss: u64,
}

fn parse_smaps(text: &str, guest: Option<FileId>) -> CloneLedger {
    let (mut inside, mut outside) = (Sums::default(), Sums::default());
    let mut in_guest = false;
    for line in text.lines() {
        if let Some(id) = mapping(line) {
            in_guest = Some(id) == guest;
            continue;
        }
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        let sums = if in_guest { &mut inside } else { &mut outside };
        let field = match name {
            "Anonymous" => &mut sums.anonymous,
            "Private_Dirty" => &mut sums.private_dirty,
            "Rss" => &mut sums.rss,
            "Pss" => &mut sums.pss,
            _ => continue,
        };
        *field += kib(value).unwrap_or(0);
    }
    CloneLedger {
        // Written pages of a private file mapping are anonymous. All other pages of the mapping belong to the page
        // cache, even if no other process maps them at the moment (Private_Clean).
        guest_private_bytes: guest.map(|_| inside.anonymous),
        guest_shared_bytes: guest.map(|_| inside.rss.saturating_sub(inside.anonymous)),
        vmm_private_bytes: Some(outside.private_dirty),
        rss_bytes: Some(inside.rss + outside.rss),
        pss_bytes: Some(inside.pss + outside.pss),
        ..CloneLedger::default()
    }
}

/// The file in a line `start-end perms offset major:minor inode path`; `None` for all other lines of smaps.
fn mapping(line: &str) -> Option<FileId> {
    let mut words = line.split_ascii_whitespace();
    let (range, _perms, _offset) = (words.next()?, words.next()?, words.next()?);
    let (start, end) = range.split_once('-')?;
    u64::from_str_radix(start, 16).ok()?;
    u64::from_str_radix(end, 16).ok()?;
    let (major, minor) = words.next()?.split_once(':')?;
    Some(FileId {
        major: u64::from_str_radix(major, 16).ok()?,
        minor: u64::from_str_radix(minor, 16).ok()?,
        inode: words.next()?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0010000000 rw-p 00000000 fe:01 4711                       /t/base/memory
Size:             262144 kB
Rss:               20000 kB
Pss:                4000 kB
Private_Clean:       300 kB
Private_Dirty:      1500 kB
Anonymous:          1500 kB
7f0010000000-7f0010001000 rw-p 00000000 00:00 0
Rss:                  64 kB
Pss:                  64 kB
Private_Dirty:        60 kB
Anonymous:            60 kB
VmFlags: rd wr mr mw me ac sd
";

    #[test]
    fn guest_memory_is_recognized_by_its_file() {
        let guest = FileId {
            major: 0xfe,
            minor: 1,
            inode: 4711,
        };
        let ledger = parse_smaps(SMAPS, Some(guest));
        assert_eq!(ledger.guest_private_bytes, Some(1500 << 10));
        assert_eq!(ledger.guest_shared_bytes, Some(18_500 << 10));
        assert_eq!(ledger.vmm_private_bytes, Some(60 << 10));
        assert_eq!(ledger.rss_bytes, Some(20_064 << 10));
        assert_eq!(ledger.pss_bytes, Some(4064 << 10));
        assert_eq!(parse_smaps(SMAPS, None).guest_private_bytes, None);
    }

    #[test]
    fn the_memory_file_of_a_template_is_recognized_by_its_name() {
        let line = SMAPS.lines().next().unwrap();
        assert_eq!(named_memory(line), mapping(line));
        assert_eq!(named_memory(&format!("{line} (deleted)")), mapping(line));
        assert_eq!(named_memory(&line.replace("/memory", "/memories")), None);
        assert_eq!(template_memory(0), None);
    }

    #[test]
    fn a_missing_process_has_an_empty_ledger() {
        let ours = clone_ledger(std::process::id(), None);
        assert!(ours.page_tables_bytes.unwrap() > 0);
        assert!(ours.vmm_private_bytes.unwrap() > 0);
        assert_eq!(clone_ledger(0, None), CloneLedger::default());
    }

    #[test]
    fn faults_are_read_for_processes_that_exist() {
        assert!(page_faults(std::process::id()).unwrap() > 0);
        assert_eq!(page_faults(0), None);
    }

    #[test]
    fn free_pages_in_per_cpu_lists_are_summed() {
        let text = "  pagesets\n    cpu: 0\n              count:    88\n              high:     2575\n    cpu: 1\n              count:    2\n";
        assert_eq!(cpu_lists_free(text), Some(90 * 4096));
        assert_eq!(cpu_lists_free(""), None);
    }

    #[test]
    fn reclaim_is_summed_over_its_kinds_and_not_counted_twice() {
        let text = "pgsteal_kswapd 5\npgsteal_direct 2\npgsteal_file 7\npgscan_kswapd 9\npgscan_direct_throttle 4\n\
                    pgscan_anon 9\npgscand 3\nnr_free_pages 1\n";
        let expected = [(SCANNED.to_owned(), 9), (STOLEN.to_owned(), 7)].into();
        assert_eq!(parse_vmstat(text), expected);
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(damon_bytes(dir.path()), None);
        for (scheme, bytes) in [
            ("0/contexts/0/schemes/0", "10\n"),
            ("1/contexts/0/schemes/3", "5\n"),
        ] {
            let stats = dir.path().join(scheme).join("stats");
            fs::create_dir_all(&stats).unwrap();
            fs::write(stats.join("sz_applied"), bytes).unwrap();
        }
        assert_eq!(damon_bytes(dir.path()), Some(15));
        assert!(sample(0, 0).reclaim.contains_key(SCANNED));
    }

    #[test]
    fn meminfo_is_in_bytes() {
        let lines =
            parse_meminfo("MemTotal:       24684084 kB\nHugePages_Total:       0\nSlab: x\n");
        assert_eq!(
            lines,
            BTreeMap::from([("MemTotal".to_owned(), 24_684_084 << 10)])
        );
        assert!(used_share().unwrap() < 1.0);
    }
}
