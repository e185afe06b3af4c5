//! What the state directory knows at the start: VMs that still run are adopted, paused sandboxes are kept, and
//! all else is swept, so that nothing is left of a server that was killed, wherever that happened.

use std::{fs, io, path::Path, time::Duration};

use model::{SandboxId, template_file};
use netisolation::Isolation;
use vmm_control::{ControlClient, VmPhase};

use crate::{
    Found, PauseMode, Recovered, SandboxState,
    cgroup::Groups,
    driver::Entry,
    host,
    record::{Kept, ProcessName, Record, SlotDir},
    slot::{Slot, Stage},
    vm::Vm,
};

/// How long an adopted VMM may take for an answer; one whose disk is slow or full takes seconds.
const ANSWER: Duration = Duration::from_secs(30);
/// A process that is told to die has gone after this.
const END: Duration = Duration::from_secs(10);

/// What became of one directory.
enum Fate {
    Alive(Box<Entry>),
    /// It was a caller's, and is gone: its note and why.
    Lost(String, String),
    /// It was nobody's.
    Swept,
}

/// Looks at every sandbox's directory, then at every control group.
///
/// # Errors
/// The directory of sandboxes cannot be read.
pub(crate) fn recover(
    sandboxes: &Path,
    host_boot_id: &str,
    groups: &Groups,
    network: Option<&Isolation>,
) -> io::Result<(Vec<(SandboxId, Entry)>, Recovered)> {
    let mut entries = Vec::new();
    let mut recovered = Recovered::default();
    for file in fs::read_dir(sandboxes)? {
        let name = file?.file_name();
        let Some(id) = name.to_str().and_then(|n| n.parse::<SandboxId>().ok()) else {
            tracing::warn!(?name, "this is no sandbox's directory; it is left alone");
            continue;
        };
        let dir = SlotDir::new(sandboxes, &id);
        match fate(&dir, &id, host_boot_id, network) {
            Fate::Alive(entry) => {
                recovered.alive.push(Found {
                    note: dir.note(),
                    state: entry.state(),
                    sandbox: entry.sandbox(&id),
                });
                entries.push((id, *entry));
                continue;
            }
            Fate::Lost(note, why) => recovered.lost.push((id, note, why)),
            Fate::Swept => {}
        }
        if let Err(error) = dir.remove() {
            tracing::error!(dir = %dir.path().display(), %error, "something is left");
        }
    }
    for group in groups.list() {
        let used = entries
            .iter()
            .any(|(id, e)| id.as_str() == group && e.state() == SandboxState::Running);
        if !used {
            sweep_group(groups, &group);
        }
    }
    Ok((entries, recovered))
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

fn fate(dir: &SlotDir, id: &SandboxId, host_boot_id: &str, network: Option<&Isolation>) -> Fate {
    let record = match dir.read() {
        Ok(record) => record,
        Err(error) => {
            // It was being made, and its VMM, if there is one, has no guest yet; or it was being ended.
            tracing::info!(dir = %dir.path().display(), %error, "no record; swept");
            shut_down(dir);
            return Fate::Swept;
        }
    };
    let same_boot = record.host_boot_id == host_boot_id;
    let vm = record.vmm.filter(|_| same_boot).and_then(Vm::adopt);
    match (record.kept, vm) {
        (Kept::Nobody, vm) => {
            end(dir, vm);
            Fate::Swept
        }
        (Kept::Paused(mode), vm) => {
            end(dir, vm);
            paused(dir, record, mode)
        }
        (Kept::Running, Some(vm)) => match adopt(dir, id, record, vm, network) {
            Ok(entry) => Fate::Alive(Box::new(entry)),
            Err(why) => Fate::Lost(dir.note(), why),
        },
        (Kept::Running, None) => {
            let why = match same_boot {
                false => "the host was started anew".to_owned(),
                true => host::last_words(&dir.stderr())
                    .unwrap_or_else(|| "its VMM was killed".to_owned()),
            };
            Fate::Lost(dir.note(), why)
        }
    }
}

/// A VMM that has no record, or whose process is not known: ask it to go. Nobody may be there.
fn shut_down(dir: &SlotDir) {
    if let Ok(mut control) = ControlClient::connect(&dir.control(), Some(ANSWER))
        && let Err(error) = control.shutdown()
    {
        let why = api_types::guest_text(&api_types::chain(&error));
        tracing::warn!(dir = %dir.path().display(), why, "a VMM does not answer");
    }
}

fn end(dir: &SlotDir, vm: Option<Vm>) {
    match vm {
        Some(vm) => {
            if let Err(error) = vm.end(END) {
                tracing::error!(dir = %dir.path().display(), %error, "a VMM does not end");
            }
        }
        // Killed between the start of the process and its record: there is one all the same.
        None => shut_down(dir),
    }
}

fn paused(dir: &SlotDir, mut record: Record, mode: PauseMode) -> Fate {
    let file = match mode {
        PauseMode::Memory => model::MANIFEST_NAME,
        PauseMode::FilesystemOnly => template_file::LAYER,
    };
    if !dir.pause().join(file).exists() {
        return Fate::Lost(dir.note(), "its snapshot is gone".to_owned());
    }
    record.vmm = None;
    record.tap = None;
    Fate::Alive(Box::new(Entry::new(
        Slot::found(Stage::Paused(mode)),
        dir.clone(),
        record,
    )))
}

fn adopt(
    dir: &SlotDir,
    id: &SandboxId,
    record: Record,
    vm: Vm,
    network: Option<&Isolation>,
) -> Result<Entry, String> {
    match adopt_tap(id, &record, network).and_then(|()| go_on(dir)) {
        Ok(()) => {}
        Err(why) => {
            end(dir, Some(vm));
            return Err(why);
        }
    }
    // What a pause or a resume that did not come to its end has left.
    let _ = fs::remove_dir_all(dir.pause());
    remove_drafts(dir);
    let mut entry = Entry::new(Slot::found(Stage::Running), dir.clone(), record);
    entry.pidfd = Some(vm.pidfd.clone());
    entry.unwatched = Some(vm);
    Ok(entry)
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
            .map_err(|e| api_types::chain(&e)),
    }
}

/// Has an adopted VM run: the former server may have been killed while it was being written to disk.
fn go_on(dir: &SlotDir) -> Result<(), String> {
    let mut control = ControlClient::connect(&dir.control(), Some(ANSWER))
        .map_err(|e| format!("its VMM cannot be reached: {e}"))?;
    let answer = |e| {
        format!(
            "its VMM does not answer: {}",
            api_types::guest_text(&api_types::chain(&e))
        )
    };
    let stats = control.stats().map_err(answer)?;
    match stats.phase {
        VmPhase::Running => Ok(()),
        VmPhase::Paused => control.resume().map_err(answer),
        VmPhase::Empty | VmPhase::Exited => Err("its guest ended".to_owned()),
    }
}
