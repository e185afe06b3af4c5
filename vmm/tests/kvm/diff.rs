//! Diffs (snapshots of clones that leave out the content of their base), and snapshots of a layer alone.

use std::{
    fs,
    path::{Path, PathBuf},
};

use model::{MANIFEST_NAME, TEMPLATE_FORMAT, TemplateManifest, template_file};
use sha2::{Digest, Sha256};
use vmm::extents::{self, Extents};
use vmm_control::{
    Failure, FailureKind,
    template::{LoadError, LoadedTemplate},
};

use crate::{
    damage::{assert_says, flip, refused, verify},
    lifecycle::{finish_busy, start_busy},
    support::{
        TestVm, run_dir, template,
        template::{copy_of, edit_manifest},
        vm::refusal,
    },
};

fn manifest(dir: &Path) -> TemplateManifest {
    let text = fs::read(dir.join(MANIFEST_NAME)).expect("a manifest");
    serde_json::from_slice(&text).expect("JSON")
}

fn diff_of(vm: &mut TestVm) -> PathBuf {
    let dir = run_dir::make("diff").join("t");
    vm.control().snapshot_diff(&dir).expect("a diff");
    dir
}

fn length(dir: &Path, name: &str) -> u64 {
    fs::metadata(dir.join(name)).expect("a file").len()
}

/// A diff of a few MB and its base contain memory, CPU state and disk of a busy guest.
pub(crate) fn kvm_a_clone_of_a_diff_continues_where_it_stopped() {
    let mut vm = TestVm::new();
    vm.sh(
        "head -c 3M /dev/urandom > /root/disk; sync; echo 3 > /proc/sys/vm/drop_caches
        head -c 3M /dev/urandom > /dev/shm/memory",
    );
    let sums = "cat /root/disk /dev/shm/memory | sha256sum";
    let expected = vm.sh(sums);
    start_busy(&vm);
    let dir = diff_of(&mut vm);
    assert_eq!(verify(&dir), None);
    let memory = length(&dir, template_file::MEMORY);
    assert!(((3 << 20)..100 << 20).contains(&memory), "{memory} bytes");
    assert!(length(&dir, template_file::LAYER) >= 3 << 20);
    for _ in 0..2 {
        let clone = TestVm::clone_of(&dir);
        assert_eq!(clone.sh(sums), expected);
        finish_busy(&clone);
        assert_ne!(clone.sh("hostname"), vm.name);
    }
    // The source continues independently, and no clone contains its later writes.
    vm.control().resume().expect("a resume");
    vm.sh("echo later > /root/disk");
    finish_busy(&vm);
    drop(vm);
    assert_eq!(TestVm::clone_of(&dir).sh(sums), expected);
}

/// A clone of a diff descends from the diff's base in every generation; the diffs in between can be deleted.
pub(crate) fn kvm_generations_of_diffs_have_one_base() {
    let mut vm = TestVm::new();
    for generation in 0..4 {
        vm.sh(&format!(
            "echo {generation} | tee -a /root/line >> /dev/shm/line; sync
            head -c 1M /dev/urandom > /root/generation.{generation}"
        ));
        let dir = diff_of(&mut vm);
        let base = manifest(&dir).base.expect("a base");
        assert_eq!(base.dir, template().canonicalize().expect("a path"));
        vm = TestVm::clone_of(&dir);
        // The clone no longer needs the directory: short runs were copied, and mapped files stay open when deleted.
        fs::remove_dir_all(&dir).expect("a removal");
        let want: Vec<String> = (0..=generation).map(|g| g.to_string()).collect();
        for file in ["/root/line", "/dev/shm/line"] {
            assert_eq!(vm.sh(&format!("cat {file}")), want.join("\n"));
        }
    }
    vm.assert_healthy();
    // A full snapshot of the last clone needs no other files.
    let dir = run_dir::make("whole").join("t");
    vm.control().snapshot(&dir).expect("a snapshot");
    assert_eq!(manifest(&dir).base, None);
    assert_eq!(verify(&dir), None);
    assert_eq!(TestVm::clone_of(&dir).sh("wc -l < /root/line"), "4");
}

