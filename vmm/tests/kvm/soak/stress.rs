//! stress-ng: every stressor of its classes, one after another.

use std::time::Duration;

use model::Bytes;
use test_cases::found;

use super::suite::upload;
use crate::support::{TestVm, vm::as_root};

const CLASSES: [&str; 9] = [
    "filesystem",
    "interrupt",
    "io",
    "memory",
    "network",
    "os",
    "pipe",
    "scheduler",
    "vm",
];
/// Time limit for one class. Most stressors take the second that they are given, a few take several.
const PATIENCE: Duration = Duration::from_secs(1800);
/// Stressors that are left out. `bigheap`, `brk` and `oom-pipe` exhaust memory on purpose, and the kernel then kills
/// arbitrary programs. `quota` fails without a disk that has quotas.
const LEFT_OUT: [&str; 4] = ["bigheap", "brk", "oom-pipe", "quota"];
/// The size of the last-level cache for `stream`, which allocates four times as much. The size that the CPU reports may be
/// more than a quarter of the guest's memory.
const STREAM: &str = "8M";
/// stress-ng's message if the earlier classes included all stressors of a class, which is not an error.
const NONE_LEFT: &str = "No stress workers invoked";
/// Levels of stress-ng's messages that report an error.
const FAULTS: [&str; 2] = ["stress-ng: fail:", "stress-ng: error:"];

/// A stressor verifies its own results where it can. The kernel log must have no complaint after each class.
pub(crate) fn soak_every_class_of_stress_ng() {
    let vm = TestVm::boot(|spec| spec.memory = Bytes::mib(1024));
    upload(&vm, "stress-ng/suite.tar");
    // The stressors `loop` and `tmpfs` fail without these.
    vm.sh("modprobe loop && mkdir -p /root/stress /root/tmpfs && mount -t tmpfs -o size=256m tmpfs /root/tmpfs");
    // On one CPU, `cyclic` cannot run as a deadline task: stress-ng requests 90 % of the CPU twice, for the stressor
    // and for its parent. A single such task is admitted.
    vm.sh("chrt -d --sched-runtime 90000 --sched-deadline 100000 --sched-period 100000 0 true");
    let mut done: Vec<String> = Vec::new();
    let mut faults = Vec::new();
    for class in CLASSES {
        let excluded: Vec<&str> = LEFT_OUT
            .into_iter()
            .chain(done.iter().map(String::as_str))
            .collect();
        let script = format!(
            "cd /root/stress; stress-ng --class {class} --sequential 1 --timeout 1 --verify --oomable --no-rand-seed \
             --cyclic-policy rr --stream-l3-size {STREAM} --exclude {} 2>&1; echo status $?",
            excluded.join(",")
        );
        let request = as_root("/bin/bash", &["-c", &script]);
        let out = vm.agent().exec(&request, PATIENCE).expect("an exec");
        let log = String::from_utf8_lossy(&out.stdout);
        eprintln!("--- {class}\n{log}");
        if log.contains(NONE_LEFT) {
            found!("{class}: all of its stressors belong to earlier classes, too");
            continue;
        }
        let run = dispatched(&log);
        let skipped = log.lines().filter(|line| is_skip(line)).count();
        assert!(!run.is_empty(), "{class}: no stressor ran");
        found!(
            "{class}: {} stressors, of which {skipped} skip themselves",
            run.len()
        );
        let is_fault = |line: &&str| FAULTS.iter().any(|level| line.starts_with(level));
        faults.extend(log.lines().filter(is_fault).map(str::to_owned));
        // 3: a stressor lacked a requirement and skipped itself.
        if !["status 0", "status 3"].contains(&log.lines().last().unwrap_or_default()) {
            faults.push(format!("{class} did not end with success"));
        }
        done.extend(run);
        assert_eq!(vm.sh("echo alive"), "alive");
        vm.assert_healthy();
    }
    for fault in &faults {
        found!("{fault}");
    }
    assert!(faults.is_empty(), "{} faults", faults.len());
}

/// The stressors in a line such as `… dispatching hogs: 1 access, 1 af-alg`.
fn dispatched(log: &str) -> Vec<String> {
    let list = |line: &str| Some(line.split_once("dispatching hogs: ")?.1.to_owned());
    let lists: Vec<String> = log.lines().filter_map(list).collect();
    let entries = lists.iter().flat_map(|list| list.split(", "));
    entries
        .filter_map(|entry| Some(entry.split_once(' ')?.1.trim().to_owned()))
        .collect()
}

fn is_skip(line: &str) -> bool {
    ["skipping", "skipped", "aborted early"]
        .iter()
        .any(|word| line.contains(word))
}
