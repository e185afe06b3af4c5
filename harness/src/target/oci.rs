//! The targets `runc`, `crun` and `runsc` (gVisor): a sandbox is a detached container with an idle process. It is
//! started, entered and ended through the command line of an OCI runtime.
//!
//! ```text
//! RUN/oci-NAME/            command (for the sweep), state/ (the runtime's --root), one bundle for each container
//! ```

use std::{
    fs::{self, File},
    io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use model::{StartPhase, Timeline};
use nix::{
    sys::wait::{WaitPidFlag, WaitStatus, waitpid},
    unistd::Pid,
};
use serde_json::{Value, json};
use testbed::leftovers::{self, RunDir};

use super::{
    About, CloneId, Output, PageCache, Sandbox, Target, command,
    users::{self, User},
};
use crate::{
    clock,
    event::{Failure, FailureCause},
    scenario::ExecSpec,
};

const PREFIX: &str = "oci-";
const COMMAND: &str = "command";
const STATE: &str = "state";
const PID_FILE: &str = "pid";
/// Maximum time to remove a container.
const DELETE_TIMEOUT: Duration = Duration::from_secs(20);

/// Starts containers of one root directory with one runtime.
#[derive(Debug)]
pub struct Oci {
    shared: Arc<Shared>,
    timeout: Duration,
    version: Option<String>,
    platform: String,
}

/// Shared by a target and its containers.
#[derive(Debug)]
struct Shared {
    /// Name in messages.
    name: &'static str,
    /// The runtime with its global options.
    command: Vec<String>,
    root: PathBuf,
    /// Directory of the target in the directory of the run.
    dir: PathBuf,
    /// Must outlive the containers.
    _run: Arc<RunDir>,
}

/// An OCI runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    Runc,
    Crun,
    Runsc,
}

impl Runtime {
    fn name(self) -> &'static str {
        match self {
            Self::Runc => "runc",
            Self::Crun => "crun",
            Self::Runsc => "runsc",
        }
    }

    /// The program with its default options.
    fn command(self) -> Vec<String> {
        let options: &[&str] = match self {
            Self::Runc | Self::Crun => &[],
            // ptrace needs neither KVM nor a recent release. target.command selects another platform.
            Self::Runsc => &["--platform=ptrace", "--network=none"],
        };
        let name = [self.name()];
        name.iter()
            .chain(options)
            .map(ToString::to_string)
            .collect()
    }

    fn platform(self, command: &[String]) -> String {
        match self {
            Self::Runc | Self::Crun => "namespaces and cgroups of the host's kernel".to_owned(),
            Self::Runsc => {
                let chosen = command.iter().find_map(|a| a.strip_prefix("--platform="));
                format!("gVisor's kernel, platform {}", chosen.unwrap_or("default"))
            }
        }
    }
}

impl Oci {
    /// `command` replaces the runtime's program and global options; empty for the defaults. `root` becomes the
    /// read-only root of the containers. `name` is a directory name, unique in the run.
    ///
    /// # Errors
    /// Returns an error that names the program if it cannot be run, or the directory if it cannot be created.
    pub fn new(
        runtime: Runtime,
        name: &str,
        command: Vec<String>,
        root: PathBuf,
        run_dir: Arc<RunDir>,
        timeout: Duration,
    ) -> Result<Self, Failure> {
        let command = if command.is_empty() {
            runtime.command()
        } else {
            command
        };
        let version = super::version_of(&command, runtime.name())?;
        let who = runtime.name();
        let io = |e: io::Error| command::failed(who, FailureCause::Spawn, &e.to_string());
        let dir = run_dir.clone_dir(&format!("{PREFIX}{name}")).map_err(io)?;
        // When the runtime exits, the processes of a container become children of this process, so that they are
        // reaped even where process 1 does not reap. A runtime waits for the processes that it has killed.
        nix::sys::prctl::set_child_subreaper(true).map_err(|e| io(e.into()))?;
        let text = serde_json::to_vec(&command).map_err(|e| io(e.into()))?;
        fs::write(dir.join(COMMAND), text).map_err(io)?;
        Ok(Self {
            platform: runtime.platform(&command),
            shared: Arc::new(Shared {
                name: who,
                command,
                root,
                dir,
                _run: run_dir,
            }),
            timeout,
            version,
        })
    }
}

