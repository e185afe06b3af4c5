//! Questions that change nothing, and the list of templates.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use model::SandboxId;
use netisolation::{Isolation, TapIndex};
use tokio::{sync::oneshot, task::spawn_blocking};

use super::{Driver, Entry};
use crate::{
    Installed, LifeEvent, PoolError, PoolStats, Sandbox, SandboxState, TemplateInfo, Usage, host,
    manifest::Manifest,
    message::{Answer, Request},
    network,
    policy::Need,
    slot::{Refusal, Stage},
    templates::{Memory, Origin},
    work::WorkError,
};

impl Driver {
    pub(super) fn answer(&mut self, request: Request) {
        match request {
            Request::Get(id, answer) => drop(answer.send(self.sandbox(&id))),
            Request::List(answer) => {
                let sandboxes = self.slots.iter().filter_map(|(id, e)| e.sandbox(id));
                let _ = answer.send(sandboxes.collect());
            }
            Request::History(id, answer) => drop(answer.send(self.history(&id))),
            Request::Usage(id, answer) => self.usage(&id, answer),
            Request::Counters(id, answer) => self.of_tap(&id, answer, network::counters),
            Request::VerifyNetwork(id, answer) => self.of_tap(&id, answer, network::verify),
            Request::Templates(answer) => drop(answer.send(self.all_templates())),
            Request::Template(name, answer) => {
                let id = self.templates.find(&name).map(|t| t.info.id.clone());
                let _ = answer.send(id.and_then(|id| self.template_info(&id)));
            }
            Request::AddTemplate(dir, names, answer) => self.add_template(&dir, names, answer),
            Request::RemoveTemplate(name, answer) => self.remove_template(&name, answer),
            Request::Stats(answer) => self.send_stats(answer),
            // `Driver::request` serves these.
            Request::Create { .. }
            | Request::Sandbox(..)
            | Request::Drain(_)
            | Request::Settle(_)
            | Request::Close(..) => {}
        }
    }

    /// A sandbox as callers see it now.
    pub(super) fn sandbox(&self, id: &SandboxId) -> Result<Sandbox, PoolError> {
        let sandbox = self.slots.get(id).and_then(|e| e.sandbox(id));
        sandbox.ok_or_else(|| PoolError::not_found(id))
    }

    fn history(&self, id: &SandboxId) -> Result<(Sandbox, Vec<LifeEvent>), PoolError> {
        let sandbox = self.sandbox(id)?;
        let entry = self.slots.leased(id)?;
        Ok((sandbox, entry.events.iter().cloned().collect()))
    }

    /// The entry of a sandbox that has a VM.
    fn running(&self, id: &SandboxId) -> Result<&Entry, PoolError> {
        let entry = self.slots.leased(id)?;
        match entry.slot.state() {
            Some(SandboxState::Running) => Ok(entry),
            _ => Err(PoolError::Refused(id.clone(), Refusal::NotRunning)),
        }
    }

    fn usage(&self, id: &SandboxId, answer: Answer<Usage>) {
        let entry = match self.running(id) {
            Ok(entry) => entry,
            Err(e) => return drop(answer.send(Err(e))),
        };
        let pid = entry.record.vmm.map_or(0, |vmm| vmm.pid);
        spawn_blocking(move || {
            let _ = answer.send(Ok(Usage {
                cpu_ns: host::cpu_ns(pid).unwrap_or(0),
                memory: host::private_bytes(pid).unwrap_or(0),
                disk: host::unlinked_bytes(pid).unwrap_or(0),
            }));
        });
    }

