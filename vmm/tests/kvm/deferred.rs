//! Memory that has no KVM slot until the guest touches it.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use model::template_file;
use monitor::layout::{DEFERRED_BYTES, offset};

use crate::support::{TestVm, run_dir, template::copy_of, until, vm::PATIENCE};

/// The kinds in `tests/guest/deferred.c`.
const KINDS: [&str; 20] = [
    "load",
    "store",
    "crossing",
    "copy_from",
    "copy_to",
    "fill",
    "compare",
    "exchange",
    "locked",
    "compare_exchange",
    "compare_exchange_16",
    "sse",
    "sse_arithmetic",
    "avx_load",
    "avx_store",
    "state_area",
    "x87",
    "stack",
    "code",
    "system_call",
];

/// A template with the program `deferred` and its file. The file's pages are only on the disk, not in memory.
fn with_file() -> &'static Path {
    static TEMPLATE: OnceLock<PathBuf> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let dir = run_dir::make("deferred").join("t");
        let mut vm = TestVm::boot(|_| ());
        vm.upload("deferred");
        vm.sh("/root/deferred make /root/data; sync; echo 3 > /proc/sys/vm/drop_caches");
        vm.control().snapshot(&dir).expect("a snapshot");
        drop(vm);
        // Records the memory that a command needs. Clones then start with slots for it, and only the rest is deferred.
        let mut first = TestVm::clone_of(&dir);
        first.sh("/root/deferred none /root/data || true");
        let path = dir.join(template_file::WORKING_SET);
        first.control().record_working_set(&path).expect("a list");
        dir
    })
}

/// Number of exits at which the VMM registered memory since it created the VM.
fn times(vm: &mut TestVm) -> u64 {
    vm.stats().exits.get("memory").copied().unwrap_or(0)
}

pub(crate) fn kvm_every_kind_of_instruction_can_touch_deferred_memory() {
    let mut total = 0;
    for kind in KINDS {
        let mut vm = TestVm::clone_of(with_file());
        let before = times(&mut vm);
        let said = vm.sh(&format!("/root/deferred {kind} /root/data 2>&1"));
        assert_eq!(said, "ok", "{kind}");
        let came = times(&mut vm) - before;
        eprintln!("{kind}: {before} times before, {came} times");
        total += came;
        vm.assert_healthy();
    }
    // The guest's kernel chooses the memory for the pages of the file, but not all of it was touched before.
    assert!(total > 0, "no memory was deferred");
}

/// Each generation is a fork of the previous one and touches more memory.
pub(crate) fn kvm_forks_keep_the_content_of_deferred_memory() {
    let sum = "sha256sum < /dev/shm/more";
    let mut vm = TestVm::clone_of(with_file());
    let mut came = 0;
    for generation in 0..4 {
        vm.sh("head -c 20M /dev/urandom >> /dev/shm/more");
        let expected = vm.sh(sum);
        came += times(&mut vm);
        let dir = run_dir::make("deferred").join("fork");
        vm.control().snapshot_diff(&dir).expect("a diff");
        vm = TestVm::clone_of(&dir);
        assert_eq!(vm.sh(sum), expected, "generation {generation}");
        vm.assert_healthy();
    }
    assert!(came > 0, "no memory was deferred");
    assert_eq!(vm.sh("/root/deferred store /root/data"), "ok");
}

/// With page tables in memory without a KVM slot, the guest fails, but its VMM still responds and exits.
pub(crate) fn kvm_a_forged_list_of_chunks_harms_the_guest_only() {
    let dir = copy_of(with_file());
    let memory = File::options()
        .write(true)
        .open(dir.join(template_file::MEMORY))
        .expect("the memory");
    let ram = 256 << 20;
    for forged in [0, 0x55, 0xff] {
        let list = [forged; DEFERRED_BYTES];
        memory
            .write_all_at(&list, ram + offset::DEFERRED)
            .expect("a write");
        let mut vm = TestVm::spawn();
        vm.restore(&dir).expect("a restore");
        vm.control().resume().expect("a resume");
        // The guest may end or spin.
        let mut answers = 0;
        until("the VMM answers", PATIENCE, || {
            vm.stats();
            answers += 1;
            (answers > 20).then_some(())
        });
    }
    fs::remove_dir_all(&dir).expect("a removal");
}
