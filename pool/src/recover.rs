//! Recovery when the pool opens: sandboxes whose VMs still run are adopted, paused sandboxes are kept, and all other
//! slots, with their processes and control groups, are removed. A server that was killed at any moment therefore leaves
//! nothing behind for long.

use std::{
    fs, io,
    panic::resume_unwind,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use model::{SandboxId, template_file};
use netisolation::Isolation;
use vmm_control::{ControlClient, VmPhase};

use crate::{
    PauseMode, Recovered, SandboxState,
    cgroup::Groups,
    driver::Entry,
    host,
    lifetime::Lifetime,
    record::{Kept, ProcessName, Record, SlotDir},
    slot::{Slot, Stage},
    vm::Vm,
};

/// Number of directories that are examined at the same time. It equals the default limit of running sandboxes, so that
/// the waits for VMMs that do not answer overlap.
const AT_ONCE: usize = 256;
/// How long a killed process may take to exit.
const END: Duration = Duration::from_secs(10);

/// The outcome for one directory.
enum Outcome {
    Alive(Box<Entry>),
    /// A caller's sandbox cannot be recovered, for this reason.
    Lost(String),
    /// The slot had no owner or no usable record.
    Swept,
}

struct Recovery<'a> {
    sandboxes: &'a Path,
    host_boot_id: &'a str,
    network: Option<&'a Isolation>,
    /// How long a VMM may take to answer. On a host with a slow or full disk, an answer takes seconds.
    patience: Duration,
    lifetime_of_note: fn(&str) -> Option<Lifetime>,
}

/// Examines every sandbox's directory, then every control group. VMMs that do not answer are waited for in parallel, up
/// to `patience` for each of their answers.
///
/// # Errors
/// Returns an error if the directory of sandboxes cannot be read or a thread cannot be started.
pub(crate) fn recover(
    sandboxes: &Path,
    host_boot_id: &str,
    groups: &Groups,
    network: Option<&Isolation>,
    patience: Duration,
    lifetime_of_note: fn(&str) -> Option<Lifetime>,
) -> io::Result<(Vec<(SandboxId, Entry)>, Recovered)> {
    let recovery = Recovery {
        sandboxes,
        host_boot_id,
        network,
        patience,
        lifetime_of_note,
    };
    let mut entries = Vec::new();
    let mut recovered = Recovered::default();
    let now = host::unix_ms();
    for (id, outcome) in recovery.outcomes(directories(sandboxes)?)? {
        let dir = SlotDir::new(sandboxes, &id);
        match outcome {
            Outcome::Alive(mut entry) => {
                let generation = u64::try_from(entries.len() + 1).unwrap_or(u64::MAX);
                entry.has_new_vm(generation, now);
                entry.add_event(now, "recovered by a new server process");
                recovered.alive.extend(entry.sandbox(&id));
                entries.push((id, *entry));
                continue;
            }
            Outcome::Lost(why) => {
                tracing::warn!(sandbox = %id, why, "a sandbox was lost while no server ran");
                recovered.lost.push((id, why));
            }
            Outcome::Swept => {}
        }
        if let Err(error) = dir.remove() {
            tracing::error!(dir = %dir.path().display(), %error, "cannot remove a sandbox's directory");
        }
    }
    for group in groups.list() {
        let used = entries
            .iter()
            .any(|(id, e)| id.as_str() == group && e.slot.state() == Some(SandboxState::Running));
        if !used {
            sweep_group(groups, &group);
        }
    }
    Ok((entries, recovered))
}

/// The ids of all sandboxes that have a directory. Other names are logged and ignored.
fn directories(sandboxes: &Path) -> io::Result<Vec<SandboxId>> {
    let mut ids = Vec::new();
    for file in fs::read_dir(sandboxes)? {
        let name = file?.file_name();
        match name.to_str().and_then(|n| n.parse().ok()) {
            Some(id) => ids.push(id),
            None => tracing::warn!(?name, "not a sandbox's directory: leaving it alone"),
        }
    }
    Ok(ids)
}

/// Kills the processes in a group without a running sandbox, and removes the group.
fn sweep_group(groups: &Groups, group: &str) {
    for pid in groups.processes(group) {
        let vm = ProcessName::of(pid).and_then(Vm::adopt);
        if let Some(Err(error)) = vm.map(|vm| vm.end(END)) {
            tracing::error!(group, pid, %error, "a VMM does not exit after SIGKILL");
        }
    }
    if let Err(error) = groups.remove(group) {
        tracing::error!(group, %error, "cannot remove a control group");
    }
}

