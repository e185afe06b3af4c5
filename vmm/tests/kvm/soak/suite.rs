//! Test suites of other projects. They run in a guest and, as a reference, on the host's kernel with the same files.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use model::Bytes;
use test_cases::found;

use crate::support::{TestVm, host, run_dir, vm::as_root};

/// Time limit for one run of a suite.
const PATIENCE: Duration = Duration::from_secs(3600);
/// How often a test that passes on the host but not in the guest is repeated in the guest.
const RETRIES: usize = 2;
/// Path of a suite's results, in both places.
pub(super) const RESULT: &str = "/root/suite-result";
/// Path of a suite's output, in both places.
pub(super) const LOG: &str = "/root/suite-log";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed,
    Failed,
    /// With the reason that the suite prints.
    Skipped(String),
}

/// By name of the test.
pub(super) type Outcomes = BTreeMap<String, Outcome>;

pub(super) struct Suite {
    /// The file below `soak/` in the artifacts: a tar archive that is unpacked at the root directory.
    pub(super) archive: &'static str,
    /// The modules or files of the suite to run. CUBE_SOAK_TESTS replaces them, separated by spaces.
    pub(super) parts: &'static [&'static str],
    /// The shell script that runs these parts. It writes [`RESULT`] and [`LOG`].
    pub(super) run: fn(&[String]) -> String,
    /// The script that repeats these tests, given by the names in [`Outcomes`].
    pub(super) repeat: fn(&[String]) -> String,
    /// The outcomes in the text of [`RESULT`].
    pub(super) parse: fn(&str) -> Outcomes,
    /// Accepted differences, one per line: the name of a test, or its prefix with `*`, a colon, the reason.
    pub(super) differences: &'static str,
    /// Minimum number of tests that must pass on the host. With fewer, the reference did not run as intended.
    pub(super) least: usize,
}

impl Suite {
    /// Runs the suite in a guest and on the host. Every test that passes on the host must pass in the guest, possibly
    /// after repetition, unless `differences` has a reason.
    pub(super) fn compare(&self) {
        let given = std::env::var("CUBE_SOAK_TESTS").ok();
        let parts: Vec<String> = match &given {
            Some(given) => given.split_whitespace().map(str::to_owned).collect(),
            None => self.parts.iter().map(|&part| part.to_owned()).collect(),
        };
        let script = (self.run)(&parts);
        let dir = run_dir::make("suite");
        let reference = Reference::new(&dir, self.archive);
        let vm = TestVm::boot(|spec| spec.memory = Bytes::mib(2048));
        upload(&vm, self.archive);
        let (guest, host) = thread::scope(|scope| {
            let host = scope.spawn(|| (self.parse)(&reference.run(&script)));
            let guest = self.in_guest(&vm, &script);
            (guest, host.join().expect("a run on the host"))
        });
        let passed = |outcomes: &Outcomes| count(outcomes, |o| *o == Outcome::Passed);
        found!(
            "{} of {} tests pass in the guest, {} of {} on the host",
            passed(&guest),
            guest.len(),
            passed(&host),
            host.len()
        );
        assert!(
            given.is_some() || passed(&host) >= self.least,
            "the reference did not run: {}",
            reference.log()
        );
        let mut worse = differing(&host, &guest);
        for attempt in 1..=RETRIES {
            let names: Vec<String> = worse
                .keys()
                .filter(|name| self.reason(name).is_none())
                .cloned()
                .collect();
            if names.is_empty() {
                break;
            }
            let again = self.in_guest(&vm, &(self.repeat)(&names));
            for name in names {
                if again.get(&name) == Some(&Outcome::Passed) {
                    found!("{name} failed in the guest and passed when repeated ({attempt})");
                    worse.remove(&name);
                }
            }
            eprintln!("{}", tail(&vm.sh(&format!("tail -n 300 {LOG}"))));
        }
        let mut unexplained = 0;
        for (name, outcome) in &worse {
            match self.reason(name) {
                Some(reason) => found!("{name} passes on the host only: {reason}"),
                None => {
                    unexplained += 1;
                    found!("{name} passes on the host only, unexplained: {outcome:?}");
                }
            }
        }
        assert_eq!(unexplained, 0, "tests pass on the host only");
        assert_eq!(vm.sh("echo alive"), "alive");
        vm.assert_healthy();
    }

