use std::{fs, path::Path, sync::Arc};

use tokio::sync::oneshot;

use super::*;
use crate::{
    BaseKind, driver::unused::tests::driver, images, lifetime::Lifetime, record::BootFiles,
    work::base::sum_of_guest,
};

/// Writes root image, kernel and initramfs, and returns where they are.
fn guest(dir: &Path) -> BootFiles {
    fs::create_dir_all(dir).unwrap();
    for path in images::guest_links(dir) {
        fs::write(&path, path.file_name().unwrap().as_encoded_bytes()).unwrap();
    }
    images::Images::boot_files(&dir.join(images::ROOT)).unwrap()
}

/// Adds a paused sandbox.
fn add(driver: &mut Driver, mode: PauseMode, boot: BootFiles) -> SandboxId {
    let id = SandboxId::from_random([9; 19]);
    let template = Arc::new(crate::spec::template::tests::info());
    let mut record = Record::new("this boot", template, Some(boot), "0".repeat(32));
    record.kept = Kept::Paused(mode);
    record.vmm_id = Some(driver.vmms.current().clone());
    let dir = SlotDir::new(&driver.config.state.join(crate::SANDBOXES), &id);
    fs::create_dir_all(dir.pause()).unwrap();
    dir.write_pause(&record).unwrap();
    let slot = Slot::recovered(Stage::Paused(mode), Lifetime::default());
    let entry = Entry::recovered(slot, dir, record, None);
    driver.slots.insert(id.clone(), entry);
    id
}

async fn needs(driver: &mut Driver, id: &SandboxId) -> Result<PauseNeeds, PoolError> {
    let (answer, mut needs) = oneshot::channel();
    driver.pause_needs(id, answer);
    if let Ok(needs) = needs.try_recv() {
        return needs;
    }
    let report = driver.reports.recv().await.unwrap();
    driver.report(report);
    needs.await.unwrap()
}

#[tokio::test]
async fn a_pause_without_memory_needs_the_files_from_which_it_boots() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, _) = driver(root.path());
    // Where a template is, and where the sandbox is after it has moved once.
    let images = driver.templates.images().dir().to_owned();
    let (of_template, of_guest) = ("05".repeat(32), "06".repeat(32));
    crate::templates::tests::image(&images.join(&of_template), None);
    for name in [of_template, of_guest] {
        let boot = guest(&images.join(name));
        let wanted = sum_of_guest(&images::guest_links(boot.root.parent().unwrap())).unwrap();
        let id = add(&mut driver, PauseMode::FilesystemOnly, boot);
        let needs = needs(&mut driver, &id).await.unwrap();
        assert_eq!((needs.kind, needs.base), (BaseKind::Guest, wanted));
        assert_eq!((needs.mode, needs.vmm), (PauseMode::FilesystemOnly, None));
    }
}
