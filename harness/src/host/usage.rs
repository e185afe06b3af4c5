//! CPU time of a run and of everything else on the host, and time for which tasks waited.
//!
//! ```text
//! <hierarchy>/…/cube-bench-run-PID/     the harness and its children
//! <hierarchy>/cube-TAG/                 VMs of a server that the run started
//! ```
//! For the run, the harness moves itself into its own cgroup. A measured server that was already running on this host
//! belongs to the run too ([`OwnGroup::add_server`]). Everything that the host runs outside of these
//! cgroups is *foreign*: other programs, and kernel threads, which are counted separately. In a container, the root
//! of the hierarchy is the container's cgroup, so programs outside the container are not visible.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    process,
};

use super::{
    cgroup::{ROOT, lineage},
    kernel_threads::KernelThreads,
};
use crate::{account::Account, clock, event::RoundUsage};

const PROCESSES: &str = "cgroup.procs";
/// CPU time of a cgroup in nanoseconds, version 1.
const V1_USAGE: &str = "cpuacct.usage";
/// File of version 2 whose first line is `usage_usec N`.
const V2_USAGE: &str = "cpu.stat";
/// Prefix of the cgroups of servers, comparison clones and runs.
const PREFIX: &str = "cube-";
/// Prefix of the cgroups of comparison clones and runs, which end in the process id of a harness.
const BENCH: &str = "cube-bench-";
const RUN: &str = "cube-bench-run-";
/// Length of the clock tick of /proc/stat, 1/USER_HZ.
const TICK_NS: u64 = 10_000_000;

/// The cgroup of a run. Dropping it moves the process back and removes the cgroup.
#[derive(Debug)]
pub struct OwnGroup {
    /// The cgroup of the process before the run.
    home: PathBuf,
    own: PathBuf,
    /// Root of the hierarchy.
    root: PathBuf,
    /// Cgroups of other servers and runs, which already existed.
    others: BTreeSet<PathBuf>,
    /// The measured server, if it was already running.
    server: Option<Account>,
    /// Whether the sandboxes run where the harness does not see their CPU time.
    client_only: bool,
}

/// One reading of all counters. Values that could not be read are `None`.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Instants before the first and after the last counter was read.
    began_ns: u64,
    ended_ns: u64,
    own_ns: Option<u64>,
    client_only: bool,
    host_ns: Option<u64>,
    kernel_threads: Option<KernelThreads>,
    memory_wait_ns: Option<u64>,
    cpu_wait_ns: Option<u64>,
}

impl OwnGroup {
    /// Moves this process into a new cgroup below its current one.
    ///
    /// # Errors
    /// Returns an error if the cgroup cannot be created or joined, for example without root.
    pub fn enter() -> io::Result<Self> {
        let cgroups = fs::read_to_string("/proc/self/cgroup")?;
        let lineage = lineage(Path::new(ROOT), &cgroups, "cpuacct");
        let (Some(home), Some(root)) = (lineage.first(), lineage.last()) else {
            return Err(io::Error::other("no cgroup hierarchy is mounted"));
        };
        let group = Self {
            own: home.join(format!("{RUN}{}", process::id())),
            home: home.clone(),
            root: root.clone(),
            others: children(root),
            server: None,
            client_only: false,
        };
        remove_stale(home);
        fs::create_dir(&group.own)?;
        // From here on, dropping the group removes the directory.
        fs::write(group.own.join(PROCESSES), process::id().to_string())?;
        Ok(group)
    }

    /// Counts the CPU time of a server that was already running as the run's.
    pub fn add_server(&mut self, server: Account) {
        self.server = Some(server);
    }

    /// Marks this host as the client of sandboxes whose CPU time is not visible.
    pub fn set_client_only(&mut self) {
        self.client_only = true;
    }

    /// Reads all counters.
    #[must_use]
    pub fn read(&self) -> Reading {
        let mut groups = children(&self.root);
        groups.retain(|group| !self.others.contains(group));
        groups.insert(self.own.clone());
        let began_ns = clock::monotonic_ns();
        Reading {
            began_ns,
            own_ns: self.own_ns(&groups),
            client_only: self.client_only,
            host_ns: self.host_ns(),
            kernel_threads: KernelThreads::read(&self.root.join(PROCESSES)),
            memory_wait_ns: waited_ns("memory"),
            cpu_wait_ns: waited_ns("cpu"),
            ended_ns: clock::monotonic_ns(),
        }
    }

    fn own_ns(&self, groups: &BTreeSet<PathBuf>) -> Option<u64> {
        let of_groups: u64 = groups
            .iter()
            .map(|group| usage_ns(group))
            .sum::<Option<_>>()?;
        let of_server = self.server.as_ref().map(Account::cpu_ns).transpose();
        Some(of_groups + of_server.ok()?.unwrap_or(0))
    }

