//! Commands and files in a build VM.
//!
//! The agent is not trusted, because a build's own commands run as root next to it. It can only make its own build
//! fail.

use std::{
    fs::File,
    io,
    net::Shutdown,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use envd::{ClientError, ENVD_PORT, EndEvent, EnvdClient, ProcessEvent};
use tasks::on_thread;
use tokio::task::{JoinHandle, spawn_blocking};

use super::{
    cancel::Cancel,
    command::{COMMAND_LIMIT, Command},
    output::{Captured, Lines},
};

/// Time limit for the agent's response. A busy host delays it.
const ANSWER: Duration = Duration::from_secs(60);
/// The agent kills a command at its limit. This is the additional time to wait for its response.
const GRACE: Duration = Duration::from_secs(60);
/// Time limit for the transfer of an archive.
const UPLOAD: Duration = Duration::from_secs(3600);

/// Why a command did not succeed. Where E2B has a text, it is the same.
#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    /// `exit status 1` or `signal: killed`.
    #[error("{0}")]
    Status(String),
    #[error("command failed: {code}: {message}")]
    Refused { code: String, message: String },
    #[error("the command did not end within {} s", .0.as_secs())]
    Limit(Duration),
    /// A text for the client.
    #[error("the virtual machine of the build does not respond, or has ended: {0}")]
    Lost(String),
    #[error("{0}")]
    Output(&'static str),
    #[error("build was cancelled")]
    Cancelled,
}

/// A request to a server in the guest.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// The vsock port on which the server listens.
    pub(super) port: u16,
    pub(super) path: String,
    pub(super) body: Option<String>,
    pub(super) expects: String,
}

/// A build's VM.
#[derive(Clone, Debug)]
pub(super) struct Guest {
    vsock: PathBuf,
    cancel: Cancel,
}

impl Guest {
    /// `vsock` is the socket of the VM's vsock device.
    pub(super) fn new(vsock: &Path, cancel: Cancel) -> Self {
        Self {
            vsock: vsock.to_owned(),
            cancel,
        }
    }

    /// Runs a command and writes its output to the log.
    pub(super) async fn run(&self, command: &Command, lines: Lines) -> Result<(), CommandError> {
        let started = self.start(command, lines).await?;
        self.unless_cancelled(started.ended()).await
    }

    /// Runs a command. Returns its output, even if it fails, and how it ended.
    pub(super) async fn capture(
        &self,
        command: &Command,
    ) -> Result<(Captured, Result<(), CommandError>), CommandError> {
        let (vsock, command) = (self.vsock.clone(), command.clone());
        let run = on_thread(move || {
            let mut captured = Captured::default();
            let stream = connect(&vsock)?;
            let ended = follow(stream, &command, |event| captured.add(event));
            Ok((captured, ended))
        });
        self.unless_cancelled(join(run)).await
    }

    /// Starts a command, which keeps running. Its output goes to the log until the returned value is dropped.
    pub(super) async fn start(
        &self,
        command: &Command,
        lines: Lines,
    ) -> Result<Started, CommandError> {
        let vsock = self.vsock.clone();
        let connected = on_thread(move || connect(&vsock));
        let stream = self.unless_cancelled(join(connected)).await?;
        let lost = |error: io::Error| CommandError::Lost(error.to_string());
        let socket = stream.try_clone().map_err(lost)?;
        let command = command.clone();
        let thread = spawn_blocking(move || {
            let mut lines = lines;
            follow(stream, &command, |event| {
                lines.add(event);
                Ok(())
            })
        });
        let thread = Some(thread);
        Ok(Started { socket, thread })
    }

    /// Writes a file of the host to a path in the guest, owned by root.
    pub(super) async fn upload(&self, from: File, to: &str) -> Result<(), CommandError> {
        let (vsock, to) = (self.vsock.clone(), to.to_owned());
        let upload = on_thread(move || {
            let mut agent = EnvdClient::over(connect(&vsock)?, UPLOAD);
            let sent = agent.upload_file(&to, from, Some("root"));
            sent.map_err(|error| command_error(error, UPLOAD))
        });
        self.unless_cancelled(join(upload)).await
    }

    /// Sends a request to a server in the guest: `POST` with a body, otherwise `GET`. Succeeds if the response has
    /// status 200 and contains `expects`.
    pub(super) async fn request(&self, request: Request) -> Result<(), CommandError> {
        let vsock = self.vsock.clone();
        let asked = on_thread(move || ask(&vsock, &request));
        self.unless_cancelled(join(asked)).await
    }