    /// Answers a question about a running sandbox's TAP. The question runs on a thread.
    fn of_tap<T: Send + 'static>(
        &self,
        id: &SandboxId,
        answer: Answer<T>,
        question: fn(Option<&Isolation>, Option<TapIndex>) -> Result<T, WorkError>,
    ) {
        let tap = match self.running(id) {
            Ok(entry) => entry.record.tap,
            Err(e) => return drop(answer.send(Err(e))),
        };
        let (network, id) = (self.config.network.clone(), id.clone());
        spawn_blocking(move || {
            let result = question(network.as_ref(), tap);
            let failed = |e: WorkError| e.into_pool("inspect the sandbox's network", &id);
            let _ = answer.send(result.map_err(failed));
        });
    }

    fn template_info(&self, id: &str) -> Option<TemplateInfo> {
        let mut info = self.templates.get(id)?.info.clone();
        info.warm = self.stock.len(id);
        Some(info)
    }

    fn all_templates(&self) -> Vec<TemplateInfo> {
        let ids = self.templates.ids();
        let mut all: Vec<_> = ids.iter().filter_map(|id| self.template_info(id)).collect();
        all.sort_by(|a, b| (&a.names, &a.id).cmp(&(&b.names, &b.id)));
        all
    }

    fn add_template(&mut self, dir: &Path, names: Vec<String>, answer: Answer<TemplateInfo>) {
        match self.draft_template(dir, &names) {
            Err(e) => drop(answer.send(Err(e))),
            Ok((id, dir)) => {
                let created = host::unix_ns() / 1_000_000_000;
                let origin = Origin::Elsewhere(dir);
                let vmms = &mut self.vmms;
                let kept = self.templates.keep(&id, names, origin, created, vmms);
                self.publish(&id, kept, answer);
            }
        }
    }

    /// Draws the id of a template whose files are in `dir`. Returns it with the resolved directory.
    fn draft_template(&self, dir: &Path, names: &[String]) -> Result<(String, PathBuf), PoolError> {
        let failed = |e: std::io::Error| PoolError::Failed {
            what: "add a template",
            why: format!("{}: {e}", dir.display()),
        };
        self.templates.check_names(names)?;
        let dir = dir.canonicalize().map_err(failed)?;
        let (id, _) = self
            .templates
            .draft()
            .map_err(|e| PoolError::of_disk("add a template", &e))?;
        Ok((id, dir))
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
        self.end_stock(&id);
        let template = self.templates.get_mut(&id);
        let memory = template.map(|t| std::mem::replace(&mut t.memory, Memory::OnDisk));
        let record = self.templates.forget(&id);
        self.images_may_be_unused = true;
        self.jobs.change_templates(move || {
            drop(memory);
            let removed = record.map_or(Ok(()), |record| record.remove());
            let failed = |e| PoolError::of_disk("remove a template", &e);
            let _ = answer.send(removed.map_err(failed));
        });
    }

    /// Returns a description of another template or a sandbox that needs the template's files in `dir`; `None` if there
    /// is none.
    fn user_of(&self, dir: &Path) -> Option<String> {
        if let Some(other) = self.templates.built_on(dir).first() {
            return Some(format!("template {other} builds on it"));
        }
        self.slots
            .iter()
            .filter(|(_, e)| !matches!(e.slot.stage, Stage::Warm | Stage::Filling))
            .find(|(_, e)| self.base_of_pause(e).as_deref() == Some(dir))
            .map(|(id, _)| format!("sandbox {id} is paused on it"))
    }

    /// The directory of the template that a sandbox's pause is a diff of, if it is one.
    fn base_of_pause(&self, entry: &Entry) -> Option<PathBuf> {
        let manifest = Manifest::read(&entry.dir.pause()).ok()?;
        Some(self.templates.images().base(&manifest.base?))
    }

    fn installed(&self) -> BTreeMap<String, Installed> {
        let installed = self.templates.iter().filter_map(|template| {
            let state = template.rebuild.as_ref()?.state;
            let vmm = template.vmm.clone();
            let name = template.info.names.first()?.clone();
            Some((name, Installed { vmm, state }))
        });
        installed.collect()
    }

    fn stats(&mut self) -> PoolStats {
        let room = self.memory.room_for(
            Need::default(),
            &self.slots,
            &self.disks,
            host::monotonic_ns(),
        );
        let has_vm = |s| {
            matches!(
                s,
                Stage::Running | Stage::Pausing(_) | Stage::Snapshotting | Stage::Adopting
            )
        };
        let is_on_disk = |s| {
            matches!(
                s,
                Stage::Paused(_)
                    | Stage::ResumeQueued(_)
                    | Stage::SnapshottingPaused(_)
                    | Stage::AdoptingPaused(_)
            )
        };
        PoolStats {
            running: self.slots.count(has_vm),
            paused: self.slots.count(is_on_disk),
            warm: self.slots.count(|s| s == Stage::Warm),
            filling: self.slots.count(|s| s == Stage::Filling),
            expected_bytes: self.memory.largest_need(),
            available_bytes: room.available.saturating_sub(room.reserve),
            vmms: self.vmm_uses(),
            installed: self.installed(),
            ..self.counters.clone()
        }
    }

    /// Sends counters and gauges. The counters of TAPs are read on a thread.
    fn send_stats(&mut self, answer: oneshot::Sender<PoolStats>) {
        let mut stats = self.stats();
        let network = self.config.network.clone();
        let images = self.templates.images().clone();
        let taps: Vec<_> = self.slots.values().filter_map(|e| e.record.tap).collect();
        spawn_blocking(move || {
            stats.images = u32::try_from(images.all().len()).unwrap_or(u32::MAX);
            for tap in taps {
                // A TAP that was released in the meantime cannot be read. Its counters are in the pool's own sum the
                // next time.
                if let Ok(counters) = network::counters(network.as_ref(), Some(tap)) {
                    network::add(&mut stats.network, &counters);
                }
            }
            let _ = answer.send(stats);
        });
    }
}
