//! Invalid input: the VMM refuses it with a clear reason, does not crash, and leaves nothing behind.

use std::{
    fs::{self, File},
    io::Write,
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::{fs::FileExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use model::{MANIFEST_NAME, template_file};
use sha2::{Digest, Sha256};
use vmm_control::{Failure, FailureKind, Reply, VmPhase};

use crate::support::{
    TestVm, host, run_dir, template,
    template::{copy_of, edit_manifest},
    until,
    vm::refusal,
};

/// Attempts a restore that must be refused and may leave only the log and the console file behind.
pub(crate) fn refused(dir: &Path) -> Failure {
    let mut vm = TestVm::spawn();
    let failure = vm.restore(dir).expect_err("a refusal");
    left_nothing(&mut vm);
    failure
}

fn left_nothing(vm: &mut TestVm) {
    assert_eq!(vm.stats().phase, VmPhase::Empty);
    assert!(!vm.vsock().exists(), "the socket file still exists");
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", vm.pid()));
    assert_eq!(children.unwrap_or_default(), "");
    // The process can still be used.
    vm.restore(template()).expect("a restore after a refusal");
    vm.control().resume().expect("a resume");
    vm.identify();
    assert_eq!(vm.log(), "", "the VMM logged an error");
}

pub(crate) fn assert_says(failure: &Failure, kind: FailureKind, words: &[&str]) {
    assert_eq!(failure.kind, kind, "{failure}");
    for word in words {
        assert!(
            failure.message.contains(word),
            "{word:?} is not in {failure}"
        );
    }
}

pub(crate) fn kvm_truncated_templates_are_refused() {
    for name in [
        template_file::MEMORY,
        template_file::LAYER,
        template_file::STATE,
        MANIFEST_NAME,
    ] {
        let dir = copy_of(template());
        let path = dir.join(name);
        let file = File::options().write(true).open(&path).expect("a file");
        let len = file.metadata().expect("a length").len();
        for cut in [1, len / 2, len] {
            file.set_len(len - cut).expect("a truncation");
            assert_says(&refused(&dir), FailureKind::BadSnapshot, &[name]);
        }
        fs::remove_file(&path).expect("a removal");
        assert_says(
            &refused(&dir),
            FailureKind::BadSnapshot,
            &[name, "No such file"],
        );
        fs::remove_dir_all(&dir).expect("a removal");
    }
    let nowhere = run_dir::make("nowhere").join("t");
    assert_says(
        &refused(&nowhere),
        FailureKind::BadSnapshot,
        &["manifest.json", "No such file"],
    );
}

pub(crate) fn flip(path: &Path, at: u64) {
    let file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .expect("a file");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte");
    byte[0] ^= 1 << (at % 8);
    file.write_all_at(&byte, at).expect("a byte");
}

/// Standard error of `cube-vmm verify`; `None` if it succeeds.
pub(crate) fn verify(dir: &Path) -> Option<String> {
    let out = Command::new(host::program())
        .arg("verify")
        .arg(dir)
        .output()
        .expect("cube-vmm");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    match out.status.code() {
        Some(0) => None,
        Some(1) => Some(said),
        _ => panic!("{:?}: {said}", out.status),
    }
}

/// For speed, a restore checks only the lengths of memory, layer and root image. `verify` also checks their content.
pub(crate) fn kvm_verify_finds_a_flipped_bit_in_every_file() {
    let dir = copy_of(template());
    let root = dir.join("root");
    fs::copy(host::guest().root, &root).expect("a copy");
    edit_manifest(&dir, |json| json["root"] = root.to_str().into());
    assert_eq!(verify(&dir), None);
    let data = |name: &str| dir.join(name);
    for path in [
        data(template_file::MEMORY),
        data(template_file::LAYER),
        data(template_file::STATE),
        root.clone(),
    ] {
        let len = path.metadata().expect("a length").len();
        // The first and last byte, and bytes in between, regardless of holes.
        for at in [0, len / 3 + 1, len - 1] {
            flip(&path, at);
            let said =
                verify(&dir).unwrap_or_else(|| panic!("{} at {at}: not found", path.display()));
            assert!(said.contains(path.to_str().expect("a path")), "{said}");
            flip(&path, at);
        }
    }
    assert_eq!(verify(&dir), None);
    // In the manifest, a flipped bit in a hash disagrees with its file, and other flips make the JSON invalid.
    let manifest = data(MANIFEST_NAME);
    let text = fs::read(&manifest).expect("a manifest");
    let sums: Vec<u64> = (0..text.len() - 64)
        .filter(|i| text[*i] == b'"' && text[i + 1..i + 65].iter().all(u8::is_ascii_hexdigit))
        .map(|i| i as u64 + 9)
        .collect();
    assert_eq!(sums.len(), 5);
    for at in sums.iter().filter(|at| !kernel_sum(&text, **at)) {
        flip(&manifest, *at);
        assert!(verify(&dir).is_some(), "a flipped sum at {at} is not found");
        flip(&manifest, *at);
    }
    // A restore also detects a flipped bit in the state file.
    flip(&data(template_file::STATE), 2000);
    assert_says(
        &refused(&dir),
        FailureKind::BadSnapshot,
        &["state", "SHA-256"],
    );
    fs::remove_dir_all(&dir).expect("a removal");
}

/// Whether the byte at `at` is in the checksum of the kernel, which is never checked: a template does not contain the
/// kernel file.
fn kernel_sum(manifest: &[u8], at: u64) -> bool {
    let before = &manifest[..usize::try_from(at).expect("an index")];
    let text = String::from_utf8_lossy(before);
    text.rfind("kernel_sum") > text.rfind("root_sum").max(text.rfind("memory_sum"))
}

/// Changes the state file, and updates header and manifest to match, as an attacker would.
fn forge_state(dir: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    const HEADER: usize = 56;
    let path = dir.join(template_file::STATE);
    let mut bytes = fs::read(&path).expect("a state");
    change(&mut bytes);
    let length = (bytes.len() - HEADER) as u64;
    bytes[16..24].copy_from_slice(&length.to_le_bytes());
    let sum = Sha256::digest(&bytes[HEADER..]);
    bytes[24..HEADER].copy_from_slice(&sum);
    fs::write(&path, &bytes).expect("a state");
    edit_manifest(dir, |json| {
        json["state_sum"]["bytes"] = bytes.len().into();
        json["state_sum"]["sha256"] = model::hex(&Sha256::digest(&bytes)).into();
    });
}

pub(crate) fn kvm_other_formats_and_platforms_are_refused() {
    let dir = copy_of(template());
    edit_manifest(&dir, |json| json["format"] = 99.into());
    assert_says(
        &refused(&dir),
        FailureKind::BadSnapshot,
        &["format 99", "make the template again"],
    );
    edit_manifest(&dir, |json| json["format"] = model::TEMPLATE_FORMAT.into());
    edit_manifest(&dir, |json| json["platform"] = "hvm".into());
    assert_says(
        &refused(&dir),
        FailureKind::BadSnapshot,
        &["platform hvm", "runs ring3"],
    );
    edit_manifest(&dir, |json| json["platform"] = "ring3".into());
    forge_state(&dir, |bytes| bytes[8] = 98);
    assert_says(&refused(&dir), FailureKind::BadSnapshot, &["format 98"]);
    forge_state(&dir, |bytes| {
        bytes[8..12].copy_from_slice(&model::TEMPLATE_FORMAT.to_le_bytes());
        bytes[12..16].fill(0);
    });
    assert_says(&refused(&dir), FailureKind::BadSnapshot, &["platform hvm"]);
    forge_state(&dir, |bytes| bytes[0] = b'X');
    assert_says(
        &refused(&dir),
        FailureKind::BadSnapshot,
        &["not a VM state file"],
    );
    for (key, value) in [("memory", "1MiB"), ("memory", "1TiB"), ("memory", "many")] {
        let dir = copy_of(template());
        edit_manifest(&dir, |json| json[key] = value.into());
        assert_says(&refused(&dir), FailureKind::BadSnapshot, &["manifest.json"]);
        fs::remove_dir_all(&dir).expect("a removal");
    }
    let extra = copy_of(template());
    edit_manifest(&extra, |json| json["surprise"] = 1.into());
    assert_says(&refused(&extra), FailureKind::BadSnapshot, &["surprise"]);
    for dir in [dir, extra] {
        fs::remove_dir_all(&dir).expect("a removal");
    }
}

/// Valid hashes and invalid content: the VMM refuses the state or the guest misbehaves, but the VMM does not crash.
pub(crate) fn kvm_forged_states_do_not_crash_the_vmm() {
    let dir = copy_of(template());
    let original = fs::read(dir.join(template_file::STATE)).expect("a state");
    let mut seed = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        usize::try_from(seed >> 33).expect("an index")
    };
    let (mut refusals, mut runs) = (0, 0);
    for round in 0..40 {
        fs::write(dir.join(template_file::STATE), &original).expect("a state");
        forge_state(&dir, |bytes| match round {
            0 => bytes.truncate(56),
            1 => bytes.truncate(100),
            2 => bytes.extend([0; 1000]),
            3 => bytes[56..].fill(0xff),
            4 => bytes[56..].fill(0),
            _ => {
                for _ in 0..=round / 4 {
                    let at = 56 + next() % (bytes.len() - 56);
                    bytes[at] = next().to_le_bytes()[0];
                }
            }
        });
        let mut vm = TestVm::spawn();
        match vm.restore(&dir) {
            Err(failure) => {
                assert!(
                    matches!(
                        failure.kind,
                        FailureKind::BadSnapshot | FailureKind::Io | FailureKind::BadSpec
                    ),
                    "round {round}: {failure:?}"
                );
                refusals += 1;
            }
            Ok(()) => {
                vm.control().resume().expect("a resume");
                let identity = model::Identity {
                    hostname: "x".into(),
                    machine_id: "0".repeat(32),
                    entropy: model::EntropySeed::new([1; 32]),
                };
                // The agent may be ready or not, or the guest may have ended. The VMM must respond in any case.
                let _ = refusal(vm.control().identity(identity, Duration::from_millis(200)));
                runs += 1;
            }
        }
        vm.stats();
    }
    eprintln!("forged states: {refusals} refused, {runs} run");
    fs::remove_dir_all(&dir).expect("a removal");
}

pub(crate) fn kvm_hostile_working_sets_are_harmless() {
    let dir = copy_of(template());
    let path = dir.join(template_file::WORKING_SET);
    let pair = |at: u64, n: u64| [at.to_le_bytes(), n.to_le_bytes()].concat();
    let lists: [Vec<u8>; 9] = [
        vec![],
        vec![1; 7],
        host::random::<4096>().to_vec(),
        pair(0, u64::MAX),
        pair(u64::MAX - 4095, 4096),
        pair(4096, 0),
        pair(0x1000_0000_0000, 4096),
        (0..5000).flat_map(|_| pair(0, 8 << 20)).collect(),
        (0..3000_u64)
            .flat_map(|i| pair(i % 60_000 * 4096, 4096))
            .collect(),
    ];
    for (i, list) in lists.iter().enumerate() {
        fs::write(&path, list).expect("a list");
        let vm = TestVm::clone_of(&dir);
        assert_eq!(vm.sh("echo alive"), "alive", "list {i}");
    }
    fs::remove_file(&path).expect("a removal");
    fs::create_dir(&path).expect("a directory");
    let mut vm = TestVm::spawn();
    let failure = vm.restore(&dir).expect_err("a refusal");
    let says = ["working-set", "not a regular file"];
    assert_says(&failure, FailureKind::BadSpec, &says);
    left_nothing(&mut vm);
    fs::remove_dir_all(&dir).expect("a removal");
}

fn boot_refused(change: impl FnOnce(&mut model::VmSpec)) -> Failure {
    let mut vm = TestVm::spawn();
    let mut spec = vm.spec();
    change(&mut spec);
    let failure = refusal(vm.control().boot(spec, None)).expect_err("a refusal");
    left_nothing(&mut vm);
    failure
}

fn file_of(bytes: &[u8]) -> PathBuf {
    let path = run_dir::make("file").join("f");
    fs::write(&path, bytes).expect("a file");
    path
}

pub(crate) fn kvm_bad_boot_files_are_refused() {
    let missing = || PathBuf::from("/nonexistent/file");
    let bad = FailureKind::BadSpec;
    let no = ["/nonexistent/file", "No such file"];
    assert_says(&boot_refused(|s| s.guest.kernel = missing()), bad, &no);
    assert_says(&boot_refused(|s| s.guest.initrd = missing()), bad, &no);
    assert_says(&boot_refused(|s| s.guest.root = missing()), bad, &no);
    assert_says(&boot_refused(|s| s.guest.layer = missing()), bad, &no);
    let words = |f: Failure| {
        assert_eq!(f.kind, FailureKind::BadSpec, "{f}");
        f.message.to_lowercase()
    };
    let text = words(boot_refused(|s| s.guest.kernel = file_of(&[b'x'; 1 << 20])));
    assert!(text.contains("elf"), "{text}");
    let empty = words(boot_refused(|s| s.guest.kernel = file_of(b"")));
    assert!(empty.contains("kernel"), "{empty}");
    // An ELF program without Xen notes.
    let program = words(boot_refused(|s| s.guest.kernel = host::program()));
    assert!(program.contains("xen"), "{program}");
    let kernel = fs::read(host::guest().kernel).expect("a kernel");
    for len in [64, 4096, kernel.len() / 2] {
        let cut = words(boot_refused(|s| s.guest.kernel = file_of(&kernel[..len])));
        eprintln!("kernel cut at {len}: {cut}");
    }
    assert_eq!(
        boot_refused(|s| s.guest.kernel = "/".into()).kind,
        FailureKind::BadSpec
    );
}

/// Starts the program with a socket as standard input.
fn bare() -> (UnixStream, std::process::Child) {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let child = Command::new(host::program())
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("cube-vmm");
    (ours, child)
}

pub(crate) fn kvm_garbage_on_the_control_socket() {
    let frame = |body: &[u8]| {
        let len = u32::try_from(body.len()).expect("a length");
        [b"CVMC\x02\0\0\0", &len.to_le_bytes()[..], body].concat()
    };
    let answered: [(Vec<u8>, &str); 7] = [
        (
            frame(b"{\"request\":\"stats\",\"files\":[\"kvm\"]}"),
            "descriptors",
        ),
        (frame(b"not json"), "cannot parse"),
        (frame(b"{\"request\":{\"dance\":1}}"), "unknown variant"),
        (
            frame(b"{\"request\":{\"boot\":{\"memory\":7}}}"),
            "cannot parse",
        ),
        (frame(b""), "cannot parse"),
        (frame(&[b'['; 100_000]), "cannot parse"),
        (
            b"CVMC\x63\0\0\0\0\0\0\0".to_vec(),
            "the VMM supports the versions",
        ),
    ];
    for (bytes, want) in answered {
        let (mut socket, child) = bare();
        socket.write_all(&bytes).expect("a request");
        socket.shutdown(Shutdown::Write).expect("the end");
        let said = match vmm_control::frame::receive::<Result<Reply, Failure>>(&socket) {
            Ok((answer, _)) => answer.expect_err("a failure").message,
            Err(e) => e.to_string(),
        };
        assert!(said.contains(want), "{want:?} is not in {said:?}");
        let out = child.wait_with_output().expect("its end");
        assert!(out.status.success(), "{out:?}");
    }
    let cases: [(Vec<u8>, &str); 4] = [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "not a control frame"),
        (b"CVMC\x02\0\0\0\xff\xff\xff\xff".to_vec(), "the limit is"),
        (b"CVM".to_vec(), "control socket"),
        (b"CVMC\x02\0\0\0\x10\0\0\0abc".to_vec(), "control socket"),
    ];
    for (bytes, want) in cases {
        let (mut socket, child) = bare();
        // The process may exit before the write is complete.
        let _ = socket.write_all(&bytes);
        drop(socket);
        let out = child.wait_with_output().expect("its end");
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(
            said.starts_with("cube-vmm: ") && said.contains(want),
            "{want:?} is not in {said:?}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    let (socket, child) = bare();
    drop(socket);
    assert!(child.wait_with_output().expect("its end").status.success());
}

/// A small tmpfs is full before the snapshot is complete.
pub(crate) fn kvm_a_full_disk_stops_a_snapshot() {
    let mount = run_dir::make("full");
    let run = |program: &str, args: &[&str]| {
        let status = Command::new(program)
            .args(args)
            .arg(&mount)
            .status()
            .expect("a program");
        assert!(status.success(), "{program} {args:?}");
    };
    run("mount", &["-t", "tmpfs", "-o", "size=8m", "none"]);
    let mut vm = TestVm::new();
    let failure = refusal(vm.control().snapshot(&mount.join("t"))).expect_err("a refusal");
    let left: Vec<_> = fs::read_dir(&mount).expect("a directory").collect();
    run("umount", &[]);
    assert_says(&failure, FailureKind::NoSpace, &["No space left"]);
    assert!(left.is_empty(), "{left:?}");
    // The guest is not affected, and a snapshot on another file system succeeds.
    vm.control().resume().expect("a resume");
    assert_eq!(vm.sh("echo alive"), "alive");
    let dir = run_dir::make("room").join("t");
    vm.control().snapshot(&dir).expect("a snapshot");
    assert_eq!(TestVm::clone_of(&dir).sh("echo alive"), "alive");
}

pub(crate) fn kvm_snapshots_never_replace_files() {
    let mut vm = TestVm::new();
    let parent = run_dir::make("taken");
    let taken = parent.join("t");
    fs::create_dir(&taken).expect("a directory");
    let failure = refusal(vm.control().snapshot(&taken)).expect_err("a refusal");
    assert_says(&failure, FailureKind::BadSpec, &["already exists"]);
    let nowhere = parent.join("no/such/place");
    let failure = refusal(vm.control().snapshot(&nowhere)).expect_err("a refusal");
    assert!(failure.message.contains("No such file"), "{failure}");
    let names: Vec<_> = fs::read_dir(&parent)
        .expect("a directory")
        .flatten()
        .map(|e| e.file_name())
        .collect();
    assert_eq!(names, ["t"]);
    vm.control().resume().expect("a resume");
    assert_eq!(vm.sh("echo alive"), "alive");
}

/// A client that exits during a snapshot leaves no temporary directory.
pub(crate) fn kvm_a_killed_vmm_leaves_only_a_draft() {
    let parent = run_dir::make("draft");
    let mut vm = TestVm::new();
    vm.control()
        .snapshot(&parent.join("t"))
        .expect("a snapshot");
    vm.kill();
    let names = || {
        let entries = fs::read_dir(&parent).expect("a directory").flatten();
        entries
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect::<Vec<_>>()
    };
    until("only the template is there", Duration::from_secs(5), || {
        (names() == ["t"]).then_some(())
    });
    assert_eq!(verify(&parent.join("t")), None);
}
