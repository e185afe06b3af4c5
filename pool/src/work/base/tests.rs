use std::{os::unix::fs::MetadataExt, sync::Barrier, thread};

use library::fixtures::restorer;

use super::*;
use crate::state::PauseMode;

/// A template with valid checksums, and the checksum of its manifest.
fn template(dir: &Path) -> String {
    library::fixtures::image(dir, None);
    let memory = File::create(dir.join(template_file::MEMORY)).unwrap();
    memory.set_len(8 << 20).unwrap();
    for (at, byte) in [(0, 1), (5 << 20, 2), ((8 << 20) - 1, 3)] {
        memory.write_all_at(&[byte], at).unwrap();
    }
    for (name, text) in [
        (template_file::STATE, "state"),
        (template_file::LAYER, "layer"),
        (images::ROOT, "root"),
    ] {
        fs::write(dir.join(name), text).unwrap();
    }
    let path = dir.join(MANIFEST_NAME);
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (key, name, form) in [
        ("memory_sum", template_file::MEMORY, Form::Sparse),
        ("layer_sum", template_file::LAYER, Form::Sparse),
        ("state_sum", template_file::STATE, Form::Whole),
        ("root_sum", images::ROOT, Form::Whole),
    ] {
        let found = sum(&File::open(dir.join(name)).unwrap(), form, &Stop::default()).unwrap();
        json[key] = serde_json::json!({"bytes": found.bytes, "sha256": found.sha256});
    }
    fs::write(&path, json.to_string()).unwrap();
    sum_of_manifest(dir).unwrap()
}

fn needs(base: &str, kind: BaseKind) -> PauseNeeds {
    PauseNeeds {
        base: base.to_owned(),
        kind,
        format: None,
        boot: None,
        vmm: None,
        mode: PauseMode::Memory,
    }
}

fn hold(images: &Images, base: &str, to: &Path, fetched: Option<&Path>) -> HoldPlan {
    HoldPlan {
        images: images.clone(),
        needs: needs(base, BaseKind::Template),
        fetched: fetched.map(Path::to_owned),
        vmm: None,
        to: to.to_owned(),
        stop: Stop::default(),
    }
}

#[test]
fn a_base_travels_is_checked_and_stays_while_a_sandbox_is_on_its_way() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let base = template(&path("from"));
    let plan = BasePlan {
        dir: Some(path("from")),
        guest: vec![
            (images::ROOT, path("from/root")),
            ("vmlinux", path("from/vmlinux")),
        ],
        restorer: restorer(root.path()),
    };
    let mut files = plan.run().unwrap();
    files.sort_by(|one, other| one.0.cmp(&other.0));
    let names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["layer", "manifest.json", "memory", "root", "state"]);

    let images = Images::open(&path("images")).unwrap();
    fs::create_dir_all(path("incoming/i")).unwrap();
    let held = |fetched: Option<&Path>| {
        let held = hold(&images, &base, &path("incoming/i"), fetched).run();
        held.map(|held| held.is_some())
    };
    assert!(!held(None).unwrap(), "it is not here yet");
    // Different content under the same names is rejected.
    for name in [template_file::MEMORY, images::ROOT, MANIFEST_NAME] {
        let wrong = path("wrong");
        remove_dir(&wrong).unwrap();
        copy_of(&path("from"), &wrong);
        let mut bytes = fs::read(wrong.join(name)).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(wrong.join(name), bytes).unwrap();
        assert!(held(Some(&wrong)).is_err(), "{name}");
        assert!(!images.dir().join(&base).exists());
    }
    let extra = path("extra");
    copy_of(&path("from"), &extra);
    fs::write(extra.join("made-by.json"), "{}").unwrap();
    assert!(held(Some(&extra)).is_err());

    let fetched = path("incoming/base");
    copy_of(&path("from"), &fetched);
    assert!(held(Some(&fetched)).unwrap() && !fetched.exists());
    assert!(held(None).unwrap(), "again");
    // An unreferenced base is removed, and recreated from the links.
    let place = images.dir().join(&base);
    fs::remove_dir_all(&place).unwrap();
    let of = |base: &str| needs(base, BaseKind::Template);
    restore(&path("incoming/i"), &images, &of(&base), &Stop::default()).unwrap();
    check(&place, &of(&base), &Stop::default()).unwrap();
    assert!(
        restore(
            &path("incoming/i"),
            &images,
            &of(&"0".repeat(64)),
            &Stop::default()
        )
        .is_err()
    );
    forget(&path("incoming/i")).unwrap();
    assert!(!path("incoming/i/base").exists() && place.exists());
}

