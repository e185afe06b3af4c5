//! Tests that take minutes: `cargo xtask soak`.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use model::Bytes;
use vmm_control::SnapshotContent;

use crate::support::{TestVm, host, run_dir, vm::as_root};

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
    vm.assert_healthy();
}

const MODULES: [&str; 12] = [
    "test_os",
    "test_posix",
    "test_subprocess",
    "test_threading",
    "test_mmap",
    "test_signal",
    "test_socket",
    "test_fork1",
    "test_select",
    "test_epoll",
    "test_time",
    "test_fcntl",
];

/// The outcome of each test: `ok`, `FAIL`, `ERROR`, `skipped …`.
fn outcomes(log: &str) -> BTreeMap<String, String> {
    let mut outcomes = BTreeMap::new();
    for line in log.lines() {
        // test_chdir (test.test_os.OSTests.test_chdir) ... ok
        let Some((head, outcome)) = line.split_once(" ... ") else {
            continue;
        };
        let name = head
            .split_once('(')
            .and_then(|(_, n)| n.split_once(')'))
            .map(|(n, _)| n);
        if let Some(name) = name.filter(|n| n.starts_with("test.")) {
            outcomes.insert(name.to_owned(), outcome.trim().to_owned());
        }
    }
    outcomes
}

fn run(command: &mut Command) -> String {
    let out = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{command:?}: {said}");
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Debian's test suite for its Python, unpacked and repacked as a tar file.
fn test_suite(dir: &Path) -> PathBuf {
    run(Command::new("apt-get")
        .args(["download", "libpython3.11-testsuite"])
        .current_dir(dir));
    let package = fs::read_dir(dir)
        .expect("a directory")
        .flatten()
        .map(|e| e.path());
    let package = package
        .into_iter()
        .find(|p| p.extension().is_some_and(|e| e == "deb"))
        .expect("a package");
    let tar = dir.join("suite.tar");
    let out = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .output()
        .expect("dpkg-deb");
    assert!(out.status.success());
    fs::write(&tar, out.stdout).expect("a tar file");
    tar
}

/// The script that runs a module of the test suite. It leaves out vsock tests: a guest without the kernel's vsock
/// loopback cannot connect to its own CID, and tests that try would wait forever. The tests run in a tmpfs, because on
/// an overlay the inode numbers in directory listings differ from those of stat.
fn tests(module: &str) -> String {
    format!(
        "mount -t tmpfs tmpfs /tmp; cd /tmp; timeout -s KILL 900 python3 -m test -v -i '*VSOCK*' {module} 2>&1; cd /; umount -l /tmp"
    )
}

/// Runs a module on this host's kernel, in a directory with the content of the guest's root image.
fn on_the_host(suite: &Path, module: &str, root: &Path) -> String {
    if !root.exists() {
        let extract = format!("--extract={}", root.display());
        run(Command::new("fsck.erofs")
            .arg(extract)
            .arg(host::guest().root));
        run(Command::new("tar")
            .arg("-xf")
            .arg(suite)
            .arg("-C")
            .arg(root));
    }
    let script = format!(
        "mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t tmpfs tmpfs /dev; mkdir /dev/pts /dev/shm; \
         for n in 'null 1 3' 'zero 1 5' 'full 1 7' 'random 1 8' 'urandom 1 9' 'tty 5 0'; do set -- $n; mknod -m 666 /dev/$1 c $2 $3; done; \
         mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts; ln -s pts/ptmx /dev/ptmx; ln -s /proc/self/fd /dev/fd; \
         mount -t tmpfs -o mode=1777 tmpfs /dev/shm; ip link set lo up; {}",
        tests(module)
    );
    run(Command::new("unshare")
        .args([
            "--mount",
            "--net",
            "--pid",
            "--uts",
            "--ipc",
            "--fork",
            "--kill-child",
            "chroot",
        ])
        .arg(root)
        .args(["/bin/sh", "-c", &script]))
}

/// Runs the same programs with the same tests on the host and in a guest.
pub(crate) fn soak_python_test_suite_as_on_the_host() {
    let dir = run_dir::make("python");
    let suite = test_suite(&dir);
    let vm = TestVm::boot(|spec| spec.memory = Bytes::mib(1024));
    vm.agent()
        .write_file(
            "/root/suite.tar",
            &fs::read(&suite).expect("a tar file"),
            Some("root"),
        )
        .expect("an upload");
    vm.sh("tar -xf /root/suite.tar -C / && rm /root/suite.tar");
    let mut worse = Vec::new();
    for module in MODULES {
        let start = Instant::now();
        let request = as_root("/bin/sh", &["-c", &tests(module)]);
        let out = vm
            .agent()
            .exec(&request, Duration::from_secs(1000))
            .expect("an exec");
        let guest = outcomes(&String::from_utf8_lossy(&out.stdout));
        let host = outcomes(&on_the_host(&suite, module, &dir.join("root")));
        let count = |outcomes: &BTreeMap<String, String>, what| {
            outcomes.values().filter(|o| o.starts_with(what)).count()
        };
        eprintln!(
            "{module}: guest {} ok, {} skipped of {}; host {} ok, {} skipped of {}; {:?}",
            count(&guest, "ok"),
            count(&guest, "skipped"),
            guest.len(),
            count(&host, "ok"),
            count(&host, "skipped"),
            host.len(),
            start.elapsed()
        );
        assert!(!host.is_empty(), "{module} did not run on the host");
        for (test, there) in &host {
            let here = guest.get(test).map_or("absent", String::as_str);
            if there == "ok" && here != "ok" {
                worse.push(format!("{test}: {here}"));
            }
        }
    }
    // The suite itself skips tests for features that the guest's older kernel lacks, with the reason.
    for line in &worse {
        eprintln!("ok on the host only: {line}");
    }
    let failed: Vec<_> = worse
        .iter()
        .filter(|line| !line.contains(": skipped"))
        .collect();
    assert!(failed.is_empty(), "{failed:#?}");
    assert_eq!(vm.sh("echo alive"), "alive");
    vm.assert_healthy();
}

/// Prints the cost of pause and resume, with a full snapshot and with a diff: times in ms (median of [`ROUNDS`]) and
/// bytes stored. Does not check times; `docs/design/005-diff-snapshots.md` contains a run.
pub(crate) fn soak_the_cost_of_diffs() {
    use vmm_control::template::LoadedTemplate;
    let loaded = LoadedTemplate::load(crate::support::template()).ok();
    let base = loaded.as_ref().map(LoadedTemplate::dir);
    eprintln!(
        "state of the clone        content    save   MB stored   restore  first exec  private MB"
    );
    for (state, script) in [
        ("at rest", "true"),
        ("4 MiB in memory", "head -c 4M /dev/urandom > /dev/shm/x"),
        ("64 MiB in memory", "head -c 64M /dev/urandom > /dev/shm/x"),
        (
            "64 MiB on disk",
            "head -c 64M /dev/urandom > /root/x; sync; echo 3 > /proc/sys/vm/drop_caches",
        ),
    ] {
        for content in [SnapshotContent::Full, SnapshotContent::Diff] {
            let stored = cost_of(state, script, content, base.as_deref());
            let diff_at_rest = content == SnapshotContent::Diff && state == "at rest";
            assert!(!diff_at_rest || stored < 16.0, "{stored} MB");
        }
    }
}

const ROUNDS: usize = 7;

/// Prints one line of the table. Returns the megabytes stored.
fn cost_of(state: &str, script: &str, content: SnapshotContent, base: Option<&Path>) -> f64 {
    let ms = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
    let mut columns: [Vec<f64>; 5] = Default::default();
    for _ in 0..ROUNDS {
        let mut vm = TestVm::clone_of(base.unwrap_or(crate::support::template()));
        vm.sh(script);
        let dir = run_dir::make("cost").join("t");
        let start = Instant::now();
        let written = vm.control().write_snapshot(&dir, content);
        written.expect("a snapshot");
        columns[0].push(ms(start));
        drop(vm);
        columns[1].push(stored(&dir));
        let mut clone = TestVm::spawn();
        let mut spec = clone.restore_spec(&dir);
        spec.base = base.map(Path::to_owned);
        let start = Instant::now();
        clone.control().restore(spec, None).expect("a restore");
        columns[2].push(ms(start));
        clone.control().resume().expect("a resume");
        clone.identify();
        clone.exec("/usr/local/bin/probe", &[]);
        columns[3].push(ms(start));
        let private = clone.stats().guest_private_bytes.unwrap_or(0);
        columns[4].push(mb(private));
        drop(clone);
        fs::remove_dir_all(dir).expect("a removal");
    }
    let [save, bytes, restore, exec, private] = columns.map(|mut values| {
        values.sort_by(f64::total_cmp);
        values[ROUNDS / 2]
    });
    let content = format!("{content:?}");
    eprintln!(
        "{state:<24}  {content:<7} {save:>7.1} {bytes:>11.1} {restore:>9.1} {exec:>11.1} {private:>11.1}"
    );
    bytes
}

/// Disk space of a directory's files in megabytes.
fn stored(dir: &Path) -> f64 {
    use std::os::unix::fs::MetadataExt;
    let files = fs::read_dir(dir).expect("a directory").flatten();
    let blocks = files.map(|file| file.metadata().expect("a file").blocks());
    mb(blocks.sum::<u64>() * 512)
}

fn mb(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes / 1000).unwrap_or(u32::MAX)) / 1e3
}
