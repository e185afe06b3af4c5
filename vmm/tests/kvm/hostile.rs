//! Malicious guests: they may harm themselves, but never the VMM.

use std::time::Duration;

use monitor::layout::{BASE, DIRECT};
use vmm_control::VmPhase;

use crate::support::{TestVm, until, vm::as_root};

/// Runs a script that may kill its guest. The VMM must still respond afterwards.
fn survives(vm: &mut TestVm, script: &str, within: Duration) -> VmPhase {
    let _ = vm
        .agent()
        .exec(&as_root("/bin/bash", &["-c", script]), within);
    let stats = vm.stats();
    if stats.phase == VmPhase::Exited {
        eprintln!("{script}: {}", stats.exit_reason.as_deref().unwrap_or(""));
    }
    assert!(
        matches!(stats.phase, VmPhase::Running | VmPhase::Exited),
        "{stats:?}"
    );
    assert!(!vm.log().contains("panicked"), "{}", vm.log());
    stats.phase
}

pub(crate) fn kvm_the_gate_to_ring_0_cannot_harm_the_vmm() {
    for seed in 0..2 {
        let mut vm = TestVm::new();
        let gate = vm.upload("gate");
        survives(
            &mut vm,
            &format!("{gate} int4 {BASE:#x} {seed}"),
            Duration::from_secs(2),
        );
        vm.control().shutdown().expect("a shutdown");
    }
    // The same as an unprivileged user in the guest.
    let mut vm = TestVm::new();
    let gate = vm.upload("gate");
    vm.sh(&format!("cp {gate} /tmp/gate; chmod 755 /tmp/gate"));
    let script = format!(
        "su user -s /bin/bash -c '/tmp/gate int4 {BASE:#x} 99' || /tmp/gate int4 {BASE:#x} 99"
    );
    survives(&mut vm, &script, Duration::from_secs(2));
    vm.control().shutdown().expect("a shutdown");
}

/// User code can access the memory of the kernel and of the monitor (`guest_isolation = "vm"`), including queues and
/// the shared page. To the VMM all of it is untrusted guest memory.
pub(crate) fn kvm_scribbling_over_all_memory_harms_the_guest_only() {
    // The page shared with the VMM, the monitor's log ring and page tables, the whole region, all RAM.
    let targets = [
        (BASE + 0x10_0000, 0x1000),
        (BASE + 0x10_8000, 0x8000),
        (BASE, 0x20_0000),
        (DIRECT, 256 << 20),
        (0xffff_8880_0100_0000, 32 << 20),
    ];
    for (i, (from, bytes)) in targets.into_iter().enumerate() {
        let mut vm = TestVm::new();
        let gate = vm.upload("gate");
        survives(
            &mut vm,
            &format!("{gate} scribble {from:#x} {bytes:#x} {i}"),
            Duration::from_secs(3),
        );
        vm.control().shutdown().expect("a shutdown");
    }
}

pub(crate) fn kvm_random_device_registers() {
    for seed in 1..5 {
        let mut vm = TestVm::new();
        let program = vm.upload("registers");
        let base = vm.sh("cat /sys/module/cube_mmio/parameters/base");
        let mut agent = vm.agent();
        let request = as_root(&program, &[&base, &seed.to_string(), &format!("{BASE:#x}")]);
        let mut stream = agent
            .start(&request, Duration::from_secs(5))
            .expect("a stream");
        let first = stream
            .next_event()
            .expect("an event")
            .and_then(|e| e.data)
            .expect("data");
        let said = first.stdout.unwrap_or_default().0;
        assert!(
            said.starts_with(b"reached"),
            "{}",
            String::from_utf8_lossy(&said)
        );
        drop(stream);
        // The agent loses its devices, so its response may never arrive.
        for _ in 0..50 {
            vm.stats();
        }
        survives(&mut vm, "echo still here", Duration::from_secs(1));
        vm.control().shutdown().expect("a shutdown");
    }
}

