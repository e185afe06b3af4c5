//! A VMM process and the client of its socket.

use std::{
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
    frame::{self, FrameError},
};

/// Why a request was not fulfilled.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The program could not be started.
    #[error("cannot start {program}")]
    Spawn {
        /// Path of the program.
        program: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A file that the request needs cannot be opened or made.
    #[error("cannot prepare the files of the request")]
    Files(#[source] FilesError),
    /// Nobody said what the VM was made from.
    #[error("the VM's lineage is not known, so a snapshot of it cannot be checked")]
    NoLineage,
    /// The VMM said no.
    #[error("the VMM refused")]
    Refused(#[source] Failure),
    /// The socket broke: the VMM is gone, or it did not answer in time.
    #[error("no answer from the VMM")]
    Frame(#[source] FrameError),
    /// The answer does not belong to the request.
    #[error("the VMM answered out of turn: {0:?}")]
    OutOfTurn(Reply),
}

impl ControlError {
    /// What a caller can act on; `None` if the VMM may be gone.
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

/// The user and group of a VMM: one for each VM, so that no VMM may touch another's processes or files. They
/// need no entry in the user database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VmUser(u32);

impl VmUser {
    /// Users of VMs that a pool owns: it gives each a number of its own. All users of VMs are above the ranges
    /// that distributions give to people, services and containers (systemd's list of user ids, "unused").
    pub const POOL: std::ops::Range<u32> = 0x7000_0000..0x7010_0000;
    /// Users of all other VMs begin here: blocks of 4096 by process id of whoever starts them.
    const OTHERS: u32 = 0x7100_0000;

    /// The user of this number; a pool's are in [`VmUser::POOL`].
    #[must_use]
    pub fn new(id: u32) -> Self {
        Self(id)
    }

    /// One that no other VM of this process has, for whoever starts VMs without a pool.
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

/// The command that starts a VMM which gives up all rights at once: no environment, and a user of its own if
/// this process may give it one.
fn confined(program: &Path, user: VmUser) -> Command {
    let mut command = Command::new(program);
    command.env_clear().arg("serve");
    if nix::unistd::geteuid().is_root() {
        command.args(["--user", &user.0.to_string()]);
    }
    command
}

/// The client side of a control socket. Calls block.
#[derive(Debug)]
pub struct ControlClient {
    socket: UnixStream,
    /// For a whole answer.
    timeout: Option<Duration>,
    lineage: Option<Lineage>,
    /// The socket's file of the VM that this client made.
    vsock: Option<PathBuf>,
}

impl ControlClient {
    /// Wraps a connected socket. No answer may take longer than `timeout`; `None` waits for ever.
    ///
    /// # Errors
    /// The socket does not take the timeout (zero is refused).
    pub fn new(socket: UnixStream, timeout: Option<Duration>) -> io::Result<Self> {
        socket.set_read_timeout(timeout)?;
        socket.set_write_timeout(timeout)?;
        Ok(Self {
            socket,
            timeout,
            lineage: None,
            vsock: None,
        })
    }

    /// Connects to a VMM of [`spawn_detached`]. It answers when its former client has left. The timeout is for this, too.
    ///
    /// # Errors
    /// See [`connect`].
    pub fn connect(path: &Path, timeout: Option<Duration>) -> io::Result<Self> {
        Self::new(connect(path, timeout)?, timeout)
    }

    /// What the VM was made from: known after [`ControlClient::boot`] and [`ControlClient::restore`].
    #[must_use]
    pub fn lineage(&self) -> Option<&Lineage> {
        self.lineage.as_ref()
    }

    /// Says what the VM was made from, for a client that did not make it.
    #[must_use]
    pub fn with_lineage(mut self, lineage: Option<Lineage>) -> Self {
        self.lineage = lineage;
        self
    }

    /// Sends one request, with descriptors beside it, and waits for its answer.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn call(&mut self, request: Request, files: &Files) -> Result<Reply, ControlError> {
        let files_named = files.roles();
        let call = Call {
            request,
            files: files_named,
        };
        frame::send(&self.socket, &call, &files.borrowed()).map_err(ControlError::Frame)?;
        let (answer, _): (Result<Reply, Failure>, _) =
            frame::receive_within(&self.socket, self.timeout).map_err(ControlError::Frame)?;
        answer.map_err(ControlError::Refused)
    }

    fn started(&mut self, request: Request, files: &Files) -> Result<Timeline, ControlError> {
        match self.call(request, files)? {
            Reply::Started(timeline) => Ok(timeline),
            other => Err(ControlError::OutOfTurn(other)),
        }
    }

    fn done(&mut self, request: Request, files: &Files) -> Result<(), ControlError> {
        match self.call(request, files)? {
            Reply::Done => Ok(()),
            other => Err(ControlError::OutOfTurn(other)),
        }
    }

    /// See [`Request::Boot`].
    ///
    /// # Errors
    /// See [`ControlError`], also for the calls below.
    pub fn boot(
        &mut self,
        spec: VmSpec,
        tap: Option<BorrowedFd<'_>>,
    ) -> Result<Timeline, ControlError> {
        if self.lineage.is_some() {
            // It has its VM, whose socket is to stay: the VMM refuses.
            return self.started(Request::Boot(spec), &Files::default());
        }
        let (files, lineage) = files::of_boot(&spec, tap).map_err(ControlError::Files)?;
        let vsock = spec.vsock.clone();
        let stamps = self.started(Request::Boot(spec), &files);
        self.made(stamps, vsock, lineage)
    }

    /// See [`Request::Restore`].
    ///
    /// # Errors
    /// See [`ControlError`].
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

    /// A VM that could not be made leaves no socket behind.
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
                // Best effort: a socket that nobody serves is replaced.
                let _ = std::fs::remove_file(vsock);
                Err(e)
            }
        }
    }

    /// See [`Request::Identity`]. The VM must run.
    ///
    /// # Errors
    /// See [`ControlError`].
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

    /// See [`Request::Pause`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn pause(&mut self) -> Result<(), ControlError> {
        self.done(Request::Pause, &Files::default())
    }

    /// See [`Request::Resume`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn resume(&mut self) -> Result<(), ControlError> {
        self.done(Request::Resume, &Files::default())
    }

    /// Writes a whole template to `dir`, which must not exist yet and appears when it is whole.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn snapshot(&mut self, dir: &Path) -> Result<(), ControlError> {
        self.write_snapshot(dir, SnapshotContent::Full)
    }

    /// As [`ControlClient::snapshot`], but leaves to the base what is the base's.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn snapshot_diff(&mut self, dir: &Path) -> Result<(), ControlError> {
        self.write_snapshot(dir, SnapshotContent::Diff)
    }

    /// As [`ControlClient::snapshot`], with as much of the VM as `content` says.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn write_snapshot(
        &mut self,
        dir: &Path,
        content: SnapshotContent,
    ) -> Result<(), ControlError> {
        let Some(lineage) = self.lineage.clone() else {
            // There is no VM, as it says itself; or nobody said what it was made from.
            self.done(Request::Snapshot { content }, &Files::default())?;
            return Err(ControlError::NoLineage);
        };
        let content = lineage.possible(content);
        let draft = Draft::begin(dir, content).map_err(ControlError::Files)?;
        let files = draft.files().map_err(ControlError::Files)?;
        self.done(Request::Snapshot { content }, &files)?;
        draft.finish(&lineage).map_err(ControlError::Files)
    }

    /// Writes the layer to a file that does not exist yet; see [`Request::SaveLayer`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn save_layer(&mut self, path: &Path) -> Result<(), ControlError> {
        self.write_file(path, TemplateFile::Layer, Request::SaveLayer)
    }

    /// Writes the working set to a file that does not exist yet; see [`Request::RecordWorkingSet`].
    ///
    /// # Errors
    /// See [`ControlError`].
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

    /// See [`Request::Stats`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn stats(&mut self) -> Result<VmStats, ControlError> {
        match self.call(Request::Stats, &Files::default())? {
            Reply::Stats(stats) => Ok(stats),
            other => Err(ControlError::OutOfTurn(other)),
        }
    }

    /// See [`Request::Shutdown`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn shutdown(&mut self) -> Result<(), ControlError> {
        self.done(Request::Shutdown, &Files::default())?;
        if let Some(vsock) = self.vsock.take() {
            // Best effort: a socket that nobody serves is replaced.
            let _ = std::fs::remove_file(vsock);
        }
        Ok(())
    }
}

