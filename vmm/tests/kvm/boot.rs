//! Booting a kernel, and specifications that cannot be booted.

use model::{Bytes, HypercallPath};
use vmm_control::FailureKind;

use crate::support::{
    TestVm, host, run_dir,
    vm::{complaints, refusal},
};

/// Boots, and checks the memory that the guest sees and its kernel log.
fn boot(memory: Bytes, hypercalls: HypercallPath) {
    let mut vm = TestVm::boot(|spec| {
        spec.memory = memory;
        spec.hypercalls = hypercalls;
    });
    let seen = vm.sh("uname -s; id -u; grep -c ^processor /proc/cpuinfo; cat /proc/meminfo");
    let mut lines = seen.lines();
    assert_eq!(lines.next(), Some("Linux"));
    assert_eq!(lines.next(), Some("0"));
    assert_eq!(lines.next(), Some("1"));
    let total = lines.next().unwrap_or_default();
    let kib: u64 = total
        .split_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or(0);
    // The kernel reserves memory for its text, its page array and other structures.
    let (least, most) = ((memory.0 >> 10) * 3 / 5, memory.0 >> 10);
    assert!((least..most).contains(&kib), "{total}");
    assert_eq!(complaints(&vm.sh("dmesg")), Vec::<&str>::new());
    vm.control().shutdown().expect("a shutdown");
}

pub(crate) fn kvm_boot_with_patched_hypercalls() {
    boot(Bytes::mib(256), HypercallPath::Call);
}

pub(crate) fn kvm_boot_with_trapped_hypercalls() {
    boot(Bytes::mib(256), HypercallPath::Trap);
}

/// Both ways of hypercalls, which depend on the kernel's code; then a snapshot and a clone.
pub(crate) fn kvm_a_newer_guest_kernel_boots_and_its_clone_runs() {
    for hypercalls in [HypercallPath::Trap, HypercallPath::Call] {
        let mut vm = TestVm::boot(|spec| {
            spec.guest = host::newer_guest();
            spec.hypercalls = hypercalls;
        });
        let release = vm.sh("uname -r");
        assert_eq!(complaints(&vm.sh("dmesg")), Vec::<&str>::new(), "{release}");
        vm.sh("echo kept > /root/mark; sync");
        let template = run_dir::make("newer-kernel").join("t");
        vm.control().snapshot(&template).expect("a snapshot");
        drop(vm);
        let clone = TestVm::clone_of(&template);
        assert_eq!(
            clone.sh("cat /root/mark; uname -r"),
            format!("kept\n{release}")
        );
        eprintln!("{hypercalls:?}: {}", release.trim());
    }
}

pub(crate) fn kvm_boot_in_the_least_memory() {
    boot(model::MIN_MEMORY, HypercallPath::Call);
}

/// Untouched guest memory takes no host memory. On a host with little free memory the test still boots a smaller guest.
pub(crate) fn kvm_boot_in_the_most_memory() {
    let memory = if host::free_memory() > 10 << 30 {
        model::MAX_MEMORY
    } else {
        eprintln!("less than 10 GiB free: testing with 2 GiB instead of 8");
        Bytes::mib(2048)
    };
    boot(memory, HypercallPath::Call);
}

pub(crate) fn kvm_specs_out_of_range_are_refused() {
    let mut vm = TestVm::spawn();
    let bad = [
        (
            Bytes::mib(256),
            2,
            "cannot run 2 vCPUs: platform ring3 supports 1 to 1",
        ),
        (
            Bytes::mib(256),
            0,
            "cannot run 0 vCPUs: platform ring3 supports 1 to 1",
        ),
        (
            Bytes::mib(126),
            1,
            "guest memory 126MiB is outside 128MiB to 8GiB",
        ),
        (
            Bytes::mib(8194),
            1,
            "guest memory 8194MiB is outside 128MiB to 8GiB",
        ),
        (
            Bytes::mib(129),
            1,
            "guest memory 129MiB is not a multiple of 2MiB",
        ),
    ];
    for (memory, vcpus, want) in bad {
        let mut spec = vm.spec();
        (spec.memory, spec.vcpus) = (memory, vcpus);
        let failure = refusal(vm.control().boot(spec, None)).expect_err("a refusal");
        assert_eq!(failure.kind, FailureKind::BadSpec);
        assert_eq!(failure.message, want);
    }
    // A refused specification has no effect: the same process boots a valid one.
    let spec = vm.spec();
    vm.control().boot(spec, None).expect("a boot");
    vm.identify();
}
