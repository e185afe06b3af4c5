use std::{fs, sync::Arc, time::Duration};

use model::{SandboxId, template_file};
use tokio::sync::mpsc;

use super::*;
use crate::{
    FORKS, PoolConfig, SANDBOXES, StateLock,
    cgroup::tests::no_groups,
    driver::{Setup, diffs::Storing},
    memory_diff::Header,
    recover::recover,
    templates::{
        Storage,
        tests::{image, keep, opened, saved, vmms},
    },
    work::diff::Stored,
};

/// A driver with one snapshot and without sandboxes, and the id of the snapshot. Nothing stays in use for any time.
pub(in crate::driver) fn driver(root: &Path) -> (Driver, String) {
    let (state, installed) = (root.join("s"), root.join("i"));
    fs::create_dir_all(&installed).unwrap();
    let mut templates = opened(&state, &installed);
    let mut vmms = vmms(&state);
    let (id, dir) = templates.draft().unwrap();
    image(&dir.join("image"), None);
    let origin = saved(SandboxId::from_random([7; 19]), vmms.current().clone());
    keep(&mut templates, &mut vmms, &id, Vec::new(), origin, 1);
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
        templates,
        vmms,
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
    pub(in crate::driver) fn another(&mut self, root: &Path) -> String {
        let mut vmms = vmms(&root.join("s"));
        let (id, dir) = self.templates.draft().unwrap();
        image(&dir.join("image"), None);
        let origin = saved(SandboxId::from_random([8; 19]), vmms.current().clone());
        keep(&mut self.templates, &mut vmms, &id, Vec::new(), origin, 1);
        id
    }
}

/// What a thread that panics leaves of a template's diff.
pub(in crate::driver) fn draft(driver: &Driver, id: &str) -> PathBuf {
    let draft = driver
        .templates
        .get(id)
        .unwrap()
        .dir
        .join("memory.diff.new");
    fs::write(&draft, "").unwrap();
    draft
}

/// Removes what is not used, as after a change of the templates.
async fn remove(driver: &mut Driver) {
    driver.images_may_be_unused = true;
    driver.remove_unused();
    if let Some(removal) = driver.removal.take() {
        removal.await.unwrap();
    }
}

#[tokio::test]
async fn the_base_of_a_diff_is_not_removed_while_the_diff_is_written_or_stored() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, id) = driver(root.path());
    // No template has these files any more: the installed one was rebuilt.
    let base = driver.templates.images().dir().join("05".repeat(32));
    fs::create_dir(&base).unwrap();
    fs::write(base.join(template_file::MEMORY), "").unwrap();

    driver.storing = Some(Storing::idle(&id));
    remove(&mut driver).await;
    assert!(base.exists(), "a diff against it is being written");

    let header = Header {
        length: 1 << 20,
        loaded_bytes: 4 << 20,
        base: Some([5; 32]),
    };
    let stored = Stored {
        bytes: 1,
        header,
        base: Some(base.clone()),
    };
    driver.stored(&id, Ok(Some(stored)));
    remove(&mut driver).await;
    assert!(base.exists(), "a diff needs it");

    driver.templates.get_mut(&id).unwrap().storage = Storage::Whole;
    remove(&mut driver).await;
    assert!(!base.exists(), "nothing needs it");
}
