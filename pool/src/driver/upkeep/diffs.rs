//! Stores the memory of templates as diffs, one at a time, in the background. A template that has not been used
//! recently is compared once. If a diff is much smaller, the memory file is deleted, and rebuilt when a VM needs it.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use library::{
    Library,
    diff::{DiffPlan, Stored, remove_aside, remove_draft, set_memory_aside},
    template::{Storage, Template, bytes_of},
};
use model::template_file;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use super::{Around, Upkeep};
use crate::{
    driver::{admission::stock::Memory, entry::Entry},
    host,
    message::Report,
    policy,
    slot::Stage,
};

/// The job under way.
#[derive(Debug)]
pub(in crate::driver) struct Storing {
    template: String,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Storing {
    /// Stops the job, and blocks until it has left the template's directory.
    pub(in crate::driver) fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        // A panic was printed.
        let _ = self.thread.join();
    }

    /// A job that writes nothing.
    #[cfg(test)]
    pub(super) fn idle(template: &str) -> Self {
        Self {
            template: template.to_owned(),
            stop: Arc::default(),
            thread: thread::spawn(|| ()),
        }
    }
}

impl Upkeep {
    /// Removes memory files that no VM needs, and begins to store the memory of the next template. This also runs on a
    /// busy server: a start that lacks a memory file makes it.
    pub(in crate::driver) fn store_diffs(
        &mut self,
        library: &mut Library,
        around: &Around,
        reports: &mpsc::UnboundedReceiver<Report>,
    ) {
        let now_ns = host::monotonic_ns();
        // A template that is being made from another one may need its files.
        if self.jobs == 0 {
            self.remove_memory_files(library, around, now_ns);
        }
        self.end_lost_storing(library, reports);
        if self.storing.is_none() && self.rebuilding.is_none() {
            self.store_next(library, around, now_ns);
        }
    }

    fn remove_memory_files(&self, library: &Library, around: &Around, now_ns: u64) {
        for template in library.iter() {
            if matches!(template.storage, Storage::Diff(_))
                && !self.is_used(library, around, template, now_ns)
                && set_memory_aside(&template.dir).unwrap_or(false)
            {
                let (id, dir) = (template.info.id.clone(), template.dir.clone());
                drop(spawn_blocking(move || match remove_aside(&dir) {
                    Ok(()) => tracing::info!(
                        template = id,
                        "removed the template's memory file: its diff remains"
                    ),
                    Err(error) => {
                        tracing::warn!(template = id, %error, "cannot remove a template's memory file")
                    }
                }));
            }
        }
    }

    /// Ends the job under way if its thread has panicked. A thread that ended without a panic sent its report first, so
    /// the order of the two conditions matters.
    fn end_lost_storing(
        &mut self,
        library: &mut Library,
        reports: &mpsc::UnboundedReceiver<Report>,
    ) {
        let has_ended = |storing: &Storing| storing.thread.is_finished();
        if !self.storing.as_ref().is_some_and(has_ended) || !reports.is_empty() {
            return;
        }
        let id = self.storing.take().map(|storing| storing.template);
        let id = id.unwrap_or_default();
        if let Some(template) = library.get(&id) {
            let dir = template.dir.clone();
            drop(spawn_blocking(move || remove_draft(&dir)));
        }
        self.stored(
            library,
            &id,
            Err(std::io::Error::other("its thread panicked")),
        );
    }

