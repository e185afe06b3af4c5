//! Checks that the guest is a correct Linux: the programs of `tests/guest` check themselves, and the kernel log has no
//! errors.

use std::time::{Duration, Instant};

use crate::support::TestVm;

/// Runs one program in a new clone.
fn check(name: &str, args: &str) -> String {
    let vm = TestVm::new();
    let said = vm.check(name, args);
    assert!(said.ends_with("ok"), "{said}");
    vm.assert_healthy();
    said
}

pub(crate) fn kvm_signals_carry_fault_addresses() {
    check("signals", "");
}

pub(crate) fn kvm_ptrace_steps_and_breakpoints() {
    check("ptrace", "");
}

pub(crate) fn kvm_ptrace_hardware_breakpoints() {
    let said = check("ptrace", "hardware");
    if said.contains("no hardware breakpoints") {
        eprintln!(
            "this host's KVM does not match debug registers at CPL 3: only their absence was tested"
        );
    }
}

pub(crate) fn kvm_copy_on_write_keeps_processes_apart() {
    check("cow", "");
}

pub(crate) fn kvm_no_mapping_is_stale() {
    check("stale", "");
}

pub(crate) fn kvm_threads_have_their_own_storage() {
    check("threads", "");
}

pub(crate) fn kvm_vector_registers_survive_switches() {
    check("vectors", "");
}

pub(crate) fn kvm_timers_and_clocks() {
    check("timers", "");
}

pub(crate) fn kvm_segment_bases_survive_switches() {
    check("bases", "");
}

pub(crate) fn kvm_files_keep_what_is_written() {
    check("files", "");
}

pub(crate) fn kvm_pipes_sockets_and_events() {
    check("ipc", "");
}

pub(crate) fn kvm_many_processes_at_once() {
    check("many", "600");
}

pub(crate) fn kvm_modules_load() {
    let vm = TestVm::new();
    vm.sh("modprobe fuse && test -c /dev/fuse && grep -q '^fuse ' /proc/modules");
    // A file system in a file, through the loop driver.
    vm.sh("modprobe loop && truncate -s 8M /tmp/image && losetup /dev/loop0 /tmp/image");
    vm.sh("head -c 8M /dev/urandom > /tmp/want && cp /tmp/want /dev/loop0 && sync && cmp /tmp/want /tmp/image");
    vm.sh("losetup -d /dev/loop0");
    vm.assert_healthy();
}

/// The kernel kills the process that uses the memory, not the agent.
pub(crate) fn kvm_out_of_memory_is_survived() {
    let vm = TestVm::new();
    let out = vm.exec(
        "/usr/bin/python3",
        &["-c", "x = [b'x' * (1 << 20) for _ in range(4096)]"],
    );
    assert_eq!((out.exit_code, out.exited), (-1, false), "{out:?}");
    assert_eq!(out.status, "signal: killed");
    assert!(vm.sh("dmesg").contains("Out of memory: Killed process"));
    assert_eq!(vm.sh("echo alive"), "alive");
}

pub(crate) fn kvm_a_fork_bomb_meets_its_limit() {
    let vm = TestVm::new();
    let bomb = "ulimit -u 60; bomb() { bomb | bomb & }; bomb 2>/dev/null; wait";
    let mut request = crate::support::vm::as_root("/bin/bash", &["-c", bomb]);
    // The limit on processes does not apply to root.
    request.user = Some("user".into());
    request.kill_after = Some(Duration::from_secs(5));
    // The bomb may end on its own, be killed, or leave children behind that hold its output.
    let _ = vm.agent().exec(&request, Duration::from_secs(3));
    assert_eq!(vm.sh("echo alive"), "alive");
    let most: u32 = vm
        .sh("ps -u user -o pid= | wc -l")
        .trim()
        .parse()
        .expect("a number");
    assert!(most <= 60, "{most} processes");
    crate::support::until("the bomb is gone", Duration::from_secs(20), || {
        vm.sh("pkill -KILL -u user; true");
        (vm.sh("ps -u user -o pid= | wc -l") == "0").then_some(())
    });
    vm.assert_healthy();
}