/// The directory of a loaded template disappears with its loader. Therefore a diff names the directory from which it
/// was loaded, and can be restored over another loaded copy.
pub(crate) fn kvm_a_diff_of_a_loaded_template_names_the_original_directory() {
    let load = || match LoadedTemplate::load(template()) {
        Ok(loaded) => Some(loaded),
        Err(LoadError::Tmpfs(why)) => {
            eprintln!("skipped: cannot create a tmpfs of huge pages: {why}");
            None
        }
        Err(other) => panic!("{other:?}"),
    };
    let Some(loaded) = load() else { return };
    let mut vm = TestVm::clone_of(&loaded.dir());
    vm.sh("echo kept > /dev/shm/mark");
    drop(loaded);
    let dir = diff_of(&mut vm);
    let home = template().canonicalize().expect("a path");
    assert_eq!(manifest(&dir).base.expect("a base").dir, home);
    assert_eq!(TestVm::clone_of(&dir).sh("cat /dev/shm/mark"), "kept");
    let Some(again) = load() else { return };
    let mut clone = over(&dir, &again.dir()).expect("a restore");
    clone.control().resume().expect("a resume");
    clone.identify();
    assert_eq!(clone.sh("cat /dev/shm/mark"), "kept");
    let second = diff_of(&mut clone);
    assert_eq!(manifest(&second).base.expect("a base").dir, home);
}

/// Restores over another base and leaves the VM paused.
fn over(dir: &Path, base: &Path) -> Result<TestVm, Failure> {
    let mut vm = TestVm::spawn();
    let mut spec = vm.restore_spec(dir);
    spec.base = Some(base.to_owned());
    refusal(vm.control().restore(spec, None)).map(|()| vm)
}

pub(crate) fn kvm_a_diff_without_its_base_is_refused() {
    let base = copy_of(template());
    let mut vm = TestVm::clone_of(&base);
    vm.sh("echo kept > /dev/shm/mark");
    let dir = diff_of(&mut vm);
    drop(vm);
    let bad = FailureKind::BadSnapshot;
    let names = [
        base.to_str().expect("a path"),
        dir.to_str().expect("a path"),
    ];
    // A different template in its place, even if only the time differs.
    edit_manifest(&base, |json| json["taken_at_unix_ns"] = 7.into());
    let words = ["is not the template", names[0], names[1]];
    assert_says(&refused(&dir), bad, &words);
    assert!(verify(&dir).expect("a complaint").contains(words[0]));
    // The manifest of the right base with files of a different template.
    fs::copy(template().join(MANIFEST_NAME), base.join(MANIFEST_NAME)).expect("a copy");
    assert_eq!(verify(&dir), None);
    flip(&base.join(template_file::MEMORY), 5 << 20);
    let said = verify(&dir).expect("a complaint");
    assert!(said.contains("its SHA-256 differs"), "{said}");
    fs::write(base.join(template_file::MEMORY), "short").expect("a write");
    assert_says(&refused(&dir), bad, &["cannot use", names[0], "5 bytes"]);
    fs::remove_dir_all(&base).expect("a removal");
    let words = [
        "cannot use",
        names[0],
        "the base of",
        names[1],
        "No such file",
    ];
    assert_says(&refused(&dir), bad, &words);
    // With `base` it can be restored from another directory. A diff is not a valid base.
    let mut moved = over(&dir, template()).expect("a restore");
    moved.control().resume().expect("a resume");
    moved.identify();
    assert_eq!(moved.sh("cat /dev/shm/mark"), "kept");
    let second = diff_of(&mut moved);
    assert_says(
        &over(&dir, &second).expect_err("a refusal"),
        bad,
        &["is not the template"],
    );
    forge(
        &dir,
        |_, _| (),
        |json| {
            json["base"]["manifest_sha256"] = model::hex(&Sha256::digest(
                fs::read(second.join(MANIFEST_NAME)).expect("a manifest"),
            ))
            .into();
        },
    );
    let failure = over(&dir, &second).expect_err("a refusal");
    assert_says(&failure, bad, &["never a diff itself"]);
}

/// Changes the lists of extents, and updates all hashes to match, as an attacker would.
fn forge(
    dir: &Path,
    lists: impl FnOnce(&mut Vec<(u64, u64)>, &mut Vec<(u64, u64)>),
    change: impl FnOnce(&mut serde_json::Value),
) {
    let path = dir.join(template_file::EXTENTS);
    let bytes = fs::read(&path).expect("a list");
    let all = (u64::MAX - 4095, u64::MAX - 4095);
    let (memory, layer) = extents::decode(&bytes, TEMPLATE_FORMAT, all).expect("a list");
    let pairs = |e: &Extents| e.iter().map(|e| (e.at, e.bytes)).collect::<Vec<_>>();
    let (mut memory, mut layer) = (pairs(&memory), pairs(&layer));
    lists(&mut memory, &mut layer);
    let mut forged = bytes[..16].to_vec();
    forged.extend((memory.len() as u64).to_le_bytes());
    forged.extend((layer.len() as u64).to_le_bytes());
    let numbers = memory.iter().chain(&layer);
    let body: Vec<u8> = numbers
        .flat_map(|(at, n)| [at.to_le_bytes(), n.to_le_bytes()].concat())
        .collect();
    forged.extend(Sha256::digest(&body));
    forged.extend(body);
    fs::write(&path, &forged).expect("a list");
    edit_manifest(dir, |json| {
        json["base"]["extents_sum"]["bytes"] = forged.len().into();
        json["base"]["extents_sum"]["sha256"] = model::hex(&Sha256::digest(&forged)).into();
        change(json);
    });
}