impl Shared {
    /// The runtime with its global options and the directory of its state.
    fn runtime(&self) -> Command {
        let mut runtime = Command::new(&self.command[0]);
        runtime
            .args(&self.command[1..])
            .arg("--root")
            .arg(self.dir.join(STATE));
        runtime
    }

    fn run(&self, args: &[&str], timeout: Duration) -> Result<Output, Failure> {
        command::output(self.runtime().args(args), timeout, self.name)
    }

    fn failed(&self, cause: FailureCause, message: &str) -> Failure {
        command::failed(self.name, cause, message)
    }

    /// Starts a detached container. Its first process inherits the log file, by which the sweep finds it.
    fn launch(&self, id: &str, bundle: &Path, timeout: Duration) -> Result<u32, Failure> {
        let spawn = |e: io::Error| self.failed(FailureCause::Spawn, &e.to_string());
        let config = config(&self.root, id).to_string();
        fs::write(bundle.join("config.json"), config).map_err(spawn)?;
        let log = bundle.join(super::vmm_direct::STDERR);
        let mut child = self
            .runtime()
            .args(["run", "--detach", "--pid-file"])
            .arg(bundle.join(PID_FILE))
            .arg("--bundle")
            .arg(bundle)
            .arg(id)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).map_err(spawn)?)
            .process_group(0)
            .spawn()
            .map_err(spawn)?;
        let status = command::wait_until(&mut child, Instant::now() + timeout).map_err(spawn)?;
        match status {
            Some(status) if status.success() => Ok(child.id()),
            None => {
                command::end_group(&mut child);
                Err(self.failed(FailureCause::Timeout, "the container did not start in time"))
            }
            Some(_) => {
                let text = fs::read_to_string(&log).unwrap_or_default();
                let why = text.lines().rfind(|line| !line.trim().is_empty());
                Err(self.failed(FailureCause::Create, why.unwrap_or("no message")))
            }
        }
    }
}

/// Configuration of a container: all namespaces except the user namespace, a read-only root, no limits. Its cgroup
/// is below the run's cgroup, so that its CPU time counts for the run; gVisor's default is below the root.
fn config(root: &Path, id: &str) -> Value {
    let namespaces = ["pid", "ipc", "uts", "mount", "network"].map(|kind| json!({ "type": kind }));
    let tmpfs = |at: &str, options: &[&str]| json!({ "destination": at, "type": "tmpfs", "source": "tmpfs", "options": options });
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": { "uid": 0, "gid": 0 },
            "args": ["/bin/sleep", "infinity"],
            "env": [format!("PATH={}", super::GUEST_PATH)],
            "cwd": "/",
            "noNewPrivileges": true,
        },
        "root": { "path": root, "readonly": true },
        "hostname": "sandbox",
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc" },
            tmpfs("/dev", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
            tmpfs("/tmp", &["nosuid", "nodev"]),
        ],
        "linux": { "namespaces": namespaces, "cgroupsPath": id },
    })
}

impl Target for Oci {
    fn create(&self, id: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        let name = format!("cube-bench-{}-{id}", std::process::id());
        let bundle = self.shared.dir.join(&name);
        let spawn = |e: io::Error| self.shared.failed(FailureCause::Spawn, &e.to_string());
        fs::create_dir(&bundle).map_err(spawn)?;
        // Dropping it removes the remains of a failed start.
        let mut container = Container {
            shared: Arc::clone(&self.shared),
            id: name,
            bundle,
            group: None,
            alive: true,
        };
        let launched = self
            .shared
            .launch(&container.id, &container.bundle, self.timeout);
        container.group = Some(launched?);
        timeline.stamp(StartPhase::Replied, clock::monotonic_ns());
        Ok(Box::new(container))
    }

    fn prepare_cache(&self, _: PageCache) -> io::Result<()> {
        Ok(())
    }

    fn about(&self) -> About {
        About {
            version: self.version.clone(),
            platform: Some(self.platform.clone()),
        }
    }
}

/// A container. Dropping it removes it.
struct Container {
    shared: Arc<Shared>,
    id: String,
    bundle: PathBuf,
    /// Process group of the runtime that started it, in which gVisor's file server remains.
    group: Option<u32>,
    alive: bool,
}

