//! A VMM process and the client of its control socket.

use std::{
    ffi::OsStr,
    io,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use model::{Identity, RestoreSpec, Timeline, VmSpec};

use crate::{
    Call, Failure, FailureKind, Reply, Request, SnapshotContent, VmStats,
    connect::connect,
    draft::{Draft, FileDraft},
    files::{self, FileRole, Files, FilesError, Lineage, TemplateFile},
    frame::{self, Frame, FrameError, Versions},
};

/// Reasons why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("cannot start {program}")]
    Spawn {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot prepare the files of the request")]
    Files(#[source] FilesError),
    /// The client did not make the VM and was not given its [`Lineage`].
    #[error("cannot check a snapshot of this VM: its lineage is unknown")]
    NoLineage,
    #[error("the VMM refused")]
    Refused(#[source] Failure),
    /// The VMM has exited, did not respond in time, or sent an invalid frame.
    #[error("no response from the VMM")]
    Frame(#[source] FrameError),
    #[error("the VMM sent a reply that does not match the request: {0:?}")]
    OutOfTurn(Box<Reply>),
}

impl ControlError {
    /// The kind of failure, on which a caller can act. `None` if the VMM did not start, may have exited, or sent a
    /// reply of the wrong kind.
    #[must_use]
    pub fn kind(&self) -> Option<FailureKind> {
        match self {
            Self::Refused(failure) => Some(failure.kind),
            Self::Files(error) => Some(error.kind()),
            Self::NoLineage => Some(FailureKind::WrongPhase),
            Self::Spawn { .. } | Self::Frame(_) | Self::OutOfTurn(_) => None,
        }
    }
}

/// User and group id of a VMM process. Each VM has its own, so that a VMM cannot access the processes and files of
/// another. The ids need no entry in the user database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VmUser(u32);

impl VmUser {
    /// Ids for VMs of a pool, which assigns one to each VM. All VM ids are above the ranges that distributions use for
    /// users, services and containers (systemd's list of user ids, "unused").
    pub const POOL: std::ops::Range<u32> = 0x7000_0000..0x7010_0000;
    /// First id for all other VMs. Each process that starts VMs has a block of 4096 ids, chosen by its pid.
    const OTHERS: u32 = 0x7100_0000;

    /// The id for a VM of a pool, from [`VmUser::POOL`].
    #[must_use]
    pub fn new(id: u32) -> Self {
        Self(id)
    }

    /// An id that no other VM of this process has, for callers without a pool.
    fn of_this_process() -> Self {
        let block = std::process::id() % (1 << 15);
        Self(Self::OTHERS + (block << 12) + number() % (1 << 12))
    }
}

/// A number that this process has not used before.
pub(crate) fn number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The command that starts a VMM without an environment and, if this process is root, with its own user id. The VMM
/// drops its privileges itself.
fn confined(program: &Path, user: VmUser) -> Command {
    let mut command = Command::new(program);
    command.env_clear().arg("serve");
    if nix::unistd::geteuid().is_root() {
        command.args(["--user", &user.0.to_string()]);
    }
    command
}

/// Client of a control socket. Its calls block.
#[derive(Debug)]
pub struct ControlClient {
    socket: UnixStream,
    /// Time limit for a whole reply. `None`: no limit.
    timeout: Option<Duration>,
    lineage: Option<Lineage>,
    /// Path of the VM's vsock socket, if this client made the VM.
    vsock: Option<PathBuf>,
    versions: Versions,
    /// The version of the next request.
    version: u16,
}

impl ControlClient {
    /// Wraps a connected socket. `timeout` limits each reply. `None`: no limit.
    ///
    /// # Errors
    /// Returns the error of setsockopt(2). A timeout of zero is invalid.
    pub fn new(socket: UnixStream, timeout: Option<Duration>) -> io::Result<Self> {
        socket.set_read_timeout(timeout)?;
        socket.set_write_timeout(timeout)?;
        Ok(Self {
            socket,
            timeout,
            lineage: None,
            vsock: None,
            versions: Versions::OURS,
            version: Versions::OURS.oldest,
        })
    }

    /// Connects to a VMM that was started by [`spawn_detached`]. The VMM serves the connection after its previous
    /// client has disconnected. `timeout` also limits the connection.
    ///
    /// # Errors
    /// Returns the errors of [`connect`].
    pub fn connect(path: &Path, timeout: Option<Duration>) -> io::Result<Self> {
        Self::new(connect(path, timeout)?, timeout)
    }

    /// The lineage of the VM. `None` before [`ControlClient::boot`] or [`ControlClient::restore`] has succeeded.
    #[must_use]
    pub fn lineage(&self) -> Option<&Lineage> {
        self.lineage.as_ref()
    }

    /// Sets the lineage, for a client that did not make the VM.
    #[must_use]
    pub fn with_lineage(mut self, lineage: Option<Lineage>) -> Self {
        self.lineage = lineage;
        self
    }

    /// Sends one request with its descriptors and waits for the reply. If the VMM refuses the version of the request,
    /// sends it again in the newest version that both support.
    ///
    /// # Errors
    /// Returns [`ControlError::Refused`] if the VMM refused or failed, and [`ControlError::Frame`] if the socket
    /// failed, the reply took too long, or the VMM supports no version that this program supports.
    pub fn call(&mut self, request: Request, files: &Files) -> Result<Reply, ControlError> {
        let files_named = files.roles();
        let call = Call {
            request,
            files: files_named,
        };
        let answer = match self.exchange(&call, files) {
            Err(FrameError::Refused { peer, ours }) => {
                let refused = FrameError::Refused { peer, ours };
                let other = ours.common(peer).filter(|v| *v != self.version);
                self.version = other.ok_or(ControlError::Frame(refused))?;
                self.exchange(&call, files)
            }
            answer => answer,
        };
        answer
            .map_err(ControlError::Frame)?
            .map_err(ControlError::Refused)
    }

    fn exchange(
        &mut self,
        call: &Call,
        files: &Files,
    ) -> Result<Result<Reply, Failure>, FrameError> {
        let speaks = (self.version, self.versions);
        frame::send_as(&self.socket, speaks, call, &files.borrowed())?;
        let Frame {
            message, newest, ..
        } = frame::receive_as(&self.socket, self.versions, self.timeout)?;
        self.version = newest.clamp(self.versions.oldest, self.versions.newest);
        Ok(message)
    }

    fn started(&mut self, request: Request, files: &Files) -> Result<Timeline, ControlError> {
        match self.call(request, files)? {
            Reply::Started(timeline) => Ok(timeline),
            other => Err(ControlError::OutOfTurn(Box::new(other))),
        }
    }

    fn done(&mut self, request: Request, files: &Files) -> Result<(), ControlError> {
        match self.call(request, files)? {
            Reply::Done => Ok(()),
            other => Err(ControlError::OutOfTurn(Box::new(other))),
        }
    }

    /// Sends [`Request::Boot`].
    ///
    /// # Errors
    /// Returns [`ControlError::Files`] if a file cannot be opened, [`ControlError::OutOfTurn`] for a reply of the wrong
    /// kind, and the errors of [`ControlClient::call`].
    pub fn boot(
        &mut self,
        spec: VmSpec,
        tap: Option<BorrowedFd<'_>>,
    ) -> Result<Timeline, ControlError> {
        if self.lineage.is_some() {
            // The VMM already has a VM and refuses the request. No files are sent, because opening them could replace
            // the VM's vsock socket.
            return self.started(Request::Boot(spec), &Files::default());
        }
        let (files, lineage) = files::of_boot(&spec, tap).map_err(ControlError::Files)?;
        let vsock = spec.vsock.clone();
        let stamps = self.started(Request::Boot(spec), &files);
        self.made(stamps, vsock, lineage)
    }

    /// Sends [`Request::Restore`].
    ///
    /// # Errors
    /// Returns the errors of [`ControlClient::boot`].
    pub fn restore(
        &mut self,
        spec: RestoreSpec,
        tap: Option<BorrowedFd<'_>>,
    ) -> Result<Timeline, ControlError> {
        if self.lineage.is_some() {
            let home = PathBuf::new();
            return self.started(Request::Restore { spec, home }, &Files::default());
        }
        let (files, lineage) = files::of_restore(&spec, tap).map_err(ControlError::Files)?;
        let vsock = spec.vsock.clone();
        let home = lineage.home.as_ref().map(|home| home.dir.clone());
        let home = home.unwrap_or_default();
        let stamps = self.started(Request::Restore { spec, home }, &files);
        self.made(stamps, vsock, lineage)
    }

    /// If the VM was made, records its lineage and its vsock socket. Otherwise removes the socket.
    fn made(
        &mut self,
        stamps: Result<Timeline, ControlError>,
        vsock: PathBuf,
        lineage: Lineage,
    ) -> Result<Timeline, ControlError> {
        match stamps {
            Ok(stamps) => {
                self.lineage = Some(lineage);
                self.vsock = Some(vsock);
                Ok(stamps)
            }
            Err(e) => {
                // Best effort: the next VM at this path replaces a socket without a listener.
                let _ = std::fs::remove_file(vsock);
                Err(e)
            }
        }
    }

    /// Sends [`Request::Identity`]. The VM must be running.
    ///
    /// # Errors
    /// Returns [`ControlError::OutOfTurn`] for a reply of the wrong kind, and the errors of [`ControlClient::call`].
    pub fn identity(
        &mut self,
        identity: Identity,
        within: Duration,
    ) -> Result<Timeline, ControlError> {
        let within_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        let request = Request::Identity {
            identity,
            within_ms,
        };
        self.started(request, &Files::default())
    }

    /// Sends [`Request::Pause`].
    ///
    /// # Errors
    /// Returns the errors of [`ControlClient::identity`].
    pub fn pause(&mut self) -> Result<(), ControlError> {
        self.done(Request::Pause, &Files::default())
    }

    /// Sends [`Request::Resume`].
    ///
    /// # Errors
    /// Returns the errors of [`ControlClient::identity`].
    pub fn resume(&mut self) -> Result<(), ControlError> {
        self.done(Request::Resume, &Files::default())
    }

    /// Writes a full snapshot to `dir`, which must not exist. The directory appears when the snapshot is complete.
    ///
    /// # Errors
    /// Returns [`ControlError::Files`] if a file cannot be created or the manifest does not match the VM's lineage,
    /// [`ControlError::NoLineage`] if this client has no lineage, and the errors of [`ControlClient::identity`].
    pub fn snapshot(&mut self, dir: &Path) -> Result<(), ControlError> {
        self.write_snapshot(dir, SnapshotContent::Full)
    }

    /// Like [`ControlClient::snapshot`], but writes a diff if the VM's template still exists.
    ///
    /// # Errors
    /// Returns the errors of [`ControlClient::snapshot`].
    pub fn snapshot_diff(&mut self, dir: &Path) -> Result<(), ControlError> {
        self.write_snapshot(dir, SnapshotContent::Diff)
    }

    /// Like [`ControlClient::snapshot`], with the given content.
    ///
    /// # Errors
    /// Returns the errors of [`ControlClient::snapshot`].
    pub fn write_snapshot(
        &mut self,
        dir: &Path,
        content: SnapshotContent,
    ) -> Result<(), ControlError> {
        let Some(lineage) = self.lineage.clone() else {
            // There is no VM, and the VMM refuses the request, or another client made the VM.
            self.done(Request::Snapshot { content }, &Files::default())?;
            return Err(ControlError::NoLineage);
        };
        let content = lineage.possible(content);
        let draft = Draft::begin(dir, content).map_err(ControlError::Files)?;
        let files = draft.files().map_err(ControlError::Files)?;
        self.done(Request::Snapshot { content }, &files)?;
        draft.finish(&lineage).map_err(ControlError::Files)
    }

    /// Sends [`Request::SaveLayer`], with a new file that appears at `path` when it is complete.
    ///
    /// # Errors
    /// Returns [`ControlError::Files`] if `path` exists or the file cannot be created, and the errors of
    /// [`ControlClient::identity`].
    pub fn save_layer(&mut self, path: &Path) -> Result<(), ControlError> {
        self.write_file(path, TemplateFile::Layer, Request::SaveLayer)
    }

    /// Sends [`Request::RecordWorkingSet`], with a new file that appears at `path` when it is complete.
    ///
    /// # Errors
    /// Returns the errors of [`ControlClient::save_layer`].
    pub fn record_working_set(&mut self, path: &Path) -> Result<(), ControlError> {
        self.write_file(path, TemplateFile::WorkingSet, Request::RecordWorkingSet)
    }

    fn write_file(
        &mut self,
        path: &Path,
        role: TemplateFile,
        request: Request,
    ) -> Result<(), ControlError> {
        let (draft, file) = FileDraft::begin(path).map_err(ControlError::Files)?;
        let mut files = Files::default();
        files.insert(FileRole::Template(role), file);
        self.done(request, &files)?;
        draft.finish().map_err(ControlError::Files)
    }

    /// Sends [`Request::Stats`].
    ///
    /// # Errors
    /// Returns [`ControlError::OutOfTurn`] for a reply of the wrong kind, and the errors of [`ControlClient::call`].
    pub fn stats(&mut self) -> Result<VmStats, ControlError> {
        match self.call(Request::Stats, &Files::default())? {
            Reply::Stats(stats) => Ok(stats),
            other => Err(ControlError::OutOfTurn(Box::new(other))),
        }
    }

    /// Sends [`Request::Shutdown`], and removes the vsock socket if this client made the VM.
    ///
    /// # Errors
    /// Returns [`ControlError::OutOfTurn`] for a reply of the wrong kind, and the errors of [`ControlClient::call`].
    pub fn shutdown(&mut self) -> Result<(), ControlError> {
        self.done(Request::Shutdown, &Files::default())?;
        if let Some(vsock) = self.vsock.take() {
            // Best effort: the next VM at this path replaces a socket without a listener.
            let _ = std::fs::remove_file(vsock);
        }
        Ok(())
    }
}

/// Starts a `cube-vmm` that outlives this process. Its control socket listens at `control`, which must not exist yet,
/// and serves one client after another. The VMM makes its own session. It exits when its guest ends, after
/// [`Request::Shutdown`], or when it is killed. `log` receives its standard error. `join` contains the files `tasks` of
/// version 1 cgroups that the VMM joins before it accepts a client. VMMs of earlier releases do not have this option.
///
/// # Errors
/// Returns [`ControlError::Spawn`] if the socket cannot be created or the program cannot be started. In the second case
/// the socket is removed.
pub fn spawn_detached(
    program: &Path,
    control: &Path,
    log: std::fs::File,
    user: VmUser,
    join: &[PathBuf],
) -> Result<Child, ControlError> {
    let failed = |source| ControlError::Spawn {
        program: program.display().to_string(),
        source,
    };
    let listener = UnixListener::bind(control).map_err(failed)?;
    let joins = join
        .iter()
        .flat_map(|tasks| [OsStr::new("--join"), tasks.as_os_str()]);
    let child = confined(program, user)
        .args(joins)
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stdout(Stdio::null())
        .stderr(log)
        .spawn();
    child.map_err(|e| {
        // A socket file here would look like a running VMM.
        let _ = std::fs::remove_file(control);
        failed(e)
    })
}

/// A running `cube-vmm` and its control socket. Dropping it kills and reaps the process.
#[derive(Debug)]
pub struct VmProcess {
    child: Child,
    pub control: ControlClient,
}

impl VmProcess {
    /// Starts `program` with its control socket as standard input. `log` receives its standard error. `None`: it
    /// inherits this process's standard error. `timeout` limits each reply. `None`: no limit.
    ///
    /// # Errors
    /// Returns [`ControlError::Spawn`] if the program cannot be started or `timeout` is zero.
    pub fn spawn(
        program: &Path,
        log: Option<std::fs::File>,
        timeout: Option<Duration>,
    ) -> Result<Self, ControlError> {
        let failed = |source| ControlError::Spawn {
            program: program.display().to_string(),
            source,
        };
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        // Must precede the spawn, because an error after it would leave a process that is never reaped.
        let control = ControlClient::new(ours, timeout).map_err(failed)?;
        let child = confined(program, VmUser::of_this_process())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(log.map_or_else(Stdio::inherit, Stdio::from))
            .spawn()
            .map_err(failed)?;
        Ok(Self { child, control })
    }

    /// Pid of the VMM.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the process and waits for it to exit.
    ///
    /// # Errors
    /// Returns an error if the process cannot be killed or waited for.
    pub fn kill(mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(|_| ())
    }
}

impl Drop for VmProcess {
    fn drop(&mut self) {
        // Both fail only if the process has already exited and been reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests;
