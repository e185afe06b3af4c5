//! CPU time of kernel threads.
//!
//! They work for every program on the host; for example, they free the memory of ended VMs and remove network
//! devices for the run. No counter attributes their time to programs, so it is reported separately.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// `PF_KTHREAD` (include/linux/sched.h) in the flags of `/proc/PID/stat`.
const KERNEL_THREAD: u64 = 0x0020_0000;

/// A thread, identified by its number and its start time in clock ticks since boot, because numbers are reused.
type Thread = (u32, u64);

/// CPU time of each kernel thread since its start, in nanoseconds. Never empty, because the kernel always has
/// threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KernelThreads(BTreeMap<Thread, u64>);

impl KernelThreads {
    /// Reads the kernel threads in this cgroup. Threads in other cgroups are skipped, because the CPU time of a
    /// cgroup already contains theirs. Returns `None` if this process sees no kernel threads, as in a container, or
    /// if the kernel does not account for their time (CONFIG_SCHED_INFO).
    pub(super) fn read(processes: &Path) -> Option<Self> {
        let list = fs::read_to_string(processes).ok()?;
        let ids = list.lines().filter_map(|line| line.parse().ok());
        let threads: BTreeMap<_, _> = ids.filter_map(read_one).collect();
        (!threads.is_empty()).then_some(Self(threads))
    }

    /// CPU time between an earlier reading and this one. The time of threads that ended in between is missing. It
    /// is short, because the kernel ends a worker only after five idle minutes (`IDLE_WORKER_TIMEOUT` in
    /// kernel/workqueue.c).
    pub(super) fn since(&self, earlier: &Self) -> u64 {
        let rise = |(thread, now): (&Thread, &u64)| {
            now.saturating_sub(earlier.0.get(thread).copied().unwrap_or(0))
        };
        self.0.iter().map(rise).sum()
    }
}

/// A kernel thread and its CPU time; `None` for a process, and for a thread that has just ended.
fn read_one(id: u32) -> Option<(Thread, u64)> {
    let dir = PathBuf::from(format!("/proc/{id}"));
    let started = kernel_thread(&fs::read_to_string(dir.join("stat")).ok()?)?;
    // Time on a CPU, time in a run queue, number of time slices (Documentation/scheduler/sched-stats.rst).
    let times = fs::read_to_string(dir.join("schedstat")).ok()?;
    let ran_ns = times.split_ascii_whitespace().next()?.parse().ok()?;
    Some(((id, started), ran_ns))
}

/// Start time of the kernel thread with this `/proc/PID/stat` (proc(5)); `None` for a process.
fn kernel_thread(stat: &str) -> Option<u64> {
    // The name, in parentheses, may contain spaces and parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    // The first field here is field 3 of proc(5).
    let field = |number: usize| -> Option<u64> {
        let mut fields = fields.split_ascii_whitespace();
        fields.nth(number - 3)?.parse().ok()
    };
    (field(9)? & KERNEL_THREAD != 0).then(|| field(22))?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn threads<const N: usize>(times: [(Thread, u64); N]) -> KernelThreads {
        KernelThreads(times.into())
    }

    #[test]
    fn new_threads_count_from_their_start_and_a_reused_number_is_a_new_thread() {
        let before = threads([((2, 1), 100), ((7, 50), 900), ((9, 60), 5)]);
        let after = threads([((2, 1), 130), ((7, 99), 40), ((11, 70), 3)]);
        assert_eq!(after.since(&before), 30 + 40 + 3);
    }

    #[test]
    fn processes_are_no_kernel_threads_whatever_their_name() {
        let tail = "0 0 0 0 3 4 0 0 20 0 1 0 77 0 0";
        let stat = |name: &str, flags: u64| format!("5 ({name}) S 2 0 0 0 -1 {flags} {tail}");
        assert_eq!(kernel_thread(&stat("kworker/0:1-ev", 69_238_880)), Some(77));
        assert_eq!(kernel_thread(&stat("a) S (b c", KERNEL_THREAD)), Some(77));
        assert_eq!(kernel_thread(&stat("kworker/0:1-ev", 4_194_560)), None);
        assert_eq!(kernel_thread("5 (sh) S 2"), None);
    }
}