#[test]
fn a_base_that_arrives_twice_is_kept_once_and_never_replaced() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let base = template(&path("from"));
    let images = Images::open(&path("images")).unwrap();
    let place = images.dir().join(&base);
    fs::create_dir_all(path("incoming/i")).unwrap();
    let held = |fetched: &Path| hold(&images, &base, &path("incoming/i"), Some(fetched)).run();
    let inode = || fs::metadata(&place).unwrap().ino();
    let (first, second, third) = (path("first"), path("second"), path("third"));
    for fetched in [&first, &second, &third] {
        copy_of(&path("from"), fetched);
    }
    assert!(held(&first).unwrap().is_some());
    let kept = inode();
    assert!(held(&second).unwrap().is_some());
    assert!(!second.exists() && inode() == kept);
    // Another job has placed it since this one looked.
    images.place(&third, &base).unwrap();
    assert!(!third.exists() && inode() == kept);
    link_dir(&path("incoming/i/base"), &place).unwrap();
    assert!(inode() == kept && images.all() == [place.clone()]);
    assert_eq!(fs::read_dir(images.dir()).unwrap().count(), 1, "a draft");

    // The move was abandoned before its links were made.
    let gone = hold(&images, &base, &path("incoming/gone"), None).run();
    assert!(gone.is_err() && !path("incoming/gone").exists());

    // An incomplete directory is rejected, and so are incomplete links.
    let of = needs(&base, BaseKind::Template);
    fs::remove_file(place.join(template_file::STATE)).unwrap();
    let why = hold(&images, &base, &path("incoming/i"), None).run();
    assert!(
        why.unwrap_err()
            .to_string()
            .contains("incomplete: state is missing")
    );
    assert!(restore(&path("incoming/i"), &images, &of, &Stop::default()).is_err());
    fs::remove_dir_all(&place).unwrap();
    fs::remove_file(path("incoming/i/base/memory")).unwrap();
    assert!(restore(&path("incoming/i"), &images, &of, &Stop::default()).is_err());
    assert!(!place.exists());
}

#[test]
fn takes_that_make_one_base_at_the_same_time_leave_it_complete() {
    let root = tempfile::tempdir().unwrap();
    let base = template(&root.path().join("from"));
    let images = Images::open(&root.path().join("images")).unwrap();
    let incoming: Vec<_> = (0..4).map(|at| root.path().join(at.to_string())).collect();
    for dir in &incoming {
        fs::create_dir(dir).unwrap();
        copy_of(&root.path().join("from"), &dir.join(BASE));
    }
    let of = needs(&base, BaseKind::Template);
    let place = images.dir().join(&base);
    for round in 0..50 {
        let begin = Barrier::new(incoming.len());
        thread::scope(|scope| {
            for dir in &incoming {
                scope.spawn(|| {
                    begin.wait();
                    restore(dir, &images, &of, &Stop::default()).unwrap();
                    // A directory that one of them uses is not removed by the others.
                    is_complete(&place, BaseKind::Template).unwrap();
                });
            }
        });
        check(&place, &of, &Stop::default()).unwrap_or_else(|why| panic!("round {round}: {why}"));
        assert_eq!(fs::read_dir(images.dir()).unwrap().count(), 1, "a draft");
        fs::remove_dir_all(&place).unwrap();
    }
}

