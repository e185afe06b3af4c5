//! `process.Process/StreamInput`: a streamed request.

use std::time::Duration;

use serde::de::IgnoredAny;

use super::{
    ClientError, EnvdClient,
    answer::{refusal, refused},
    deadline::Deadline,
    frames::{Frames, Item},
    protocol,
};
use crate::envd::{
    ConnectRequest, ProcessInput, ProcessSelector, StreamInputData, StreamInputRequest, frame,
};

/// A call in progress. If this value is dropped without [`InputStream::finish`] or [`InputStream::answer`], the
/// connection cannot be used any more.
#[derive(Debug)]
pub struct InputStream<'a> {
    client: &'a mut EnvdClient,
    deadline: Deadline,
}

impl EnvdClient {
    /// Starts to stream input to a process. The agent ends the call after `connect_timeout`, the client after
    /// `timeout`.
    ///
    /// # Errors
    /// Returns [`ClientError`] if the request cannot be sent. Errors of the agent are returned by
    /// [`InputStream::finish`].
    pub fn stream_input(
        &mut self,
        process: &ProcessSelector,
        connect_timeout: Option<Duration>,
        timeout: Duration,
    ) -> Result<InputStream<'_>, ClientError> {
        let deadline = Deadline::after(timeout);
        let mut head = String::from(
            "POST /process.Process/StreamInput HTTP/1.1\r\nhost: guest\r\n\
             content-type: application/connect+json\r\nconnect-protocol-version: 1\r\n\
             transfer-encoding: chunked\r\n",
        );
        if let Some(after) = connect_timeout {
            head.push_str(&format!("connect-timeout-ms: {}\r\n", after.as_millis()));
        }
        if let Some(token) = &self.token {
            head.push_str(&format!("x-access-token: {token}\r\n"));
        }
        head.push_str("\r\n");
        self.connection.begin()?;
        self.connection.send(&[head.as_bytes()], deadline)?;
        let mut stream = InputStream {
            client: self,
            deadline,
        };
        let start = ConnectRequest {
            process: process.clone(),
        };
        stream.message(&StreamInputRequest {
            start: Some(start),
            ..StreamInputRequest::default()
        })?;
        Ok(stream)
    }
}

impl InputStream<'_> {
    /// Sends input.
    ///
    /// # Errors
    /// Returns [`ClientError`] if the input cannot be sent.
    pub fn send(&mut self, input: ProcessInput) -> Result<(), ClientError> {
        self.message(&StreamInputRequest {
            data: Some(StreamInputData { input }),
            ..StreamInputRequest::default()
        })
    }

    /// Sends any message.
    ///
    /// # Errors
    /// Returns [`ClientError`] if the message cannot be sent.
    pub fn message(&mut self, message: &StreamInputRequest) -> Result<(), ClientError> {
        let json = serde_json::to_vec(message).map_err(protocol)?;
        let mut framed = Vec::with_capacity(json.len() + frame::HEADER);
        frame::encode(0, &json, &mut framed).map_err(protocol)?;
        let size = format!("{:x}\r\n", framed.len());
        let parts = [size.as_bytes(), &framed, b"\r\n"];
        self.client.connection.send(&parts, self.deadline)
    }

    /// Ends the request and waits until the process has taken all input.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent refused a message, and the other [`ClientError`]s if the call
    /// fails.
    pub fn finish(self) -> Result<(), ClientError> {
        self.client
            .connection
            .send(&[b"0\r\n\r\n"], self.deadline)?;
        self.answer()
    }

    /// Waits for the answer without ending the request. The agent answers early only if it refuses a message.
    ///
    /// # Errors
    /// Returns the errors of [`InputStream::finish`].
    pub fn answer(self) -> Result<(), ClientError> {
        let connection = &mut self.client.connection;
        let head = connection.read_head(self.deadline)?;
        if head.status != 200 {
            return Err(refused(&connection.collect(head, self.deadline)?));
        }
        let mut frames = Frames::of(head.body);
        loop {
            let item: Item<IgnoredAny> = frames.next(connection, self.deadline)?;
            if let Item::End(end) = item {
                let refused = end.error.map(|error| refusal(200, &error));
                return refused.map_or(Ok(()), Err);
            }
        }
    }
}
