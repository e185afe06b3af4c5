use std::sync::Arc;

use library::{
    fixtures::{image, info},
    vmms::VmmId,
};

use super::*;
use crate::state_dir::SANDBOXES;

/// A received pause below `root`, and the plan to take it over. Its base is the set of files that it boots from.
fn arrived(root: &Path, mode: PauseMode) -> TakePlan {
    let id = model::SandboxId::from_random([7; 19]);
    let images = Images::open(&root.join("images")).unwrap();
    let name = "06".repeat(32);
    let place = images.dir().join(&name);
    fs::create_dir_all(&place).unwrap();
    for path in library::images::guest_links(&place) {
        fs::write(path, "").unwrap();
    }
    let from = SlotDir::new(&root.join("incoming"), &id);
    image(&from.pause(), None);
    let vmm = VmmId::try_from("07".repeat(32)).unwrap();
    let mut record = Record::new("a boot", Arc::new(info()), None, "0".repeat(32));
    record.kept = Kept::Paused(mode);
    record.vmm_id = Some(vmm.clone());
    from.write_pause(&record).unwrap();
    fs::create_dir_all(root.join(SANDBOXES)).unwrap();
    TakePlan {
        store: Store::new(images, [root.join("incoming").as_path()]).unwrap(),
        to: SlotDir::new(&root.join(SANDBOXES), &id),
        from,
        needs: Some(PauseNeeds {
            base: name,
            kind: BaseKind::Guest,
            format: None,
            boot: None,
            vmm: (mode == PauseMode::Memory).then_some(vmm),
            mode,
        }),
        claim: None,
        missing_vmm: None,
        host_boot_id: "this boot".to_owned(),
        stop: Stop::default(),
    }
}

#[test]
fn a_pause_of_another_mode_or_vmm_than_was_offered_is_refused() {
    for mode in [PauseMode::Memory, PauseMode::FilesystemOnly] {
        let root = tempfile::tempdir().unwrap();
        arrived(root.path(), mode).run().unwrap();
        let other = match mode {
            PauseMode::Memory => PauseMode::FilesystemOnly,
            PauseMode::FilesystemOnly => PauseMode::Memory,
        };
        let vmm = |text: &str| VmmId::try_from(text.repeat(32)).unwrap();
        for (is_about, change) in [
            ("the mode of the pause is", (other, None)),
            ("differs from the offered one", (mode, Some(vmm("08")))),
        ] {
            let mut plan = arrived(root.path(), mode);
            let manifest = plan.from.pause().join(MANIFEST_NAME);
            let before = fs::read(&manifest).unwrap();
            let needs = plan.needs.as_mut().unwrap();
            (needs.mode, needs.vmm) = change;
            let why = plan.run().unwrap_err().to_string();
            assert!(why.contains(is_about), "{why}");
            assert_eq!(fs::read(&manifest).unwrap(), before, "it was changed");
        }
    }
}

#[test]
fn a_vmm_that_was_removed_is_kept_again_from_its_link_and_no_other_one() {
    let root = tempfile::tempdir().unwrap();
    let vmms = root.path().join("vmms");
    fs::create_dir(&vmms).unwrap();
    let taken = |program: Option<&str>| {
        let mut plan = arrived(root.path(), PauseMode::Memory);
        let link = plan.from.path().join("vmm");
        let _ = fs::remove_file(&link);
        if let Some(program) = program {
            fs::write(link, program).unwrap();
        }
        let other = root.path().join("other");
        fs::create_dir_all(&other).unwrap();
        let program = root.path().join("program");
        fs::write(&program, "the VMM").unwrap();
        let id = vmms::copy(&program, &other).unwrap();
        let mut record = plan.from.read_pause().unwrap();
        record.vmm_id = Some(id.clone());
        plan.from.write_pause(&record).unwrap();
        plan.needs.as_mut().unwrap().vmm = Some(id.clone());
        plan.missing_vmm = Some((vmms.clone(), "it is missing".to_owned()));
        plan.run().map(|_| vmms.join(id.as_str()).join("cube-vmm"))
    };
    for wrong in [None, Some("another VMM")] {
        let why = taken(wrong).unwrap_err().to_string();
        assert!(why.contains("it is missing"), "{why}");
    }
    for _ in 0..2 {
        let kept = taken(Some("the VMM")).unwrap();
        assert_eq!(fs::read(kept).unwrap(), b"the VMM");
    }
}

#[test]
fn a_pause_that_arrives_is_this_servers_with_the_paths_of_its_files() {
    for mode in [PauseMode::Memory, PauseMode::FilesystemOnly] {
        let root = tempfile::tempdir().unwrap();
        let mut plan = arrived(root.path(), mode);
        plan.claim = Some(Claim {
            hold: crate::claim::Hold::Sealed,
            text: "here".into(),
        });
        let (from, to) = (plan.from.clone(), plan.to.clone());
        let place = root.path().join("images").join("06".repeat(32));
        let record = plan.run().unwrap().unwrap();
        assert_eq!(record.claim.as_ref().unwrap().text.as_ref(), "here");
        let boot = record.boot.as_ref().unwrap();
        assert_eq!(boot.root, place.canonicalize().unwrap().join("root"));
        assert!(boot.exist() && !from.path().exists());
        assert_eq!(to.read_pause().unwrap(), *record);
    }
}

#[test]
fn a_sandbox_whose_arrival_is_not_synced_is_still_on_its_way() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let (from, to) = (path("incoming/i"), path("sandboxes/i"));
    for dir in [&from, &path("sandboxes")] {
        fs::create_dir_all(dir).unwrap();
    }
    fs::write(from.join("record.json"), "{}").unwrap();
    let broken = || io::Error::from(nix::errno::Errno::EIO);
    for parent in [path("sandboxes"), path("incoming")] {
        let sync = |dir: &Path| {
            if dir == parent {
                return Err(broken());
            }
            sync_dir(dir)
        };
        assert!(arrive(&from, &to, sync).is_err());
        assert!(from.join("record.json").exists() && !to.exists());
    }
    // It cannot be moved back: then it has arrived, and the source may remove its files.
    let sync = |_: &Path| {
        fs::create_dir_all(&from).unwrap();
        fs::write(from.join("in the way"), "").unwrap();
        Err(broken())
    };
    arrive(&from, &to, sync).unwrap();
    assert!(to.join("record.json").exists());

    fs::remove_dir_all(&from).unwrap();
    fs::rename(&to, &from).unwrap();
    arrive(&from, &to, sync_dir).unwrap();
    assert!(to.join("record.json").exists() && !from.exists());
}
