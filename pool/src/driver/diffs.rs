//! Storing the memory of templates as diffs, one at a time, in the background. A template that has not been used lately is
//! compared once; if a diff is much smaller, the memory file goes, and comes back when a VM needs it.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use model::template_file;
use tokio::task::spawn_blocking;

use super::{Driver, Entry};
use crate::{
    PoolStats, host,
    message::Report,
    policy,
    slot::Stage,
    templates::{Memory, Storage, Template, bytes_of},
    work::diff::{DiffPlan, Stored, remove_aside, set_memory_aside},
};

/// The job under way.
#[derive(Debug)]
pub(super) struct Storing {
    template: String,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Storing {
    /// Stops the job, and blocks until it has left the template's directory.
    pub(super) fn end(self) {
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

impl Driver {
    /// Removes memory files that no VM needs, and begins to store the memory of the next template. Does nothing while a start
    /// waits or is under way, or a template is made from another one: it may need the files.
    pub(super) fn store_diffs(&mut self) {
        if self.publishing > 0
            || self.stopping.closing.is_some()
            || !self.adoptions.is_swept()
            || !self.is_at_rest()
        {
            return;
        }
        let now_ns = host::monotonic_ns();
        for template in self.templates.iter() {
            if matches!(template.storage, Storage::Diff(_))
                && !self.is_used(template, now_ns)
                && set_memory_aside(&template.dir).unwrap_or(false)
            {
                let (id, dir) = (template.info.id.clone(), template.dir.clone());
                drop(spawn_blocking(move || match remove_aside(&dir) {
                    Ok(()) => tracing::info!(template = id, "only the diff of its memory stays"),
                    Err(error) => {
                        tracing::warn!(template = id, %error, "cannot remove a memory file")
                    }
                }));
            }
        }
        if self.storing.is_none() && self.rebuilding.is_none() {
            self.store_next(now_ns);
        }
    }

    fn store_next(&mut self, now_ns: u64) {
        let is_due = |template: &&Template| match template.storage {
            Storage::New { since_ns } => {
                policy::is_idle(since_ns, now_ns, self.config.idle)
                    && !self.is_used(template, now_ns)
            }
            Storage::Whole | Storage::Diff(_) => false,
        };
        let Some(template) = self.templates.iter().find(is_due) else {
            return;
        };
        // A diff that is not kept may be nearly as large as the memory.
        let Ok(room) = self.disks.set_aside(&self.slots, template.loaded_bytes) else {
            return;
        };
        let stop = Arc::new(AtomicBool::new(false));
        let plan = DiffPlan {
            id: template.info.id.clone(),
            dir: template.dir.clone(),
            base: self.base_of_diff(template),
            stop: Arc::clone(&stop),
        };
        let id = plan.id.clone();
        let reporter = self.jobs.reporter.clone();
        // A thread of its own, because its priority cannot be raised again.
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

    /// Whether the memory file is in use, or was lately.
    fn is_used(&self, template: &Template, now_ns: u64) -> bool {
        let is_loaded = matches!(template.memory, Memory::Loaded(_) | Memory::Loading);
        let maps = |entry: &Entry| {
            let home = entry.record.lineage.as_ref().and_then(|l| l.home.as_ref());
            entry.record.template.id == template.info.id
                || home.is_some_and(|home| home.dir == template.dir)
        };
        let has_vm = |entry: &&Entry| !matches!(entry.slot.stage, Stage::Paused(_));
        is_loaded
            || !template.supply.is_memory_idle(now_ns, self.config.idle)
            || self.slots.values().filter(has_vm).any(maps)
    }

    /// The installed template whose root image the template has, otherwise `base`. Only files in the directory of images
    /// stay as they are, so no others can be a base.
    fn base_of_diff(&self, template: &Template) -> Option<PathBuf> {
        let images = self.templates.images();
        let is_base = |dir: &Path| images.has(dir) && dir.join(template_file::MEMORY).is_file();
        let origin = template.root.parent().filter(|dir| is_base(dir));
        let installed = || {
            let base = self.templates.find("base")?;
            base.rebuild.as_ref().map(|_| base.dir.as_path())
        };
        let found = origin.or_else(|| installed().filter(|dir| is_base(dir)));
        found.map(Path::to_owned)
    }

    pub(super) fn stored(&mut self, id: &str, stored: std::io::Result<Option<Stored>>) {
        let _ = self.take_storing(id);
        let Some(template) = self.templates.get_mut(id) else {
            return;
        };
        template.storage = match stored {
            Ok(Some(stored)) => Storage::Diff(stored),
            Ok(None) => Storage::Whole,
            Err(error) => {
                tracing::warn!(template = id, %error, "cannot store a template's memory as a diff: it stays whole");
                Storage::Whole
            }
        };
        template.info.bytes = bytes_of(&template.dir);
    }

    /// Takes the job under way if it is about this template, which is being removed.
    pub(super) fn take_storing(&mut self, id: &str) -> Option<Storing> {
        self.storing.take_if(|storing| storing.template == id)
    }

    /// Ends the job under way, and waits for its thread: the next server may use the directory at once.
    pub(super) async fn end_storing(&mut self) {
        if let Some(storing) = self.storing.take() {
            let _ = spawn_blocking(move || storing.end()).await;
        }
    }

    pub(super) fn add_diff_stats(&self, stats: &mut PoolStats) {
        for template in self.templates.iter() {
            if let Storage::Diff(stored) = &template.storage {
                stats.memory_diffs += 1;
                stats.memory_diff_bytes += stored.bytes;
                stats.memory_diff_memory_bytes += stored.header.loaded_bytes;
            }
        }
    }
}
