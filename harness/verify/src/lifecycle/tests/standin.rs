//! An in-memory stand-in for a server, with at most one fault.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use super::super::{
    plan::{Action, AtDeadline, Keep, Place},
    play::SOON_S,
    site::{Guest, Miss, Reply, Seen, Site},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// One in seven values is acknowledged but not written.
    LostValue,
    /// A killed sandbox runs again after the server is killed.
    ResurrectedSandbox,
    /// A fork has the values before the last write.
    StaleFork,
    /// One in three killed sandboxes leaves its directory.
    LeakedDirectory,
    /// Reads of one in five values fail.
    FailedRequest,
    /// One in five creates makes two sandboxes.
    ExtraSandbox,
    /// Deadlines take effect at once.
    EarlyDeadline,
    /// Clients can delete the template.
    DeletedTemplate,
}

#[derive(Clone, Copy, Debug, Default)]
struct Values {
    disk: u32,
    memory: u32,
}

#[derive(Clone, Debug)]
struct Sandbox {
    paused: Option<Keep>,
    now: Values,
    before: Values,
    at_deadline: AtDeadline,
    ends_at: Option<Instant>,
}

#[derive(Debug, Default)]
struct World {
    sandboxes: BTreeMap<String, Sandbox>,
    killed: BTreeMap<String, Sandbox>,
    snapshots: BTreeMap<String, Sandbox>,
    directories: BTreeSet<String>,
    made: u32,
    kills: u32,
}

#[derive(Debug)]
pub(super) struct StandIn {
    world: Mutex<World>,
    fault: Option<Fault>,
}

impl StandIn {
    pub(super) fn new(fault: Option<Fault>) -> Self {
        Self {
            world: Mutex::default(),
            fault,
        }
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// The world after all passed deadlines have taken effect.
    fn world(&self) -> MutexGuard<'_, World> {
        let mut world = self.world.lock().unwrap();
        let now = Instant::now();
        let is_due = |sandbox: &Sandbox| {
            sandbox.paused.is_none() && sandbox.ends_at.is_some_and(|at| at <= now)
        };
        let due = world
            .sandboxes
            .iter()
            .filter(|(_, sandbox)| is_due(sandbox));
        let due: Vec<String> = due.map(|(id, _)| id.clone()).collect();
        for id in due {
            match world.sandboxes[&id].at_deadline {
                AtDeadline::End => world.end(&id),
                AtDeadline::Pause => {
                    world.sandboxes.get_mut(&id).unwrap().paused = Some(Keep::All);
                }
            }
        }
        world
    }
}

impl World {
    fn make(&mut self, sandbox: Sandbox) -> Guest {
        self.made += 1;
        let id = format!("s{}", self.made);
        self.sandboxes.insert(id.clone(), sandbox);
        self.directories.insert(id.clone());
        Guest { id, token: None }
    }

    fn end(&mut self, id: &str) {
        let sandbox = self.sandboxes.remove(id).unwrap();
        self.killed.insert(id.to_owned(), sandbox);
        self.directories.remove(id);
    }

    fn running(&mut self, of: &Guest) -> Result<&mut Sandbox, Miss> {
        let sandbox = self.sandboxes.get_mut(&of.id);
        sandbox.filter(|s| s.paused.is_none()).ok_or(Miss::NotFound)
    }
}

fn seen(sandbox: &Sandbox) -> Seen {
    match sandbox.paused {
        None => Seen::Running,
        Some(_) => Seen::Paused,
    }
}

fn copy(sandbox: &Sandbox, values: Values) -> Sandbox {
    Sandbox {
        paused: None,
        now: values,
        before: values,
        ends_at: None,
        ..sandbox.clone()
    }
}

impl Site for StandIn {
    fn create(&self, from: Option<&str>, at_deadline: AtDeadline) -> Result<Guest, Miss> {
        let mut world = self.world();
        let values = match from {
            None => Values::default(),
            Some(id) => world.snapshots.get(id).ok_or(Miss::NotFound)?.now,
        };
        let sandbox = Sandbox {
            paused: None,
            now: values,
            before: values,
            at_deadline,
            ends_at: None,
        };
        if self.has(Fault::ExtraSandbox) && world.made % 5 == 4 {
            world.make(sandbox.clone());
        }
        Ok(world.make(sandbox))
    }

    fn fork(&self, of: &Guest) -> Result<Guest, Miss> {
        let mut world = self.world();
        let source = world.running(of)?.clone();
        let values = if self.has(Fault::StaleFork) {
            source.before
        } else {
            source.now
        };
        Ok(world.make(copy(&source, values)))
    }

