//! Runs commands and collects their output.

use std::{
    collections::BTreeMap,
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use serde::Serialize;

use super::{
    ClientError, EnvdClient,
    answer::{refusal, refused},
    deadline::Deadline,
    frames::{Frames, Item},
    protocol,
};
use crate::{
    Blob, EndEvent, EventResponse, ProcessConfig, ProcessEvent, StartRequest, Transport, frame,
};

/// Maximum number of output bytes that [`EnvdClient::exec`] accepts, both streams together.
pub const MAX_EXEC_OUTPUT: usize = 256 << 20;

/// A command for [`EnvdClient::exec`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecRequest {
    /// Same as [`ProcessConfig::cmd`].
    pub cmd: String,
    /// Arguments without the program's name.
    pub args: Vec<String>,
    /// Added to the environment.
    pub envs: BTreeMap<String, String>,
    /// Working directory. `None`: the sandbox's default.
    pub cwd: Option<String>,
    /// `None`: the sandbox's default user.
    pub user: Option<String>,
    /// A name by which later requests can select the process.
    pub tag: Option<String>,
    /// Whether standard input is a pipe. `None`: the key is omitted, so the agent's default applies.
    pub stdin: Option<bool>,
    /// Time after which the agent kills the command. `None`: never.
    pub kill_after: Option<Duration>,
}

impl ExecRequest {
    /// A command without standard input; all other options have the sandbox's defaults.
    #[must_use]
    pub fn new(cmd: impl Into<String>, args: &[&str]) -> Self {
        Self {
            cmd: cmd.into(),
            args: args.iter().map(ToString::to_string).collect(),
            stdin: Some(false),
            ..Self::default()
        }
    }
}

/// The result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecOutput {
    /// Process id in the guest.
    pub pid: u32,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// -1 if a signal ended the command.
    pub exit_code: i32,
    /// Whether the command exited, as opposed to being ended by a signal.
    pub exited: bool,
    /// `exit status N` or `signal: killed`.
    pub status: String,
    /// When the first output arrived. `None`: the command wrote nothing.
    pub first_byte: Option<Instant>,
}

impl<S: Transport> EnvdClient<S> {
    /// Runs a command to its end and collects its output.
    ///
    /// # Errors
    /// Returns [`ClientError`] if the call fails; a command that fails is not an error. After [`ClientError::Timeout`],
    /// the command continues to run unless [`ExecRequest::kill_after`] is set.
    pub fn exec(
        &mut self,
        request: &ExecRequest,
        timeout: Duration,
    ) -> Result<ExecOutput, ClientError> {
        let mut stream = self.start(request, timeout)?;
        let mut output = ExecOutput {
            pid: stream.pid(),
            stdout: Vec::new(),
            stderr: Vec::new(),
            exit_code: -1,
            exited: false,
            status: String::new(),
            first_byte: None,
        };
        let mut end = None;
        while let Some(event) = stream.next_event()? {
            if let Some(data) = event.data {
                output.first_byte.get_or_insert_with(Instant::now);
                output.stdout.extend(data.stdout.unwrap_or_default().0);
                output.stderr.extend(data.stderr.unwrap_or_default().0);
            }
            if output.stdout.len() + output.stderr.len() > MAX_EXEC_OUTPUT {
                return Err(protocol("the output of the command exceeds its limit"));
            }
            end = event.end.or(end);
        }
        let end: EndEvent = end.ok_or_else(|| protocol("the stream ended without an end event"))?;
        output.exit_code = end.exit_code;
        output.exited = end.exited;
        output.status = end.status;
        Ok(output)
    }

