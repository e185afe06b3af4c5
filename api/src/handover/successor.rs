//! The old process's side of a handover.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::channel::{Channel, Message};
use super::{Given, HandoverError, VARIABLE, VERSION};

/// How long a process that has closed the connection may take to exit.
const EXIT: Duration = Duration::from_secs(5);
const EXIT_POLL: Duration = Duration::from_millis(10);

/// The path of this program as it was started, so that a later call finds the build that is installed then. A path in
/// the first argument is not resolved, because a link in it may lead to another build by then.
///
/// # Errors
/// Returns an error if the path cannot be determined.
pub fn program() -> std::io::Result<PathBuf> {
    let named = env::args_os().next().map(PathBuf::from);
    let named = named.filter(|path| path.components().count() > 1 && path.is_file());
    match named {
        Some(path) => std::path::absolute(path),
        None => env::current_exe(),
    }
}

/// The new process. It is killed when this value is dropped, unless it serves.
#[derive(Debug)]
pub struct Successor {
    /// `None` once it serves.
    child: Option<Child>,
    pid: u32,
    channel: Channel,
}

impl Successor {
    /// Starts `program` with the arguments and the environment of this process.
    ///
    /// # Errors
    /// Returns [`HandoverError::Start`] if the program cannot be started.
    pub fn start(program: &Path) -> Result<Self, HandoverError> {
        let failed = |source| HandoverError::Start {
            program: program.display().to_string(),
            source,
        };
        let (channel, other) = Channel::pair().map_err(failed)?;
        let arguments: Vec<OsString> = env::args_os().skip(1).collect();
        let child = Command::new(program)
            .args(arguments)
            .env(VARIABLE, VERSION.to_string())
            // Sockets from systemd are handed over like any others.
            .env_remove("LISTEN_PID")
            .env_remove("LISTEN_FDS")
            .env_remove("LISTEN_FDNAMES")
            .stdin(Stdio::from(other))
            .spawn()
            .map_err(failed)?;
        Ok(Self {
            pid: child.id(),
            child: Some(child),
            channel,
        })
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until the process has checked everything that it can check before it takes over.
    ///
    /// # Errors
    /// Returns [`HandoverError`] if the process fails, exits, or does not respond within `limit`.
    pub async fn prepared(&mut self, limit: Duration) -> Result<(), HandoverError> {
        match self.next(limit).await? {
            Message::Prepared => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Hands descriptors over, and waits until the process serves.
    ///
    /// # Errors
    /// Returns [`HandoverError`] if the process fails, exits, or does not serve within `limit`.
    pub async fn take_over(&mut self, given: Given, limit: Duration) -> Result<(), HandoverError> {
        self.channel.send(Message::Given(given)).await?;
        match self.next(limit).await? {
            Message::Serving => {}
            other => return Err(unexpected(other)),
        }
        if let Some(mut child) = self.child.take() {
            // If the process exits before this one, it must not remain a zombie.
            std::thread::spawn(move || child.wait());
        }
        Ok(())
    }

    async fn next(&mut self, limit: Duration) -> Result<Message, HandoverError> {
        let received = tokio::time::timeout(limit, self.channel.receive()).await;
        match received.map_err(|_| HandoverError::Late(limit.as_secs()))?? {
            Some(message) => Ok(message),
            None => Err(HandoverError::Ended(self.status().await)),
        }
    }

    async fn status(&mut self) -> String {
        let deadline = tokio::time::Instant::now() + EXIT;
        while let Some(child) = &mut self.child
            && tokio::time::Instant::now() < deadline
        {
            if let Ok(Some(status)) = child.try_wait() {
                return status.to_string();
            }
            tokio::time::sleep(EXIT_POLL).await;
        }
        "still running".to_owned()
    }
}

fn unexpected(message: Message) -> HandoverError {
    match message {
        Message::Failed(why) => HandoverError::Failed(why),
        other => HandoverError::Protocol(format!("{other:?}")),
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        self.end();
    }
}

impl Successor {
    /// Kills the process, unless it serves, and waits until it has exited.
    pub fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            let ended = child.kill().and_then(|()| child.wait());
            if let Err(error) = ended {
                tracing::error!(pid = self.pid, %error, "cannot kill the new server process");
            }
        }
    }
}
