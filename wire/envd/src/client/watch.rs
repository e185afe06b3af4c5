//! Watches a directory.

use std::{os::unix::net::UnixStream, time::Duration};

use super::{
    ClientError, EnvdClient,
    answer::refusal,
    deadline::Deadline,
    frames::{Frames, Item},
    protocol,
};
use crate::{FilesystemEvent, Transport, WatchDirRequest, WatchDirResponse};

impl<S: Transport> EnvdClient<S> {
    /// Starts to watch a directory and returns once the agent watches it. `timeout` limits the whole stream.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent cannot watch the directory, and the other [`ClientError`]s if the
    /// call fails.
    pub fn watch(
        &mut self,
        request: &WatchDirRequest,
        timeout: Duration,
    ) -> Result<WatchStream<'_, S>, ClientError> {
        let deadline = Deadline::after(timeout);
        let frames = self.open_stream("filesystem.Filesystem/WatchDir", request, &[], deadline)?;
        let mut stream = WatchStream {
            client: self,
            frames,
            deadline,
        };
        let first = stream.next_message()?;
        if first.is_none_or(|message| message.start.is_none()) {
            return Err(protocol("the stream does not begin with a start event"));
        }
        Ok(stream)
    }
}

/// The changes below a watched directory. If this value is dropped, the connection cannot be used any more.
#[derive(Debug)]
pub struct WatchStream<'a, S = UnixStream> {
    client: &'a mut EnvdClient<S>,
    frames: Frames,
    deadline: Deadline,
}

impl<S: Transport> WatchStream<'_, S> {
    /// Waits for the next change. `None`: the stream has ended successfully.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] with status 200 if the stream ends with an error, and the other
    /// [`ClientError`]s if the call fails.
    pub fn next_change(&mut self) -> Result<Option<FilesystemEvent>, ClientError> {
        while let Some(message) = self.next_message()? {
            if message.filesystem.is_some() {
                return Ok(message.filesystem);
            }
        }
        Ok(None)
    }

    fn next_message(&mut self) -> Result<Option<WatchDirResponse>, ClientError> {
        let connection = &mut self.client.connection;
        match self.frames.next(connection, self.deadline)? {
            Item::Message(message) => Ok(Some(message)),
            Item::End(end) => match end.error {
                None => Ok(None),
                Some(error) => Err(refusal(200, &error)),
            },
        }
    }
}