    /// The result of the work, or an error as soon as the build is cancelled. Everything started in the guest ends with
    /// the VM.
    async fn unless_cancelled<T>(
        &self,
        work: impl Future<Output = Result<T, CommandError>>,
    ) -> Result<T, CommandError> {
        let mut cancel = self.cancel.clone();
        tokio::select! {
            biased;
            () = cancel.cancelled() => Err(CommandError::Cancelled),
            result = work => result,
        }
    }

    /// Sleeps, but wakes up when the build is cancelled.
    pub(super) async fn sleep(&self, duration: Duration) -> Result<(), CommandError> {
        let sleep = async {
            tokio::time::sleep(duration).await;
            Ok(())
        };
        self.unless_cancelled(sleep).await
    }
}

/// A running command. Dropping this closes the connection; the command continues.
#[derive(Debug)]
pub(super) struct Started {
    socket: UnixStream,
    thread: Option<JoinHandle<Result<(), CommandError>>>,
}

impl Started {
    /// Waits for the command to exit.
    pub(super) async fn ended(mut self) -> Result<(), CommandError> {
        self.wait().await
    }

    /// Waits for the command to exit. Can be dropped and called again. Must not be called after it has returned.
    pub(super) async fn wait(&mut self) -> Result<(), CommandError> {
        let Some(thread) = &mut self.thread else {
            return std::future::pending().await;
        };
        let ended = join(thread).await;
        self.thread = None;
        ended
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // Fails only if the connection is already closed.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

async fn join<T>(
    thread: impl Future<Output = Result<Result<T, CommandError>, tokio::task::JoinError>>,
) -> Result<T, CommandError> {
    let panicked = |_| CommandError::Lost("the server is stopping".to_owned());
    thread.await.map_err(panicked)?
}

fn connect(vsock: &Path) -> Result<UnixStream, CommandError> {
    EnvdClient::connect(vsock, ENVD_PORT, ANSWER)
        .and_then(EnvdClient::into_stream)
        .map_err(|error| command_error(error, ANSWER))
}

fn ask(vsock: &Path, request: &Request) -> Result<(), CommandError> {
    let not_yet = || CommandError::Status("no response".to_owned());
    let method = if request.body.is_some() {
        "POST"
    } else {
        "GET"
    };
    let body = request.body.as_deref().unwrap_or_default().as_bytes();
    let mut server =
        EnvdClient::connect(vsock, request.port, ANSWER).map_err(|_not_listening| not_yet())?;
    let answer = server.request(method, &request.path, &[], body);
    let answer = answer.map_err(|_not_ready| not_yet())?;
    let text = String::from_utf8_lossy(&answer.body);
    if answer.status == 200 && text.contains(&request.expects) {
        return Ok(());
    }
    Err(not_yet())
}

/// Runs a command until it exits, and forwards its events.
fn follow(
    stream: UnixStream,
    command: &Command,
    mut on_event: impl FnMut(&ProcessEvent) -> Result<(), CommandError>,
) -> Result<(), CommandError> {
    let limit = command.limit.unwrap_or(COMMAND_LIMIT);
    let failed = |error| command_error(error, limit);
    let mut agent = EnvdClient::over(stream, ANSWER);
    let mut events = agent
        .start(&command.request(), limit + GRACE)
        .map_err(failed)?;
    let mut end: Option<EndEvent> = None;
    while let Some(event) = events.next_event().map_err(failed)? {
        on_event(&event)?;
        end = event.end.or(end);
    }
    match end {
        Some(end) if end.exited && end.exit_code == 0 => Ok(()),
        Some(end) => Err(CommandError::Status(envd::guest_text(&end.status))),
        None => Err(CommandError::Lost("the agent sent no result".to_owned())),
    }
}

fn command_error(error: ClientError, limit: Duration) -> CommandError {
    match error {
        ClientError::Refused { code, .. } if code == "deadline_exceeded" => {
            CommandError::Limit(limit)
        }
        ClientError::Refused { code, message, .. } => CommandError::Refused { code, message },
        ClientError::Timeout(_) => CommandError::Limit(limit),
        ClientError::NotReachable { .. } | ClientError::Local { .. } | ClientError::Protocol(_) => {
            CommandError::Lost(model::chain(&error))
        }
    }
}
