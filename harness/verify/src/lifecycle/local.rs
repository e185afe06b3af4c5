//! The processes and files of a server that the suite has started.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use model::chain;
use stats::random::SplitMix64;
use testbed::{leftovers, server::LocalServer};

use crate::remains::Remains;

/// Timeout of background work in the server.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
/// Directory in which each server pins its eBPF objects in its own subdirectory, in the mount namespace of the
/// suite.
const PINS: &str = "/sys/fs/bpf/cube";
/// Network devices in the namespace of the suite.
const DEVICES: &str = "/proc/thread-self/net/dev";

#[derive(Debug)]
pub(super) struct Local {
    server: LocalServer,
    remains: Remains,
    /// Source of the moments of kills during a start.
    random: SplitMix64,
    /// Duration of the last start.
    typical: Duration,
}

/// Devices and pins of the namespaces before the server was started.
#[derive(Debug)]
pub(super) struct Before {
    devices: BTreeSet<String>,
    pins: BTreeSet<String>,
}

/// Yields polls until [`PATIENCE`] is over.
pub(super) fn polls() -> impl Iterator<Item = ()> {
    let deadline = Instant::now() + PATIENCE;
    std::iter::from_fn(move || (Instant::now() < deadline).then_some(()))
}

/// Kills the VMM whose files are in `dir` with SIGKILL. `None`: there is no such VMM.
pub(super) fn kill_vmm(dir: &Path) -> Option<io::Result<()>> {
    let pid = *leftovers::processes_of(dir).first()?;
    Some(leftovers::kill_and_wait(pid))
}

/// Whether a VMM with files in `dir` is running.
pub(super) fn has_vmm(dir: &Path) -> bool {
    !leftovers::processes_of(dir).is_empty()
}

impl Local {
    pub(super) fn new(server: LocalServer, seed: u64) -> Self {
        let mut remains = Remains::default();
        remains.watch(&server.state());
        Self {
            server,
            remains,
            random: SplitMix64::new(seed),
            typical: Duration::from_millis(300),
        }
    }

    pub(super) fn log(&self) -> PathBuf {
        self.server.log()
    }

    /// The directory of a sandbox.
    pub(super) fn dir_of(&self, id: &str) -> PathBuf {
        self.server.sandboxes().join(id)
    }

    pub(super) fn kill_server(&mut self, twice: bool) -> Result<(), String> {
        let failed = |error: &dyn std::error::Error| format!("the server: {}", chain(error));
        self.server.kill().map_err(|e| failed(&e))?;
        if twice {
            self.server.begin().map_err(|e| failed(&e))?;
            thread::sleep(self.typical.mul_f64(1.2 * self.random.unit()));
            if let Some(error) = self.server.exited() {
                return Err(failed(&error));
            }
            self.server.kill().map_err(|e| failed(&e))?;
        }
        let began = Instant::now();
        self.server.restart().map_err(|e| failed(&e))?;
        self.typical = began.elapsed();
        Ok(())
    }

    /// Leftovers of sandboxes and snapshots that have ended, and of forks.
    pub(super) fn leaks(&self, sandboxes: &[&str], snapshots: &[&str]) -> Vec<String> {
        let mut polls = polls();
        loop {
            let left = self.left(sandboxes, snapshots);
            if left.is_empty() || polls.next().is_none() {
                return left;
            }
            thread::sleep(POLL);
        }
    }

    fn left(&self, sandboxes: &[&str], snapshots: &[&str]) -> Vec<String> {
        let mut left = Vec::new();
        let state = self.server.state();
        for id in sandboxes {
            let dir = self.dir_of(id);
            for pid in leftovers::processes_of(&dir) {
                left.push(format!(
                    "process {pid} of sandbox {id}, which has ended, is left"
                ));
            }
            if dir.exists() {
                left.push(format!(
                    "directory {} of an ended sandbox is left",
                    dir.display()
                ));
            }
        }
        for group in self.remains.groups_of(sandboxes) {
            left.push(format!(
                "cgroup {} of an ended sandbox is left",
                group.display()
            ));
        }
        for dir in snapshots.iter().map(|id| state.join("templates").join(id)) {
            if dir.exists() {
                left.push(format!(
                    "directory {} of a removed snapshot is left",
                    dir.display()
                ));
            }
        }
        for dir in names(&state.join("forks")) {
            left.push(format!(
                "the snapshot {dir} of forks that have started is left"
            ));
        }
        left
    }

    /// Ends the server, and returns what it left behind in its state directory and in the namespaces.
    pub(super) fn end(self, run_dir: &Path, before: &Before) -> Vec<String> {
        let Self {
            server, remains, ..
        } = self;
        let state = server.state();
        drop(server);
        let mut left = remains.find(run_dir);
        for part in ["sandboxes", "forks", "damaged"] {
            let of_part = names(&state.join(part));
            left.extend(
                of_part
                    .iter()
                    .map(|name| format!("the server left {part}/{name} behind")),
            );
        }
        let Before { devices, pins } = Before::read();
        let devices = devices.difference(&before.devices);
        left.extend(devices.map(|name| format!("the server left network device {name} behind")));
        let pins = pins.difference(&before.pins);
        left.extend(pins.map(|name| format!("the server left {PINS}/{name} behind")));
        left
    }
}

impl Before {
    pub(super) fn read() -> Self {
        let devices = fs::read_to_string(DEVICES).unwrap_or_default();
        let devices = devices.lines().filter_map(|line| line.split_once(':'));
        Self {
            devices: devices.map(|(name, _)| name.trim().to_owned()).collect(),
            pins: names(Path::new(PINS)),
        }
    }
}

/// Names of the entries of a directory; empty if the directory does not exist.
fn names(dir: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}
