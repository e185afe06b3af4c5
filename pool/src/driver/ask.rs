//! What callers ask for.

use std::path::{Path, PathBuf};

use model::SandboxId;
use netisolation::{Isolation, Policy, TapIndex};
use tokio::sync::oneshot;

use super::{Closing, Driver, ForkImage, Pending, Want, entry::Waiter};
use crate::{
    CreateSpec, Init, PauseMode, PoolError, PoolStats, Sandbox, SandboxState, TemplateInfo, Usage,
    host,
    message::{Answer, Ask, Report},
    network,
    policy::{Need, StartFor},
    record::Durability,
    slot::{Event, Stage},
    templates::{Memory, Origin, base_of},
    work::{
        WorkError,
        save::{CopyPlan, PausePlan, link_snapshot},
    },
};

/// No note is longer.
const MAX_NOTE: usize = 256 << 10;

/// Forks that wait for their source's snapshot.
#[derive(Debug)]
pub(crate) struct ForkPlan {
    number: u64,
    dir: PathBuf,
    specs: Vec<CreateSpec>,
    accepted_ns: u64,
    pub(super) answer: Answer<Vec<oneshot::Receiver<Result<Sandbox, PoolError>>>>,
}

impl Driver {
    pub(super) fn answer(&mut self, ask: Ask) {
        match ask {
            Ask::Create(spec, at, answer) => self.create(spec, at, answer),
            Ask::Kill(id, answer) => self.kill(&id, answer),
            Ask::Pause(id, mode, answer) => self.pause(&id, mode, answer),
            Ask::Resume(id, init, start, at, answer) => self.resume(id, init, start, at, answer),
            Ask::Snapshot(id, names, answer) => self.snapshot(&id, names, answer),
            Ask::Fork(id, specs, at, answer) => self.fork(&id, specs, at, answer),
            Ask::Annotate(id, note, answer) => self.annotate(&id, note, answer),
            Ask::Usage(id, answer) => self.usage(&id, answer),
            Ask::SetPolicy(id, policy, answer) => {
                let _ = answer.send(self.set_policy(&id, policy));
            }
            Ask::Counters(id, answer) => self.of_tap(&id, answer, network::counters),
            Ask::VerifyNetwork(id, answer) => self.of_tap(&id, answer, network::verify),
            Ask::Templates(answer) => drop(answer.send(self.all_templates())),
            Ask::Template(name, answer) => {
                let found = self.templates.find(&name).map(|t| t.info.id.clone());
                let _ = answer.send(found.and_then(|id| self.template_info(&id)));
            }
            Ask::AddTemplate(dir, names, answer) => {
                let _ = answer.send(self.add_template(&dir, names));
            }
            Ask::RemoveTemplate(name, answer) => self.remove_template(&name, answer),
            Ask::Stats(answer) => self.tell_stats(answer),
            Ask::Close(kill, done) => self.close(kill, done),
        }
    }

    fn create(&mut self, spec: Box<CreateSpec>, accepted_ns: u64, answer: Answer<Sandbox>) {
        self.last_foreground_ns = Self::now_ns();
        if self.closing.is_some() {
            return Self::refuse(answer, PoolError::Closing);
        }
        if let Err(e) = check_note(&spec.note) {
            return Self::refuse(answer, e);
        }
        let Some(template) = self.templates.find(&spec.template) else {
            return Self::refuse(answer, PoolError::NoTemplate(spec.template));
        };
        let template = template.info.id.clone();
        self.queue.push_back(Pending {
            want: Want::New {
                spec,
                template,
                fork: None,
            },
            accepted_ns,
            answer,
        });
    }

    /// The state of a sandbox that callers know.
    fn known(&self, id: &SandboxId) -> Result<SandboxState, PoolError> {
        let entry = self.slots.get(id).filter(|e| e.slot.is_leased());
        entry
            .map(super::Entry::state)
            .ok_or_else(|| PoolError::NoSandbox(id.clone()))
    }

    /// A sandbox that callers know and that runs.
    fn running(&self, id: &SandboxId) -> Result<(), PoolError> {
        match self.known(id)? {
            SandboxState::Running => Ok(()),
            state => Err(PoolError::WrongState {
                id: id.clone(),
                state,
            }),
        }
    }

    fn kill(&mut self, id: &SandboxId, answer: Answer<()>) {
        let entry = self.slots.get_mut(id).filter(|e| e.slot.is_leased());
        let Some(entry) = entry else {
            let _ = answer.send(Err(PoolError::NoSandbox(id.clone())));
            return;
        };
        entry.mourners.push(answer);
        entry.died = None;
        self.end(id);
    }

