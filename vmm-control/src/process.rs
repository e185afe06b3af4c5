//! A VMM process and the client of its socket.

use std::{
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use model::{Identity, RestoreSpec, Timeline, VmSpec};

use crate::{
    Failure, Reply, Request, SnapshotContent, VmStats,
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

/// The client side of a control socket. Calls block.
#[derive(Debug)]
pub struct ControlClient {
    socket: UnixStream,
}

impl ControlClient {
    /// Wraps a connected socket. No answer may take longer than `timeout`; `None` waits for ever.
    ///
    /// # Errors
    /// The socket does not take the timeout (zero is refused).
    pub fn new(socket: UnixStream, timeout: Option<Duration>) -> io::Result<Self> {
        socket.set_read_timeout(timeout)?;
        socket.set_write_timeout(timeout)?;
        Ok(Self { socket })
    }

    /// Connects to a VMM of [`spawn_detached`]. It answers when its former client has left.
    ///
    /// # Errors
    /// Nobody listens there, or the timeout is zero.
    pub fn connect(path: &Path, timeout: Option<Duration>) -> io::Result<Self> {
        Self::new(UnixStream::connect(path)?, timeout)
    }

    /// Sends one request, with a TAP descriptor beside it if given, and waits for its answer.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn call(
        &mut self,
        request: &Request,
        tap: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, ControlError> {
        frame::send(&self.socket, request, tap.map(|fd| fd.as_raw_fd()))
            .map_err(ControlError::Frame)?;
        let (answer, _): (Result<Reply, Failure>, _) =
            frame::receive(&self.socket).map_err(ControlError::Frame)?;
        answer.map_err(ControlError::Refused)
    }

    fn started(
        &mut self,
        request: &Request,
        tap: Option<BorrowedFd<'_>>,
    ) -> Result<Timeline, ControlError> {
        match self.call(request, tap)? {
            Reply::Started(timeline) => Ok(timeline),
            other => Err(ControlError::OutOfTurn(other)),
        }
    }

    fn done(&mut self, request: &Request) -> Result<(), ControlError> {
        match self.call(request, None)? {
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
        self.started(&Request::Boot(spec), tap)
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
        self.started(&Request::Restore(spec), tap)
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
        self.started(
            &Request::Identity {
                identity,
                within_ms,
            },
            None,
        )
    }

    /// See [`Request::Pause`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn pause(&mut self) -> Result<(), ControlError> {
        self.done(&Request::Pause)
    }

    /// See [`Request::Resume`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn resume(&mut self) -> Result<(), ControlError> {
        self.done(&Request::Resume)
    }

    /// See [`Request::Snapshot`]; a full one.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn snapshot(&mut self, dir: &Path) -> Result<(), ControlError> {
        self.done(&Request::Snapshot {
            dir: dir.into(),
            content: SnapshotContent::Full,
        })
    }

    /// See [`Request::Snapshot`]; one that leaves to the base what is the base's.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn snapshot_diff(&mut self, dir: &Path) -> Result<(), ControlError> {
        self.done(&Request::Snapshot {
            dir: dir.into(),
            content: SnapshotContent::Diff,
        })
    }

    /// See [`Request::SaveLayer`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn save_layer(&mut self, path: &Path) -> Result<(), ControlError> {
        self.done(&Request::SaveLayer { path: path.into() })
    }

    /// See [`Request::RecordWorkingSet`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn record_working_set(&mut self, path: &Path) -> Result<(), ControlError> {
        self.done(&Request::RecordWorkingSet { path: path.into() })
    }

    /// See [`Request::Stats`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn stats(&mut self) -> Result<VmStats, ControlError> {
        match self.call(&Request::Stats, None)? {
            Reply::Stats(stats) => Ok(stats),
            other => Err(ControlError::OutOfTurn(other)),
        }
    }

    /// See [`Request::Shutdown`].
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn shutdown(&mut self) -> Result<(), ControlError> {
        self.done(&Request::Shutdown)
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
) -> Result<Child, ControlError> {
    let failed = |source| ControlError::Spawn {
        program: program.display().to_string(),
        source,
    };
    let listener = UnixListener::bind(control).map_err(failed)?;
    let child = Command::new(program)
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
        let child = Command::new(program)
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
