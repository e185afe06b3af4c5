//! Accounts for the CPU time and the memory of a server and all its sandboxes, by cgroup.
//!
//! ```text
//! memory          cube-TAG/                 the VMs      cube-TAG-server-PID/   the server, with loaded templates
//! CPU, version 2  the same two groups
//! CPU, version 1  one group, created here, around the server and all its descendants; or, if the pool has a group in
//!                 that hierarchy (cpu and cpuacct mounted together), that group and the CPU clock of the server.
//!                 A server that was already running stays in its own group
//! ```
//! The CPU time of a process stays in its group after the process has ended. Kernel threads are not included.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
    time::Duration,
};

use nix::{
    sys::{
        resource::{UsageWho, getrusage},
        time::TimeValLike,
    },
    time::{ClockId, clock_gettime},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};

use crate::target::group::directory;

/// Beginning of the names of groups that are created here; the rest is the process id of the harness.
const PREFIX: &str = "cube-account-";
const PROCESSES: &str = "cgroup.procs";
/// Separates the pool's name from the process id in the name of a server's group.
const SERVER: &str = "-server-";
/// CPU time of a group: nanoseconds in version 1, `usage_usec` in version 2.
const CPU_FILES: [&str; 2] = ["cpuacct.usage", "cpu.stat"];

/// The accounts of one server. Dropping this value removes a group that was created for it, so the server and its
/// sandboxes must have ended by then.
#[derive(Debug)]
pub struct Account {
    cpu: Vec<CpuSource>,
    /// Memory groups of the VMs and of the server; `None` if the server does not have its own group.
    memory: Option<(PathBuf, PathBuf)>,
    /// A group that was created here.
    created: Option<PathBuf>,
}

#[derive(Debug, PartialEq, Eq)]
enum CpuSource {
    Group(PathBuf),
    Process(u32),
    /// A process with its living descendants, and the descendants that have ended.
    Tree(u32),
}

/// Memory of a server and its sandboxes in bytes, without pages of files that the kernel can drop at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolMemory {
    /// All VMs together, with the kernel's memory for them.
    pub vms_bytes: u64,
    /// The server, without templates.
    pub server_bytes: u64,
    /// Templates that the server has loaded into memory.
    pub templates_bytes: u64,
}

/// The groups of one process in a version 1 or 2 hierarchy.
struct Membership<'a> {
    controllers: &'a str,
    path: &'a str,
}

impl Account {
    /// Finds or creates the accounts of the server with the process id `server`.
    ///
    /// # Errors
    /// Returns an error if the groups of the server cannot be read, or if a new group cannot be created or entered.
    pub fn open(server: u32) -> io::Result<Self> {
        Self::with(server, |account, member| {
            let group = enclose(&member.dir(), server)?;
            account.cpu.push(CpuSource::Group(group.clone()));
            account.created = Some(group);
            Ok(())
        })
    }

    /// Finds the accounts of a server that was already running, which is not moved. The group of a server that has none
    /// of its own may contain this process; then the server's processes are counted.
    ///
    /// # Errors
    /// Returns an error if the groups of the server cannot be read.
    pub fn observe(server: u32) -> io::Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        Self::with(server, |account, member| {
            let mut own = memberships(&own).filter(|own| own.controllers == member.controllers);
            let has_own_group = own.all(|own| !Path::new(own.path).starts_with(member.path));
            account
                .cpu
                .push(if has_own_group && cpu_of(&member.dir()).is_ok() {
                    CpuSource::Group(member.dir())
                } else {
                    CpuSource::Tree(server)
                });
            Ok(())
        })
    }

    /// `otherwise` adds the CPU time of a server without groups as a pool has them.
    fn with(
        server: u32,
        otherwise: impl FnOnce(&mut Self, &Membership<'_>) -> io::Result<()>,
    ) -> io::Result<Self> {
        let text = fs::read_to_string(format!("/proc/{server}/cgroup"))?;
        let all: Vec<Membership<'_>> = memberships(&text).collect();
        let memory = all.iter().find_map(Membership::server_name);
        let pool = memory.and_then(|(_, name)| Some(name.split_once(SERVER)?.0));
        let mut account = Self {
            cpu: Vec::new(),
            memory: memory.zip(pool).map(|((member, name), pool)| {
                let above = member.above();
                (above.join(pool), above.join(name))
            }),
            created: None,
        };
        let v1 = all.iter().find(|m| m.has("cpuacct"));
        let Some(member) = v1.or_else(|| all.iter().find(|m| m.controllers.is_empty())) else {
            return Err(io::Error::other(
                "no cgroup hierarchy accounts for CPU time",
            ));
        };
        let above = member.above();
        let vms = pool
            .map(|pool| above.join(pool))
            .filter(|dir| cpu_of(dir).is_ok());
        match vms {
            Some(vms) => {
                account.cpu.push(CpuSource::Group(vms));
                let own = member.server_name();
                account.cpu.push(match own {
                    Some((_, name)) => CpuSource::Group(above.join(name)),
                    None => CpuSource::Process(server),
                });
            }
            None => otherwise(&mut account, member)?,
        }
        Ok(account)
    }

    /// CPU time that the server, its VMMs and its other helpers have used so far, in nanoseconds.
    ///
    /// # Errors
    /// Returns an error if a group has vanished or the server has ended.
    pub fn cpu_ns(&self) -> io::Result<u64> {
        let of = |source: &CpuSource| match source {
            CpuSource::Group(dir) => cpu_of(dir),
            CpuSource::Process(pid) => process_cpu_ns(*pid),
            CpuSource::Tree(pid) => tree_cpu_ns(*pid),
        };
        self.cpu.iter().map(of).sum()
    }

    /// Memory of the server and its sandboxes; `None` if it cannot be read.
    #[must_use]
    pub fn memory(&self) -> Option<PoolMemory> {
        let (vms, server) = self.memory.as_ref()?;
        let (vms, server) = (GroupMemory::of(vms)?, GroupMemory::of(server)?);
        Some(PoolMemory {
            vms_bytes: vms.without_files + vms.shmem,
            server_bytes: server.without_files,
            templates_bytes: server.shmem,
        })
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if let Some(group) = &self.created {
            // On failure, the next run removes the group.
            let _ = fs::remove_dir(group);
        }
    }
}