    /// CPU time of all tasks. Version 1 counts it exactly in its root group. The root group of version 2 only has
    /// the values of /proc/stat, and adds steal.
    fn host_ns(&self) -> Option<u64> {
        if self.root.join(V1_USAGE).exists() {
            return usage_ns(&self.root);
        }
        busy_ns(&fs::read_to_string("/proc/stat").ok()?)
    }
}

impl Drop for OwnGroup {
    fn drop(&mut self) {
        // On an error, an empty cgroup remains, which is harmless.
        let _ = fs::write(self.home.join(PROCESSES), process::id().to_string());
        let _ = fs::remove_dir(&self.own);
    }
}

impl Reading {
    /// Usage between this reading and a later one. The duration includes both readings: the process may have waited
    /// during one of them, and shares must not exceed 1.
    #[must_use]
    pub fn until(&self, later: &Self, cores: usize) -> RoundUsage {
        let wall_ns = later.ended_ns.saturating_sub(self.began_ns).max(1);
        let rise = |from: Option<u64>, to: Option<u64>| Some(to?.saturating_sub(from?));
        let own_cpu_ns = rise(self.own_ns, later.own_ns);
        let host_cpu_ns = rise(self.host_ns, later.host_ns);
        let threads = self
            .kernel_threads
            .as_ref()
            .zip(later.kernel_threads.as_ref());
        let share = |ns: Option<u64>| Some((ns? as f64 / wall_ns as f64).min(1.0));
        RoundUsage {
            wall_ns,
            own_cpu_ns,
            // The counters are read one after the other, so the run's own time may be slightly ahead.
            foreign_cpu_ns: host_cpu_ns
                .zip(own_cpu_ns)
                .map(|(host, own)| host.saturating_sub(own)),
            kernel_cpu_ns: threads.map(|(before, after)| after.since(before)),
            client_only: later.client_only,
            cores,
            memory_wait_share: share(rise(self.memory_wait_ns, later.memory_wait_ns)),
            cpu_wait_share: share(rise(self.cpu_wait_ns, later.cpu_wait_ns)),
        }
    }
}

/// Number of CPUs of the host, including those that this process may not use.
#[must_use]
pub fn host_cores() -> usize {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let is_cpu = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
    text.lines().filter(is_cpu).count().max(1)
}

/// cgroups of servers and of harness runs directly below the root.
fn children(root: &Path) -> BTreeSet<PathBuf> {
    let own = process::id().to_string();
    let is_ours = |name: &str| match name.strip_prefix(BENCH) {
        Some(rest) => rest.rsplit('-').next() == Some(own.as_str()),
        None => name.starts_with(PREFIX),
    };
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    entries
        .filter(|entry| is_ours(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.path())
        .collect()
}

/// Removes cgroups of killed runs.
fn remove_stale(home: &Path) {
    for entry in fs::read_dir(home).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(RUN));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            // Fails if a child of that run is still alive.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

fn usage_ns(group: &Path) -> Option<u64> {
    if let Ok(text) = fs::read_to_string(group.join(V1_USAGE)) {
        return text.trim().parse().ok();
    }
    let text = fs::read_to_string(group.join(V2_USAGE)).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("usage_usec "));
    Some(line?.trim().parse::<u64>().ok()? * 1000)
}

/// Sum of user, nice, system, irq and softirq of the first line of /proc/stat (proc(5)).
fn busy_ns(stat: &str) -> Option<u64> {
    let fields: Vec<u64> = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_ascii_whitespace()
        .map(|n| n.parse().ok())
        .collect::<Option<_>>()?;
    let busy = [0, 1, 2, 5, 6].map(|index: usize| fields.get(index).copied());
    Some(busy.into_iter().sum::<Option<u64>>()? * TICK_NS)
}

