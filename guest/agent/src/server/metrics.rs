//! `GET /metrics`: processors, memory and disk, read at each request.

use std::{
    fs, io,
    time::{SystemTime, UNIX_EPOCH},
};

use envd::Metrics;
use nix::sys::statvfs::{Statvfs, statvfs};

/// Measures processor use between requests: holds the times of the previous response, or zeros before the first,
/// which therefore covers the time since boot.
#[derive(Default)]
pub(crate) struct Meter {
    last: CpuTimes,
}

/// Time of all processors since boot, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CpuTimes {
    count: u32,
    total: u64,
    idle: u64,
}

/// Reads /proc/stat (proc(5)).
fn cpu_times(stat: &str) -> CpuTimes {
    let mut times = CpuTimes::default();
    for line in stat.lines() {
        let Some(rest) = line.strip_prefix("cpu") else {
            continue;
        };
        if !rest.starts_with(' ') {
            times.count += 1;
            continue;
        }
        // user, nice, system, idle, iowait, irq, softirq, steal. Time of guests is included in user.
        for (place, ticks) in rest.split_ascii_whitespace().take(8).enumerate() {
            let ticks: u64 = ticks.parse().unwrap_or(0);
            times.total = times.total.saturating_add(ticks);
            if matches!(place, 3 | 4) {
                times.idle = times.idle.saturating_add(ticks);
            }
        }
    }
    times
}

/// A line of /proc/meminfo in bytes; zero if there is none.
fn memory(meminfo: &str, name: &str) -> u64 {
    let mut values = meminfo.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?.strip_prefix(':')?;
        rest.split_ascii_whitespace().next()?.parse::<u64>().ok()
    });
    values.next().unwrap_or(0).saturating_mul(1024)
}

/// `part` in percent of `whole`, at most 100, rounded down to two decimals; 0 if `whole` is 0.
fn percent(part: u64, whole: u64) -> f32 {
    let hundredths = part
        .saturating_mul(10_000)
        .checked_div(whole)
        .unwrap_or(0)
        .min(10_000);
    f32::from(u16::try_from(hundredths).unwrap_or(10_000)) / 100.0
}

impl Meter {
    #[cold]
    #[inline(never)]
    pub(crate) fn read(&mut self) -> io::Result<Metrics> {
        let now = cpu_times(&fs::read_to_string("/proc/stat")?);
        let meminfo = fs::read_to_string("/proc/meminfo")?;
        let disk = statvfs("/")?;
        let past = self.last;
        self.last = now;
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(Metrics {
            ts: seconds.map_or(0, |since| since.as_secs()),
            ..measure(past, now, &meminfo, &disk_bytes(&disk))
        })
    }
}

/// Sizes of a file system in bytes.
struct Disk {
    total: u64,
    free: u64,
}

fn disk_bytes(disk: &Statvfs) -> Disk {
    let bytes = |blocks: u64| blocks.saturating_mul(disk.fragment_size());
    Disk {
        total: bytes(disk.blocks()),
        free: bytes(disk.blocks_free()),
    }
}

fn measure(past: CpuTimes, now: CpuTimes, meminfo: &str, disk: &Disk) -> Metrics {
    let total = now.total.saturating_sub(past.total);
    let idle = now.idle.saturating_sub(past.idle);
    let mem_total = memory(meminfo, "MemTotal");
    let mem_used = mem_total.saturating_sub(memory(meminfo, "MemAvailable"));
    Metrics {
        ts: 0,
        cpu_count: now.count,
        cpu_used_pct: percent(total.saturating_sub(idle), total),
        mem_total,
        mem_used,
        mem_cache: memory(meminfo, "Cached"),
        mem_total_mib: mem_total >> 20,
        mem_used_mib: mem_used >> 20,
        disk_used: disk.total.saturating_sub(disk.free),
        disk_total: disk.total,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STAT: &str = "cpu  10 20 30 400 50 1 2 7 99 99\ncpu0 1 2 3 4 5 6 7 8 9 9\n\
                        cpu1 1 2 3 4 5 6 7 8 9 9\nintr 5 6\ncpufoo\n";

    #[test]
    fn usage_is_the_non_idle_share_since_the_previous_answer() {
        let times = cpu_times("cpu  10 20 30 400 50 1 2 7 99 99\ncpu0 1 2\ncpu1 1 2\nintr 5\n");
        let expected = CpuTimes {
            count: 2,
            total: 520,
            idle: 450,
        };
        assert_eq!(times, expected);
        let meminfo = "MemTotal:  4096 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\nSwapCached: 9 kB\n\
                       Cached: 512 kB\n";
        let disk = Disk {
            total: 1000,
            free: 400,
        };
        let past = CpuTimes {
            count: 2,
            total: 505,
            idle: 440,
        };
        let metrics = measure(past, times, meminfo, &disk);
        let expected = Metrics {
            ts: 0,
            cpu_count: 2,
            cpu_used_pct: 33.33,
            mem_total: 4 << 20,
            mem_used: 3 << 20,
            mem_cache: 512 << 10,
            mem_total_mib: 4,
            mem_used_mib: 3,
            disk_used: 600,
            disk_total: 1000,
        };
        assert_eq!(metrics, expected);
    }

    #[test]
    fn no_elapsed_time_counts_as_no_usage() {
        let times = cpu_times(STAT);
        let disk = Disk { total: 0, free: 1 };
        let metrics = measure(times, times, "", &disk);
        assert_eq!((metrics.cpu_used_pct, metrics.disk_used), (0.0, 0));
        // Counters may go back in a restored machine.
        let less = CpuTimes {
            count: 2,
            total: 1,
            idle: 1,
        };
        assert_eq!(measure(times, less, "", &disk).cpu_used_pct, 0.0);
    }

    proptest! {
        #[test]
        fn usage_stays_between_0_and_100(past: [u64; 2], now: [u64; 2], text in "[a-zA-Z: 0-9\n]{0,80}") {
            let times = |[total, idle]: [u64; 2]| CpuTimes { count: 1, total, idle };
            let disk = Disk { total: past[0], free: now[0] };
            let metrics = measure(times(past), times(now), &text, &disk);
            prop_assert!((0.0..=100.0).contains(&metrics.cpu_used_pct));
            let _ = cpu_times(&text);
        }
    }
}
