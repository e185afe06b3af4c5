//! Upkeep of the library: rebuilds of installed templates, memory stored as diffs, and the removal of files that nothing
//! needs any more. One of each at a time, in the background.

mod diffs;
mod rebuilds;
mod unused;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use tokio::task::JoinHandle;

use super::{admission::Admission, jobs::Jobs, slots::Slots};
use crate::{
    config::PoolConfig,
    stats::PoolStats,
    work::{base::Held, needs::GuestSums},
};
use diffs::Storing;
use rebuilds::Running;

#[derive(Debug)]
pub(super) struct Upkeep {
    config: Arc<PoolConfig>,
    /// The rebuild under way.
    rebuilding: Option<Running>,
    /// The template whose memory is being stored as a diff.
    storing: Option<Storing>,
    /// The latest task that removes unused files.
    removal: Option<JoinHandle<()>>,
    /// Whether a slot or template has ended since the last search for unused images.
    images_may_be_unused: bool,
    /// Set if a record or template could not be read. Nothing is removed then, because the files may yet be repaired.
    keeps_unused: bool,
    /// Number of jobs that read or write templates and bases.
    jobs: u32,
    /// Files needed by sandboxes that are moving to this server, by directory, until the sandboxes have links to them.
    held: BTreeMap<PathBuf, Held>,
    /// Checksums of files from which sandboxes boot.
    guest_sums: GuestSums,
    /// Templates that were rebuilt, and rebuilds that failed.
    rebuilt: u64,
    rebuilds_failed: u64,
}

/// The owners whose state decides what upkeep may do.
pub(super) struct Around<'a> {
    pub(super) slots: &'a Slots,
    pub(super) admission: &'a mut Admission,
    pub(super) jobs: &'a Jobs,
}

impl Upkeep {
    pub(super) fn new(config: &Arc<PoolConfig>, keeps_unused: bool) -> Self {
        Self {
            config: Arc::clone(config),
            rebuilding: None,
            storing: None,
            removal: None,
            images_may_be_unused: true,
            keeps_unused,
            jobs: 0,
            held: BTreeMap::new(),
            guest_sums: GuestSums::default(),
            rebuilt: 0,
            rebuilds_failed: 0,
        }
    }

    /// A job begins that reads or writes templates or bases. Their files are not removed until it has ended.
    pub(super) fn job_begins(&mut self) {
        self.jobs += 1;
    }

    pub(super) fn job_ended(&mut self) {
        self.jobs -= 1;
    }

    /// Whether a job or a rebuild is under way that a close must wait for.
    pub(super) fn is_busy(&self) -> bool {
        self.jobs > 0 || self.rebuilding.is_some()
    }

    /// A slot or a template has ended, so images may have become unused.
    pub(super) fn look_for_unused_images(&mut self) {
        self.images_may_be_unused = true;
    }

    /// Holds files for a sandbox that is moving here, in this directory.
    pub(super) fn hold(&mut self, dir: PathBuf, held: Held) {
        self.held.insert(dir, held);
    }

    /// The checksums that are known.
    pub(super) fn guest_sums(&self) -> &GuestSums {
        &self.guest_sums
    }

    pub(super) fn add_guest_sum(&mut self, summed: Option<(Vec<PathBuf>, String)>) {
        self.guest_sums.extend(summed);
    }

    /// Adds the metrics of rebuilds.
    pub(super) fn add_stats(&self, stats: &mut PoolStats) {
        (stats.rebuilt, stats.rebuilds_failed) = (self.rebuilt, self.rebuilds_failed);
    }

    /// Waits for the removal under way. The next server may need the files being removed.
    pub(super) async fn end_removal(&mut self) {
        if let Some(removal) = self.removal.take() {
            // The task logs its own errors.
            let _ = removal.await;
        }
    }
}
