//! Directories of runs below /run/cube ([`run_root`]), and the removal of directories and processes that killed runs
//! left behind.
//!
//! ```text
//! /run/cube/bench-<pid>-<start time>/      one for each cube-bench process
//!     <round>-<arrival>/                   one for each clone: vsock.sock, console.log, vmm.stderr
//! ```
//! The name of a run's directory contains the process id and the start time of its owner, so a dead run is recognized
//! even if its process id has been reused. A VMM belongs to a run if its standard error is a file below the run's
//! directory. A VMM exits when its control socket closes, so usually only directories are left.
//!
//! Other users may be able to create the root before this program does. Before the root is used or swept, it must
//! therefore be a directory (not a symbolic link) that this user owns and to which no other user can write. It is then
//! made inaccessible to other users.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use model::ProcessStat;
use nix::{
    libc,
    sys::{
        signal::{Signal, kill},
        statfs::{TMPFS_MAGIC, statfs},
    },
    unistd::{Pid, geteuid},
};

/// The root on most hosts.
const RUN_ROOT: &str = "/run/cube";
/// The root if `/run` is on a disk and `/dev/shm` is not.
const MEMORY_ROOT: &str = "/dev/shm/cube";
const PREFIX: &str = "bench-";
/// Longest wait for a killed VMM to exit.
const KILL_WAIT: Duration = Duration::from_secs(5);

/// The default root: below /run, or below /dev/shm if that is in memory and /run is not.
///
/// A round creates and removes a dozen files for each sandbox. With a root in memory, they do not add the latency of a
/// disk to the measurements.
#[must_use]
pub fn run_root() -> PathBuf {
    let in_memory =
        |path: &str| statfs(path).is_ok_and(|system| system.filesystem_type() == TMPFS_MAGIC);
    choose_root(in_memory).into()
}

fn choose_root(in_memory: impl Fn(&str) -> bool) -> &'static str {
    if in_memory("/dev/shm") && !in_memory("/run") {
        MEMORY_ROOT
    } else {
        RUN_ROOT
    }
}

/// The directory of this process's run. Dropping it removes the directory.
#[derive(Debug)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// Creates the directory below `root`.
    ///
    /// # Errors
    /// Returns an error if the directory exists or cannot be created, or if other users could have changed the root.
    pub fn create(root: &Path) -> io::Result<Self> {
        let pid = std::process::id();
        let start =
            start_time(pid).ok_or_else(|| io::Error::other("cannot read /proc/self/stat"))?;
        let path = root.join(format!("{PREFIX}{pid}-{start}"));
        if let Some(above) = root.parent() {
            fs::create_dir_all(above)?;
        }
        match private().create(root) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => make_private(root)?,
        }
        private().create(&path)?;
        Ok(Self(path))
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Creates a directory for one clone in the directory of the run.
    ///
    /// # Errors
    /// Returns an error if the directory exists or cannot be created.
    pub fn clone_dir(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.0.join(name);
        private().create(&path)?;
        Ok(path)
    }
}

fn private() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    builder
}

/// Makes a directory private, after checking that no other user could have created or filled it.
///
/// # Errors
/// Returns an error if the path is missing, is not a directory or is a symbolic link, if another user owns it, or if
/// other users may write to it.
fn make_private(dir: &Path) -> io::Result<()> {
    let mut options = File::options();
    options.read(true);
    options.custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW);
    let opened = options.open(dir)?;
    let meta = opened.metadata()?;
    let (owner, mode) = (meta.uid(), meta.mode() & 0o7777);
    if owner != geteuid().as_raw() || mode & 0o022 != 0 {
        return Err(io::Error::other(format!(
            "{} is open to others (owner {owner}, mode {mode:o}): remove it if it is not yours, or name another \
             directory with --run-root",
            dir.display()
        )));
    }
    opened.set_permissions(Permissions::from_mode(0o700))
}

impl Drop for RunDir {
    fn drop(&mut self) {
        // If this fails, the next sweep removes the directory.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Result of a sweep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Directories of dead runs that were removed.
    pub dirs: Vec<PathBuf>,
    /// Process ids of VMMs of dead runs that were killed.
    pub processes: Vec<u32>,
    /// Directories that could not be removed and processes that could not be killed, each with the error.
    pub remaining: Vec<String>,
}

impl Swept {
    /// The result in one line; `None` if there was nothing to remove.
    #[must_use]
    pub fn describe(&self) -> Option<String> {
        if self == &Self::default() {
            return None;
        }
        let mut text = format!(
            "removed {} directories and killed {} processes of dead runs",
            self.dirs.len(),
            self.processes.len()
        );
        for what in &self.remaining {
            text.push_str("; could not remove ");
            text.push_str(what);
        }
        Some(text)
    }
}

/// Kills the VMMs and removes the directories of all runs whose owner no longer exists.
///
/// # Errors
/// Returns an error if the root exists and cannot be listed, or if other users could have changed it. Failures to
/// remove single directories or processes are recorded in [`Swept::remaining`].
pub fn sweep(root: &Path) -> io::Result<Swept> {
    let mut swept = Swept::default();
    for dir in dead_runs(root)? {
        for pid in processes_of(&dir) {
            match kill_and_wait(pid) {
                Ok(()) => swept.processes.push(pid),
                Err(e) => swept.remaining.push(format!("process {pid}: {e}")),
            }
        }
        match fs::remove_dir_all(&dir) {
            Ok(()) => swept.dirs.push(dir),
            Err(e) => swept.remaining.push(format!("{}: {e}", dir.display())),
        }
    }
    Ok(swept)
}

/// Directories of the runs whose owner no longer exists.
///
/// # Errors
/// Returns an error if the root exists and cannot be listed, or if other users could have changed it.
fn dead_runs(root: &Path) -> io::Result<Vec<PathBuf>> {
    match make_private(root) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        checked => checked?,
    }
    let entries = match fs::read_dir(root) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut dead = Vec::new();
    for entry in entries {
        let entry = entry?;
        if let Some((pid, start)) = owner(&entry.file_name().to_string_lossy())
            && start_time(pid) != Some(start)
        {
            dead.push(entry.path());
        }
    }
    Ok(dead)
}

