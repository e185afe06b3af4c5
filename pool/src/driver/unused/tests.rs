use std::{fs, sync::Arc, time::Duration};

use library::{
    diff::Stored,
    fixtures::{image, keep, opened, saved},
    memory_diff::Header,
    template::Storage,
};
use model::{SandboxId, template_file};
use tokio::sync::mpsc;

use super::*;
use crate::{
    answer::Reply,
    cgroup::tests::no_groups,
    claim::{BaseKind, PauseNeeds},
    driver::{Setup, diffs::Storing},
    recover::recover,
    spec::{PauseMode, PoolConfig},
    state_dir::{FORKS, SANDBOXES, StateLock},
};

/// A driver with one snapshot and without sandboxes, and the id of the snapshot. Recently used files do not count as in
/// use.
pub(in crate::driver) fn driver(root: &Path) -> (Driver, String) {
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
    pub(in crate::driver) fn another(&mut self) -> String {
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
pub(in crate::driver) fn draft(driver: &Driver, id: &str) -> PathBuf {
    let draft = driver.library.get(id).unwrap().dir.join("memory.diff.new");
    fs::write(&draft, "").unwrap();
    draft
}

/// Removes unused files, as after a change of the templates.
async fn remove(driver: &mut Driver) {
    driver.images_may_be_unused = true;
    removed(driver).await;
}

async fn removed(driver: &mut Driver) {
    driver.remove_unused();
    if let Some(removal) = driver.removal.take() {
        removal.await.unwrap();
    }
}

/// Adds another kept VMM.
fn another_vmm(driver: &mut Driver, root: &Path) -> VmmId {
    let program = root.join("another.vmm");
    fs::write(&program, "another VMM").unwrap();
    driver.library.vmms_mut().keep(&program).unwrap()
}

#[tokio::test]
async fn what_a_sandbox_on_its_way_needs_stays_until_the_move_is_given_up() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, _) = driver(root.path());
    let vmm = another_vmm(&mut driver, root.path());
    let kept = root.path().join("s.vmms").join(vmm.as_str());
    let name = "05".repeat(32);
    let base = driver.library.images().dir().join(&name);
    fs::create_dir(&base).unwrap();
    for file in ["manifest.json", "state", "memory", "layer", "root"] {
        fs::write(base.join(file), "").unwrap();
    }
    let needs = PauseNeeds {
        base: name,
        kind: BaseKind::Template,
        format: None,
        boot: None,
        vmm: Some(vmm),
        mode: PauseMode::Memory,
    };
    let incoming = root.path().join("incoming");
    let ids = [
        SandboxId::from_random([1; 19]),
        SandboxId::from_random([2; 19]),
    ];
    for id in &ids {
        fs::create_dir_all(incoming.join(id.as_str())).unwrap();
        let (answer, held) = Reply::new();
        driver.hold(id, &incoming, needs.clone(), None, answer);
        let report = driver.reports.recv().await.unwrap();
        driver.report(report);
        assert!(held.await.unwrap().unwrap());
    }
    for id in &ids {
        remove(&mut driver).await;
        assert!(base.exists() && kept.exists(), "{id} is on its way");
        fs::remove_dir_all(incoming.join(id.as_str())).unwrap();
    }
    // No other event occurs.
    driver.images_may_be_unused = false;
    removed(&mut driver).await;
    assert!(!base.exists() && !kept.exists() && driver.held.is_empty());
}

#[tokio::test]
async fn the_base_of_a_diff_is_not_removed_while_the_diff_is_written_or_stored() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, id) = driver(root.path());
    // No template has these files now: the installed one was rebuilt.
    let base = driver.library.images().dir().join("05".repeat(32));
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

    driver.library.get_mut(&id).unwrap().storage = Storage::Whole;
    remove(&mut driver).await;
    assert!(!base.exists(), "nothing needs it");
}