    fn pause(&mut self, id: &SandboxId, mode: PauseMode, answer: Answer<()>) {
        let admitted = self
            .running(id)
            .and_then(|()| self.may_save())
            .and_then(|()| self.room_to_save(id, mode));
        if let Err(e) = admitted {
            let _ = answer.send(Err(e));
            return;
        }
        if self.event(id, Event::Pause(mode)).is_err() {
            let _ = answer.send(Err(PoolError::NoSandbox(id.clone())));
            return;
        }
        let timeout = self.config.start_timeout;
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        entry.waiter = Some(Waiter::Pause(answer));
        let plan = PausePlan {
            dir: entry.dir.clone(),
            record: entry.record.clone(),
            mode,
            control: entry.take_control(),
            timeout,
        };
        let (id, reporter) = (id.clone(), self.reporter.clone());
        tokio::task::spawn_blocking(move || {
            let _ = reporter.send(Report::Paused(id, Box::new(plan.run())));
        });
    }

    fn resume(
        &mut self,
        id: SandboxId,
        init: Init,
        start: StartFor,
        accepted_ns: u64,
        answer: Answer<Sandbox>,
    ) {
        self.last_foreground_ns = Self::now_ns();
        let refusal = match self.known(&id) {
            _ if self.closing.is_some() => Some(PoolError::Closing),
            Ok(SandboxState::Paused(_)) => None,
            Ok(state) => Some(PoolError::WrongState {
                id: id.clone(),
                state,
            }),
            Err(e) => Some(e),
        };
        match refusal {
            Some(e) => Self::refuse(answer, e),
            None => self.queue.push_back(Pending {
                want: Want::Resume { id, init, start },
                accepted_ns,
                answer,
            }),
        }
    }

    fn snapshot(&mut self, id: &SandboxId, names: Vec<String>, answer: Answer<TemplateInfo>) {
        if let Err(e) = self.begin_snapshot(id, &names) {
            let _ = answer.send(Err(e));
            return;
        }
        let draft = match self.templates.draft() {
            Ok(draft) => draft,
            Err(e) => {
                let _ = answer.send(Err(PoolError::Failed {
                    what: "make a template",
                    why: e.to_string(),
                }));
                return;
            }
        };
        let (template, home) = draft;
        let waiter = Waiter::Template {
            id: template,
            names,
            answer,
        };
        self.copy(id, home.join("image"), waiter);
    }

    fn begin_snapshot(&mut self, id: &SandboxId, names: &[String]) -> Result<(), PoolError> {
        if self.closing.is_some() {
            return Err(PoolError::Closing);
        }
        self.templates.check_names(names)?;
        match self.known(id)? {
            SandboxState::Running => {
                self.may_save()?;
                self.room_to_save(id, PauseMode::Memory)
            }
            // A second link to its files.
            SandboxState::Paused(PauseMode::Memory) => self.may_save(),
            state => Err(PoolError::WrongState {
                id: id.clone(),
                state,
            }),
        }
    }

    /// Begins the job that copies a sandbox, running or paused with its memory.
    fn copy(&mut self, id: &SandboxId, to: PathBuf, waiter: Waiter) {
        let was_paused = matches!(self.known(id), Ok(SandboxState::Paused(_)));
        let begun = self.event(id, Event::Save);
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        entry.waiter = Some(waiter);
        let pause = entry.dir.pause();
        let plan = CopyPlan {
            dir: entry.dir.clone(),
            control: entry.take_control(),
            lineage: entry.record.lineage.clone(),
            to: to.clone(),
        };
        let (id, reporter) = (id.clone(), self.reporter.clone());
        if begun.is_err() {
            // Checked by the callers; a bug is told, not hung on.
            let error = WorkError::Image("it changed state".to_owned());
            let _ = reporter.send(Report::Copied(id, Err((error, false))));
            return;
        }
        tokio::task::spawn_blocking(move || {
            let copied = if was_paused {
                link_snapshot(&pause, &to).map_err(|e| (e, false))
            } else {
                plan.run()
            };
            let _ = reporter.send(Report::Copied(id, copied));
        });
    }