    fn in_guest(&self, vm: &TestVm, script: &str) -> Outcomes {
        let request = as_root("/bin/sh", &["-c", script]);
        let mut agent = vm.agent();
        agent.exec(&request, PATIENCE).expect("an exec");
        let result = agent.read_file(RESULT, Some("root"));
        (self.parse)(&String::from_utf8_lossy(&result.expect("a result")))
    }

    fn reason(&self, name: &str) -> Option<&'static str> {
        let mut lines = self.differences.lines().filter_map(|l| l.split_once(": "));
        let matches = |pattern: &str| match pattern.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
            None => name == pattern,
        };
        lines.find_map(|(pattern, reason)| matches(pattern).then_some(reason))
    }
}

/// The tests that pass on the host but not in the guest, with their outcome in the guest.
fn differing(host: &Outcomes, guest: &Outcomes) -> Outcomes {
    let passed = host.iter().filter(|(_, o)| **o == Outcome::Passed);
    let outcome = |name: &String| guest.get(name).cloned().unwrap_or(Outcome::Failed);
    passed
        .map(|(name, _)| (name.clone(), outcome(name)))
        .filter(|(_, outcome)| *outcome != Outcome::Passed)
        .collect()
}

fn count(outcomes: &Outcomes, what: fn(&Outcome) -> bool) -> usize {
    outcomes.values().filter(|o| what(o)).count()
}

/// The last 20 kB of a text.
fn tail(text: &str) -> &str {
    let from = text.char_indices().rev().nth(20_000).map_or(0, |(i, _)| i);
    &text[from..]
}

/// A file that `cargo xtask soak` prepares.
pub(super) fn prepared(name: &str) -> PathBuf {
    let path = host::suites().join(name);
    assert!(
        path.exists(),
        "{} is missing: run `cargo xtask soak` once",
        path.display()
    );
    path
}

/// Unpacks an archive of `cargo xtask soak` at the guest's root directory.
pub(super) fn upload(vm: &TestVm, archive: &str) {
    let bytes = fs::read(prepared(archive)).expect("an archive");
    vm.agent()
        .write_file("/root/archive.tar", &bytes, Some("root"))
        .expect("an upload");
    vm.sh("tar -xf /root/archive.tar -C / && rm /root/archive.tar");
}

/// The guest's root image and a suite in a directory of the host.
struct Reference {
    root: PathBuf,
}

impl Reference {
    fn new(dir: &Path, archive: &str) -> Self {
        let root = dir.join("root");
        let extract = format!("--extract={}", root.display());
        run(Command::new("fsck.erofs")
            .arg(extract)
            .arg(host::guest().root));
        let mut tar = Command::new("tar");
        tar.arg("-xf").arg(prepared(archive)).arg("-C").arg(&root);
        run(&mut tar);
        Self { root }
    }

    /// Runs a script on this host's kernel, in separate namespaces. Returns the text of [`RESULT`].
    fn run(&self, script: &str) -> String {
        let script = format!(
            "mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t tmpfs tmpfs /dev; mkdir /dev/pts /dev/shm; \
             for n in 'null 1 3' 'zero 1 5' 'full 1 7' 'random 1 8' 'urandom 1 9' 'tty 5 0'; do set -- $n; mknod -m 666 /dev/$1 c $2 $3; done; \
             mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts; ln -s pts/ptmx /dev/ptmx; ln -s /proc/self/fd /dev/fd; \
             for n in 0/stdin 1/stdout 2/stderr; do ln -s /proc/self/fd/${{n%/*}} /dev/${{n#*/}}; done; \
             mount -t tmpfs -o mode=1777 tmpfs /dev/shm; ip link set lo up; {script}"
        );
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--net", "--pid", "--uts", "--ipc", "--fork"])
            .args(["--kill-child", "chroot"])
            .arg(&self.root)
            .args(["/bin/sh", "-c", &script]);
        run(&mut command);
        let result = fs::read(self.root.join(&RESULT[1..])).expect("a result on the host");
        String::from_utf8_lossy(&result).into_owned()
    }

    fn log(&self) -> String {
        let log = fs::read(self.root.join(&LOG[1..])).unwrap_or_default();
        tail(&String::from_utf8_lossy(&log)).to_owned()
    }
}

fn run(command: &mut Command) {
    let out = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{command:?}: {errors}");
}