/// The console file is limited in size, whatever the guest prints.
pub(crate) fn kvm_a_flooded_console_is_bounded() {
    let mut vm = TestVm::new();
    let flood = "dmesg -n 8; (timeout 2 yes 0123456789abcdefghijklmnopqrstuvwxyz > /dev/console; timeout 2 yes flood > /dev/kmsg) 2>/dev/null; true";
    let phase = survives(&mut vm, flood, Duration::from_secs(20));
    assert_eq!(phase, VmPhase::Running);
    assert_eq!(vm.sh("echo alive"), "alive");
    let len = vm.dir.join("console").metadata().expect("a console").len();
    assert!(len <= 2 << 20, "{len} bytes");
    assert!(len > 0, "nothing was printed");
}

/// Streams from the guest to every host port, and many streams from the host that are never read.
pub(crate) fn kvm_a_flooded_vsock_keeps_serving() {
    let mut vm = TestVm::new();
    let flood = r#"
import socket, random
refused = 0
for i in range(300):
    s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    s.settimeout(2)
    try:
        # Other machines than the host do not answer at all, as with vhost: one in a hundred is enough.
        s.connect((77 if i % 100 == 99 else 2, random.randrange(1 << 32)))
    except OSError:
        refused += 1
    s.close()
print(refused)
"#;
    vm.agent()
        .write_file("/root/flood.py", flood.as_bytes(), Some("root"))
        .expect("an upload");
    let refused: u32 = vm
        .sh("timeout 40 python3 /root/flood.py")
        .parse()
        .expect("a number");
    assert!(refused >= 290, "{refused} of 300 were refused");
    // Output that is never read, on as many connections as an agent accepts.
    let mut endless = as_root("/usr/bin/yes", &[]);
    endless.kill_after = Some(Duration::from_secs(3));
    let mut agents: Vec<_> = (0..24).map(|_| vm.agent()).collect();
    let streams: Vec<_> = agents
        .iter_mut()
        .filter_map(|agent| agent.start(&endless, Duration::from_secs(30)).ok())
        .collect();
    assert!(streams.len() >= 8, "{} streams", streams.len());
    assert_eq!(vm.sh("echo alive"), "alive");
    drop(streams);
    drop(agents);
    until("the writers are gone", Duration::from_secs(20), || {
        (vm.sh("pgrep -c yes || true") == "0").then_some(())
    });
    assert_eq!(vm.stats().phase, VmPhase::Running);
    vm.assert_healthy();
}

/// Limits of a guest that has taken over its VMM. Each thread has its own user and group, no capability, no_new_privs
/// and a seccomp filter. Two VMs have different users. The VMM holds only the files that it was given.
pub(crate) fn kvm_a_running_vmm_is_confined() {
    let (vm, other) = (TestVm::new(), TestVm::new());
    let user = status_of(vm.pid(), "Uid");
    assert_ne!(user, status_of(other.pid(), "Uid"));
    assert!(!user.split_whitespace().any(|id| id == "0"), "{user}");
    assert_eq!(user, status_of(vm.pid(), "Gid"));
    let tasks = std::fs::read_dir(format!("/proc/{}/task", vm.pid())).expect("threads");
    for task in tasks {
        let thread = task.expect("a thread").file_name();
        let thread = thread.to_string_lossy().parse().expect("a number");
        assert_eq!(status_of(thread, "Seccomp"), "2", "a filter");
        assert_eq!(status_of(thread, "NoNewPrivs"), "1");
        assert_eq!(status_of(thread, "Groups"), "");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status_of(thread, set), "0000000000000000", "{set}");
        }
    }
    let held = std::fs::read_dir(format!("/proc/{}/fd", vm.pid())).expect("descriptors");
    for fd in held {
        let file = std::fs::read_link(fd.expect("one").path()).expect("a name");
        assert_ne!(file, std::path::Path::new("/dev/kvm"), "/dev/kvm is closed");
    }
    let environment = std::fs::read(format!("/proc/{}/environ", vm.pid())).expect("a list");
    assert!(environment.is_empty());
}

/// A field of /proc/PID/status, with single spaces.
fn status_of(pid: u32, name: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a status");
    let value = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let words: Vec<_> = value.expect(name).split_whitespace().collect();
    words.join(" ")
}
