use std::{fs, path::Path, sync::Arc};

use library::images::{self, BootFiles};

use super::*;
use crate::{
    answer::Reply,
    driver::fixtures::driver,
    lifetime::Lifetime,
    work::{Stop, base::sum_of_guest},
};

/// Writes root image, kernel and initramfs, and returns their paths.
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
    let template = Arc::new(library::fixtures::info());
    let mut record = Record::new("this boot", template, Some(boot), "0".repeat(32));
    record.kept = Kept::Paused(mode);
    record.vmm_id = Some(driver.library.vmms().current().clone());
    let dir = SlotDir::new(&driver.config.state.join(SANDBOXES), &id);
    fs::create_dir_all(dir.pause()).unwrap();
    dir.write_pause(&record).unwrap();
    let slot = Slot::recovered(Stage::Paused(mode), Lifetime::default());
    let entry = Entry::recovered(slot, dir, record, None);
    driver.slots.insert(id.clone(), entry);
    id
}

async fn needs(driver: &mut Driver, id: &SandboxId) -> Result<PauseNeeds, PoolError> {
    let (answer, mut needs) = Reply::new();
    driver.pause_needs(id, answer);
    if let Ok(needs) = needs.try_recv() {
        return needs;
    }
    let report = driver.reports.recv().await.unwrap();
    driver.report(report);
    needs.await.unwrap()
}

/// Makes the paused sandbox a diff of a template.
fn diff_of(driver: &Driver, id: &SandboxId, base: &str) {
    let pause = driver.slots.leased(id).unwrap().dir.pause();
    let dir = driver.library.images().dir().join(base);
    library::fixtures::image(&pause, Some(&dir));
    let path = pause.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace(&"0".repeat(64), base)).unwrap();
}

#[tokio::test]
async fn the_files_with_which_a_template_boots_are_announced_and_given_if_it_has_all() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, _) = driver(root.path());
    let dir = driver.library.images().dir().join("template");
    library::fixtures::image(&dir, None);
    for name in ["state", "memory", "layer"] {
        fs::write(dir.join(name), "").unwrap();
    }
    let base = images::sum_of_manifest(&dir).unwrap();
    let place = dir.with_file_name(&base);
    fs::rename(dir, &place).unwrap();
    let boot = guest(&place);
    let id = add(&mut driver, PauseMode::Memory, boot.clone());
    diff_of(&driver, &id, &base);
    let sum = sum_of_guest(&[boot.kernel.clone(), boot.initrd], &Stop::default()).unwrap();
    for (has_kernel, wanted, files) in [(true, Some(sum), 7), (false, None, 5)] {
        if !has_kernel {
            fs::remove_file(&boot.kernel).unwrap();
        }
        let needs = needs(&mut driver, &id).await.unwrap();
        assert_eq!((needs.kind, &needs.base), (BaseKind::Template, &base));
        assert_eq!(needs.boot, wanted);
        assert_eq!(needs.format, Some(model::TEMPLATE_FORMAT));
        let plan = driver.needs_plan(&id).unwrap();
        let given = plan.base(driver.jobs.restorer()).unwrap().run().unwrap();
        assert_eq!(given.len(), files, "{given:?}");
    }
    fs::remove_dir_all(&place).unwrap();
    let why = needs(&mut driver, &id).await.unwrap_err().to_string();
    assert!(why.contains("no longer has the files"), "{why}");
}

#[tokio::test]
async fn a_template_that_this_release_cannot_check_is_refused_before_it_is_fetched() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, _) = driver(root.path());
    let needs = |kind, format| PauseNeeds {
        base: "05".repeat(32),
        kind,
        format,
        boot: None,
        vmm: None,
        mode: PauseMode::Memory,
    };
    let format = model::TEMPLATE_FORMAT;
    let (template, guest) = (BaseKind::Template, BaseKind::Guest);
    let mut can = |kind, format, gives| driver.can_take(&needs(kind, format), gives).is_ok();
    assert!(can(template, Some(format), GivesBase::Yes));
    assert!(can(guest, None, GivesBase::Yes));
    assert!(!can(template, Some(format), GivesBase::No));
    for format in [None, Some(format - 1), Some(format + 1)] {
        assert!(!can(template, format, GivesBase::Yes), "{format:?}");
    }
    // It needs no second check.
    let place = driver.library.images().dir().join("05".repeat(32));
    fs::create_dir(&place).unwrap();
    for gives in [GivesBase::Yes, GivesBase::No] {
        driver.can_take(&needs(template, None), gives).unwrap();
    }
    // An older release sends neither format nor boot files.
    let mut former = serde_json::to_value(needs(template, Some(1))).unwrap();
    for later in ["format", "boot", "kind"] {
        former.as_object_mut().unwrap().remove(later).unwrap();
    }
    let read: PauseNeeds = serde_json::from_value(former).unwrap();
    assert_eq!(read, needs(template, None));
}

#[tokio::test]
async fn a_pause_without_memory_needs_the_files_from_which_it_boots() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, _) = driver(root.path());
    // The directory of a template, and its directory after the sandbox has moved once.
    let images = driver.library.images().dir().to_owned();
    let (of_template, of_guest) = ("05".repeat(32), "06".repeat(32));
    library::fixtures::image(&images.join(&of_template), None);
    for name in [of_template, of_guest] {
        let boot = guest(&images.join(name));
        let files = images::guest_links(boot.root.parent().unwrap());
        let wanted = sum_of_guest(&files, &Stop::default()).unwrap();
        let id = add(&mut driver, PauseMode::FilesystemOnly, boot);
        let needs = needs(&mut driver, &id).await.unwrap();
        assert_eq!((needs.kind, needs.base), (BaseKind::Guest, wanted));
        assert_eq!((needs.mode, needs.vmm), (PauseMode::FilesystemOnly, None));
    }
}

#[tokio::test]
async fn a_close_ends_the_jobs_that_read_large_files() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, _) = driver(root.path());
    let boot = guest(&driver.library.images().dir().join("06".repeat(32)));
    let id = add(&mut driver, PauseMode::FilesystemOnly, boot);
    let (answer, mut needs) = Reply::new();
    driver.close(crate::sandbox::OnClose::Keep, Reply::new().0);
    driver.pause_needs(&id, answer);
    let report = driver.reports.recv().await.unwrap();
    driver.report(report);
    let stopped = needs.try_recv().unwrap().unwrap_err();
    assert!(matches!(stopped, PoolError::Draining), "{stopped}");
}