impl<'a> Membership<'a> {
    fn has(&self, controller: &str) -> bool {
        self.controllers.split(',').any(|name| name == controller)
    }

    /// Directory of the group.
    fn dir(&self) -> PathBuf {
        let path = Path::new(self.path);
        directory(self.controllers).join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Directory that contains the group.
    fn above(&self) -> PathBuf {
        let dir = self.dir();
        match self.server_name() {
            Some(_) => dir.parent().unwrap_or(&dir).to_owned(),
            None => dir,
        }
    }

    /// The last component of the path, if it is the name of a server's own group.
    fn server_name(&self) -> Option<(&Self, &'a str)> {
        let name = self.path.rsplit('/').next()?;
        name.contains(SERVER).then_some((self, name))
    }
}

/// The lines of /proc/PID/cgroup.
fn memberships(text: &str) -> impl Iterator<Item = Membership<'_>> {
    text.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        Some(Membership { controllers, path })
    })
}

/// Creates a group in `above` and moves a process and its children into it. Later descendants are born in it.
fn enclose(above: &Path, pid: u32) -> io::Result<PathBuf> {
    for entry in fs::read_dir(above)?.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            // If the group still has a process, the next run removes it.
            let _ = fs::remove_dir(entry.path());
        }
    }
    let group = above.join(format!("{PREFIX}{}", process::id()));
    match fs::create_dir(&group) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    fs::write(group.join(PROCESSES), pid.to_string())?;
    for child in children(pid)? {
        match fs::write(group.join(PROCESSES), child.to_string()) {
            // The child has ended.
            Err(e) if e.raw_os_error() != Some(nix::libc::ESRCH) => return Err(e),
            _ => {}
        }
    }
    Ok(group)
}

/// The children of all threads of a process.
fn children(pid: u32) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
        let text = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        found.extend(
            text.split_whitespace()
                .filter_map(|pid| pid.parse::<u32>().ok()),
        );
    }
    Ok(found)
}

/// CPU time of a group and all its descendants in nanoseconds.
fn cpu_of(group: &Path) -> io::Result<u64> {
    let [v1, v2] = CPU_FILES.map(|file| fs::read_to_string(group.join(file)));
    let found = match (v1, v2) {
        (Ok(text), _) => text.trim().parse().ok(),
        (_, Ok(text)) => field(&text, "usage_usec").and_then(|us| us.checked_mul(1000)),
        (_, Err(error)) => return Err(error),
    };
    found.ok_or_else(|| io::Error::other(format!("{} has no CPU time", group.display())))
}

/// CPU time of all threads of a process in nanoseconds.
///
/// # Errors
/// Returns an error if the process has ended.
pub(crate) fn process_cpu_ns(pid: u32) -> io::Result<u64> {
    let pid = Pid::from_raw(i32::try_from(pid).map_err(io::Error::other)?);
    let time = clock_gettime(ClockId::pid_cpu_clock_id(pid)?)?;
    Ok(u64::try_from(Duration::from(time).as_nanos()).unwrap_or(u64::MAX))
}

/// CPU time of a process, its living descendants, and their children that have ended. The harness is not counted, even if
/// the server started it.
fn tree_cpu_ns(pid: u32) -> io::Result<u64> {
    let mut sum = process_cpu_ns(pid)? + reaped_cpu_ns(pid);
    let mut left = children(pid)?;
    while let Some(pid) = left.pop() {
        // A process that ends now is counted by its parent, or at the next reading.
        if pid != process::id()
            && let Ok(ns) = process_cpu_ns(pid)
        {
            sum += ns + reaped_cpu_ns(pid);
            left.extend(children(pid).unwrap_or_default());
        }
    }
    Ok(sum)
}

