//! What jobs and watchers say.

use std::sync::Arc;

use model::SandboxId;

use super::{Driver, entry::Waiter};
use crate::{
    PoolError, host,
    message::Report,
    network,
    slot::{Event, Stage},
    templates::Memory,
    work::{
        WorkError,
        lease::{Lines, Served},
        save::Paused,
        start::Started,
        wall_clock::tell_again,
    },
};

impl Driver {
    pub(super) fn hear(&mut self, report: Report) {
        match report {
            Report::Made(id, made) => self.made(&id, made),
            Report::Told(id, told) => self.told(&id, told),
            Report::Paused(id, paused) => self.paused(&id, *paused),
            Report::Copied(id, copied) => self.copied(&id, copied),
            Report::Noted(id, noted) => self.noted(&id, noted),
            Report::Gone(id) => self.gone(&id),
            Report::Cleaned(id) => {
                let _ = self.event(&id, Event::Cleaned);
            }
            Report::Released(counters) => network::add(&mut self.counters.network, &counters),
            Report::Loaded(id, loaded) => self.loaded(&id, loaded),
        }
    }

    fn failed(&mut self, id: &SandboxId, what: &'static str, error: WorkError) -> PoolError {
        *self.counters.failed.entry(error.cause()).or_default() += 1;
        let mut error = error.into_pool(what, id);
        if let (PoolError::Failed { why, .. }, Some(entry)) = (&mut error, self.slots.get(id))
            && let Some(words) = host::last_words(&entry.dir.stderr())
        {
            *why = format!("{why} (the VMM's last words: {words})");
        }
        tracing::warn!(sandbox = %id, %error, "failed");
        error
    }

    fn made(&mut self, id: &SandboxId, made: Result<Box<Started>, WorkError>) {
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        let stage = entry.slot.stage;
        let fork = entry.fork.take();
        match made {
            Ok(started) => self.has_vm(id, stage, *started),
            Err(error) => self.not_made(id, stage, error),
        }
        if let Some(fork) = fork {
            self.fork_started(fork);
        }
    }

    fn has_vm(&mut self, id: &SandboxId, stage: Stage, started: Started) {
        let Started {
            vm,
            record,
            timeline,
            up,
            private,
        } = started;
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        let template = record.template.id.clone();
        entry.pidfd = Some(Arc::clone(&vm.pidfd));
        entry.record = record;
        entry.timeline = timeline;
        entry.private = private;
        entry.lines = Lines::new(up.control, up.agent).ok();
        if let Some(lines) = entry.lines.as_ref().filter(|_| up.clock_may_be_late) {
            tell_again(&lines.agent, self.config.start_timeout);
        }
        self.watch(id, vm);
        let event = match stage {
            Stage::Filling => Event::Filled,
            Stage::Resuming(_) => Event::Resumed,
            // In `Ending` all three are the same.
            _ => Event::Started,
        };
        let now = self.event(id, event);
        if now == Ok(Stage::Warm) {
            if let Some(t) = self.templates.get_mut(&template) {
                t.failures = 0;
            }
            let has = private.unwrap_or(0);
            self.needs.entry(template).or_default().warm(has);
        }
        if now == Ok(Stage::Running) {
            self.hand_over(id);
        }
    }

    /// The sandbox is its caller's; one who is gone has no use for it.
    fn hand_over(&mut self, id: &SandboxId) {
        self.last_foreground_ns = Self::now_ns();
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        if let Some(t) = self.templates.get_mut(&entry.record.template.id) {
            t.info.spawned += 1;
            t.wanted = true;
        }
        let sandbox = entry.sandbox(id);
        match entry.waiter.take() {
            Some(Waiter::Sandbox(answer)) => {
                if answer.send(Ok(sandbox)).is_err() {
                    tracing::info!(sandbox = %id, "nobody waits for it any more");
                    self.end(id);
                }
            }
            other => entry.waiter = other,
        }
    }

    fn not_made(&mut self, id: &SandboxId, stage: Stage, error: WorkError) {
        let what = match stage {
            Stage::Filling => "make a warm slot",
            Stage::Resuming(_) => "resume the sandbox",
            _ => "start a sandbox",
        };
        let error = self.failed(id, what, error);
        let template = self.slots.get(id).map(|e| e.record.template.id.clone());
        if stage == Stage::Filling {
            self.fill_failed(&template.unwrap_or_default());
        }
        self.answer_waiter(id, error);
        let event = match stage {
            Stage::Resuming(_) => Event::StillPaused,
            _ => Event::Failed,
        };
        let _ = self.event(id, event);
    }

    fn answer_waiter(&mut self, id: &SandboxId, error: PoolError) {
        let waiter = self.slots.get_mut(id).and_then(|e| e.waiter.take());
        match waiter {
            Some(Waiter::Sandbox(answer)) => Self::refuse(answer, error),
            Some(Waiter::Pause(answer)) => drop(answer.send(Err(error))),
            Some(Waiter::Template { answer, .. }) => drop(answer.send(Err(error))),
            Some(Waiter::Fork(plan)) => drop(plan.answer.send(Err(error))),
            None => {}
        }
    }