/// Starts a `cube-vmm` that outlives whoever started it: its control socket listens at `control`, which must
/// not exist yet, and serves clients one after another. It makes a session of its own, and ends with its
/// guest, with [`Request::Shutdown`], or when it is killed. `log` receives its standard error.
///
/// # Errors
/// The socket cannot be made, or the program cannot be started; then the socket is removed again.
pub fn spawn_detached(
    program: &Path,
    control: &Path,
    log: std::fs::File,
    user: VmUser,
) -> Result<Child, ControlError> {
    let failed = |source| ControlError::Spawn {
        program: program.display().to_string(),
        source,
    };
    let listener = UnixListener::bind(control).map_err(failed)?;
    let child = confined(program, user)
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stdout(Stdio::null())
        .stderr(log)
        .spawn();
    child.map_err(|e| {
        // Who looks for a VMM here shall find none.
        let _ = std::fs::remove_file(control);
        failed(e)
    })
}

/// A running `cube-vmm` and its control socket. Dropping it kills and reaps the process.
#[derive(Debug)]
pub struct VmProcess {
    child: Child,
    /// The control socket.
    pub control: ControlClient,
}

impl VmProcess {
    /// Starts `program` with its control socket as standard input. `log` receives its standard error;
    /// without it that goes to the caller's. `timeout` bounds each answer.
    ///
    /// # Errors
    /// The program cannot be started.
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
        let child = confined(program, VmUser::of_this_process())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(log.map_or_else(Stdio::inherit, Stdio::from))
            .spawn()
            .map_err(failed)?;
        let control = ControlClient::new(ours, timeout).map_err(failed)?;
        Ok(Self { child, control })
    }

    /// Process id of the VMM.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills the process at once and waits for it.
    ///
    /// # Errors
    /// The process cannot be waited for.
    pub fn kill(mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(|_| ())
    }
}

impl Drop for VmProcess {
    fn drop(&mut self) {
        // Both fail only when the process is already gone and reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