/// CPU time of the children of a process for which it has waited: fields 16 and 17 of /proc/PID/stat (proc(5)).
fn reaped_cpu_ns(pid: u32) -> u64 {
    const TICK_NS: u64 = 10_000_000;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields = after_name.split_ascii_whitespace().skip(13).take(2);
    fields
        .filter_map(|ticks| ticks.parse::<u64>().ok())
        .sum::<u64>()
        * TICK_NS
}

/// CPU time of all processes that this process has started and waited for, in nanoseconds. `None` if it cannot be read.
#[must_use]
pub fn children_cpu_ns() -> Option<u64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).ok()?;
    let us = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    u64::try_from(us).ok()?.checked_mul(1000)
}

/// Memory of a group in bytes.
struct GroupMemory {
    shmem: u64,
    /// Everything except file pages, including file pages in memory file systems.
    without_files: u64,
}

impl GroupMemory {
    fn of(group: &Path) -> Option<Self> {
        let read = |file: &str| fs::read_to_string(group.join(file)).ok();
        let stat = read("memory.stat")?;
        let usage = read("memory.current").or_else(|| read("memory.usage_in_bytes"))?;
        let files = field(&stat, "total_cache").or_else(|| field(&stat, "file"))?;
        let shmem = field(&stat, "total_shmem").or_else(|| field(&stat, "shmem"))?;
        Some(Self {
            shmem,
            without_files: usage.trim().parse::<u64>().ok()?.saturating_sub(files),
        })
    }
}

/// The number after `name` in lines of the form `name number`.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    fn group_of(text: &'static str) -> Option<(PathBuf, &'static str)> {
        let all: Vec<_> = memberships(text).collect();
        let (member, name) = all.iter().find_map(Membership::server_name)?;
        Some((member.above(), name))
    }

    #[test]
    fn groups_of_a_server_are_found_in_both_versions() {
        let v1 = "4:memory:/slice/cube-a-server-7\n2:cpuacct:/\n1:cpu:/\n0::/\n";
        let memory = Path::new("/sys/fs/cgroup/memory/slice");
        assert_eq!(group_of(v1), Some((memory.to_owned(), "cube-a-server-7")));
        let v2 = "0::/cube-a-server-7\n";
        let (above, name) = group_of(v2).unwrap();
        assert_eq!((above, name), (directory(""), "cube-a-server-7"));
        assert_eq!(group_of("0::/user.slice\n"), None);
        let all: Vec<_> = memberships("3:cpu,cpuacct:/a\n").collect();
        assert!(all[0].has("cpuacct") && !all[0].has("acct"));
        assert_eq!(all[0].dir(), Path::new("/sys/fs/cgroup/cpu/a"));
    }

    #[test]
    fn files_of_both_versions_are_read_and_droppable_pages_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| fs::write(dir.path().join(file), text).unwrap();
        assert!(cpu_of(dir.path()).is_err());
        write("cpu.stat", "usage_usec 5\nuser_usec 3\n");
        write("memory.current", "1000\n");
        write("memory.stat", "anon 300\nfile 600\nshmem 100\n");
        assert_eq!(cpu_of(dir.path()).unwrap(), 5000);
        let read = || GroupMemory::of(dir.path()).map(|m| (m.without_files, m.shmem));
        assert_eq!(read(), Some((400, 100)));
        write("cpuacct.usage", "77\n");
        write(
            "memory.stat",
            "cache 1\nshmem 2\ntotal_cache 700\ntotal_shmem 50\n",
        );
        assert_eq!(cpu_of(dir.path()).unwrap(), 77);
        assert_eq!(read(), Some((300, 50)));
    }

    /// A shell whose child uses CPU time and ends; the shell then waits for the end of its standard input.
    fn busy() -> Child {
        Command::new("/bin/sh")
            .args([
                "-c",
                "(i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done); read x",
            ])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap()
    }

    #[test]
    fn cpu_time_of_waited_children_is_counted() {
        let before = children_cpu_ns().unwrap();
        let mut child = busy();
        let clock = process_cpu_ns(child.id()).unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(children_cpu_ns().unwrap() - before > 1_000_000);
        assert!(clock < u64::MAX && process_cpu_ns(child.id()).is_err());
    }

    #[test]
    fn net_a_created_group_counts_descendants_and_is_removed() {
        let mut child = busy();
        let account = Account::open(child.id()).unwrap();
        let before = account.cpu_ns().unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        let spent = account.cpu_ns().unwrap() - before;
        assert!(spent > 1_000_000, "{spent}");
        assert!(
            account.memory().is_none(),
            "a shell has no group for memory"
        );
        let group = account.created.clone().unwrap();
        drop(account);
        assert!(!group.exists());
    }
}
