//! `process.Process/StreamInput`: a streamed request.

use std::{os::unix::net::UnixStream, time::Duration};

use serde::de::IgnoredAny;

use super::{
    ClientError, EnvdClient,
    answer::{refusal, refused},
    deadline::Deadline,
    frames::{Frames, Item},
    protocol,
};
use crate::{
    ConnectRequest, ProcessInput, ProcessSelector, StreamInputData, StreamInputRequest, Transport,
    frame,
};

/// A call in progress. If this value is dropped without [`InputStream::finish`] or [`InputStream::answer`], the
/// connection cannot be used any more.
#[derive(Debug)]
pub struct InputStream<'a, S = UnixStream> {
    client: &'a mut EnvdClient<S>,
    deadline: Deadline,
}

impl<S: Transport> EnvdClient<S> {
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
    ) -> Result<InputStream<'_, S>, ClientError> {
        let deadline = Deadline::after(timeout);
        let mut headers = vec![
            ("content-type", "application/connect+json"),
            ("connect-protocol-version", "1"),
            ("transfer-encoding", "chunked"),
        ];
        let after = connect_timeout.map(|after| after.as_millis().to_string());
        headers.extend(after.iter().map(|ms| ("connect-timeout-ms", ms.as_str())));
        let mut head = self.head("POST", "/process.Process/StreamInput", &headers);
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

impl<S: Transport> InputStream<'_, S> {
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
    /// Returns [`ClientError::Refused`] if the agent rejected a message, and the other [`ClientError`]s if
    /// the call fails.
    pub fn finish(self) -> Result<(), ClientError> {
        self.client
            .connection
            .send(&[b"0\r\n\r\n"], self.deadline)?;
        self.answer()
    }

    /// Waits for the response without ending the request. The agent responds early only if it rejects a message.
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
