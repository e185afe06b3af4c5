//! Leftovers of a killed server: processes, directories and cgroups that no sandbox needs.

use std::{
    fs, io,
    panic::resume_unwind,
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use vmm_control::ControlClient;

use crate::{
    cgroup::Groups,
    record::{ProcessName, SlotDir},
    vm::Vm,
};

/// Number of leftover directories that are removed at the same time. Each may wait for an unresponsive VMM.
const SWEPT_AT_ONCE: usize = 32;
/// How long a killed process may take to exit.
const END: Duration = Duration::from_secs(10);

/// Leftovers of a previous server that no sandbox needs.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    /// Directories of warm, unfinished and lost slots, with their VMMs.
    pub(crate) slots: Vec<(SlotDir, Option<Vm>)>,
    /// Cgroups.
    pub(crate) groups: Vec<String>,
    /// Directories of forks that had not started.
    pub(crate) forks: Vec<PathBuf>,
}

impl Leftovers {
    /// Ends the processes and removes the directories and cgroups. Logs failures; the next server tries again. Waits up
    /// to `patience` for each response of a VMM.
    pub(crate) fn sweep(self, groups: &Groups, patience: Duration) {
        let Self {
            slots,
            groups: names,
            forks,
        } = self;
        let swept = in_parallel(&slots, SWEPT_AT_ONCE, |(dir, vm)| {
            end(dir, vm.as_ref(), patience);
            if let Err(error) = dir.remove() {
                tracing::error!(dir = %dir.path().display(), %error, "cannot remove the sandbox's directory");
            }
        });
        if let Err(error) = swept {
            tracing::error!(%error, "cannot start a thread to remove the leftovers of the previous server");
        }
        for name in names {
            sweep_group(groups, &name);
        }
        for dir in forks {
            if let Err(error) = fs::remove_dir_all(&dir) {
                tracing::error!(dir = %dir.display(), %error, "cannot remove the snapshot of forks");
            }
        }
    }
}

/// Ends the VMM of a slot, if there is one, whether or not its process is recorded: the previous server may have been
/// killed between starting the process and recording it.
pub(crate) fn end(dir: &SlotDir, vm: Option<&Vm>, patience: Duration) {
    match vm {
        Some(vm) => {
            if let Err(error) = vm.stop(END) {
                tracing::error!(dir = %dir.path().display(), %error, "VMM did not exit after SIGKILL");
            }
        }
        None => shut_down(dir, patience),
    }
}

/// Requests the VMM at this slot's control socket to exit, because its process id is not recorded.
fn shut_down(dir: &SlotDir, patience: Duration) {
    if let Ok(mut control) = ControlClient::connect(&dir.control(), Some(patience))
        && let Err(error) = control.shutdown()
    {
        let why = envd::guest_text(&model::chain(&error));
        tracing::warn!(dir = %dir.path().display(), why, "VMM did not respond to the request to exit");
    }
}

/// Kills the processes in a cgroup that has no running sandbox, and removes the cgroup.
pub(crate) fn sweep_group(groups: &Groups, group: &str) {
    for pid in groups.processes(group) {
        let vm = ProcessName::of(pid).and_then(Vm::adopt);
        if let Some(Err(error)) = vm.map(|vm| vm.end(END)) {
            tracing::error!(group, pid, %error, "VMM did not exit after SIGKILL");
        }
    }
    if let Err(error) = groups.remove(group) {
        tracing::error!(group, %error, "cannot remove cgroup");
    }
}

/// Whether a VMM listens at the slot's control socket.
pub(crate) fn has_listener(dir: &SlotDir) -> bool {
    const AT_ONCE: Duration = Duration::from_millis(1);
    match vmm_control::connect(&dir.control(), Some(AT_ONCE)) {
        Ok(_) => true,
        Err(e) => !matches!(
            e.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
        ),
    }
}

/// Calls `work` for every item, on at most `threads` threads. Returns the results in the order of the items.
pub(crate) fn in_parallel<I: Sync, T: Send>(
    items: &[I],
    threads: usize,
    work: impl Fn(&I) -> T + Sync,
) -> io::Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut results = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(number) else {
                return results;
            };
            results.push((number, work(item)));
        }
    };
    let mut results = thread::scope(|scope| {
        let begin = |_| thread::Builder::new().spawn_scoped(scope, run);
        let begun: Vec<_> = (0..items.len().min(threads)).map(begin).collect();
        let mut results = Vec::new();
        for thread in begun {
            results.extend(thread?.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        io::Result::Ok(results)
    })?;
    results.sort_by_key(|(number, _)| *number);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}
