//! Two clones of one snapshot are distinct machines, and both have the right time.

use std::{
    collections::BTreeSet,
    fs,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::support::{TestVm, host, run_dir, template, template::edit_manifest};

/// Values that must differ between two clones, each with the command that reads it.
const SECRETS: [(&str, &str); 8] = [
    ("machine-id", "cat /etc/machine-id"),
    ("boot-id", "cat /proc/sys/kernel/random/boot_id"),
    ("hostname", "hostname"),
    ("kernel uuid", "cat /proc/sys/kernel/random/uuid"),
    ("urandom", "head -c 16 /dev/urandom | od -An -tx1"),
    (
        "getrandom",
        "python3 -c 'import os; print(os.getrandom(16).hex())'",
    ),
    (
        "python random",
        "python3 -c 'import random; print(random.random())'",
    ),
    ("uuid4", "python3 -c 'import uuid; print(uuid.uuid4())'"),
];

pub(crate) fn kvm_clones_are_different_machines() {
    let clones: Vec<_> = (0..4).map(|_| TestVm::new()).collect();
    for (what, command) in SECRETS {
        let answers: BTreeSet<_> = clones.iter().map(|vm| vm.sh(command)).collect();
        assert_eq!(answers.len(), clones.len(), "{what}: {answers:?}");
    }
    for vm in &clones {
        assert_eq!(
            vm.sh("hostname; getent hosts $(hostname) | head -1 | wc -l"),
            format!("{}\n1", vm.name)
        );
    }
}

/// Two clones' kernels return different random bytes before other events are mixed into their pools.
pub(crate) fn kvm_first_random_bytes_differ() {
    let first = |vm: TestVm| {
        vm.exec("/usr/bin/head", &["-c", "32", "/dev/urandom"])
            .stdout
    };
    let (a, b) = (first(TestVm::new()), first(TestVm::new()));
    assert_eq!((a.len(), b.len()), (32, 32));
    assert_ne!(a, b);
}

fn host_ns() -> i128 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a time");
    i128::try_from(now.as_nanos()).expect("a time")
}

/// Guest time minus host time in milliseconds, as an interval: the host's time is taken before and after the call.
fn wall_clock_error_ms(vm: &TestVm) -> (i128, i128) {
    let program = vm.upload("wall");
    // The first call faults the pages in; the second is measured.
    vm.exec(&program, &[]);
    let before = host_ns();
    let out = vm.exec(&program, &[]);
    let after = host_ns();
    let text = String::from_utf8_lossy(&out.stdout).trim().to_owned();
    let guest: i128 = text.parse().expect("a time");
    ((guest - after) / 1_000_000, (guest - before) / 1_000_000)
}

/// Checks the wall clocks of three clones; one must be right. The identity request carries the time. If the guest has
/// to wait for a CPU when the request arrives, its clock is late by the length of the wait. A busy host can delay one
/// clone, but is unlikely to delay all three.
fn assert_wall_clock(start: impl Fn() -> TestVm) {
    let errors: Vec<_> = (0..3).map(|_| wall_clock_error_ms(&start())).collect();
    assert!(
        errors
            .iter()
            .any(|(least, most)| *least <= 50 && *most >= -50),
        "the clocks are wrong by these intervals (ms): {errors:?}"
    );
}

/// CLOCK_MONOTONIC of the guest in seconds.
fn monotonic(vm: &TestVm) -> f64 {
    vm.sh("python3 -c 'import time; print(time.clock_gettime(time.CLOCK_MONOTONIC))'")
        .parse()
        .expect("a time")
}

pub(crate) fn kvm_the_wall_clock_is_right() {
    assert_wall_clock(|| TestVm::boot(|_| ()));
    assert_wall_clock(TestVm::new);
}

