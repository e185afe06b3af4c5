use std::fs;

use library::{diff::Stored, memory_diff::Header, template::Storage, vmms::VmmId};
use model::{SandboxId, template_file};

use super::*;
use crate::{
    answer::Reply,
    claim::{BaseKind, PauseNeeds},
    driver::{Driver, fixtures::driver, upkeep::diffs::Storing},
    state::PauseMode,
};

/// Removes unused files, as after a change of the templates.
async fn remove(driver: &mut Driver) {
    driver.upkeep.images_may_be_unused = true;
    removed(driver).await;
}

async fn removed(driver: &mut Driver) {
    driver.remove_unused();
    if let Some(removal) = driver.upkeep.removal.take() {
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
    driver.upkeep.images_may_be_unused = false;
    removed(&mut driver).await;
    assert!(!base.exists() && !kept.exists() && driver.upkeep.held.is_empty());
}

#[tokio::test]
async fn the_base_of_a_diff_is_not_removed_while_the_diff_is_written_or_stored() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, id) = driver(root.path());
    // No template has these files now: the installed one was rebuilt.
    let base = driver.library.images().dir().join("05".repeat(32));
    fs::create_dir(&base).unwrap();
    fs::write(base.join(template_file::MEMORY), "").unwrap();

    driver.upkeep.storing = Some(Storing::idle(&id));
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
    driver
        .upkeep
        .stored(&mut driver.library, &id, Ok(Some(stored)));
    remove(&mut driver).await;
    assert!(base.exists(), "a diff needs it");

    driver.library.get_mut(&id).unwrap().storage = Storage::Whole;
    remove(&mut driver).await;
    assert!(!base.exists(), "nothing needs it");
}