    fn snapshot(&self, of: &Guest) -> Result<String, Miss> {
        let mut world = self.world();
        let source = world.sandboxes.get(&of.id).ok_or(Miss::NotFound)?.clone();
        if source.paused == Some(Keep::Disk) {
            return Err(Miss::Conflict);
        }
        world.made += 1;
        let id = format!("t{}", world.made);
        world.snapshots.insert(id.clone(), source);
        Ok(id)
    }

    fn remove_snapshot(&self, id: &str) -> Result<(), Miss> {
        self.world()
            .snapshots
            .remove(id)
            .map(drop)
            .ok_or(Miss::NotFound)
    }

    fn keeps_template(&self) -> Result<(), String> {
        if self.has(Fault::DeletedTemplate) {
            return Err("the template was deleted".to_owned());
        }
        Ok(())
    }

    fn act(&self, on: &Guest, action: Action) -> Result<Reply, Miss> {
        let mut world = self.world();
        match action {
            Action::Look => {
                let sandbox = world.sandboxes.get(&on.id);
                return Ok(Reply::State(sandbox.map_or(Seen::Absent, seen)));
            }
            Action::Kill => {
                if !world.sandboxes.contains_key(&on.id) {
                    return Err(Miss::NotFound);
                }
                world.kills += 1;
                world.end(&on.id);
                if self.has(Fault::LeakedDirectory) && world.kills.is_multiple_of(3) {
                    world.directories.insert(on.id.clone());
                }
            }
            Action::Connect | Action::Resume => {
                let sandbox = world.sandboxes.get_mut(&on.id).ok_or(Miss::NotFound)?;
                let was = sandbox.paused;
                if was.is_none() && action == Action::Resume {
                    return Err(Miss::Conflict);
                }
                sandbox.paused = None;
                sandbox.ends_at = None;
                if was == Some(Keep::Disk) {
                    sandbox.now.memory = 0;
                }
                return Ok(was.map_or(Reply::WasRunning, |_| Reply::Resumed));
            }
            Action::Pause(keep) => {
                let sandbox = world.sandboxes.get_mut(&on.id).ok_or(Miss::NotFound)?;
                if sandbox.paused.is_some() {
                    return Err(Miss::Conflict);
                }
                sandbox.paused = Some(keep);
                sandbox.ends_at = None;
            }
            Action::Exec => drop(world.running(on)?),
            Action::Extend => world.running(on)?.ends_at = None,
            Action::Expire => {
                let soon = match self.fault {
                    Some(Fault::EarlyDeadline) => Duration::ZERO,
                    _ => Duration::from_secs(u64::from(SOON_S)),
                };
                world.running(on)?.ends_at = Some(Instant::now() + soon);
            }
            Action::Write(place, value) => {
                let is_lost = self.has(Fault::LostValue) && value.is_multiple_of(7);
                let sandbox = world.running(on)?;
                sandbox.before = sandbox.now;
                match place {
                    _ if is_lost => {}
                    Place::Disk => sandbox.now.disk = value,
                    Place::Memory => sandbox.now.memory = value,
                }
            }
            Action::Read(place) => {
                let values = world.running(on)?.now;
                let value = match place {
                    Place::Disk => values.disk,
                    Place::Memory => values.memory,
                };
                if self.has(Fault::FailedRequest) && value % 5 == 4 {
                    return Err(Miss::Failed("seeded".to_owned()));
                }
                return Ok(Reply::Value(value));
            }
            Action::Snapshot(_) | Action::Fork(_) | Action::Deadline | Action::KillVmm => {
                panic!("{action}");
            }
        }
        Ok(Reply::Done)
    }

    fn ends_soon(&self, of: &Guest) -> bool {
        let world = self.world();
        let sandbox = world.sandboxes.get(&of.id);
        sandbox.is_none_or(|sandbox| sandbox.ends_at.is_some())
    }

    fn list(&self) -> Result<BTreeMap<String, Seen>, Miss> {
        let world = self.world();
        let all = world.sandboxes.iter();
        Ok(all
            .map(|(id, sandbox)| (id.clone(), seen(sandbox)))
            .collect())
    }

    fn kill_server(&self, _twice: bool) -> Result<(), String> {
        let mut world = self.world();
        if self.has(Fault::ResurrectedSandbox)
            && let Some((id, sandbox)) = world.killed.pop_first()
        {
            world.directories.insert(id.clone());
            world.sandboxes.insert(id, sandbox);
        }
        Ok(())
    }

    fn kill_vmm(&self, of: &Guest) -> Option<Result<(), String>> {
        let mut world = self.world();
        world.running(of).ok()?;
        world.end(&of.id);
        Some(Ok(()))
    }

    fn leaks(&self, sandboxes: &[&str], _snapshots: &[&str]) -> Vec<String> {
        let world = self.world();
        let left = sandboxes
            .iter()
            .filter(|id| world.directories.contains(**id));
        left.map(|id| format!("directory of {id} is left"))
            .collect()
    }
}