/// A snapshot that appears an hour old in both places that hold its age: the guest's wall clock (in its memory; set
/// back before the snapshot, as it would be after an hour on disk) and `taken_at_unix_ns` in the manifest. The guest's
/// CLOCK_MONOTONIC counts only the time in which the guest ran.
pub(crate) fn kvm_a_clone_of_an_old_snapshot_has_the_present_time() {
    const HOUR: u64 = 3600;
    let dir = run_dir::make("old").join("t");
    let before = {
        let mut vm = TestVm::new();
        vm.sh(&format!("date -s @$(( $(date +%s) - {HOUR} ))"));
        let (_, error) = wall_clock_error_ms(&vm);
        assert!(error < -3_500_000, "the clock was not set back: {error} ms");
        let before = monotonic(&vm);
        vm.control().snapshot(&dir).expect("a snapshot");
        before
    };
    edit_manifest(&dir, |json| {
        let taken = json["taken_at_unix_ns"].as_u64().expect("a time");
        json["taken_at_unix_ns"] = (taken - HOUR * 1_000_000_000).into();
    });
    assert_wall_clock(|| TestVm::clone_of(&dir));
    let vm = TestVm::clone_of(&dir);
    let after = monotonic(&vm);
    assert!(
        after >= before,
        "CLOCK_MONOTONIC went back from {before} to {after}"
    );
    assert!(
        after - before < 30.0,
        "CLOCK_MONOTONIC jumped from {before} to {after}"
    );
    // Timers do not fire as if that hour had passed in the guest.
    vm.assert_healthy();
}

/// A timer with two and a half seconds left at the snapshot has the same time left in each clone.
pub(crate) fn kvm_pending_timers_keep_their_remaining_time() {
    let dir = run_dir::make("timers").join("t");
    let fired = "until test -s /root/fired; do read -t 0.02 <> <(:) || true; done; cat /root/fired";
    let vm = {
        let mut vm = TestVm::new();
        let pending = vm.upload("pending");
        vm.sh(&format!("{pending} 2500 >/root/fired.tmp 2>&1 </dev/null & until test -e /root/armed; do :; done"));
        vm.control().snapshot(&dir).expect("a snapshot");
        vm
    };
    drop(vm);
    for _ in 0..2 {
        let clone = TestVm::clone_of(&dir);
        // Each kind of timer, and its delay in milliseconds on the guest's own clock.
        let said = clone.sh(fired);
        for line in said.lines() {
            let (kind, late) = line.split_once(' ').expect("kind and lateness");
            let late: i64 = late.parse().expect("milliseconds");
            assert!(
                (0..500).contains(&late),
                "{kind} was {late} ms late: {said}"
            );
        }
        assert_eq!(said.lines().count(), 4, "{said}");
    }
}

pub(crate) fn kvm_clones_do_not_see_each_other() {
    use crate::support::sparse_sum;
    let template = template();
    let sums = |dir: &std::path::Path| {
        let mut sums: Vec<_> = ["memory", "state", "layer", "manifest.json"]
            .iter()
            .map(|name| {
                let path = dir.join(name);
                let changed = path.metadata().and_then(|m| m.modified()).expect("a time");
                (name.to_string(), sparse_sum(&path).sha256, changed)
            })
            .collect();
        sums.sort();
        sums
    };
    let before = sums(template);
    let (a, b) = (TestVm::new(), TestVm::new());
    // Files and memory (a tmpfs is memory) of one clone are not visible in the other.
    for (vm, word) in [(&a, "alpha"), (&b, "beta")] {
        vm.sh(&format!("echo {word} | tee /root/f /dev/shm/f /etc/cube-test >/dev/null; sync; echo 3 > /proc/sys/vm/drop_caches"));
    }
    for (vm, word) in [(&a, "alpha"), (&b, "beta")] {
        assert_eq!(
            vm.sh("cat /root/f /dev/shm/f /etc/cube-test"),
            [word; 3].join("\n")
        );
    }
    let late = TestVm::new();
    assert_eq!(
        late.sh("ls /root/f /dev/shm/f /etc/cube-test 2>/dev/null | wc -l"),
        "0"
    );
    drop((a, b, late));
    assert_eq!(sums(template), before, "a clone wrote to its template");
    assert!(host::program().exists() && fs::metadata(template).is_ok());
}

/// An identity request is validated, and an invalid one changes nothing.
pub(crate) fn kvm_a_bad_identity_is_refused() {
    use model::{EntropySeed, Identity};
    let mut vm = TestVm::new();
    let name = vm.sh("hostname");
    for (hostname, machine_id) in [
        ("", "0"),
        ("a b", "00"),
        ("x", "zz"),
        (&*"y".repeat(64), ""),
    ] {
        let identity = Identity {
            hostname: hostname.into(),
            machine_id: machine_id.into(),
            entropy: EntropySeed::new([7; 32]),
        };
        let answer = vm.control().identity(identity, Duration::from_secs(10));
        let failure = crate::support::vm::refusal(answer).expect_err("a refusal");
        assert_eq!(
            failure.kind,
            vmm_control::FailureKind::AgentUnready,
            "{failure:?}"
        );
    }
    assert_eq!(vm.sh("hostname"), name);
}
