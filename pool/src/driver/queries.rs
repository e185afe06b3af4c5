//! Read-only requests. [`super::catalog`] has the ones about templates.

use std::collections::BTreeMap;

use library::{info::TemplateKind, template::Storage, template::Template, vmms::VmmId};
use model::{SandboxId, template_file};
use netisolation::{Isolation, TapIndex};
use tokio::task::spawn_blocking;

use super::{Driver, entry::Entry};
use crate::{
    answer::{Answer, Reply},
    change::{Change, ChangeKind},
    error::PoolError,
    host,
    message::Request,
    network,
    sandbox::{LifeEvent, Sandbox, Usage},
    slot::{Refusal, Stage},
    state::{PauseMode, SandboxState},
    stats::{Installed, PoolStats, VmmUse},
    work::{WorkError, save::record_working_set},
};

impl Driver {
    pub(super) fn answer(&mut self, request: Request) {
        match request {
            Request::Get(id, answer) => answer.send(self.sandbox(&id)),
            Request::List(answer) => {
                let sandboxes = self.slots.iter().filter_map(|(id, e)| e.sandbox(id));
                answer.send(sandboxes.collect());
            }
            Request::History(id, answer) => answer.send(self.history(&id)),
            Request::Usage(id, answer) => self.usage(&id, answer),
            Request::Counters(id, answer) => self.of_tap(&id, answer, network::counters),
            Request::VerifyNetwork(id, answer) => self.of_tap(&id, answer, network::verify),
            Request::Templates(answer) => answer.send(self.all_templates()),
            Request::Template(name, answer) => {
                let found = self.library.find(&name);
                answer.send(found.map(|t| self.template_info(t)));
            }
            Request::AddTemplate(dir, names, answer) => self.add_template(&dir, names, answer),
            Request::AddDisk(spec, answer) => self.add_disk(spec, answer),
            Request::DiskOf(reference, size, answer) => self.disk_of(&reference, size, answer),
            Request::DiskFiles(reference, answer) => {
                answer.send(self.disk_files(&reference));
            }
            Request::CopyOf(reference, answer) => self.copy_of(&reference, answer),
            Request::RecordWorkingSet(id, answer) => self.record_working_set(&id, answer),
            Request::RecipeDir(reference, answer) => {
                let dir = self.library.find(&reference).map(Template::recipe_dir);
                answer.send(dir.ok_or(PoolError::NoTemplate(reference)));
            }
            Request::GiveNames(reference, names, answer) => {
                self.give_names(&reference, &names, answer);
            }
            Request::TakeNames(names, answer) => self.take_names(&names, answer),
            Request::RemoveTemplate(name, answer) => self.remove_template(&name, answer),
            Request::PauseFiles(id, answer) => answer.send(self.pause_files(&id)),
            Request::PauseNeeds(id, answer) => self.pause_needs(&id, answer),
            Request::BaseFiles(id, answer) => self.base_files(&id, answer),
            Request::CanTake(needs, gives, answer) => {
                answer.send(self.can_take(&needs, gives));
            }
            Request::Hold {
                id,
                incoming,
                needs,
                fetched,
                answer,
            } => self.hold(&id, &incoming, needs, fetched, answer),
            Request::RootImages(answer) => self.root_images(answer),
            Request::Take {
                id,
                incoming,
                needs,
                claim,
                answer,
            } => self.take(id, &incoming, needs, claim, answer),
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

    /// Reports a change to the follower of the pool, if there is one.
    pub(super) fn changed(&mut self, id: &SandboxId, kind: ChangeKind) {
        self.followers.changed(Change {
            at: self.slots.clock.now(),
            id: id.clone(),
            kind,
            sandbox: self.slots.get(id).and_then(|e| e.sandbox(id)),
        });
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
        let Some((entry, answer)) = answer.or_refuse(self.running(id)) else {
            return;
        };
        let pid = entry.record.vmm.map_or(0, |vmm| vmm.pid);
        spawn_blocking(move || {
            answer.send(Ok(Usage {
                cpu_ns: host::cpu_ns(pid).unwrap_or(0),
                memory: host::private_bytes(pid).unwrap_or(0),
                disk: host::unlinked_bytes(pid).unwrap_or(0),
            }));
        });
    }

    /// Responds to a query about a running sandbox's TAP. The query runs on a thread.
    fn of_tap<T: Send + 'static>(
        &self,
        id: &SandboxId,
        answer: Answer<T>,
        question: fn(Option<&Isolation>, Option<TapIndex>) -> Result<T, WorkError>,
    ) {
        let tap = self.running(id).map(|entry| entry.record.tap);
        let Some((tap, answer)) = answer.or_refuse(tap) else {
            return;
        };
        let (network, id) = (self.config.network.clone(), id.clone());
        spawn_blocking(move || {
            let result = question(network.as_ref(), tap);
            let failed = |e: WorkError| e.into_pool("inspect the sandbox's network", &id);
            answer.send(result.map_err(failed));
        });
    }

    fn record_working_set(&mut self, id: &SandboxId, answer: Answer<()>) {
        let template = self
            .running(id)
            .map(|entry| entry.record.template.id.clone());
        let to = template.and_then(|template| match self.library.get(&template) {
            Some(t) if t.info.kind == TemplateKind::Built => {
                Ok(t.dir.join(template_file::WORKING_SET))
            }
            Some(_) | None => Err(PoolError::NoTemplate(template)),
        });
        let entry = self.slots.get_mut(id);
        let found = to.and_then(|to| Ok((to, entry.ok_or_else(|| PoolError::not_found(id))?)));
        let Some(((to, entry), answer)) = answer.or_refuse(found) else {
            return;
        };
        let (control, dir, id) = (entry.take_control(), entry.dir.clone(), id.clone());
        spawn_blocking(move || {
            let recorded = record_working_set(control, &dir, &to);
            let failed = |e: WorkError| e.into_pool("record the working set of a template", &id);
            answer.send(recorded.map_err(failed));
        });
    }

    fn installed(&self) -> BTreeMap<String, Installed> {
        let installed = self.library.iter().filter_map(|template| {
            let state = template.rebuild.as_ref()?.state;
            let vmm = template.vmm.clone();
            let name = template.info.names.first()?.clone();
            Some((name, Installed { vmm, state }))
        });
        installed.collect()
    }

    /// The uses of every kept VMM.
    fn vmm_uses(&self) -> BTreeMap<VmmId, VmmUse> {
        let mut uses: BTreeMap<VmmId, VmmUse> = BTreeMap::new();
        uses.entry(self.library.vmms().current().clone())
            .or_default()
            .is_present = true;
        for entry in self.slots.values() {
            let Some(id) = &entry.record.vmm_id else {
                continue;
            };
            match entry.slot.state() {
                Some(SandboxState::Paused(PauseMode::FilesystemOnly)) => {}
                Some(SandboxState::Paused(PauseMode::Memory)) => {
                    uses.entry(id.clone()).or_default().paused += 1;
                }
                Some(SandboxState::Running) | None => {
                    uses.entry(id.clone()).or_default().running += 1;
                }
            }
        }
        let has_memory = |t: &&Template| t.info.kind != TemplateKind::Disk;
        for template in self.library.iter().filter(has_memory) {
            uses.entry(template.vmm.clone()).or_default().templates += 1;
        }
        uses
    }

    fn add_diff_stats(&self, stats: &mut PoolStats) {
        for template in self.library.iter() {
            if let Storage::Diff(stored) = &template.storage {
                stats.memory_diffs += 1;
                stats.memory_diff_bytes += stored.bytes;
                stats.memory_diff_memory_bytes += stored.header.loaded_bytes;
            }
        }
    }

    fn stats(&mut self) -> PoolStats {
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
        let mut stats = PoolStats {
            running: self.slots.count(has_vm),
            paused: self.slots.count(is_on_disk),
            warm: self.slots.count(|s| s == Stage::Warm),
            filling: self.slots.count(|s| s == Stage::Filling),
            vmms: self.vmm_uses(),
            installed: self.installed(),
            ..self.counters.clone()
        };
        self.admission
            .add_stats(&self.slots, &self.library, &mut stats);
        self.upkeep.add_stats(&mut stats);
        self.add_diff_stats(&mut stats);
        stats
    }

    /// Sends counters and gauges. The counters of TAPs are read on a thread.
    fn send_stats(&mut self, answer: Reply<PoolStats>) {
        let mut stats = self.stats();
        let network = self.config.network.clone();
        let images = self.library.images().clone();
        let taps: Vec<_> = self.slots.values().filter_map(|e| e.record.tap).collect();
        spawn_blocking(move || {
            stats.images = u32::try_from(images.all().len()).unwrap_or(u32::MAX);
            for tap in taps {
                // A TAP released after the list was made cannot be read. The pool's totals include its counters from
                // the next query on.
                if let Ok(counters) = network::counters(network.as_ref(), Some(tap)) {
                    network::add(&mut stats.network, &counters);
                }
            }
            answer.send(stats);
        });
    }
}