impl Recovery<'_> {
    /// Examines all directories, and returns the outcome for each id in the order of `ids`.
    fn outcomes(&self, ids: Vec<SandboxId>) -> io::Result<Vec<(SandboxId, Outcome)>> {
        let next = AtomicUsize::new(0);
        let examine = || {
            let mut outcomes = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(id) = ids.get(number) else {
                    return outcomes;
                };
                outcomes.push((number, self.examine(id)));
            }
        };
        let mut outcomes = thread::scope(|scope| {
            let begin = |_| thread::Builder::new().spawn_scoped(scope, examine);
            let begun: Vec<_> = (0..ids.len().min(AT_ONCE)).map(begin).collect();
            let mut outcomes = Vec::new();
            for thread in begun {
                outcomes.extend(thread?.join().unwrap_or_else(|panic| resume_unwind(panic)));
            }
            io::Result::Ok(outcomes)
        })?;
        outcomes.sort_by_key(|(number, _)| *number);
        Ok(ids
            .into_iter()
            .zip(outcomes.into_iter().map(|(_, outcome)| outcome))
            .collect())
    }

    fn examine(&self, id: &SandboxId) -> Outcome {
        let dir = &SlotDir::new(self.sandboxes, id);
        let record = match dir.read(self.lifetime_of_note) {
            Ok(record) => record,
            Err(error) => {
                // The former server was killed either before it recorded the VMM, which then has no guest yet, or while
                // it ended the sandbox.
                tracing::info!(dir = %dir.path().display(), %error, "removing a sandbox without a usable record");
                self.shut_down(dir);
                return Outcome::Swept;
            }
        };
        let same_boot = record.host_boot_id == self.host_boot_id;
        let vm = record.vmm.filter(|_| same_boot).and_then(Vm::adopt);
        match (record.kept, vm) {
            (Kept::Nobody, vm) => {
                self.end(dir, vm);
                Outcome::Swept
            }
            (Kept::Paused(mode), vm) => {
                self.end(dir, vm);
                paused(dir, record, mode)
            }
            (Kept::Running, Some(vm)) => match self.adopt(dir, id, record, vm) {
                Ok(entry) => Outcome::Alive(Box::new(entry)),
                Err(why) => Outcome::Lost(why),
            },
            (Kept::Running, None) => {
                let why = if same_boot {
                    host::last_words(&dir.stderr())
                        .unwrap_or_else(|| "its VMM was killed".to_owned())
                } else {
                    "the host was rebooted".to_owned()
                };
                Outcome::Lost(why)
            }
        }
    }

    /// Asks the VMM at this slot's control socket to exit, because its process id is not recorded. There may be no VMM.
    fn shut_down(&self, dir: &SlotDir) {
        if let Ok(mut control) = ControlClient::connect(&dir.control(), Some(self.patience))
            && let Err(error) = control.shutdown()
        {
            let why = api_types::guest_text(&model::chain(&error));
            tracing::warn!(dir = %dir.path().display(), why, "a VMM does not answer the request to exit");
        }
    }

    fn end(&self, dir: &SlotDir, vm: Option<Vm>) {
        match vm {
            Some(vm) => {
                if let Err(error) = vm.end(END) {
                    tracing::error!(dir = %dir.path().display(), %error, "a VMM does not exit after SIGKILL");
                }
            }
            // There may be a VMM whose process is not in the record, if the former server was killed between starting
            // the process and recording it.
            None => self.shut_down(dir),
        }
    }

    fn adopt(
        &self,
        dir: &SlotDir,
        id: &SandboxId,
        record: Record,
        vm: Vm,
    ) -> Result<Entry, String> {
        match adopt_tap(id, &record, self.network).and_then(|()| self.go_on(dir)) {
            Ok(()) => {}
            Err(why) => {
                self.end(dir, Some(vm));
                return Err(why);
            }
        }
        // These are the files of an unfinished pause, or of a pause that was resumed.
        let _ = fs::remove_dir_all(dir.pause());
        remove_drafts(dir);
        let mut entry = Entry::new(
            Slot::recovered(Stage::Running, record.lifetime),
            dir.clone(),
            record,
        );
        entry.pidfd = Some(vm.pidfd.clone());
        entry.unwatched = Some(vm);
        Ok(entry)
    }

    /// Resumes an adopted VM if it is paused, because the former server may have been killed while a snapshot was being
    /// written. Returns an error if the VMM does not answer or its guest has exited.
    fn go_on(&self, dir: &SlotDir) -> Result<(), String> {
        let mut control = ControlClient::connect(&dir.control(), Some(self.patience))
            .map_err(|e| format!("cannot connect to its VMM: {e}"))?;
        let answer = |e| {
            format!(
                "its VMM does not answer: {}",
                api_types::guest_text(&model::chain(&e))
            )
        };
        let stats = control.stats().map_err(answer)?;
        match stats.phase {
            VmPhase::Running => Ok(()),
            VmPhase::Paused => control.resume().map_err(answer),
            VmPhase::Empty | VmPhase::Exited => Err("its guest exited".to_owned()),
        }
    }
}

fn paused(dir: &SlotDir, mut record: Record, mode: PauseMode) -> Outcome {
    let file = match mode {
        PauseMode::Memory => model::MANIFEST_NAME,
        PauseMode::FilesystemOnly => template_file::LAYER,
    };
    if !dir.pause().join(file).exists() {
        return Outcome::Lost("its snapshot is missing".to_owned());
    }
    record.vmm = None;
    record.tap = None;
    Outcome::Alive(Box::new(Entry::new(
        Slot::recovered(Stage::Paused(mode), record.lifetime),
        dir.clone(),
        record,
    )))
}

/// Removes incomplete snapshots of the former server. No other server can be writing one, because this server holds the
/// lock of the state directory.
fn remove_drafts(dir: &SlotDir) {
    for entry in fs::read_dir(dir.path()).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(".pause.") {
            // If this fails, the files are removed with the sandbox's directory.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Puts the record's policy in force at the TAP of an adopted VM. On an error the caller ends the sandbox, because its
/// traffic would not be filtered.
fn adopt_tap(id: &SandboxId, record: &Record, network: Option<&Isolation>) -> Result<(), String> {
    match (record.tap, network) {
        (None, _) => Ok(()),
        (Some(_), None) => {
            Err("it has a network, and this server is configured without one".to_owned())
        }
        (Some(tap), Some(network)) => network
            .adopt(tap, id, &record.policy)
            .map_err(|e| model::chain(&e)),
    }
}
