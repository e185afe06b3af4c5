//! The target `bubblewrap`: a sandbox is `bwrap` with its own namespaces and an idle process. Commands enter the
//! namespaces with `nsenter`.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader},
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use model::{StartPhase, Timeline};
use nix::{
    poll::{PollFd, PollFlags},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use testbed::leftovers::RunDir;

use super::{
    About, CloneId, Output, PageCache, Sandbox, Target, command,
    users::{self, User},
};
use crate::{
    clock,
    event::{Failure, FailureCause},
    scenario::ExecSpec,
};

const WHO: &str = "bubblewrap";
/// The first program of a sandbox: it reports that the namespaces are complete, and waits.
const INIT: &str = "echo ready; exec sleep infinity";

/// Starts sandboxes in one root directory.
#[derive(Debug)]
pub struct Bubblewrap {
    command: Vec<String>,
    root: PathBuf,
    run_dir: Arc<RunDir>,
    timeout: Duration,
    version: Option<String>,
}

impl Bubblewrap {
    /// `command` is `bwrap` with options, which precede those that this target adds; `root` becomes the read-only
    /// root of the sandboxes.
    ///
    /// # Errors
    /// Returns an error that names the program if it cannot be run.
    pub fn new(
        command: Vec<String>,
        root: PathBuf,
        run_dir: Arc<RunDir>,
        timeout: Duration,
    ) -> Result<Self, Failure> {
        let version = super::version_of(&command, "bubblewrap")?;
        Ok(Self {
            command,
            root,
            run_dir,
            timeout,
            version,
        })
    }

    fn spawn(&self, stderr: File) -> io::Result<Child> {
        let mut bwrap = Command::new(&self.command[0]);
        // The status with the process id goes to standard error, a file of the run.
        bwrap
            .args(&self.command[1..])
            .args([
                "--unshare-all",
                "--die-with-parent",
                "--json-status-fd",
                "2",
            ])
            .args(["--hostname", "sandbox", "--ro-bind"])
            .arg(&self.root)
            .args(["/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"])
            .args(["--", "/bin/sh", "-c", INIT])
            .env_clear()
            .env("PATH", super::GUEST_PATH)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .process_group(0)
            .spawn()
    }
}

impl Target for Bubblewrap {
    fn create(&self, id: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        let spawn = |e: io::Error| command::failed(WHO, FailureCause::Spawn, &e.to_string());
        let dir = self.run_dir.clone_dir(&id.to_string()).map_err(spawn)?;
        let status = dir.join(super::vmm_direct::STDERR);
        let stderr = File::create_new(&status).map_err(spawn)?;
        let deadline = Instant::now() + self.timeout;
        let child = self.spawn(stderr).map_err(spawn);
        let mut sandbox = match child {
            Ok(child) => Wrapped {
                child,
                inner: 0,
                ended: false,
                root: self.root.clone(),
                dir,
            },
            Err(failure) => {
                let _ = fs::remove_dir_all(&dir);
                return Err(failure);
            }
        };
        timeline.stamp(StartPhase::ProcessStarted, clock::monotonic_ns());
        sandbox.await_ready(deadline)?;
        timeline.stamp(StartPhase::Replied, clock::monotonic_ns());
        sandbox.inner = child_pid(&status)?;
        Ok(Box::new(sandbox))
    }

    fn prepare_cache(&self, _: PageCache) -> io::Result<()> {
        Ok(())
    }

    fn about(&self) -> About {
        About {
            version: self.version.clone(),
            platform: Some("namespaces of the host's kernel".to_owned()),
        }
    }
}

/// A running sandbox. Dropping it kills it.
struct Wrapped {
    child: Child,
    /// Process id of the sandbox's first process, in the host's namespace.
    inner: u32,
    ended: bool,
    root: PathBuf,
    dir: PathBuf,
}

impl Wrapped {
    fn await_ready(&mut self, deadline: Instant) -> Result<(), Failure> {
        let create = |why: &str| command::failed(WHO, FailureCause::Create, why);
        let pipe = self.child.stdout.take();
        let pipe = pipe.ok_or_else(|| create("no pipe"))?;
        let mut fds = [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)];
        if !command::ready_until(&mut fds, deadline).map_err(|e| create(&e.to_string()))? {
            return Err(command::failed(
                WHO,
                FailureCause::Timeout,
                "no answer in time",
            ));
        }
        let mut line = String::new();
        let read = BufReader::new(pipe).read_line(&mut line);
        if read.is_ok() && line == "ready\n" {
            return Ok(());
        }
        let log = fs::read_to_string(self.dir.join(super::vmm_direct::STDERR)).unwrap_or_default();
        let log = log.lines().rfind(|line| !line.starts_with('{'));
        Err(create(log.unwrap_or("bwrap ended without a message")))
    }

    fn end(&mut self) -> io::Result<()> {
        // The kernel kills the whole PID namespace with its first process; bwrap reaps that one and ends.
        let deadline = Instant::now() + Duration::from_secs(10);
        if self.ended {
            return Ok(());
        }
        self.ended = true;
        if let Some(inner) = i32::try_from(self.inner).ok().filter(|pid| *pid > 1) {
            // Fails only if the process has already ended.
            let _ = kill(Pid::from_raw(inner), Signal::SIGKILL);
            command::wait_until(&mut self.child, deadline)?;
        }
        command::end_group(&mut self.child);
        if self.inner != 0 && !command::await_end(self.inner, deadline) {
            let why = format!("process {} is still alive", self.inner);
            return Err(io::Error::other(why));
        }
        match fs::remove_dir_all(&self.dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

/// The process id in the first line of bwrap's status.
fn child_pid(status: &Path) -> Result<u32, Failure> {
    let text = fs::read_to_string(status).unwrap_or_default();
    let found = text.lines().find_map(|line| {
        let value: serde_json::Value = serde_json::from_str(line).ok()?;
        u32::try_from(value.get("child-pid")?.as_u64()?).ok()
    });
    found.ok_or_else(|| command::failed(WHO, FailureCause::Create, "bwrap reported no process id"))
}

impl Sandbox for Wrapped {
    fn exec(&mut self, spec: &ExecSpec) -> Result<Output, Failure> {
        super::refuse_cell(spec, WHO)?;
        let User { uid, gid } = users::find(&self.root, &spec.user)?;
        let mut nsenter = Command::new("nsenter");
        nsenter
            .args(["-t", &self.inner.to_string()])
            .args(["-m", "-u", "-i", "-n", "-p", "-r", "-w"])
            .args(["-S", &uid.to_string(), "-G", &gid.to_string(), "--"])
            .args(&spec.argv)
            .env_clear()
            .env("PATH", super::GUEST_PATH);
        command::output(&mut nsenter, spec.timeout, WHO)
    }

    fn write_file(&mut self, path: &str, _: &[u8]) -> Result<(), Failure> {
        Err(super::read_only(WHO, path))
    }

    fn set_network(&mut self, _: &serde_json::Value) -> Result<(), Failure> {
        Err(super::no_policies(WHO))
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    fn kill(mut self: Box<Self>) -> Result<(), Failure> {
        self.end()
            .map_err(|e| command::failed(WHO, FailureCause::Kill, &e.to_string()))
    }
}

impl Drop for Wrapped {
    fn drop(&mut self) {
        // After a kill, there is no process left to end.
        let _ = self.end();
    }
}