    fn told(&mut self, id: &SandboxId, told: Result<Box<Served>, WorkError>) {
        match told {
            Ok(served) => {
                let Some(entry) = self.slots.get_mut(id) else {
                    return;
                };
                let Served {
                    record,
                    timeline,
                    lines,
                } = *served;
                entry.record = record;
                entry.timeline = timeline;
                entry.lines = Some(lines);
                match self.event(id, Event::Told) {
                    Ok(Stage::Running) => self.hand_over(id),
                    _ => self.answer_waiter(id, PoolError::NoSandbox(id.clone())),
                }
            }
            Err(error) => {
                let error = self.failed(id, "start a sandbox", error);
                self.answer_waiter(id, error);
                let _ = self.event(id, Event::Failed);
            }
        }
    }

    fn paused(&mut self, id: &SandboxId, paused: Paused) {
        let (event, error) = match paused {
            Paused::OnDisk(record) => {
                if let Some(entry) = self.slots.get_mut(id) {
                    entry.record = *record;
                }
                (Event::Stopped, None)
            }
            Paused::Kept(e) => (Event::Kept, Some(e)),
            Paused::Lost(e) => (Event::Failed, Some(e)),
        };
        if let Some(error) = error {
            let error = self.failed(id, "pause the sandbox", error);
            if event == Event::Failed
                && let Some(entry) = self.slots.get_mut(id)
                && entry.slot.stage != Stage::Ending
            {
                entry.died = Some(error.to_string());
            }
            self.answer_waiter(id, error);
        }
        // Else the answer comes when the VM is gone; or it was killed meanwhile, and burying answers.
        if let Ok(Stage::Paused(_)) = self.event(id, event) {
            self.is_paused(id);
        }
    }

    fn is_paused(&mut self, id: &SandboxId) {
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        entry.pidfd = None;
        entry.lines = None;
        entry.private = None;
        let vmm = entry.record.vmm.take();
        let (network, tap) = (self.config.network.clone(), entry.record.tap.take());
        let reporter = self.reporter.clone();
        tokio::task::spawn_blocking(move || {
            let counters = network::release(network.as_ref(), tap, vmm);
            let _ = reporter.send(Report::Released(counters));
        });
        match entry.waiter.take() {
            Some(Waiter::Pause(answer)) => drop(answer.send(Ok(()))),
            other => entry.waiter = other,
        }
    }

    fn gone(&mut self, id: &SandboxId) {
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        let unasked = match entry.slot.stage {
            Stage::Ending | Stage::Stopping(_) => false,
            Stage::Filling
            | Stage::Warm
            | Stage::Starting
            | Stage::Running
            | Stage::Pausing(_)
            | Stage::Paused(_)
            | Stage::Resuming(_)
            | Stage::Saving
            | Stage::SavingPaused(_) => true,
        };
        if unasked {
            let words = host::last_words(&entry.dir.stderr());
            let why = words.unwrap_or_else(|| "the VMM was killed".to_owned());
            tracing::warn!(sandbox = %id, why, "its VM ended");
            if entry.slot.is_leased() {
                self.counters.died += 1;
                entry.died = Some(why);
            }
        }
        if let Ok(Stage::Paused(_)) = self.event(id, Event::Gone) {
            self.is_paused(id);
        }
    }

    fn noted(&mut self, id: &SandboxId, noted: std::io::Result<()>) {
        let Some(entry) = self.slots.get_mut(id) else {
            return;
        };
        for answer in std::mem::take(&mut entry.notes.writing) {
            let result = noted.as_ref().copied().map_err(|e| PoolError::Failed {
                what: "write the sandbox's note",
                why: e.to_string(),
            });
            let _ = answer.send(result);
        }
        let _ = self.event(id, Event::NoteDone);
        let next = self.slots.get_mut(id).and_then(|e| {
            e.notes.writing = std::mem::take(&mut e.notes.waiting);
            e.notes.next.take()
        });
        if let Some(note) = next {
            self.write_note(id, note);
        }
    }

    fn loaded(
        &mut self,
        id: &str,
        loaded: Result<Arc<vmm_control::template::LoadedTemplate>, String>,
    ) {
        let loaded = match loaded {
            Ok(loaded) => Some(loaded),
            Err(why) => {
                tracing::warn!(
                    template = id,
                    why,
                    "no huge pages; clones come from the disk"
                );
                None
            }
        };
        match self.templates.get_mut(id) {
            Some(template) => {
                template.memory = loaded.map_or(Memory::Unloadable, Memory::Loaded);
            }
            // It was removed meanwhile; giving its memory back takes time.
            None => drop(tokio::task::spawn_blocking(move || drop(loaded))),
        }
    }
}
