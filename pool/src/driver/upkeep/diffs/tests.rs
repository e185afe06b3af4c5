use library::{
    fixtures::{memory, plan, remove_memory, with_memory},
    memory_diff,
};
use model::SandboxId;
use tokio::time::timeout;

use super::*;
use crate::{
    driver::{
        Driver,
        admission::stock::Memory,
        fixtures::{draft, driver},
    },
    record::{Record, SlotDir},
    slot::Slot,
};

/// A driver that has removed the leftovers of previous servers.
async fn swept(root: &Path) -> (Driver, String) {
    let (mut driver, id) = driver(root);
    driver.adopt();
    while !driver.adoptions.is_swept() {
        let report = driver.reports.recv().await.unwrap();
        driver.report(report);
    }
    (driver, id)
}

/// Adds a start of a sandbox of this template, which has no VM yet.
fn start(driver: &mut Driver, template: &str) -> SandboxId {
    let id = SandboxId::from_random([9; 19]);
    let info = Arc::new(driver.library.get(template).unwrap().info.clone());
    let record = Record::new("this boot", info, None, String::new());
    let dir = SlotDir::new(&driver.config.state, &id);
    let entry = Entry::new(Slot::new(Stage::Starting), dir, record);
    driver.slots.insert(id.clone(), entry);
    id
}

/// Makes a template due to be stored.
fn is_due(driver: &mut Driver, id: &str, loaded_bytes: u64) {
    let template = driver.library.get_mut(id).unwrap();
    template.storage = Storage::New { since_ns: 0 };
    template.loaded_bytes = loaded_bytes;
}

/// Stores the memory of the template. Its file then exists next to the diff.
fn store(driver: &mut Driver, id: &str) -> PathBuf {
    let template = driver.library.get_mut(id).unwrap();
    with_memory(&template.dir, &memory(2, 5));
    let stored = plan(&template.dir, None).run().unwrap().unwrap();
    template.storage = Storage::Diff(stored);
    template.dir.join(template_file::MEMORY)
}

#[tokio::test]
async fn a_job_whose_thread_panicked_lets_the_next_one_begin() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, id) = swept(root.path()).await;
    let draft = draft(&driver, &id);
    is_due(&mut driver, &id, 1);
    driver.upkeep.storing = Some(Storing::idle(&id));
    let ended = |driver: &Driver| driver.upkeep.storing.as_ref().unwrap().thread.is_finished();
    while !ended(&driver) {
        thread::yield_now();
    }
    // Its report was sent and will be received.
    let report = Report::Stored(id.clone(), Ok(None));
    driver.jobs.reporter.send(report).unwrap();
    driver.begin_upkeep();
    assert!(driver.upkeep.storing.is_some() && draft.exists());
    driver.reports.recv().await.unwrap();
    driver.begin_upkeep();
    assert!(driver.upkeep.storing.is_none());
    let storage = &driver.library.get(&id).unwrap().storage;
    assert!(matches!(storage, Storage::Whole), "{storage:?}");
    let removed = async {
        while draft.exists() {
            tokio::task::yield_now().await;
        }
    };
    timeout(std::time::Duration::from_secs(30), removed)
        .await
        .unwrap();
}

#[tokio::test]
async fn neither_a_start_nor_a_template_that_does_not_fit_holds_up_the_others() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, first) = swept(root.path()).await;
    let second = driver.another();
    let other = driver.another();
    let (large, small) = (first.clone().min(second.clone()), first.max(second));
    is_due(&mut driver, &large, u64::MAX / 2);
    is_due(&mut driver, &small, 1);
    start(&mut driver, &other);
    driver.begin_upkeep();
    assert_eq!(driver.upkeep.storing.as_ref().unwrap().template, small);
    let aside = driver.admission.account().aside();
    assert!(aside <= 1, "{aside}");
}

#[tokio::test]
async fn a_memory_file_stays_while_a_start_may_need_it_and_goes_while_others_start() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, id) = swept(root.path()).await;
    let other = driver.another();
    let memory = store(&mut driver, &id);
    let dir = driver.library.get(&id).unwrap().dir.clone();
    let stays = |driver: &mut Driver, template: &str, stays: bool| {
        let start = start(driver, template);
        driver.begin_upkeep();
        assert_eq!(memory.exists(), stays, "{template}");
        driver.slots.remove(&start).unwrap();
    };
    stays(&mut driver, &id, true);
    // A clone of a snapshot that is based on it.
    driver.library.get_mut(&other).unwrap().base = Some(dir);
    stays(&mut driver, &other, true);
    driver.library.get_mut(&other).unwrap().base = None;
    // A fork of a sandbox whose template is gone.
    let fork = start(&mut driver, &other);
    let gone = driver.library.forget(&other);
    driver.begin_upkeep();
    assert!(memory.exists() && gone.is_some());
    driver.slots.remove(&fork).unwrap();

    let other = driver.another();
    stays(&mut driver, &other, false);
}

#[tokio::test]
async fn a_load_is_tried_again_when_the_disk_has_room_and_not_if_the_diff_is_damaged() {
    let root = tempfile::tempdir().unwrap();
    let (mut driver, id) = driver(root.path());
    let memory = store(&mut driver, &id);
    let dir = memory.parent().unwrap().to_owned();
    remove_memory(&dir);
    let load = async |driver: &mut Driver| {
        driver.admission.load(&driver.library, &driver.jobs, &id);
        let report = driver.reports.recv().await.unwrap();
        driver.report(report);
        let supply = driver.admission.stock.supply_mut(&id);
        (supply.refilling, supply.loads) = (true, true);
        supply.memory.clone()
    };
    let aside = driver
        .admission
        .account()
        .take(u64::MAX / 2, |_| Ok::<_, ()>(()));
    for failures in 1..4 {
        let now_ns = host::monotonic_ns();
        let memory = load(&mut driver).await;
        assert!(matches!(memory, Memory::OnDisk), "{memory:?}");
        let supply = driver.admission.stock.supply(&id);
        assert_eq!(supply.load_failures, failures);
        let retry_ns = supply.load_not_before_ns;
        let pause_ms = (retry_ns - now_ns) / 1_000_000;
        assert!(pause_ms >= 500 << (failures - 1) && pause_ms < 60_000);
        let next = |now_ns| {
            driver
                .admission
                .stock
                .next_fills(&driver.library, false, now_ns)
        };
        assert!(next(retry_ns - 1).is_empty());
        assert_eq!(next(retry_ns).len(), 1);
    }
    drop(aside);
    let loaded = load(&mut driver).await;
    assert!(memory.exists() && !matches!(loaded, Memory::OnDisk));
    // Huge pages need privileges.
    if nix::unistd::geteuid().is_root() {
        assert!(matches!(loaded, Memory::Loaded(_)), "{loaded:?}");
        assert_eq!(driver.admission.stock.supply(&id).load_failures, 0);
    }

    remove_memory(&dir);
    let supply = driver.admission.stock.supply_mut(&id);
    (supply.memory, supply.copy) = (Memory::OnDisk, std::sync::Weak::new());
    drop(loaded);
    let diff = dir.join(memory_diff::NAME);
    let bytes = std::fs::read(&diff).unwrap();
    std::fs::write(&diff, &bytes[..96]).unwrap();
    let damaged = load(&mut driver).await;
    assert!(matches!(damaged, Memory::Unloadable), "{damaged:?}");
}