pub(crate) fn kvm_a_damaged_diff_is_refused() {
    let mut vm = TestVm::new();
    vm.sh("head -c 1M /dev/urandom > /root/file; sync");
    let good = diff_of(&mut vm);
    drop(vm);
    for name in [
        template_file::MEMORY,
        template_file::LAYER,
        template_file::EXTENTS,
    ] {
        let dir = copy_of(&good);
        let path = dir.join(name);
        flip(&path, length(&dir, name) - 1);
        assert!(verify(&dir).expect("a complaint").contains(name));
        let file = fs::File::options().write(true).open(&path).expect("a file");
        file.set_len(length(&dir, name) - 4096 % length(&dir, name))
            .expect("a truncation");
        assert_says(&refused(&dir), FailureKind::BadSnapshot, &[name]);
        fs::remove_file(&path).expect("a removal");
        let words = [name, "No such file"];
        assert_says(&refused(&dir), FailureKind::BadSnapshot, &words);
    }
    type Pairs = Vec<(u64, u64)>;
    type Forgery = (&'static str, fn(&mut Pairs, &mut Pairs));
    let forgeries: [Forgery; 7] = [
        ("its extent of", |m, _| m[0].0 = 1 << 50),
        ("its extent of", |m, _| m[0].0 = u64::MAX - 4095),
        ("its extent of", |m, _| m.swap(0, 1)),
        ("its extent of", |m, _| m[1].0 = m[0].0),
        ("its extent of", |_, l| l[0].1 = 0),
        ("its extent of", |_, l| l[0].0 += 512),
        ("bytes of the memory file", |m, _| m.truncate(m.len() - 1)),
    ];
    for (words, change) in forgeries {
        let dir = copy_of(&good);
        forge(&dir, change, |_| ());
        assert_says(
            &refused(&dir),
            FailureKind::BadSnapshot,
            &["extents", words],
        );
        fs::remove_dir_all(&dir).expect("a removal");
    }
    assert_eq!(TestVm::clone_of(&good).sh("echo alive"), "alive");
}

/// A booted VM has no base. A clone has none either if its base was removed while it ran.
pub(crate) fn kvm_without_a_base_a_diff_is_a_full_snapshot() {
    let mut vm = TestVm::boot(|_| ());
    let dir = diff_of(&mut vm);
    drop(vm);
    assert_eq!(manifest(&dir).base, None);
    let mut clone = TestVm::clone_of(&dir);
    clone.sh("echo kept > /root/mark");
    fs::remove_dir_all(&dir).expect("a removal");
    let dir = diff_of(&mut clone);
    assert_eq!(manifest(&dir).base, None);
    assert_eq!(verify(&dir), None);
    assert_eq!(TestVm::clone_of(&dir).sh("cat /root/mark"), "kept");
}

/// A saved layer keeps files across a cold boot; memory is lost.
pub(crate) fn kvm_a_saved_layer_boots() {
    let layer = run_dir::make("layer").join("layer");
    let mut vm = TestVm::new();
    vm.sh("head -c 5M /dev/urandom > /root/file; echo gone > /dev/shm/file; sync");
    let sum = vm.sh("sha256sum /root/file");
    vm.control().save_layer(&layer).expect("a layer");
    let taken = refusal(vm.control().save_layer(&layer)).expect_err("a refusal");
    assert_says(&taken, FailureKind::BadSpec, &["already exists"]);
    vm.control().resume().expect("a resume");
    assert_eq!(vm.sh("sha256sum /root/file"), sum);
    // The same holds for a clone of a diff, whose disk consists of three parts.
    let mut clone = TestVm::clone_of(&diff_of(&mut vm));
    drop(vm);
    clone.sh("echo more > /root/more; sync");
    let second = layer.with_file_name("second");
    clone.control().save_layer(&second).expect("a layer");
    drop(clone);
    for (layer, more) in [(layer, "absent"), (second, "more")] {
        let vm = TestVm::boot(|spec| spec.guest.layer = layer);
        assert_eq!(vm.sh("sha256sum /root/file"), sum);
        assert_eq!(vm.sh("cat /root/more 2>/dev/null || echo absent"), more);
        assert_eq!(vm.sh("cat /dev/shm/file 2>/dev/null || echo none"), "none");
        vm.assert_healthy();
    }
}
