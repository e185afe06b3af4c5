//! Tests that take minutes: `cargo xtask soak`.

mod diffs;
mod files;
mod node;
mod python;
mod stress;
mod suite;

use std::{fs, path::PathBuf, time::Duration};

use model::Bytes;
use test_cases::found;

pub(crate) use self::{
    diffs::soak_the_cost_of_diffs, files::soak_files_across_generations,
    node::soak_node_test_suite_as_on_the_host, python::soak_python_test_suite_as_on_the_host,
    stress::soak_every_class_of_stress_ng,
};
use crate::support::{TestVm, run_dir, vm::as_root};

/// Duration of the mixed stress. CUBE_SOAK_SECONDS shortens it during development.
fn duration() -> Duration {
    let given = std::env::var("CUBE_SOAK_SECONDS").ok();
    Duration::from_secs(given.and_then(|s| s.parse().ok()).unwrap_or(600))
}

/// Processes, memory, mappings, files, signals, threads and vector registers, all at once and repeatedly.
pub(crate) fn soak_mixed_stress() {
    const WORK: [(&str, &str); 9] = [
        ("stale", ""),
        ("cow", ""),
        ("threads", ""),
        ("vectors", ""),
        ("signals", "loaded"),
        ("ipc", ""),
        ("bases", ""),
        ("many", "80"),
        ("ptrace", ""),
    ];
    let vm = TestVm::boot(|spec| spec.memory = Bytes::mib(1024));
    let until = duration().as_secs();
    let mut script = format!("end=$(( $(cut -d. -f1 /proc/uptime) + {until} ))\n");
    script.push_str("loop() { n=0; while [ $(cut -d. -f1 /proc/uptime) -lt $end ]; do \"$@\" >/tmp/out.${1##*/} 2>&1 || { echo \"FAILED $*\"; cat /tmp/out.${1##*/}; return; }; n=$((n+1)); done; echo \"$1 $n times\"; }\n");
    for (name, args) in WORK {
        script.push_str(&format!("loop {} {args} &\n", vm.upload(name)));
    }
    script.push_str(&format!("loop {} &\n", vm.upload("files")));
    script.push_str("loop python3 -c 'import subprocess; [subprocess.run([\"/bin/true\"]) for _ in range(20)]' &\n");
    script.push_str("loop dd if=/dev/zero of=/root/big bs=1M count=64 conv=fsync &\nwait\n");
    let request = as_root("/bin/bash", &["-c", &script]);
    let out = vm
        .agent()
        .exec(&request, duration() + Duration::from_secs(300))
        .expect("an exec");
    let said = String::from_utf8_lossy(&out.stdout);
    eprintln!("{said}");
    assert!(!said.contains("FAILED"), "{said}");
    assert_eq!(said.matches(" times").count(), WORK.len() + 3, "{said}");
    let counts = said.lines().filter_map(|line| line.strip_suffix(" times"));
    let runs = counts.filter_map(|line| line.rsplit(' ').next()?.parse::<u32>().ok());
    found!(
        "{} programs at once, {} runs",
        WORK.len() + 3,
        runs.sum::<u32>()
    );
    assert_eq!(vm.sh("echo alive"), "alive");
    vm.assert_healthy();
}

/// Each generation is a clone of the previous one's snapshot and appends a line.
pub(crate) fn soak_two_hundred_generations() {
    const GENERATIONS: usize = 200;
    let parent = run_dir::make("generations");
    let mut vm = TestVm::new();
    let mut last: Option<PathBuf> = None;
    for generation in 1..=GENERATIONS {
        vm.sh(&format!(
            "echo {generation} >> /root/generations; echo {generation} >> /dev/shm/generations"
        ));
        let dir = parent.join(generation.to_string());
        vm.control().snapshot(&dir).expect("a snapshot");
        vm = TestVm::clone_of(&dir);
        let lines = vm.sh(
            "wc -l < /root/generations; wc -l < /dev/shm/generations; tail -n 1 /root/generations",
        );
        assert_eq!(
            lines,
            [
                generation.to_string(),
                generation.to_string(),
                generation.to_string()
            ]
            .join("\n")
        );
        if let Some(old) = last.replace(dir) {
            fs::remove_dir_all(old).expect("a removal");
        }
    }
    found!("{GENERATIONS} generations, each with the lines of all before it");
    vm.assert_healthy();
}
