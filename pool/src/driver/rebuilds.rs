//! Rebuilds installed templates that were made with another VMM, kernel or root image, one at a time, in the
//! background. New sandboxes start from the old files until the rebuild is complete.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use library::rebuilt::RebuildState;

use super::Driver;
use crate::{
    host,
    message::Report,
    slot::Stage,
    work::rebuild::{Outcome, RebuildPlan},
};

/// Delay after the first failure. It doubles with each further failure, up to [`LONGEST_DELAY`].
const FIRST_DELAY: Duration = Duration::from_secs(60);
const LONGEST_DELAY: Duration = Duration::from_secs(3600);

/// The rebuild under way.
#[derive(Debug)]
pub(super) struct Running {
    stop: Arc<AtomicBool>,
    /// The VM process that it started last.
    vm: Option<Arc<OwnedFd>>,
}

impl Driver {
    /// Begins to examine or rebuild the next template, unless more important work is under way.
    pub(super) fn rebuild(&mut self) {
        let now_ns = host::monotonic_ns();
        if self.rebuilding.is_some()
            || self.stopping.is_closing()
            || !self.adoptions.is_swept()
            || !self.admission.queue.is_empty()
        {
            return;
        }
        let is_due = |state, not_before_ns| match state {
            RebuildState::Waiting | RebuildState::Failed => not_before_ns <= now_ns,
            RebuildState::Running | RebuildState::Current | RebuildState::Kept => false,
        };
        let next = self.library.iter().find_map(|template| {
            let rebuild = template.rebuild.as_ref()?;
            is_due(rebuild.state, rebuild.not_before_ns).then(|| template.info.id.clone())
        });
        if let Some(id) = next {
            self.begin_rebuild(&id, now_ns);
        }
    }

    fn begin_rebuild(&mut self, id: &str, now_ns: u64) {
        let current = self.library.vmms().current().clone();
        let Ok(vmm) = self.library.vmms_mut().get(&current) else {
            return;
        };
        let images = self.library.images().clone();
        let Some(template) = self.library.get_mut(id) else {
            return;
        };
        let Some(rebuild) = &mut template.rebuild else {
            return;
        };
        // During the build, the guest may touch all of its memory, and its files may grow to that size.
        let bytes = template
            .info
            .memory
            .0
            .saturating_add(self.config.limits.memory_overhead.0);
        let slots = &self.slots;
        let Some(room) = self.admission.room_for_rebuild(id, bytes, slots, now_ns) else {
            return;
        };
        rebuild.state = RebuildState::Running;
        let stop = Arc::new(AtomicBool::new(false));
        let plan = RebuildPlan {
            id: id.to_owned(),
            installed: rebuild.installed.clone(),
            dir: template.dir.clone(),
            made_by: template.vmm.clone(),
            vmm,
            images,
            groups: Arc::clone(&self.jobs.groups),
            stop: Arc::clone(&stop),
        };
        self.rebuilding = Some(Running { stop, vm: None });
        let reporter = self.jobs.reporter.clone();
        // Needs its own thread, because a thread's lowered priority cannot be raised again.
        let begun = thread::Builder::new().spawn(move || {
            let on_vmm = |vm| drop(reporter.send(Report::Rebuilding(vm)));
            let result = plan.run(&on_vmm);
            drop(room);
            let _ = reporter.send(Report::Rebuilt(plan.id, result));
        });
        if let Err(error) = begun {
            self.rebuilt(id, Err(error.to_string()));
        }
    }

    /// Ends the rebuild under way, because the pool closes.
    pub(super) fn stop_rebuild(&mut self) {
        if let Some(running) = &self.rebuilding {
            running.stop.store(true, Ordering::SeqCst);
            if let Some(vm) = &running.vm {
                crate::vm::kill(vm);
            }
        }
    }

    pub(super) fn rebuilding(&mut self, vm: Arc<OwnedFd>) {
        let Some(running) = &mut self.rebuilding else {
            return;
        };
        running.vm = Some(vm);
        if running.stop.load(Ordering::SeqCst) {
            self.stop_rebuild();
        }
    }

    /// Ends the rebuild under way and waits for its thread, because the next server may use the directory immediately.
    pub(super) async fn end_rebuild(&mut self) {
        self.stop_rebuild();
        while self.rebuilding.is_some() {
            match self.reports.recv().await {
                Some(Report::Rebuilding(vm)) => self.rebuilding(vm),
                Some(Report::Rebuilt(..)) | None => self.rebuilding = None,
                Some(_) => {}
            }
        }
    }

    pub(super) fn rebuilt(&mut self, id: &str, result: Result<Outcome, String>) {
        self.rebuilding = None;
        if self.stopping.is_closing() {
            return;
        }
        let result = result.and_then(|outcome| match outcome {
            Outcome::Current => Ok(RebuildState::Current),
            Outcome::Impossible(why) => {
                tracing::info!(
                    template = id,
                    why,
                    "cannot rebuild an installed template: it remains unchanged"
                );
                Ok(RebuildState::Kept)
            }
            Outcome::Built(dir, vmm) => {
                self.library.replace(id, &dir, vmm)?;
                let former = self.admission.stock.supply_mut(id).files_replaced();
                self.jobs.change_templates(move || drop(former));
                self.counters.rebuilt += 1;
                self.images_may_be_unused = true;
                self.end_stock(id);
                tracing::info!(
                    template = id,
                    dir = %dir.display(),
                    "rebuilt an installed template: new sandboxes start from it"
                );
                Ok(RebuildState::Current)
            }
        });
        let Some(rebuild) = self.library.get_mut(id).and_then(|t| t.rebuild.as_mut()) else {
            return;
        };
        match result {
            Ok(state) => rebuild.state = state,
            Err(why) => {
                rebuild.state = RebuildState::Failed;
                let delay = FIRST_DELAY
                    .saturating_mul(1 << rebuild.failures.min(16))
                    .min(LONGEST_DELAY);
                rebuild.failures = rebuild.failures.saturating_add(1);
                let delay_ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
                rebuild.not_before_ns = host::monotonic_ns().saturating_add(delay_ns);
                self.counters.rebuilds_failed += 1;
                tracing::error!(
                    template = id,
                    why,
                    again_in_s = delay.as_secs(),
                    "cannot rebuild an installed template: its sandboxes keep starting from the old files"
                );
            }
        }
    }

    /// Ends the warm slots of a template, including the ones that are being filled.
    pub(super) fn end_stock(&mut self, template: &str) {
        let is_stock = |stage| matches!(stage, Stage::Warm | Stage::Filling);
        let stock = self
            .slots
            .ids(|e| e.record.template.id == template && is_stock(e.slot.stage));
        for slot in stock {
            self.end(&slot);
        }
    }
}