impl Container {
    /// Kills the container, waits for its first process, and deletes it. `delete --force` alone takes longer with
    /// some runtimes, because they poll for the end of the process at long intervals.
    fn end(&mut self) -> Result<(), Failure> {
        self.alive = false;
        let pid = fs::read_to_string(self.bundle.join(PID_FILE)).ok();
        let pid: Option<u32> = pid.and_then(|text| text.trim().parse().ok());
        self.shared
            .run(&["kill", &self.id, "KILL"], DELETE_TIMEOUT)?;
        if let Some(pid) = pid {
            reap(pid, self.group, Instant::now() + DELETE_TIMEOUT);
        }
        let deleted = self.shared.run(&["delete", &self.id], DELETE_TIMEOUT)?;
        if deleted.status != Some(0) {
            let forced = ["delete", "--force", &self.id];
            let forced = self.shared.run(&forced, DELETE_TIMEOUT)?;
            if forced.status != Some(0) {
                let why = super::shorten(&forced.stderr);
                return Err(self.shared.failed(FailureCause::Kill, &why));
            }
        }
        fs::remove_dir_all(&self.bundle)
            .map_err(|e| self.shared.failed(FailureCause::Kill, &e.to_string()))
    }
}

/// Waits until the first process of a container has ended and no child of this process is left in `group`, and
/// reaps them.
fn reap(first: u32, group: Option<u32>, deadline: Instant) {
    let id = |pid: u32| i32::try_from(pid).ok().filter(|pid| *pid > 1);
    let which = [id(first), group.and_then(id).map(|group| -group)];
    for pid in which.into_iter().flatten() {
        loop {
            match waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_micros(200));
                }
                // The group may have further processes.
                Ok(status) if pid < 0 && status != WaitStatus::StillAlive => {}
                Ok(_) | Err(_) => break,
            }
        }
    }
    // Not a child of this process if another process is the subreaper.
    command::await_end(first, deadline);
}

impl Sandbox for Container {
    fn exec(&mut self, spec: &ExecSpec) -> Result<Output, Failure> {
        super::refuse_cell(spec, self.shared.name)?;
        let User { uid, gid } = users::find(&self.shared.root, &spec.user)?;
        let user = format!("{uid}:{gid}");
        let mut args = vec!["exec", "--user", user.as_str(), self.id.as_str()];
        args.extend(spec.argv.iter().map(String::as_str));
        self.shared.run(&args, spec.timeout)
    }

    fn write_file(&mut self, path: &str, _: &[u8]) -> Result<(), Failure> {
        Err(super::read_only(self.shared.name, path))
    }

    fn set_network(&mut self, _: &Value) -> Result<(), Failure> {
        Err(super::no_policies(self.shared.name))
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    fn kill(mut self: Box<Self>) -> Result<(), Failure> {
        self.end()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if self.alive {
            // On failure, the sweep of a later run tries again.
            let _ = self.end();
            let _ = fs::remove_dir_all(&self.bundle);
        }
    }
}

/// Deletes the containers of runs that no longer exist.
///
/// # Errors
/// Returns an error if the root of runs cannot be listed.
pub fn sweep(run_root: &Path) -> io::Result<()> {
    for run in leftovers::dead_runs(run_root)? {
        for dir in entries(&run) {
            let name = dir.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(PREFIX) {
                delete_all(&dir);
            }
        }
    }
    Ok(())
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Deletes the containers of one target, whose directory contains the runtime's command.
fn delete_all(dir: &Path) {
    let text = fs::read(dir.join(COMMAND)).unwrap_or_default();
    let command: Vec<String> = serde_json::from_slice(&text).unwrap_or_default();
    let Some((program, options)) = command.split_first() else {
        return;
    };
    for container in entries(&dir.join(STATE)) {
        let mut delete = Command::new(program);
        delete
            .args(options)
            .arg("--root")
            .arg(dir.join(STATE))
            .args(["delete", "--force"])
            .arg(container.file_name().unwrap_or_default());
        if let Err(failure) = command::output(&mut delete, DELETE_TIMEOUT, program) {
            eprintln!("cube-bench: cannot delete a container: {}", failure.message);
        }
    }
}
