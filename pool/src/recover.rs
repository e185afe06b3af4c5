//! Recovery when the pool opens. Slots are made from the records alone. No VMM is contacted yet, so the server accepts
//! requests immediately, however many sandboxes there are. A running sandbox begins in [`Stage::Adopting`], and
//! [`crate::work::adopt`] verifies it before its first request is served. Other leftovers of a killed server are
//! removed in the background ([`Leftovers`]).
//!
//! The background work never touches a new slot: its list is complete before the first new slot exists, and slot ids
//! are random.

pub(crate) mod unnamed;

use std::{collections::BTreeSet, fs, io, path::Path, thread};

use model::{SandboxId, template_file};

use crate::{
    cgroup::Groups,
    change::Recovered,
    clock::{Clock, Reading},
    driver::entry::Entry,
    host,
    leftovers::{Leftovers, has_listener, in_parallel},
    lifetime::Lifetime,
    record::{Contents, Kept, Record, SlotDir},
    sandbox::Sandbox,
    slot::{Slot, Stage},
    state::PauseMode,
    vm::Vm,
};

/// The leftovers of a previous server in the state directory.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) entries: Vec<(SandboxId, Entry)>,
    pub(crate) recovered: Recovered,
    pub(crate) leftovers: Leftovers,
    /// The clocks to which the deadlines of the entries refer.
    pub(crate) clock: Clock,
    /// Whether a record could not be read, so that the files its sandbox needs are unknown.
    pub(crate) is_partial: bool,
}

/// The outcome for one directory.
enum Outcome {
    Alive(Box<Entry>),
    /// A caller's sandbox cannot be recovered, for this reason. Contains its previous state if the record could be
    /// read.
    Lost(String, Option<Vm>, Option<Box<Sandbox>>),
    /// A caller's sandbox cannot be recovered, for this reason, but its files must not be removed.
    Kept(String),
    /// The slot had no owner or no record.
    Leftover(Option<Vm>),
    /// A newer release wrote the record, so nothing may be removed.
    Later(io::Error),
}

/// The leftovers of a slot that has a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub(crate) kept: Kept,
    /// The recorded VM runs.
    pub(crate) vm: bool,
    /// The files of the recorded pause exist.
    pub(crate) files: bool,
    /// Whether a paused sandbox has a process, recorded or not, or a cgroup.
    pub(crate) rest: bool,
}

/// The fate of a slot that has a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It becomes a slot in this stage.
    Recover(Stage),
    /// A caller's sandbox cannot be recovered.
    Lose,
    /// The slot has no owner, and is removed.
    Remove,
}

/// Decides the fate of a slot. A paused sandbox is usable immediately, unless the previous server was killed during a
/// pause or a resume and left a process or a cgroup.
pub(crate) fn fate(left: Left) -> Fate {
    match left.kept {
        Kept::Nobody => Fate::Remove,
        Kept::Running if left.vm => Fate::Recover(Stage::Adopting),
        Kept::Running => Fate::Lose,
        Kept::Paused(_) if !left.files => Fate::Lose,
        Kept::Paused(mode) if left.rest => Fate::Recover(Stage::AdoptingPaused(mode)),
        Kept::Paused(mode) => Fate::Recover(Stage::Paused(mode)),
    }
}

struct Recovery<'a> {
    sandboxes: &'a Path,
    host_boot_id: &'a str,
    /// The names of all VM groups.
    groups: BTreeSet<String>,
    lifetime_of_note: fn(&str) -> Option<Lifetime>,
    now: Reading,
}

/// Reads the record in each sandbox directory, and lists what must be removed.
///
/// # Errors
/// Returns an error if the directory of sandboxes cannot be read or a thread cannot be started.
pub(crate) fn recover(
    sandboxes: &Path,
    forks: &Path,
    host_boot_id: &str,
    groups: &Groups,
    lifetime_of_note: fn(&str) -> Option<Lifetime>,
) -> io::Result<Found> {
    let mut recovery = Recovery {
        sandboxes,
        host_boot_id,
        groups: groups.list().into_iter().collect(),
        lifetime_of_note,
        now: Reading::now(),
    };
    let mut entries = Vec::new();
    let mut recovered = Recovered::default();
    let mut slots = Vec::new();
    let now = recovery.now.wall;
    let ids = directories(sandboxes)?;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let outcomes = in_parallel(&ids, cores, |id| recovery.examine(id))?;
    let mut is_partial = false;
    for (id, outcome) in ids.into_iter().zip(outcomes) {
        match outcome {
            Outcome::Alive(mut entry) => {
                let generation = u64::try_from(entries.len() + 1).unwrap_or(u64::MAX);
                entry.has_new_vm(generation, now);
                entry.add_event(now, "recovered by a new server process");
                recovered.alive.extend(entry.sandbox(&id));
                recovery.groups.remove(id.as_str());
                entries.push((id, *entry));
            }
            Outcome::Lost(why, vm, sandbox) => {
                tracing::warn!(sandbox = %id, why, "sandbox was lost while no server ran");
                slots.push((SlotDir::new(sandboxes, &id), vm));
                recovered.lost.push((id, why));
                recovered.former.extend(sandbox.map(|s| *s));
            }
            Outcome::Kept(why) => {
                is_partial = true;
                // Its VM may run.
                recovery.groups.remove(id.as_str());
                recovered.lost.push((id, why));
            }
            Outcome::Leftover(vm) => slots.push((SlotDir::new(sandboxes, &id), vm)),
            Outcome::Later(error) => return Err(error),
        }
    }
    let forks = fs::read_dir(forks)?.flatten().map(|entry| entry.path());
    let leftovers = Leftovers {
        slots,
        groups: recovery.groups.into_iter().collect(),
        forks: forks.collect(),
    };
    Ok(Found {
        entries,
        recovered,
        leftovers,
        clock: Clock::new(recovery.now),
        is_partial,
    })
}

