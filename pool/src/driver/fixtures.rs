//! A driver for tests.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use library::fixtures::{image, keep, opened, saved};
use model::SandboxId;
use tokio::sync::mpsc;

use super::{Driver, Setup};
use crate::{
    cgroup::tests::no_groups,
    config::PoolConfig,
    recover::recover,
    state_dir::{FORKS, SANDBOXES, StateLock},
};

/// A driver with one snapshot and without sandboxes, and the id of the snapshot. Recently used files do not count as in
/// use.
pub(super) fn driver(root: &Path) -> (Driver, String) {
    let (state, installed) = (root.join("s"), root.join("i"));
    fs::create_dir_all(&installed).unwrap();
    let mut library = opened(&state, &installed);
    let (id, dir) = library.draft().unwrap();
    image(&dir.join("image"), None);
    let origin = saved(
        SandboxId::from_random([7; 19]),
        library.vmms().current().clone(),
    );
    keep(&mut library, &id, Vec::new(), origin, 1);
    let groups = no_groups();
    let (sandboxes, forks) = (root.join(SANDBOXES), root.join(FORKS));
    for dir in [&sandboxes, &forks] {
        fs::create_dir(dir).unwrap();
    }
    let found = recover(&sandboxes, &forks, "this boot", &groups, |_| None).unwrap();
    let driver = Driver::new(Setup {
        config: PoolConfig {
            idle: Duration::ZERO,
            ..PoolConfig::new(state.with_extension("vmm"), state.clone())
        },
        host_boot_id: "this boot".to_owned(),
        groups: Arc::new(groups),
        library,
        keeps_unused: false,
        entries: found.entries,
        leftovers: found.leftovers,
        clock: found.clock,
        requests: mpsc::channel(1).1,
        ended: mpsc::unbounded_channel().0,
        lock: StateLock::take(&state).unwrap(),
    });
    (driver, id)
}

impl Driver {
    /// Adds another snapshot.
    pub(super) fn another(&mut self) -> String {
        let (id, dir) = self.library.draft().unwrap();
        image(&dir.join("image"), None);
        let origin = saved(
            SandboxId::from_random([8; 19]),
            self.library.vmms().current().clone(),
        );
        keep(&mut self.library, &id, Vec::new(), origin, 1);
        id
    }
}

/// Leaves the files of a panicked thread that stored a template's diff.
pub(super) fn draft(driver: &Driver, id: &str) -> PathBuf {
    let draft = driver.library.get(id).unwrap().dir.join("memory.diff.new");
    fs::write(&draft, "").unwrap();
    draft
}
