use std::thread;

use model::SandboxId;

use super::*;
use crate::{
    account::Allowance,
    copy::CopyPlan,
    error::is_full,
    fixtures::{image, memory, plan, remove_memory, restorer, saved, with_memory},
    template::IMAGE,
    vmms::VmmId,
};

/// A template with this memory, in a directory named by its manifest's checksum.
fn template(images: &Path, name: &str, memory: &[u8]) -> PathBuf {
    let dir = images.join(name);
    image(&dir, None);
    with_memory(&dir, memory);
    let place = images.join(sum_of_manifest(&dir).unwrap());
    fs::rename(dir, &place).unwrap();
    place
}

#[test]
fn memory_comes_back_from_its_diff_and_only_with_its_base() {
    let root = tempfile::tempdir().unwrap();
    let images = root.path();
    let base = template(images, "base", &memory(1, 0));
    let whole = memory(2, 5);
    let dir = template(images, "one", &whole);
    let stored = plan(&dir, Some(&base)).run().unwrap().unwrap();
    assert_eq!(find(&dir, images).unwrap().as_ref(), Some(&stored));
    assert!(!dir.join(MEMORY).exists(), "it can be made again");
    assert_eq!(memory_length(&dir).unwrap(), whole.len() as u64);
    assert_eq!(stored.base.as_ref(), Some(&base));
    assert!(stored.bytes < 64 << 10, "{stored:?}");

    let restorer = restorer(images);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| restorer.restore(&dir).unwrap());
        }
    });
    assert!(fs::read(dir.join(MEMORY)).unwrap() == whole);
    let taken = allocated(&dir.join(MEMORY));
    assert!(taken < whole.len() as u64, "holes stay: {taken}");
    assert!(!dir.join(DRAFTS[1]).exists());
    remove_memory(&dir);

    // Without room nothing is written, and the diff is not reported as damaged.
    let full = Restorer {
        allowance: Allowance::Beyond(u64::MAX),
        ..restorer.clone()
    };
    // Another job has set the rest of the disk aside. Unlike a start, a resume is still allowed.
    let aside = restorer.account.take(u64::MAX / 2, |_| Ok::<_, ()>(()));
    for full in [&full, &restorer] {
        let why = full.restore(&dir).unwrap_err();
        assert!(
            is_full(&why) && !why.to_string().contains("backup"),
            "{why}"
        );
    }
    let resume = Restorer {
        allowance: Allowance::All,
        ..restorer.clone()
    };
    resume.restore(&dir).unwrap();
    remove_memory(&dir);
    drop(aside);
    assert_eq!(restorer.account.aside(), 0, "all was given back");

    // Another base of the same length.
    let aside = images.join("aside");
    fs::rename(base.join(MEMORY), &aside).unwrap();
    fs::write(base.join(MEMORY), vec![7; whole.len()]).unwrap();
    let why = restorer.restore(&dir).unwrap_err().to_string();
    assert!(
        why.contains("differs from the manifest") && why.contains("build it again"),
        "{why}"
    );
    fs::remove_file(base.join(MEMORY)).unwrap();
    for why in [
        restorer.restore(&dir).unwrap_err().to_string(),
        find(&dir, images).unwrap_err(),
    ] {
        let base = base.to_str().unwrap();
        assert!(why.contains(base) && why.contains("from a backup"), "{why}");
    }
    assert!(!dir.join(MEMORY).exists() && !dir.join(DRAFTS[1]).exists());
    fs::rename(aside, base.join(MEMORY)).unwrap();
    restorer.restore(&dir).unwrap();

    // A diff truncated between two chunks.
    remove_memory(&dir);
    let path = dir.join(memory_diff::NAME);
    let diff = fs::read(&path).unwrap();
    fs::write(&path, &diff[..96]).unwrap();
    let why = restorer.restore(&dir).unwrap_err().to_string();
    assert!(why.contains("differs from the manifest"), "{why}");
    fs::write(&path, &diff[..95]).unwrap();
    assert!(find(&dir, images).unwrap_err().contains("build it again"));
    fs::write(&path, &diff).unwrap();
    restorer.restore(&dir).unwrap();
}