/// Each wake-up of an idle guest costs one timer interrupt: the tick stops at once, and neither another tick nor RCU
/// callbacks keep it.
pub(crate) fn kvm_an_idle_guest_stops_its_tick() {
    let vm = TestVm::new();
    let count = "
import re, time
def interrupts():
    return int(re.search(r'([0-9]+) .* timer0$', open('/proc/interrupts').read(), re.M)[1])
def taken():
    before = interrupts()
    for _ in range(20):
        time.sleep(0.01)
    return interrupts() - before
print(min(taken() for _ in range(10)))
";
    let least = vm.sh(&format!("python3 -c \"{count}\""));
    let least: u32 = least.parse().expect("a number of interrupts");
    // Other timers and a busy host only add some. With a late tick there are two for each sleep.
    assert!((20..30).contains(&least), "{least} interrupts in 20 sleeps");
    let next =
        vm.sh("pgrep -x rcuop/0 >&2 && cat /sys/module/rcutree/parameters/jiffies_till_next_fqs");
    assert_eq!(next, "10");
    vm.assert_healthy();
}

/// Checks the description of the VM that programs read.
pub(crate) fn kvm_proc_is_sane() {
    let vm = TestVm::new();
    assert_eq!(vm.sh("nproc; grep -c ^processor /proc/cpuinfo"), "1\n1");
    assert_eq!(
        vm.sh("cat /sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "xen"
    );
    assert_eq!(
        vm.sh("stat -f -c %T /; findmnt -n -o FSTYPE / || true")
            .lines()
            .last(),
        Some("overlay")
    );
    // The agent has set the size of a file that a page fault maps, and debugfs is not left mounted.
    let around = "! grep -q debugfs /proc/mounts && mount -t debugfs none /sys/kernel/debug \
                  && cat /sys/kernel/debug/fault_around_bytes && umount /sys/kernel/debug";
    assert_eq!(vm.sh(around), "1048576");
    // setmntent(3) reads this.
    vm.sh("grep -q '^overlay / overlay' /etc/mtab");
    // Idle time increases while nothing runs: the guest halts instead of spinning.
    let idle = "awk '/^cpu /{print $5}' /proc/stat";
    let ticks: Vec<u64> = vm
        .sh(&format!(
            "{idle}; python3 -c 'import time; time.sleep(0.5)'; {idle}"
        ))
        .lines()
        .map(|l| l.parse().expect("ticks"))
        .collect();
    assert!(ticks[1] - ticks[0] >= 25, "{ticks:?}");
    vm.sh(
        "test $(ls /proc | grep -c '^[0-9]') -gt 3 && test -r /proc/self/maps && test -e /dev/null",
    );
    vm.sh("python3 -c 'import os,ctypes; assert os.cpu_count() == 1; ctypes.CDLL(None).getpid()'");
    vm.assert_healthy();
}

/// Many commands through one agent: streams open and close.
pub(crate) fn kvm_a_hundred_commands() {
    let vm = TestVm::new();
    let start = Instant::now();
    let mut agent = vm.agent();
    for i in 0..100 {
        let request = crate::support::vm::as_root("/bin/echo", &[&i.to_string()]);
        let out = agent
            .exec(&request, Duration::from_secs(10))
            .expect("an exec");
        assert_eq!(out.stdout, format!("{i}\n").into_bytes());
    }
    eprintln!("100 commands in {:?}", start.elapsed());
    // Files of all sizes are read back unchanged.
    for size in [0, 1, 4095, 65_536, 1_000_003, 20 << 20] {
        let bytes: Vec<u8> = (0..size)
            .map(|i: u32| ((i * 31) >> 3).to_le_bytes()[0])
            .collect();
        agent
            .write_file("/root/f", &bytes, Some("root"))
            .expect("a write");
        assert!(
            agent.read_file("/root/f", Some("root")).expect("a read") == bytes,
            "{size}"
        );
    }
    vm.assert_healthy();
}