    /// Starts a command and returns after its start event. `timeout` limits the whole stream.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent cannot start the command, and the other [`ClientError`]s if the
    /// call fails.
    pub fn start(
        &mut self,
        request: &ExecRequest,
        timeout: Duration,
    ) -> Result<ExecStream<'_, S>, ClientError> {
        let message = StartRequest {
            process: Some(ProcessConfig {
                cmd: request.cmd.clone(),
                args: request.args.clone(),
                envs: request.envs.clone(),
                cwd: request.cwd.clone(),
            }),
            pty: None,
            tag: request.tag.clone(),
            stdin: request.stdin,
        };
        let user = request.user.as_deref();
        let kill_after = request.kill_after;
        self.stream("process.Process/Start", &message, user, kill_after, timeout)
    }

    /// Calls an RPC that streams process events: `process.Process/Start` or `process.Process/Connect`.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the agent rejects the call, and the other [`ClientError`]s if
    /// the call fails.
    pub fn stream<Q: Serialize>(
        &mut self,
        method: &str,
        message: &Q,
        user: Option<&str>,
        connect_timeout: Option<Duration>,
        timeout: Duration,
    ) -> Result<ExecStream<'_, S>, ClientError> {
        let mut headers = Vec::new();
        if let Some(after) = connect_timeout {
            headers.push(("connect-timeout-ms", after.as_millis().max(1).to_string()));
        }
        if let Some(user) = user {
            headers.push(("authorization", basic(user)));
        }
        let headers: Vec<_> = headers.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let deadline = Deadline::after(timeout);
        let frames = self.open_stream(method, message, &headers, deadline)?;
        let mut stream = ExecStream {
            client: self,
            frames,
            deadline,
            pid: 0,
        };
        let first = stream.next_event()?.and_then(|event| event.start);
        let start =
            first.ok_or_else(|| protocol("the stream does not begin with a start event"))?;
        stream.pid = start.pid;
        Ok(stream)
    }

    /// Calls an RPC that takes one message and returns a stream.
    pub(super) fn open_stream<Q: Serialize>(
        &mut self,
        method: &str,
        message: &Q,
        headers: &[(&str, &str)],
        deadline: Deadline,
    ) -> Result<Frames, ClientError> {
        let message = serde_json::to_vec(message).map_err(protocol)?;
        let mut body = Vec::with_capacity(message.len() + frame::HEADER);
        frame::encode(0, &message, &mut body).map_err(protocol)?;
        let mut all = vec![
            ("content-type", "application/connect+json"),
            ("connect-protocol-version", "1"),
        ];
        all.extend(headers);
        self.send_request("POST", &format!("/{method}"), &all, &body, deadline)?;
        let head = self.connection.read_head(deadline)?;
        if head.status != 200 {
            return Err(refused(&self.connection.collect(head, deadline)?));
        }
        Ok(Frames::of(head.body))
    }
}

/// The events of a running command. If this value is dropped before the end of the stream, the command continues to
/// run, and the connection cannot be used any more.
#[derive(Debug)]
pub struct ExecStream<'a, S = UnixStream> {
    client: &'a mut EnvdClient<S>,
    frames: Frames,
    deadline: Deadline,
    pid: u32,
}

impl<S: Transport> ExecStream<'_, S> {
    /// Process id of the command in the guest.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits for the next event. `None`: the stream has ended successfully.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] with status 200 if the stream ends with an error, and the other
    /// [`ClientError`]s if the call fails.
    pub fn next_event(&mut self) -> Result<Option<ProcessEvent>, ClientError> {
        let connection = &mut self.client.connection;
        let item: Item<EventResponse> = self.frames.next(connection, self.deadline)?;
        match item {
            Item::Message(message) => Ok(Some(message.event)),
            Item::End(end) => match end.error {
                None => Ok(None),
                Some(error) => Err(refusal(200, &error)),
            },
        }
    }
}

/// The `Authorization` that names a user of the guest.
pub(super) fn basic(user: &str) -> String {
    let mut value = b"Basic ".to_vec();
    Blob::encode_into(format!("{user}:").as_bytes(), &mut value);
    String::from_utf8(value).unwrap_or_default()
}