/// Moves a directory with a damaged record aside. Returns why the sandbox is lost, with the path of its files.
fn set_aside(dir: &SlotDir, why: String) -> String {
    match dir.set_aside() {
        Ok(to) => {
            let to = to.display();
            tracing::error!(
                %why,
                files = %to,
                "a sandbox's record is damaged: its files were moved aside; recover what you need, then delete them"
            );
            format!("{why}; its files are in {to}")
        }
        Err(error) => {
            tracing::error!(%why, %error, "a sandbox's record is damaged, and its files cannot be moved aside");
            why
        }
    }
}

/// The ids of all sandboxes that have a directory. Other names are logged and ignored.
fn directories(sandboxes: &Path) -> io::Result<Vec<SandboxId>> {
    let mut ids = Vec::new();
    for file in fs::read_dir(sandboxes)? {
        let name = file?.file_name();
        match name.to_str().and_then(|n| n.parse().ok()) {
            Some(id) => ids.push(id),
            None => tracing::warn!(?name, "ignoring a file that is not a sandbox's directory"),
        }
    }
    Ok(ids)
}

impl Recovery<'_> {
    fn examine(&self, id: &SandboxId) -> Outcome {
        let dir = SlotDir::new(self.sandboxes, id);
        let record = match dir.look(self.lifetime_of_note) {
            Contents::Record(record) => *record,
            Contents::Nothing => {
                // The previous server was killed either before it recorded the VMM, which then has no guest yet, or
                // while it ended the sandbox.
                tracing::info!(dir = %dir.path().display(), "removing a sandbox without a record");
                return Outcome::Leftover(None);
            }
            // The host did not crash, so the record was damaged while the sandbox ran.
            Contents::Torn(why) if has_listener(&dir) => {
                tracing::error!(
                    why,
                    "a sandbox's record is damaged and its VM runs: ignoring both; repair the record and restart the server, or kill the VMM"
                );
                return Outcome::Kept(why);
            }
            Contents::Torn(why) => {
                let what = "it ran, or waited for a lease, when the host crashed";
                return Outcome::Lost(format!("{why}; {what}"), None, None);
            }
            Contents::Later(why) => return Outcome::Later(io::Error::other(why)),
            Contents::Damaged(why) => return Outcome::Kept(set_aside(&dir, why)),
            Contents::Unusable(why) => {
                tracing::error!(
                    why,
                    "cannot read a sandbox's record: ignoring its directory; repair the record and restart the server"
                );
                return Outcome::Kept(why);
            }
        };
        let same_boot = record.host_boot_id == self.host_boot_id;
        let vm = record.vmm.filter(|_| same_boot).and_then(Vm::adopt);
        let (files, rest) = match record.kept {
            Kept::Paused(mode) => self.beside(id, &dir, mode, vm.as_ref()),
            Kept::Nobody | Kept::Running => (false, false),
        };
        let left = Left {
            kept: record.kept,
            vm: vm.is_some(),
            files,
            rest,
        };
        match fate(left) {
            Fate::Remove => Outcome::Leftover(vm),
            Fate::Recover(stage) => {
                Outcome::Alive(Box::new(self.recovered(id, stage, dir, record, vm)))
            }
            Fate::Lose => {
                let why = why_lost(&dir, record.kept, same_boot);
                let stage = match record.kept {
                    Kept::Paused(mode) => Stage::Paused(mode),
                    Kept::Nobody | Kept::Running => Stage::Adopting,
                };
                let former = self.recovered(id, stage, dir, record, None).sandbox(id);
                Outcome::Lost(why, vm, former.map(Box::new))
            }
        }
    }

    /// Whether the files of a pause exist, and whether a process or a cgroup exists as well. A recorded VM makes the
    /// search for other processes unnecessary.
    fn beside(
        &self,
        id: &SandboxId,
        dir: &SlotDir,
        mode: PauseMode,
        vm: Option<&Vm>,
    ) -> (bool, bool) {
        let file = match mode {
            PauseMode::Memory => model::MANIFEST_NAME,
            PauseMode::FilesystemOnly => template_file::LAYER,
        };
        let rest = vm.is_some() || self.groups.contains(id.as_str()) || has_listener(dir);
        (dir.pause().join(file).exists(), rest)
    }

    fn recovered(
        &self,
        id: &SandboxId,
        stage: Stage,
        dir: SlotDir,
        mut record: Record,
        vm: Option<Vm>,
    ) -> Entry {
        let mut lifetime = record.lifetime;
        match stage {
            Stage::Paused(_) | Stage::AdoptingPaused(_) => {
                record.vmm = None;
                record.tap = None;
            }
            _ => lifetime = record.lifetime_at(self.now),
        }
        if lifetime != record.lifetime {
            tracing::warn!(
                sandbox = %id,
                from = record.lifetime.end_at,
                to = lifetime.end_at,
                "the wall clock was set while no server ran: moving the sandbox's deadline by the same amount"
            );
        }
        Entry::recovered(Slot::recovered(stage, lifetime), dir, record, vm)
    }
}

fn why_lost(dir: &SlotDir, kept: Kept, same_boot: bool) -> String {
    match kept {
        Kept::Paused(_) => "its snapshot is missing".to_owned(),
        Kept::Nobody | Kept::Running if same_boot => {
            host::last_words(&dir.stderr()).unwrap_or_else(|| "its VMM was killed".to_owned())
        }
        Kept::Nobody | Kept::Running => "the host was rebooted".to_owned(),
    }
}