    pub(super) fn copied(&mut self, id: &SandboxId, copied: Result<(), (WorkError, bool)>) {
        let waiter = self.slots.get_mut(id).and_then(|e| e.waiter.take());
        let source = self.slots.get(id).map(|e| e.record.template.id.clone());
        let (event, result) = match copied {
            Ok(()) => (Event::Saved, Ok(())),
            Err((e, dead)) => {
                let event = if dead { Event::Failed } else { Event::Saved };
                (event, Err(e.into_pool("copy the sandbox", id)))
            }
        };
        if event == Event::Failed
            && let Some(entry) = self.slots.get_mut(id)
            && entry.slot.stage != Stage::Ending
        {
            entry.died = Some("it could not go on after a copy".to_owned());
        }
        let _ = self.event(id, event);
        match waiter {
            Some(Waiter::Template {
                id: template,
                names,
                answer,
            }) => {
                let origin = Origin::Snapshot(id.clone());
                let created = host::unix_ns() / 1_000_000_000;
                let kept =
                    result.and_then(|()| self.templates.keep(&template, names, origin, created));
                self.template_copied(&template, kept, answer);
            }
            Some(Waiter::Fork(plan)) => {
                self.fork_copied(plan, source.unwrap_or_default(), result);
            }
            Some(Waiter::Sandbox(_) | Waiter::Pause(_)) | None => {}
        }
    }

    fn template_copied(
        &mut self,
        id: &str,
        kept: Result<TemplateInfo, PoolError>,
        answer: Answer<TemplateInfo>,
    ) {
        let home = self.config.state.join(crate::TEMPLATES).join(id);
        tokio::task::spawn_blocking(move || {
            match &kept {
                // It has to be there after a crash of the host, too.
                Ok(_) => crate::work::save::sync_tree(&home),
                Err(_) => drop(std::fs::remove_dir_all(&home)),
            }
            let _ = answer.send(kept);
        });
    }

    fn fork(
        &mut self,
        id: &SandboxId,
        mut specs: Vec<CreateSpec>,
        accepted_ns: u64,
        answer: Answer<Vec<oneshot::Receiver<Result<Sandbox, PoolError>>>>,
    ) {
        self.last_foreground_ns = Self::now_ns();
        let checked = match self.closing {
            Some(_) => Err(PoolError::Closing),
            None => self
                .running(id)
                .and_then(|()| specs.iter().try_for_each(|s| check_note(&s.note)))
                .and_then(|()| self.room_to_save(id, PauseMode::Memory)),
        };
        if let Err(e) = checked {
            let _ = answer.send(Err(e));
            return;
        }
        // What the source may reach, forks may, and no more.
        let policy = self.slots.get(id).map(|e| e.record.policy.clone());
        for spec in &mut specs {
            spec.policy = policy.clone().unwrap_or_default();
        }
        self.next_fork += 1;
        let dir = self
            .config
            .state
            .join(crate::FORKS)
            .join(self.next_fork.to_string());
        let plan = ForkPlan {
            number: self.next_fork,
            dir: dir.clone(),
            specs,
            accepted_ns,
            answer,
        };
        self.copy(id, dir, Waiter::Fork(plan));
    }

    fn fork_copied(&mut self, plan: ForkPlan, template: String, copied: Result<(), PoolError>) {
        if let Err(e) = copied.and_then(|()| self.check_snapshot(&plan.dir)) {
            let _ = std::fs::remove_dir_all(&plan.dir);
            let _ = plan.answer.send(Err(e));
            return;
        }
        let number = plan.number;
        self.forks.insert(
            number,
            ForkImage {
                dir: plan.dir,
                left: plan.specs.len() + 1,
            },
        );
        let mut answers = Vec::new();
        for spec in plan.specs {
            let (answer, receiver) = oneshot::channel();
            answers.push(receiver);
            self.queue.push_back(Pending {
                want: Want::New {
                    spec: Box::new(spec),
                    template: template.clone(),
                    fork: Some(number),
                },
                accepted_ns: plan.accepted_ns,
                answer,
            });
        }
        let _ = plan.answer.send(Ok(answers));
        // One was counted for this function, so that no forks at all leave no image.
        self.fork_started(number);
    }

    /// One fork less needs its image.
    pub(super) fn fork_started(&mut self, number: u64) {
        let Some(image) = self.forks.get_mut(&number) else {
            return;
        };
        image.left -= 1;
        if image.left == 0
            && let Some(image) = self.forks.remove(&number)
        {
            // VMs that were restored from it hold its files by themselves.
            tokio::task::spawn_blocking(move || {
                if let Err(error) = std::fs::remove_dir_all(&image.dir) {
                    tracing::warn!(dir = %image.dir.display(), %error, "a fork's snapshot is left");
                }
            });
        }
    }

    fn annotate(&mut self, id: &SandboxId, note: String, answer: Answer<()>) {
        let refusal = self.known(id).and_then(|_| check_note(&note)).err();
        let Some(entry) = self.slots.get_mut(id).filter(|_| refusal.is_none()) else {
            let refusal = refusal.unwrap_or_else(|| PoolError::NoSandbox(id.clone()));
            let _ = answer.send(Err(refusal));
            return;
        };
        if entry.slot.note {
            entry.notes.next = Some(note);
            entry.notes.waiting.push(answer);
        } else {
            entry.notes.writing.push(answer);
            self.write_note(id, note);
        }
    }

