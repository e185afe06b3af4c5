//! Reads the frames of a streamed response up to the end of its body, and no further.

use serde::de::DeserializeOwned;

use super::{ClientError, connection::Connection, deadline::Deadline, protocol, response::Body};
use crate::{EndStream, Transport, frame};

/// An element of a stream.
pub(super) enum Item<M> {
    Message(M),
    End(EndStream),
}

/// State of a stream.
#[derive(Debug)]
pub(super) struct Frames {
    body: Body,
    /// Bytes of an incomplete frame.
    held: Vec<u8>,
}

impl Frames {
    pub(super) fn of(body: Body) -> Self {
        Self {
            body,
            held: Vec::new(),
        }
    }

    /// Waits for the next message or the end of the stream. Must not be called after it has returned [`Item::End`].
    pub(super) fn next<M: DeserializeOwned, S: Transport>(
        &mut self,
        connection: &mut Connection<S>,
        deadline: Deadline,
    ) -> Result<Item<M>, ClientError> {
        let limit = connection.limits.frame;
        loop {
            if let Some((frame, used)) = frame::decode(&self.held, limit).map_err(protocol)? {
                if frame.flags & frame::END_STREAM != 0 {
                    let end = serde_json::from_slice(frame.body).map_err(protocol)?;
                    self.held.drain(..used);
                    self.finish(connection, deadline)?;
                    return Ok(Item::End(end));
                }
                let message = serde_json::from_slice(frame.body).map_err(protocol)?;
                self.held.drain(..used);
                return Ok(Item::Message(message));
            }
            if !connection.read_body(&mut self.body, &mut self.held, deadline)? {
                return Err(protocol("the stream ended without an end-of-stream frame"));
            }
        }
    }

    /// Reads the end of the body after the last frame, so that the connection can be reused. Data after the last frame
    /// is an error.
    fn finish<S: Transport>(
        &mut self,
        connection: &mut Connection<S>,
        deadline: Deadline,
    ) -> Result<(), ClientError> {
        let is_over = self.held.is_empty()
            && !connection.read_body(&mut self.body, &mut self.held, deadline)?;
        if is_over {
            Ok(())
        } else {
            Err(protocol("data after the end of the stream"))
        }
    }
}
