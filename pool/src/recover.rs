//! What the state directory knows at the start: VMs that still run are adopted, paused sandboxes are kept, and
//! all else is swept, so that nothing is left of a server that was killed, wherever that happened.

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

/// So many directories are looked at at once. VMMs that do not answer are waited for together then: as many as a server
/// has by default.
const AT_ONCE: usize = 256;
/// A process that is told to die has gone after this.
const END: Duration = Duration::from_secs(10);

/// What became of one directory.
enum Fate {
    Alive(Box<Entry>),
    /// It was a caller's, and is gone: why.
    Lost(String),
    /// It was nobody's.
    Swept,
}

/// What is looked at.
struct Lookout<'a> {
    sandboxes: &'a Path,
    host_boot_id: &'a str,
    network: Option<&'a Isolation>,
    /// How long a VMM may take for an answer; one whose disk is slow or full takes seconds.
    patience: Duration,
    lifetime_of_note: fn(&str) -> Option<Lifetime>,
}

/// Looks at every sandbox's directory, then at every control group. No VMM is waited for longer than `patience`, and
/// those that are silent are waited for at the same time.
///
/// # Errors
/// The directory of sandboxes cannot be read.
pub(crate) fn recover(
    sandboxes: &Path,
    host_boot_id: &str,
    groups: &Groups,
    network: Option<&Isolation>,
    patience: Duration,
    lifetime_of_note: fn(&str) -> Option<Lifetime>,
) -> io::Result<(Vec<(SandboxId, Entry)>, Recovered)> {
    let lookout = Lookout {
        sandboxes,
        host_boot_id,
        network,
        patience,
        lifetime_of_note,
    };
    let mut entries = Vec::new();
    let mut recovered = Recovered::default();
    let now = host::unix_ms();
    for (id, fate) in lookout.fates(directories(sandboxes)?)? {
        let dir = SlotDir::new(sandboxes, &id);
        match fate {
            Fate::Alive(mut entry) => {
                let generation = u64::try_from(entries.len() + 1).unwrap_or(u64::MAX);
                entry.has_new_vm(generation, now);
                entry.tell(now, "taken over from the server before");
                recovered.alive.extend(entry.sandbox(&id));
                entries.push((id, *entry));
                continue;
            }
            Fate::Lost(why) => {
                tracing::warn!(sandbox = %id, why, "a sandbox was lost while no server ran");
                recovered.lost.push((id, why));
            }
            Fate::Swept => {}
        }
        if let Err(error) = dir.remove() {
            tracing::error!(dir = %dir.path().display(), %error, "something is left");
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

/// The sandboxes that have a directory.
fn directories(sandboxes: &Path) -> io::Result<Vec<SandboxId>> {
    let mut ids = Vec::new();
    for file in fs::read_dir(sandboxes)? {
        let name = file?.file_name();
        match name.to_str().and_then(|n| n.parse().ok()) {
            Some(id) => ids.push(id),
            None => tracing::warn!(?name, "this is no sandbox's directory; it is left alone"),
        }
    }
    Ok(ids)
}

/// Ends what is in the group of a VM that nobody has, and removes it.
fn sweep_group(groups: &Groups, group: &str) {
    for pid in groups.processes(group) {
        let vm = ProcessName::of(pid).and_then(Vm::adopt);
        if let Some(Err(error)) = vm.map(|vm| vm.end(END)) {
            tracing::error!(group, pid, %error, "a VMM does not end");
        }
    }
    if let Err(error) = groups.remove(group) {
        tracing::error!(group, %error, "a control group is left");
    }
}

impl Lookout<'_> {
    /// What became of each, in the same order.
    fn fates(&self, ids: Vec<SandboxId>) -> io::Result<Vec<(SandboxId, Fate)>> {
        let next = AtomicUsize::new(0);
        let look = || {
            let mut fates = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(id) = ids.get(number) else {
                    return fates;
                };
                fates.push((number, self.fate(id)));
            }
        };
        let mut fates = thread::scope(|scope| {
            let begin = |_| thread::Builder::new().spawn_scoped(scope, look);
            let begun: Vec<_> = (0..ids.len().min(AT_ONCE)).map(begin).collect();
            let mut fates = Vec::new();
            for thread in begun {
                fates.extend(thread?.join().unwrap_or_else(|panic| resume_unwind(panic)));
            }
            io::Result::Ok(fates)
        })?;
        fates.sort_by_key(|(number, _)| *number);
        Ok(ids
            .into_iter()
            .zip(fates.into_iter().map(|(_, fate)| fate))
            .collect())
    }

    fn fate(&self, id: &SandboxId) -> Fate {
        let dir = &SlotDir::new(self.sandboxes, id);
        let record = match dir.read(self.lifetime_of_note) {
            Ok(record) => record,
            Err(error) => {
                // It was being made, and its VMM, if there is one, has no guest yet; or it was being ended.
                tracing::info!(dir = %dir.path().display(), %error, "no record; swept");
                self.shut_down(dir);
                return Fate::Swept;
            }
        };
        let same_boot = record.host_boot_id == self.host_boot_id;
        let vm = record.vmm.filter(|_| same_boot).and_then(Vm::adopt);
        match (record.kept, vm) {
            (Kept::Nobody, vm) => {
                self.end(dir, vm);
                Fate::Swept
            }
            (Kept::Paused(mode), vm) => {
                self.end(dir, vm);
                paused(dir, record, mode)
            }
            (Kept::Running, Some(vm)) => match self.adopt(dir, id, record, vm) {
                Ok(entry) => Fate::Alive(Box::new(entry)),
                Err(why) => Fate::Lost(why),
            },
            (Kept::Running, None) => {
                let why = if same_boot {
                    host::last_words(&dir.stderr())
                        .unwrap_or_else(|| "its VMM was killed".to_owned())
                } else {
                    "the host was started anew".to_owned()
                };
                Fate::Lost(why)
            }
        }
    }

    /// A VMM that has no record, or whose process is not known: ask it to go. Nobody may be there.
    fn shut_down(&self, dir: &SlotDir) {
        if let Ok(mut control) = ControlClient::connect(&dir.control(), Some(self.patience))
            && let Err(error) = control.shutdown()
        {
            let why = api_types::guest_text(&model::chain(&error));
            tracing::warn!(dir = %dir.path().display(), why, "a VMM does not answer");
        }
    }

    fn end(&self, dir: &SlotDir, vm: Option<Vm>) {
        match vm {
            Some(vm) => {
                if let Err(error) = vm.end(END) {
                    tracing::error!(dir = %dir.path().display(), %error, "a VMM does not end");
                }
            }
            // Killed between the start of the process and its record: there is one all the same.
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
        // What a pause or a resume that did not come to its end has left.
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

    /// Has an adopted VM run: the former server may have been killed while it was being written to disk.
    fn go_on(&self, dir: &SlotDir) -> Result<(), String> {
        let mut control = ControlClient::connect(&dir.control(), Some(self.patience))
            .map_err(|e| format!("its VMM cannot be reached: {e}"))?;
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
            VmPhase::Empty | VmPhase::Exited => Err("its guest ended".to_owned()),
        }
    }
}

fn paused(dir: &SlotDir, mut record: Record, mode: PauseMode) -> Fate {
    let file = match mode {
        PauseMode::Memory => model::MANIFEST_NAME,
        PauseMode::FilesystemOnly => template_file::LAYER,
    };
    if !dir.pause().join(file).exists() {
        return Fate::Lost("its snapshot is gone".to_owned());
    }
    record.vmm = None;
    record.tap = None;
    Fate::Alive(Box::new(Entry::new(
        Slot::recovered(Stage::Paused(mode), record.lifetime),
        dir.clone(),
        record,
    )))
}

/// Removes snapshots that the former server was writing: no other server has this directory.
fn remove_drafts(dir: &SlotDir) {
    for entry in fs::read_dir(dir.path()).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(".pause.") {
            // Best effort: the end of the sandbox removes it.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Puts the record's policy in force at the TAP of a VM that went on without a server. One whose TAP nobody watches
/// cannot stay.
fn adopt_tap(id: &SandboxId, record: &Record, network: Option<&Isolation>) -> Result<(), String> {
    match (record.tap, network) {
        (None, _) => Ok(()),
        (Some(_), None) => Err("it has a network, and this server gives none".to_owned()),
        (Some(tap), Some(network)) => network
            .adopt(tap, id, &record.policy)
            .map_err(|e| model::chain(&e)),
    }
}