    /// Begins to write a note. Of a slot that ends meanwhile nobody needs one.
    pub(super) fn write_note(&mut self, id: &SandboxId, note: String) {
        if self.event(id, Event::NoteBegun).is_err() {
            return;
        }
        let Some(entry) = self.slots.get(id) else {
            return;
        };
        let durability = match entry.slot.stage {
            Stage::Running => Durability::Process,
            _ => Durability::Host,
        };
        let (id, dir, reporter) = (id.clone(), entry.dir.clone(), self.reporter.clone());
        tokio::task::spawn_blocking(move || {
            let written = dir.write_note(&note, durability);
            let _ = reporter.send(Report::Noted(id, written));
        });
    }

    fn usage(&self, id: &SandboxId, answer: Answer<Usage>) {
        let vmm = self.running(id).map(|()| {
            let entry = self.slots.get(id);
            entry.and_then(|e| e.record.vmm).map_or(0, |vmm| vmm.pid)
        });
        match vmm {
            Ok(pid) => drop(tokio::task::spawn_blocking(move || {
                let _ = answer.send(Ok(Usage {
                    cpu_ns: host::cpu_ns(pid).unwrap_or(0),
                    memory: host::private_bytes(pid).unwrap_or(0),
                    disk: host::unlinked_bytes(pid).unwrap_or(0),
                }));
            })),
            Err(e) => drop(answer.send(Err(e))),
        }
    }

    /// A running sandbox's policy. It is a file and a few map entries: less than handing it to a thread, and no
    /// other change of the sandbox comes between. The record is first: whoever finds it after a crash puts in force
    /// what it says.
    fn set_policy(&mut self, id: &SandboxId, policy: Policy) -> Result<(), PoolError> {
        // A copy leaves the VM as it is.
        let copied = self.slots.get(id).map(|e| e.slot.stage) == Some(Stage::Saving);
        if !copied {
            self.running(id)?;
        }
        let Some(entry) = self.slots.get_mut(id) else {
            return Err(PoolError::NoSandbox(id.clone()));
        };
        let before = std::mem::replace(&mut entry.record.policy, policy);
        let changed = entry
            .dir
            .write(&entry.record, Durability::Process)
            .map_err(|e| WorkError::Io("write the sandbox's record", e))
            .and_then(|()| network::update(self.config.network.as_ref(), &entry.record));
        changed.map_err(|e| {
            entry.record.policy = before;
            if let Err(error) = entry.dir.write(&entry.record, Durability::Process) {
                tracing::error!(sandbox = %id, %error, "its record has a policy that is not in force");
            }
            e.into_pool("set what the sandbox may reach", id)
        })
    }