/// Process id and start time of a run's owner, from the name of its directory.
fn owner(name: &str) -> Option<(u32, u64)> {
    let (pid, start) = name.strip_prefix(PREFIX)?.split_once('-')?;
    Some((pid.parse().ok()?, start.parse().ok()?))
}

/// Start time of a process, in clock ticks since boot. `None` if there is no such process.
fn start_time(pid: u32) -> Option<u64> {
    Some(stat(pid)?.start_ticks)
}

fn stat(pid: u32) -> Option<ProcessStat> {
    ProcessStat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Ids of the processes whose standard error is a file below `dir`.
pub fn processes_of(dir: &Path) -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            fs::read_link(format!("/proc/{pid}/fd/2")).is_ok_and(|file| file.starts_with(dir))
        })
        .collect()
}

pub fn kill_and_wait(pid: u32) -> io::Result<()> {
    let raw = i32::try_from(pid).map_err(io::Error::other)?;
    let started = start_time(pid);
    match kill(Pid::from_raw(raw), Signal::SIGKILL) {
        Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
        Err(e) => return Err(e.into()),
    }
    let deadline = Instant::now() + KILL_WAIT;
    while started.is_some() && start_time(pid) == started && !is_zombie(pid) {
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Whether a process has exited but has not been waited for, or no longer exists. In both cases, its memory and files
/// are released.
#[must_use]
pub fn is_zombie(pid: u32) -> bool {
    !stat(pid).is_some_and(|stat| stat.is_alive())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_in_memory_if_possible() {
        assert_eq!(choose_root(|_| true), RUN_ROOT);
        assert_eq!(choose_root(|path| path == "/dev/shm"), MEMORY_ROOT);
        assert_eq!(choose_root(|path| path == "/run"), RUN_ROOT);
        assert_eq!(choose_root(|_| false), RUN_ROOT);
    }
    use std::process::{Command, Stdio};

    #[test]
    fn a_sweep_removes_dead_runs_with_their_processes_and_keeps_living_ones() {
        let root = tempfile::tempdir().unwrap();
        let living = RunDir::create(root.path()).unwrap();
        let kept = living.clone_dir("0-1").unwrap();
        // This process's id with a different start time: a dead run whose id was reused.
        let dead = root.path().join(format!("bench-{}-1", std::process::id()));
        fs::create_dir_all(dead.join("0-0")).unwrap();
        let log = File::create(dead.join("0-0").join("vmm.stderr")).unwrap();
        let mut child = Command::new("sleep")
            .arg("60")
            .stderr(Stdio::from(log))
            .spawn()
            .unwrap();
        fs::create_dir(root.path().join("something-else")).unwrap();

        let swept = sweep(root.path()).unwrap();
        assert_eq!(swept.dirs, std::slice::from_ref(&dead));
        assert_eq!(swept.processes, [child.id()]);
        assert_eq!(swept.remaining, Vec::<String>::new());
        assert!(!child.wait().unwrap().success());
        assert!(!dead.exists() && kept.exists());
        assert!(root.path().join("something-else").exists());

        assert_eq!(sweep(root.path()).unwrap().describe(), None);
        let path = living.path().to_owned();
        drop(living);
        assert!(!path.exists());
    }

    #[test]
    fn a_root_that_other_users_could_have_changed_is_neither_used_nor_swept() {
        let place = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        let refused = |root: &Path, why: &str| {
            let e = RunDir::create(root).unwrap_err().to_string();
            assert!(e.contains(why), "{e}");
            sweep(root).unwrap_err();
        };
        // A root that others can read is made private.
        let own = place.path().join("own");
        DirBuilder::new().mode(0o755).create(&own).unwrap();
        let run = RunDir::create(&own).unwrap();
        assert_eq!((mode(&own), mode(run.path())), (0o700, 0o700));
        // A root that others can write to is rejected, because its content may be theirs.
        let dead = own.join(format!("bench-{}-1", std::process::id()));
        fs::create_dir(&dead).unwrap();
        fs::set_permissions(&own, Permissions::from_mode(0o777)).unwrap();
        refused(&own, "mode 777");
        assert!(dead.exists());
        let link = place.path().join("link");
        std::os::unix::fs::symlink(place.path().join("elsewhere"), &link).unwrap();
        refused(&link, "");
        fs::create_dir(place.path().join("elsewhere")).unwrap();
        refused(&link, "");
        assert!(
            fs::read_dir(place.path().join("elsewhere"))
                .unwrap()
                .next()
                .is_none()
        );
        if geteuid().is_root() {
            let theirs = place.path().join("theirs");
            private().create(&theirs).unwrap();
            std::os::unix::fs::chown(&theirs, Some(65_534), None).unwrap();
            refused(&theirs, "owner 65534");
        }
    }

    #[test]
    fn a_missing_root_has_nothing_to_sweep() {
        assert_eq!(sweep(Path::new("/no/such/root")).unwrap(), Swept::default());
    }
}
