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

use library::{Library, rebuilt::RebuildState};
use tokio::sync::mpsc;

use super::{Around, Upkeep};
use crate::{
    host,
    message::Report,
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

impl Upkeep {
    /// Begins to examine or rebuild the next template, unless more important work is under way.
    pub(in crate::driver) fn rebuild(&mut self, library: &mut Library, around: &mut Around) {
        let now_ns = host::monotonic_ns();
        if self.rebuilding.is_some() || !around.admission.queue.is_empty() {
            return;
        }
        let is_due = |state, not_before_ns| match state {
            RebuildState::Waiting | RebuildState::Failed => not_before_ns <= now_ns,
            RebuildState::Running | RebuildState::Current | RebuildState::Kept => false,
        };
        let next = library.iter().find_map(|template| {
            let rebuild = template.rebuild.as_ref()?;
            is_due(rebuild.state, rebuild.not_before_ns).then(|| template.info.id.clone())
        });
        if let Some(id) = next {
            self.begin_rebuild(library, around, &id, now_ns);
        }
    }

    fn begin_rebuild(&mut self, library: &mut Library, around: &mut Around, id: &str, now_ns: u64) {
        let current = library.vmms().current().clone();
        let Ok(vmm) = library.vmms_mut().get(&current) else {
            return;
        };
        let images = library.images().clone();
        let Some(template) = library.get_mut(id) else {
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
        let (admission, slots) = (&mut *around.admission, around.slots);
        let Some(room) = admission.room_for_rebuild(id, bytes, slots, now_ns) else {
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
            groups: Arc::clone(&around.jobs.groups),
            stop: Arc::clone(&stop),
        };
        self.rebuilding = Some(Running { stop, vm: None });
        let reporter = around.jobs.reporter.clone();
        // Needs its own thread, because a thread's lowered priority cannot be raised again.
        let begun = thread::Builder::new().spawn(move || {
            let on_vmm = |vm| drop(reporter.send(Report::Rebuilding(vm)));
            let result = plan.run(&on_vmm);
            drop(room);
            let _ = reporter.send(Report::Rebuilt(plan.id, result));
        });
        if let Err(error) = begun {
            self.rebuilding = None;
            self.rebuild_failed(library, id, &error.to_string());
        }
    }

    /// Ends the rebuild under way, because the pool closes.
    pub(in crate::driver) fn stop_rebuild(&mut self) {
        if let Some(running) = &self.rebuilding {
            running.stop.store(true, Ordering::SeqCst);
            if let Some(vm) = &running.vm {
                crate::vm::kill(vm);
            }
        }
    }

    pub(in crate::driver) fn rebuilding(&mut self, vm: Arc<OwnedFd>) {
        let Some(running) = &mut self.rebuilding else {
            return;
        };
        running.vm = Some(vm);
        if running.stop.load(Ordering::SeqCst) {
            self.stop_rebuild();
        }
    }

    /// Ends the rebuild under way and waits for its thread, because the next server may use the directory immediately.
    pub(in crate::driver) async fn end_rebuild(
        &mut self,
        reports: &mut mpsc::UnboundedReceiver<Report>,
    ) {
        self.stop_rebuild();
        while self.rebuilding.is_some() {
            match reports.recv().await {
                Some(Report::Rebuilding(vm)) => self.rebuilding(vm),
                Some(Report::Rebuilt(..)) | None => self.rebuilding = None,
                Some(_) => {}
            }
        }
    }

    /// Forgets the rebuild under way, whose result the next server does not need.
    pub(in crate::driver) fn rebuild_stopped(&mut self) {
        self.rebuilding = None;
    }

    /// Records the end of a rebuild. Returns whether sandboxes of the template now start from other files, so that its
    /// warm slots must end.
    pub(in crate::driver) fn rebuilt(
        &mut self,
        library: &mut Library,
        id: &str,
        result: Result<Outcome, String>,
    ) -> bool {
        self.rebuilding = None;
        let mut is_replaced = false;
        let state = match result {
            Ok(Outcome::Current) => Ok(RebuildState::Current),
            Ok(Outcome::Impossible(why)) => {
                tracing::info!(
                    template = id,
                    why,
                    "cannot rebuild an installed template: it remains unchanged"
                );
                Ok(RebuildState::Kept)
            }
            Ok(Outcome::Built(dir, vmm)) => library.replace(id, &dir, vmm).map(|()| {
                self.rebuilt += 1;
                self.images_may_be_unused = true;
                tracing::info!(
                    template = id,
                    dir = %dir.display(),
                    "rebuilt an installed template: new sandboxes start from it"
                );
                is_replaced = true;
                RebuildState::Current
            }),
            Err(why) => Err(why),
        };
        match state {
            Ok(state) => set_state(library, id, state),
            Err(why) => self.rebuild_failed(library, id, &why),
        }
        is_replaced
    }

    fn rebuild_failed(&mut self, library: &mut Library, id: &str, why: &str) {
        let Some(rebuild) = library.get_mut(id).and_then(|t| t.rebuild.as_mut()) else {
            return;
        };
        rebuild.state = RebuildState::Failed;
        let delay = FIRST_DELAY
            .saturating_mul(1 << rebuild.failures.min(16))
            .min(LONGEST_DELAY);
        rebuild.failures = rebuild.failures.saturating_add(1);
        let delay_ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        rebuild.not_before_ns = host::monotonic_ns().saturating_add(delay_ns);
        self.rebuilds_failed += 1;
        tracing::error!(
            template = id,
            why,
            again_in_s = delay.as_secs(),
            "cannot rebuild an installed template: its sandboxes keep starting from the old files"
        );
    }
}

fn set_state(library: &mut Library, id: &str, state: RebuildState) {
    if let Some(rebuild) = library.get_mut(id).and_then(|t| t.rebuild.as_mut()) {
        rebuild.state = state;
    }
}