#[test]
fn a_diff_that_is_not_smaller_or_not_right_is_not_kept() {
    let root = tempfile::tempdir().unwrap();
    let images = root.path();
    let mut noise = vec![0; CHUNK];
    File::open("/dev/urandom")
        .and_then(|mut file| io::Read::read_exact(&mut file, &mut noise))
        .unwrap();
    let dir = template(images, "noise", &noise);
    let is_whole = |dir: &Path| dir.join(MEMORY).exists() && !dir.join(memory_diff::NAME).exists();
    assert_eq!(plan(&dir, None).run().unwrap(), None);
    assert!(is_whole(&dir) && find(&dir, images).unwrap().is_none());
    assert!(is_whole(&dir), "{:?}", fs::read_dir(&dir));
    // The same noise in the base, so the diff is small.
    let same = template(images, "same", &[noise.clone(), noise.clone()].concat());
    assert!(plan(&same, Some(&dir)).run().unwrap().is_some());

    let other = template(images, "other", &memory(2, 5));
    let stopped = DiffPlan {
        stop: Arc::new(AtomicBool::new(true)),
        ..plan(&other, Some(&dir))
    };
    assert!(stopped.run().unwrap_err().to_string().contains("stopping"));
    // The file no longer matches the manifest's checksum.
    let memory = File::options()
        .write(true)
        .open(other.join(MEMORY))
        .unwrap();
    memory.write_all_at(b"changed", 0).unwrap();
    let why = plan(&other, Some(&dir)).run().unwrap_err().to_string();
    assert!(
        why.contains("differs from the template's manifest"),
        "{why}"
    );
    assert!(is_whole(&other) && !other.join(DRAFTS[0]).exists());
    restorer(images).restore(&other).unwrap();
    assert!(is_whole(&other));
}

#[test]
fn a_diff_whose_name_is_not_synced_goes_or_keeps_its_base() {
    let root = tempfile::tempdir().unwrap();
    let dir = template(root.path(), "one", &memory(2, 5));
    let (draft, diff) = (dir.join(DRAFTS[0]), dir.join(memory_diff::NAME));
    let plan = plan(&dir, None);
    fs::write(&draft, "").unwrap();
    let failed = |_: &Path| Err(io::Error::other("broken disk"));
    let why = plan.put_in_place(&draft, failed).unwrap_err();
    assert_eq!(why.to_string(), "broken disk");
    assert!(!diff.exists() && !draft.exists() && dir.join(MEMORY).exists());
    // A directory in its place cannot be removed as a file. The diff then counts as stored, and its base as used.
    fs::write(&draft, "").unwrap();
    let stays = |_: &Path| {
        fs::remove_file(&diff)?;
        fs::create_dir(&diff)?;
        Err(io::Error::other("broken disk"))
    };
    plan.put_in_place(&draft, stays).unwrap();
}

#[test]
fn a_copy_of_a_template_that_is_stored_as_a_diff_has_the_memory() {
    let root = tempfile::tempdir().unwrap();
    let images = root.path();
    let whole = memory(2, 5);
    let dir = template(images, "one", &whole);
    plan(&dir, None).run().unwrap().unwrap();
    remove_memory(&dir);
    for name in ["state", "layer"] {
        fs::write(dir.join(name), name).unwrap();
    }
    let home = images.join("copy");
    fs::create_dir(&home).unwrap();
    let copy = CopyPlan {
        id: "copy".to_owned(),
        home: home.clone(),
        from: dir,
        origin: saved(SandboxId::from_random([7; 19]), VmmId::default()),
        restorer: restorer(images),
    };
    copy.run().unwrap();
    let image = home.join(IMAGE);
    assert!(fs::read(image.join(MEMORY)).unwrap() == whole);
    assert!(!image.join(memory_diff::NAME).exists());
}