#[test]
fn nothing_is_read_to_its_end_once_the_pool_closes() {
    let root = tempfile::tempdir().unwrap();
    let (dir, to) = (root.path().join("t"), root.path().join("i"));
    let base = template(&dir);
    fs::create_dir(&to).unwrap();
    let images = Images::open(&root.path().join("images")).unwrap();
    let plan = hold(&images, &base, &to, Some(&dir));
    plan.stop.set();
    let stopped = plan.run().unwrap_err();
    assert!(matches!(stopped, PoolError::Draining), "{stopped}");
    assert!(dir.exists(), "another attempt may go on with it");
    let stopped = sum_of_guest(&[dir.join(images::ROOT)], &plan.stop);
    assert!(
        stopped
            .unwrap_err()
            .to_string()
            .contains("server is stopping")
    );
}

fn copy_of(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn a_kernel_or_initramfs_that_was_not_offered_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("t");
    let base = template(&dir);
    let [_, kernel, initrd] = images::guest_links(&dir);
    for path in [&kernel, &initrd] {
        fs::write(path, "1").unwrap();
    }
    let of = |boot: Option<String>| PauseNeeds {
        boot,
        ..needs(&base, BaseKind::Template)
    };
    let check = |of: &PauseNeeds| check(&dir, of, &Stop::default());
    let boot = sum_of_guest(&[kernel.clone(), initrd.clone()], &Stop::default()).unwrap();
    check(&of(Some(boot.clone()))).unwrap();
    let why = check(&of(None)).unwrap_err().to_string();
    assert!(why.contains("vmlinux was not announced"), "{why}");
    for path in [&kernel, &initrd] {
        fs::write(path, "2").unwrap();
        let why = check(&of(Some(boot.clone()))).unwrap_err().to_string();
        assert!(why.contains("the checksum of its kernel"), "{why}");
        fs::write(path, "1").unwrap();
    }
    fs::remove_file(&kernel).unwrap();
    assert!(check(&of(Some(boot))).is_err());
    fs::remove_file(&initrd).unwrap();
    check(&of(None)).unwrap();
}

#[test]
fn a_base_of_another_format_is_refused_with_the_reason() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("t");
    template(&dir);
    let path = dir.join(MANIFEST_NAME);
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json["format"] = (TEMPLATE_FORMAT + 1).into();
    fs::write(&path, json.to_string()).unwrap();
    let base = sum_of_manifest(&dir).unwrap();
    let why = check(&dir, &needs(&base, BaseKind::Template), &Stop::default()).unwrap_err();
    assert!(matches!(why, NotUsed::Unfit(_)), "{why}");
    let why = why.to_string();
    assert!(why.contains("has format"), "{why}");
}

#[test]
fn the_files_of_a_sandbox_that_booted_travel_and_its_pause_names_them() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    for dir in ["from", "incoming/i"] {
        fs::create_dir_all(path(dir)).unwrap();
    }
    let paths = images::guest_links(&path("from"));
    for (at, file) in paths.iter().enumerate() {
        fs::write(file, format!("file {at}")).unwrap();
    }
    let base = sum_of_guest(&paths, &Stop::default()).unwrap();
    let plan = BasePlan {
        dir: None,
        guest: images::GUEST.into_iter().zip(paths.clone()).collect(),
        restorer: restorer(root.path()),
    };
    assert_eq!(plan.run().unwrap().len(), 3);
    let images = Images::open(&path("images")).unwrap();
    let held = |fetched: &Path| {
        let plan = hold(&images, &base, &path("incoming/i"), Some(fetched));
        let needs = needs(&base, BaseKind::Guest);
        HoldPlan { needs, ..plan }.run().map(|held| held.is_some())
    };
    let fetched = path("incoming/base");
    copy_of(&path("from"), &fetched);
    fs::write(fetched.join(images::ROOT), "file 9").unwrap();
    assert!(held(&fetched).is_err(), "another root image");
    fs::copy(&paths[0], fetched.join(images::ROOT)).unwrap();
    assert!(held(&fetched).unwrap());
    let place = images.dir().join(&base);
    fs::remove_dir_all(&place).unwrap();
    restore(
        &path("incoming/i"),
        &images,
        &needs(&base, BaseKind::Guest),
        &Stop::default(),
    )
    .unwrap();

    let pause = path("pause");
    library::fixtures::image(&pause, None);
    set_root(&pause, &place.join(images::ROOT)).unwrap();
    let manifest = Manifest::read(&pause).unwrap();
    assert_eq!(manifest.root, place.join(images::ROOT));
}
