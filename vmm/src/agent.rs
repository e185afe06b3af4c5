//! The VMM's only request to the guest: `POST /init` to the agent, which applies the clone's identity before it
//! responds. The request carries the wall clock at the time of sending.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use envd::{InitRequest, Timestamp};
use model::{Identity, clock};

use crate::watch::{Interest, Token, Watch};

/// The agent's vsock port. It has the same number as envd's TCP port.
pub const AGENT_PORT: u32 = 49983;
/// Delay before the next attempt after a stream ended without a response, for example because the agent is not
/// listening yet.
const RETRY: Duration = Duration::from_millis(5);
/// Limit on the length of a response's head in bytes. A response that reaches it is parsed as if its head were
/// complete.
const MAX_ANSWER: usize = 16 << 10;

/// State of an [`IdentityTask`].
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// The agent has not responded.
    Waiting,
    /// The agent has applied the identity.
    Ready,
    /// The agent's response was not a 2xx status, or the deadline passed. Contains the reason.
    Failed(String),
}

/// The transfer of an identity to the agent.
#[derive(Debug)]
pub struct IdentityTask {
    identity: Identity,
    deadline: Instant,
    attempt: Attempt,
}

#[derive(Debug)]
enum Attempt {
    At(Instant),
    Open { stream: UnixStream, answer: Vec<u8> },
}

impl IdentityTask {
    /// Creates a task whose first attempt is due at `now`.
    #[must_use]
    pub fn new(identity: Identity, within: Duration, now: Instant) -> Self {
        Self {
            identity,
            deadline: now + within,
            attempt: Attempt::At(now),
        }
    }

    /// The time at which [`IdentityTask::step`] must be called even if no descriptor becomes ready.
    #[must_use]
    pub fn due(&self) -> Instant {
        match &self.attempt {
            Attempt::At(at) => (*at).min(self.deadline),
            Attempt::Open { .. } => self.deadline,
        }
    }

    /// Continues the task. If an attempt is due, also returns the far end of a new stream, which the caller must
    /// connect to [`AGENT_PORT`].
    ///
    /// # Errors
    /// Returns an error if the stream cannot be created, written or watched.
    pub fn step(
        &mut self,
        now: Instant,
        watch: &mut Watch,
    ) -> io::Result<(Progress, Option<UnixStream>)> {
        if now >= self.deadline {
            let why =
                "the agent did not respond in time (is the guest still starting? see its console)";
            return Ok((Progress::Failed(why.into()), None));
        }
        match &mut self.attempt {
            Attempt::At(at) if now < *at => Ok((Progress::Waiting, None)),
            Attempt::At(_) => self.open(watch).map(|far| (Progress::Waiting, Some(far))),
            Attempt::Open { stream, answer } => {
                let progress = match read_answer(stream, answer) {
                    Some(progress) => progress,
                    None => {
                        self.attempt = Attempt::At(now + RETRY);
                        Progress::Waiting
                    }
                };
                Ok((progress, None))
            }
        }
    }

    fn open(&mut self, watch: &mut Watch) -> io::Result<UnixStream> {
        let (mut near, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        // The request is smaller than any socket buffer, so this writes all of it without blocking.
        near.write_all(request(&self.identity, clock::unix_ns()).as_bytes())?;
        watch.add(&near, Token::Agent, Interest::Read)?;
        self.attempt = Attempt::Open {
            stream: near,
            answer: Vec::new(),
        };
        Ok(far)
    }
}

/// Reads from the stream. Returns `None` if the stream ended or failed before the response's head was complete.
fn read_answer(stream: &mut UnixStream, answer: &mut Vec<u8>) -> Option<Progress> {
    let mut buffer = [0; 1024];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return None,
            Ok(n) => answer.extend_from_slice(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Some(Progress::Waiting),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
        if let Some(progress) = parse_answer(answer) {
            return Some(progress);
        }
    }
}

fn parse_answer(answer: &[u8]) -> Option<Progress> {
    let text = String::from_utf8_lossy(answer);
    if !text.contains("\r\n\r\n") && answer.len() < MAX_ANSWER {
        return None;
    }
    let status = text.strip_prefix("HTTP/1.1 ").and_then(|t| t.get(..3));
    Some(match status {
        Some(s) if s.starts_with('2') => Progress::Ready,
        _ => {
            let shown: String = text.chars().take(300).collect();
            Progress::Failed(format!("the agent answered {shown:?}"))
        }
    })
}

fn request(identity: &Identity, unix_ns: u64) -> String {
    let init = InitRequest {
        hostname: Some(identity.hostname.clone()),
        machine_id: Some(identity.machine_id.clone()),
        entropy: Some(identity.entropy.as_hex().to_owned()),
        timestamp: Some(Timestamp::from_unix_ns(unix_ns)),
        ..InitRequest::default()
    };
    // Serializing strings and numbers cannot fail.
    let body = serde_json::to_string(&init).unwrap_or_default();
    format!(
        "POST /init HTTP/1.1\r\nHost: guest\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::EntropySeed;

    fn identity() -> Identity {
        Identity {
            hostname: "h".into(),
            machine_id: "0".repeat(32),
            entropy: EntropySeed::new([1; 32]),
        }
    }

    #[test]
    fn an_answer_is_parsed_when_its_head_is_complete() {
        assert_eq!(parse_answer(b"HTTP/1.1 204 No Con"), None);
        assert_eq!(
            parse_answer(b"HTTP/1.1 204 No Content\r\n\r\n"),
            Some(Progress::Ready)
        );
        assert!(matches!(
            parse_answer(b"HTTP/1.1 400 Bad\r\n\r\nno"),
            Some(Progress::Failed(_))
        ));
        assert!(matches!(
            parse_answer(&[b'x'; MAX_ANSWER]),
            Some(Progress::Failed(_))
        ));
    }

    #[test]
    fn a_refused_attempt_is_repeated_until_the_deadline() {
        let now = Instant::now();
        let mut watch = crate::watch::tests::test_watch();
        let mut task = IdentityTask::new(identity(), Duration::from_secs(1), now);
        let (_, far) = task.step(now, &mut watch).unwrap();
        // Shut down, not dropped: a process that another test forks at this moment may hold a copy of the descriptor.
        far.unwrap().shutdown(std::net::Shutdown::Both).unwrap();
        let (progress, far) = task.step(now, &mut watch).unwrap();
        assert!(progress == Progress::Waiting && far.is_none());
        assert_eq!(task.due(), now + RETRY);
        let (_, far) = task.step(now + RETRY, &mut watch).unwrap();
        assert!(far.is_some());
        let (progress, _) = task.step(now + Duration::from_secs(1), &mut watch).unwrap();
        assert!(matches!(progress, Progress::Failed(_)));
    }
}