    /// Answers a question about a running sandbox's TAP, on a thread.
    fn of_tap<T: Send + 'static>(
        &self,
        id: &SandboxId,
        answer: Answer<T>,
        question: fn(Option<&Isolation>, Option<TapIndex>) -> Result<T, WorkError>,
    ) {
        if let Err(e) = self.running(id) {
            let _ = answer.send(Err(e));
            return;
        }
        let tap = self.slots.get(id).and_then(|e| e.record.tap);
        let (network, id) = (self.config.network.clone(), id.clone());
        tokio::task::spawn_blocking(move || {
            let said = question(network.as_ref(), tap);
            let _ =
                answer.send(said.map_err(|e| e.into_pool("look at the sandbox's network", &id)));
        });
    }

    fn template_info(&self, id: &str) -> Option<TemplateInfo> {
        let mut info = self.templates.get(id)?.info.clone();
        let warm = self.warm.get(id).map_or(0, std::collections::VecDeque::len);
        info.warm = u32::try_from(warm).unwrap_or(u32::MAX);
        Some(info)
    }

    fn all_templates(&self) -> Vec<TemplateInfo> {
        let mut all: Vec<_> = self
            .templates
            .ids()
            .iter()
            .filter_map(|id| self.template_info(id))
            .collect();
        all.sort_by(|a, b| (&a.names, &a.id).cmp(&(&b.names, &b.id)));
        all
    }

    fn add_template(&mut self, dir: &Path, names: Vec<String>) -> Result<TemplateInfo, PoolError> {
        let failed = |e: std::io::Error| PoolError::Failed {
            what: "add a template",
            why: format!("{}: {e}", dir.display()),
        };
        self.templates.check_names(&names)?;
        let dir = dir.canonicalize().map_err(failed)?;
        let (id, home) = self.templates.draft().map_err(failed)?;
        let created = host::unix_ns() / 1_000_000_000;
        let kept = self
            .templates
            .keep(&id, names, Origin::Elsewhere(dir), created);
        if kept.is_err() {
            // Empty, and nobody knows of it.
            let _ = std::fs::remove_dir_all(home);
        }
        kept
    }

    fn remove_template(&mut self, name: &str, answer: Answer<()>) {
        let Some(template) = self.templates.find(name) else {
            let _ = answer.send(Err(PoolError::NoTemplate(name.to_owned())));
            return;
        };
        let (id, dir) = (template.info.id.clone(), template.dir.clone());
        if let Some(user) = self.user_of(&dir) {
            let _ = answer.send(Err(PoolError::InUse(name.to_owned(), user)));
            return;
        }
        let of_it: Vec<_> = self
            .slots
            .iter()
            .filter(|(_, e)| {
                e.record.template.id == id && matches!(e.slot.stage, Stage::Warm | Stage::Filling)
            })
            .map(|(id, _)| id.clone())
            .collect();
        for slot in of_it {
            self.end(&slot);
        }
        self.warm.remove(&id);
        let memory = self
            .templates
            .get_mut(&id)
            .map(|t| std::mem::replace(&mut t.memory, Memory::OnDisk));
        let home = self.templates.forget(&id);
        tokio::task::spawn_blocking(move || {
            drop(memory);
            let removed = home.map_or(Ok(()), std::fs::remove_dir_all);
            let _ = answer.send(removed.map_err(|e| PoolError::Failed {
                what: "remove a template",
                why: e.to_string(),
            }));
        });
    }

    /// Who needs the files of this template: a paused sandbox or another template.
    fn user_of(&self, dir: &Path) -> Option<String> {
        if let Some(other) = self.templates.built_on(dir).first() {
            return Some(format!("template {other} builds on it"));
        }
        self.slots
            .iter()
            .filter(|(_, e)| !matches!(e.slot.stage, Stage::Warm | Stage::Filling))
            .find(|(_, e)| base_of(&e.dir.pause()).as_deref() == Some(dir))
            .map(|(id, _)| format!("sandbox {id} is paused on it"))
    }

    fn stats(&mut self) -> PoolStats {
        let count = |want: fn(Stage) -> bool| {
            let n = self.slots.values().filter(|e| want(e.slot.stage)).count();
            u32::try_from(n).unwrap_or(u32::MAX)
        };
        let (running, paused, warm, filling) = (
            count(|s| matches!(s, Stage::Running | Stage::Pausing(_) | Stage::Saving)),
            count(|s| matches!(s, Stage::Paused(_) | Stage::SavingPaused(_))),
            count(|s| s == Stage::Warm),
            count(|s| s == Stage::Filling),
        );
        let room = self.room_for(&Need::default());
        let needs = self.needs.values().map(|need| need.expected);
        PoolStats {
            running,
            paused,
            warm,
            filling,
            expected_bytes: needs.max().unwrap_or(room.expected),
            available_bytes: room.available.saturating_sub(room.reserve),
            ..self.counters.clone()
        }
    }

    /// Counters and gauges; those of TAPs are read on a thread.
    fn tell_stats(&mut self, answer: oneshot::Sender<PoolStats>) {
        let mut stats = self.stats();
        let network = self.config.network.clone();
        let taps: Vec<_> = self.slots.values().filter_map(|e| e.record.tap).collect();
        tokio::task::spawn_blocking(move || {
            for tap in taps {
                // One that is gone meanwhile counts from the next time on.
                if let Ok(counters) = network::counters(network.as_ref(), Some(tap)) {
                    network::add(&mut stats.network, &counters);
                }
            }
            let _ = answer.send(stats);
        });
    }

    fn close(&mut self, kill: bool, done: oneshot::Sender<()>) {
        let closing = self.closing.get_or_insert_with(|| Closing {
            kill,
            done: Vec::new(),
        });
        closing.kill |= kill;
        closing.done.push(done);
        let doomed: Vec<_> = self
            .slots
            .iter()
            .filter(|(_, e)| kill || !e.slot.is_leased())
            .map(|(id, _)| id.clone())
            .collect();
        for id in doomed {
            self.end(&id);
        }
    }
}

fn check_note(note: &str) -> Result<(), PoolError> {
    if note.len() <= MAX_NOTE {
        Ok(())
    } else {
        Err(PoolError::Failed {
            what: "keep the note",
            why: format!("{} bytes, at most {MAX_NOTE} are kept", note.len()),
        })
    }
}
