//! The new process's side of a handover.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use super::channel::{Channel, Message};
use super::{Given, HandoverError, VARIABLE, VERSION};

/// The process that started this one in order to hand over.
#[derive(Debug)]
pub struct Predecessor(Channel);

impl Predecessor {
    /// Finds the predecessor at the standard input, which is then replaced by `/dev/null`. `None`: this process was
    /// started normally. Must be called in a runtime.
    ///
    /// # Errors
    /// Returns [`HandoverError::Version`] if the predecessor speaks another version of the protocol, and
    /// [`HandoverError::Channel`] if the standard input cannot be used.
    pub fn find() -> Result<Option<Self>, HandoverError> {
        let Some(version) = std::env::var_os(VARIABLE) else {
            return Ok(None);
        };
        let version = version.to_string_lossy();
        if version.parse() != Ok(VERSION) {
            return Err(HandoverError::Version(version.into_owned()));
        }
        let taken = || -> io::Result<Channel> {
            let socket = io::stdin().as_fd().try_clone_to_owned()?;
            nix::unistd::dup2_stdin(File::open("/dev/null")?)?;
            Channel::new(socket)
        };
        taken().map(Self).map(Some).map_err(HandoverError::Channel)
    }

    /// Reports that this process can serve, and waits until the predecessor has handed over.
    ///
    /// # Errors
    /// Returns [`HandoverError::Abandoned`] if the predecessor exits first, and the errors of the connection.
    pub async fn prepared(&self) -> Result<Given, HandoverError> {
        self.0.send(Message::Prepared).await?;
        match self.0.receive().await? {
            Some(Message::Given(given)) => Ok(given),
            Some(other) => Err(HandoverError::Protocol(format!("{other:?}"))),
            None => Err(HandoverError::Abandoned),
        }
    }

    /// Reports that this process serves. If the predecessor has been killed, nothing waits for the report.
    pub async fn serving(self) {
        if let Err(error) = self.0.send(Message::Serving).await {
            tracing::warn!(%error, "the old server process exited during the handover");
        }
    }

    /// Reports why this process cannot serve.
    pub async fn failed(self, why: String) {
        // If the predecessor has exited, the reason is only in the log.
        let _gone = self.0.send(Message::Failed(why)).await;
    }
}