    fn store_next(&mut self, library: &Library, around: &Around, now_ns: u64) {
        let is_due = |template: &&Template| match template.storage {
            Storage::New { since_ns } => {
                policy::is_idle(since_ns, now_ns, self.config.idle)
                    && !self.is_used(library, around, template, now_ns)
            }
            Storage::Whole | Storage::Diff(_) => false,
        };
        // A rejected diff may be nearly as large as the memory. A diff that does not fit waits, and a smaller one is
        // stored first.
        let room_for = |template: &Template| {
            let room = around
                .admission
                .set_aside(around.slots, template.loaded_bytes);
            room.ok()
        };
        let mut due = library.iter().filter(is_due);
        let Some((template, room)) = due.find_map(|t| Some((t, room_for(t)?))) else {
            return;
        };
        let stop = Arc::new(AtomicBool::new(false));
        let plan = DiffPlan {
            id: template.info.id.clone(),
            dir: template.dir.clone(),
            base: base_of_diff(library, template),
            stop: Arc::clone(&stop),
        };
        let id = plan.id.clone();
        let reporter = around.jobs.reporter.clone();
        // Needs its own thread, because a thread's lowered priority cannot be raised again.
        let begun = thread::Builder::new().spawn(move || {
            let stored = plan.run();
            drop(room);
            let _ = reporter.send(Report::Stored(plan.id, stored));
        });
        match begun {
            Ok(thread) => {
                self.storing = Some(Storing {
                    template: id,
                    stop,
                    thread,
                });
            }
            Err(error) => tracing::warn!(%error, "cannot store a template's memory as a diff"),
        }
    }

    /// Whether the memory file is in use, or was used recently.
    fn is_used(
        &self,
        library: &Library,
        around: &Around,
        template: &Template,
        now_ns: u64,
    ) -> bool {
        let supply = around.admission.stock.supply(&template.info.id);
        let is_loaded = matches!(supply.memory, Memory::Loaded(_) | Memory::Loading);
        let maps = |entry: &Entry| {
            let id = &entry.record.template.id;
            let home = entry.record.lineage.as_ref().and_then(|l| l.home.as_ref());
            *id == template.info.id
                || home.is_some_and(|home| home.dir == template.dir)
                || may_start_from(library, entry, &template.dir)
        };
        let has_vm = |entry: &&Entry| !matches!(entry.slot.stage, Stage::Paused(_));
        is_loaded
            || !supply.is_memory_idle(now_ns, self.config.idle)
            || around.slots.values().filter(has_vm).any(maps)
    }

    pub(in crate::driver) fn stored(
        &mut self,
        library: &mut Library,
        id: &str,
        stored: std::io::Result<Option<Stored>>,
    ) {
        let _ = self.take_storing(id);
        let Some(template) = library.get_mut(id) else {
            return;
        };
        template.storage = match stored {
            Ok(Some(stored)) => Storage::Diff(stored),
            Ok(None) => Storage::Whole,
            Err(error) => {
                tracing::warn!(
                    template = id,
                    %error,
                    "cannot store a template's memory as a diff: keeping the memory file"
                );
                Storage::Whole
            }
        };
        template.info.bytes = bytes_of(&template.dir);
    }

    /// Takes the job under way if it works on this template, which is being removed.
    pub(in crate::driver) fn take_storing(&mut self, id: &str) -> Option<Storing> {
        self.storing.take_if(|storing| storing.template == id)
    }

    /// Ends the job under way and waits for its thread, because the next server may use the directory immediately.
    pub(in crate::driver) async fn end_storing(&mut self) {
        if let Some(storing) = self.storing.take() {
            let _ = spawn_blocking(move || storing.end()).await;
        }
    }
}

/// Whether a start is under way whose VM may map the memory in `dir` as a base. The start's record does not name
/// the base yet.
fn may_start_from(library: &Library, entry: &Entry, dir: &Path) -> bool {
    let is_starting = !matches!(entry.slot.stage, Stage::Warm) && !entry.slot.is_settled();
    let of = || library.get(&entry.record.template.id);
    // The template of a fork may have been removed.
    is_starting && of().is_none_or(|of| of.base.as_deref() == Some(dir))
}

/// The installed template that has the same root image as this one, otherwise `base`. Only files in the images
/// directory never change, so no others can be a base.
fn base_of_diff(library: &Library, template: &Template) -> Option<PathBuf> {
    let images = library.images();
    let is_base = |dir: &Path| images.has(dir) && dir.join(template_file::MEMORY).is_file();
    let origin = template.root.parent().filter(|dir| is_base(dir));
    let installed = || {
        let base = library.find("base")?;
        base.rebuild.as_ref().map(|_| base.dir.as_path())
    };
    let found = origin.or_else(|| installed().filter(|dir| is_base(dir)));
    found.map(Path::to_owned)
}

#[cfg(test)]
mod tests;
