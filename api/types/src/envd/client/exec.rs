//! Commands and what they write.

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
use crate::envd::{
    Blob, EndEvent, EventResponse, ProcessConfig, ProcessEvent, StartRequest, Transport, frame,
};

/// Output that [`EnvdClient::exec`] collects at most, both streams together.
pub const MAX_EXEC_OUTPUT: usize = 256 << 20;

/// A command for [`EnvdClient::exec`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecRequest {
    /// Program, see [`ProcessConfig::cmd`].
    pub cmd: String,
    /// Arguments after the program's own name.
    pub args: Vec<String>,
    /// Added to the environment.
    pub envs: BTreeMap<String, String>,
    /// Working directory; absent means the sandbox's default.
    pub cwd: Option<String>,
    /// Who runs it; absent means the sandbox's default user.
    pub user: Option<String>,
    /// A name to select it by.
    pub tag: Option<String>,
    /// Whether it gets a pipe as standard input; `None` leaves the key out of the message.
    pub stdin: Option<bool>,
    /// The agent kills it after this long; absent means never.
    pub kill_after: Option<Duration>,
}

impl ExecRequest {
    /// A command without standard input and with everything else left to the sandbox's defaults.
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

/// What a command left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecOutput {
    /// Process id inside the guest.
    pub pid: u32,
    /// All of standard output.
    pub stdout: Vec<u8>,
    /// All of standard error.
    pub stderr: Vec<u8>,
    /// -1 when a signal ended it.
    pub exit_code: i32,
    /// Whether it ended by itself.
    pub exited: bool,
    /// `exit status N` or `signal: killed`.
    pub status: String,
    /// When its first output arrived; absent when it wrote nothing.
    pub first_byte: Option<Instant>,
}

impl<S: Transport> EnvdClient<S> {
    /// Runs a command to its end and collects its output.
    ///
    /// # Errors
    /// See [`ClientError`]; a command that fails is no error. On [`ClientError::Timeout`] the command goes
    /// on unless [`ExecRequest::kill_after`] says otherwise.
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
                return Err(protocol("the command writes more than is collected"));
            }
            end = event.end.or(end);
        }
        let end: EndEvent = end.ok_or_else(|| protocol("a stream without an end event"))?;
        output.exit_code = end.exit_code;
        output.exited = end.exited;
        output.status = end.status;
        Ok(output)
    }

    /// Starts a command and returns once the agent has said that it runs. `timeout` bounds the whole stream.
    ///
    /// # Errors
    /// See [`ClientError`].
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

    /// A server stream of process events: `process.Process/Start` or `process.Process/Connect`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn stream<Q: Serialize>(
        &mut self,
        method: &str,
        message: &Q,
        user: Option<&str>,
        connect_timeout: Option<Duration>,
        timeout: Duration,
    ) -> Result<ExecStream<'_, S>, ClientError> {
        let message = serde_json::to_vec(message).map_err(protocol)?;
        let mut body = Vec::with_capacity(message.len() + frame::HEADER);
        frame::encode(0, &message, &mut body).map_err(protocol)?;
        let mut headers = vec![
            ("content-type", "application/connect+json".to_owned()),
            ("connect-protocol-version", "1".to_owned()),
        ];
        if let Some(after) = connect_timeout {
            headers.push(("connect-timeout-ms", after.as_millis().max(1).to_string()));
        }
        if let Some(user) = user {
            headers.push(("authorization", basic(user)));
        }
        let headers: Vec<_> = headers.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let deadline = Deadline::after(timeout);
        self.send_request("POST", &format!("/{method}"), &headers, &body, deadline)?;
        let head = self.connection.read_head(deadline)?;
        if head.status != 200 {
            return Err(refused(&self.connection.collect(head, deadline)?));
        }
        let mut stream = ExecStream {
            client: self,
            frames: Frames::of(head.body),
            deadline,
            pid: 0,
        };
        let first = stream.next_event()?.and_then(|event| event.start);
        let start = first.ok_or_else(|| protocol("a stream without a start event"))?;
        stream.pid = start.pid;
        Ok(stream)
    }
}

/// A running command's events. Dropping it half-way leaves the connection unusable; the command goes on.
#[derive(Debug)]
pub struct ExecStream<'a, S = UnixStream> {
    client: &'a mut EnvdClient<S>,
    frames: Frames,
    deadline: Deadline,
    pid: u32,
}

impl<S: Transport> ExecStream<'_, S> {
    /// The command's process id inside the guest.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits for the next event; `None` after the stream has ended well.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with status 200 when the stream ends with an error; all others.
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

fn basic(user: &str) -> String {
    let mut value = b"Basic ".to_vec();
    Blob::encode_into(format!("{user}:").as_bytes(), &mut value);
    String::from_utf8(value).unwrap_or_default()
}