/// Total time in which some task of the host waited for this resource (Documentation/accounting/psi.rst).
fn waited_ns(resource: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/pressure/{resource}")).ok()?;
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let (_, total) = some.split_once("total=")?;
    Some(total.trim().parse::<u64>().ok()? * 1000)
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        io::Write,
        process::Command,
        time::{Duration, Instant},
    };

    use super::*;

    /// CPU time of a process or thread in nanoseconds, from /proc/PID/schedstat, to which the kernel adds at each
    /// switch. The ticks of /proc/PID/stat are samples, which miss threads that run briefly.
    fn ran_ns(pid: u32) -> Option<u64> {
        let times = fs::read_to_string(format!("/proc/{pid}/schedstat")).ok()?;
        times.split_ascii_whitespace().next()?.parse().ok()
    }

    /// Whether the kernel started this process or thread.
    fn is_of_kernel(pid: u32) -> Option<bool> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some(pid == 2 || model::ProcessStat::parse(&stat)?.parent == 2)
    }

    /// CPU time of kthreadd and each of its children, in nanoseconds.
    fn kernel_ran_ns() -> BTreeMap<u32, u64> {
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let threads = pids.filter(|pid| is_of_kernel(*pid) == Some(true));
        threads
            .filter_map(|pid| Some((pid, ran_ns(pid)?)))
            .collect()
    }

    /// CPU time of the kernel threads that still exist, since then. A thread that ended had been idle for minutes.
    fn kernel_ran_since(from: &BTreeMap<u32, u64>) -> u64 {
        let rise = |(pid, ns): (u32, u64)| ns.saturating_sub(from.get(&pid).copied().unwrap_or(0));
        kernel_ran_ns().into_iter().map(rise).sum()
    }

    /// Makes kernel threads write pages to a disk.
    fn write_back() {
        let mut file = tempfile::tempfile_in("/var/tmp").unwrap();
        for _ in 0..16 {
            file.write_all(&[7; 1 << 20]).unwrap();
        }
        nix::unistd::sync();
    }

    #[test]
    fn net_a_busy_process_counts_as_a_program_and_work_of_kernel_threads_does_not() {
        if !nix::unistd::geteuid().is_root() || is_of_kernel(2) != Some(true) {
            eprintln!("skipped: needs root and a view of the kernel's threads");
            return;
        }
        // In the cgroup of this test, which is not the run's cgroup.
        let mut busy = Command::new("setsid")
            .args(["sh", "-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let group = OwnGroup::enter().unwrap();
        let burned = || ran_ns(busy.id()).unwrap();
        // The interval of the group lies within the interval of the kernel threads, and contains the interval of
        // the busy process.
        let (kernel_from, before, busy_from) = (kernel_ran_ns(), group.read(), burned());
        let deadline = Instant::now() + Duration::from_secs(60);
        let enough: u64 = 200_000_000;
        while kernel_ran_since(&kernel_from) < enough || burned() < busy_from + enough {
            assert!(Instant::now() < deadline, "the kernel's threads are idle");
            write_back();
        }
        let busy_ns = burned() - busy_from;
        let used = before.until(&group.read(), host_cores());
        let kernel = kernel_ran_since(&kernel_from);
        busy.kill().unwrap();
        busy.wait().unwrap();
        let (counted, programs) = (used.kernel_cpu_ns.unwrap(), used.programs_ns().unwrap());
        assert!(
            counted * 2 > kernel && counted <= kernel,
            "{counted} of {kernel}"
        );
        assert!(programs * 10 > busy_ns * 9, "{programs} of {busy_ns}");
        assert_eq!(programs + counted, used.foreign_cpu_ns.unwrap());
    }

    #[test]
    fn own_time_and_the_time_of_others_add_up_to_that_of_the_host() {
        let before = Reading {
            began_ns: 0,
            ended_ns: 1,
            own_ns: Some(10),
            client_only: false,
            host_ns: Some(100),
            kernel_threads: None,
            memory_wait_ns: Some(5),
            cpu_wait_ns: None,
        };
        let later = Reading {
            began_ns: 999,
            ended_ns: 1000,
            own_ns: Some(410),
            client_only: false,
            host_ns: Some(1100),
            kernel_threads: None,
            memory_wait_ns: Some(105),
            cpu_wait_ns: None,
        };
        let used = before.until(&later, 2);
        assert_eq!(
            (used.own_cpu_ns, used.foreign_cpu_ns),
            (Some(400), Some(600))
        );
        assert_eq!(used.kernel_cpu_ns, None);
        assert_eq!(used.programs_share(), Some(0.3));
        assert_eq!(used.memory_wait_share, Some(0.1));
        assert_eq!(used.cpu_wait_share, None);
    }

    #[test]
    fn cgroups_of_other_runs_are_not_own() {
        let root = tempfile::tempdir().unwrap();
        let own = format!("{RUN}{}", process::id());
        for name in [
            "cube-ab12",
            &own,
            "cube-bench-run-4194999",
            "cube-bench-4194999",
            "x",
        ] {
            fs::create_dir(root.path().join(name)).unwrap();
        }
        let found = children(root.path());
        assert_eq!(
            found,
            ["cube-ab12", &own]
                .map(|name| root.path().join(name))
                .into()
        );
        remove_stale(root.path());
        assert!(!root.path().join("cube-bench-run-4194999").exists());
        assert!(root.path().join(own).exists());
    }

    #[test]
    fn formats_of_the_kernel_are_parsed() {
        assert_eq!(busy_ns("cpu  1 2 3 100 9 4 5 50 7 0\n"), Some(15 * TICK_NS));
        let group = tempfile::tempdir().unwrap();
        fs::write(group.path().join(V2_USAGE), "usage_usec 12\nuser_usec 1\n").unwrap();
        assert_eq!(usage_ns(group.path()), Some(12_000));
        fs::write(group.path().join(V1_USAGE), "77\n").unwrap();
        assert_eq!(usage_ns(group.path()), Some(77));
    }
}
