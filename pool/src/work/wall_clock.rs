//! The wall clock of a guest. A request carries the time of its making, and the guest sets its clock once it has a
//! CPU to read it with: on a busy host that is a while later, and its clock is late by as much. How late nobody
//! knows, but no later than the answer took. After a slow answer the time is told again, now to a guest that runs.

use std::{io, os::fd::AsFd, time::Duration};

use api_types::envd::{InitRequest, Timestamp};
use tokio::{io::AsyncWriteExt, net::UnixStream, time::timeout};

use super::{
    WorkError,
    lease::{http_request, told},
};
use crate::host;

/// A clock that may be late by more than this is set again: less than half of what clones are promised.
const SLACK_NS: u64 = 20_000_000;
/// How often at most. On a host that is that busy each further try is as likely to be late as the one before.
const AGAIN: u32 = 2;

/// Whether a guest's clock may be wrong whose answer came now, by CLOCK_MONOTONIC.
pub(crate) fn may_be_late(sent_ns: u64, now_ns: u64) -> bool {
    now_ns.saturating_sub(sent_ns) > SLACK_NS
}

/// Tells the time again, until an answer is quick. Nobody waits for that: the request is on its way before this
/// returns, so before anything that the sandbox's caller asks, and a task hears the answer. Needs a runtime around
/// it.
pub(crate) fn tell_again(agent: &UnixStream, bound: Duration) {
    let sent_ns = host::monotonic_ns();
    let begun = time_alone()
        .and_then(|request| send(agent, &request))
        .and_then(|()| copy(agent));
    match begun {
        Ok(agent) => {
            tokio::spawn(async move {
                match timeout(bound, hear_out(agent, sent_ns)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%error, "a guest's clock may be late"),
                    Err(_) => tracing::debug!("a guest's clock may be late: no answer"),
                }
            });
        }
        Err(error) => tracing::debug!(%error, "a guest's clock may be late"),
    }
}

/// What is written to a socket into which little was written so far goes whole.
fn send(agent: &UnixStream, request: &[u8]) -> Result<(), WorkError> {
    let failed = |e| WorkError::Io("tell the guest agent", e);
    match agent.try_write(request).map_err(failed)? {
        n if n == request.len() => Ok(()),
        _ => Err(failed(io::ErrorKind::WriteZero.into())),
    }
}

fn copy(agent: &UnixStream) -> Result<UnixStream, WorkError> {
    let copy = agent.as_fd().try_clone_to_owned();
    copy.and_then(|fd| UnixStream::from_std(fd.into()))
        .map_err(|e| WorkError::Io("copy a descriptor", e))
}

async fn hear_out(mut agent: UnixStream, first_sent_ns: u64) -> Result<(), WorkError> {
    let mut sent_ns = first_sent_ns;
    for _ in 1..AGAIN {
        told(&mut agent).await?;
        if !may_be_late(sent_ns, host::monotonic_ns()) {
            return Ok(());
        }
        sent_ns = host::monotonic_ns();
        let sent = agent.write_all(&time_alone()?).await;
        sent.map_err(|e| WorkError::Io("tell the guest agent", e))?;
    }
    told(&mut agent).await
}

/// The time of now and nothing else: what the guest has been told besides stays as it is.
fn time_alone() -> Result<Vec<u8>, WorkError> {
    http_request(&InitRequest {
        timestamp: Some(Timestamp::from_unix_ns(host::unix_ns())),
        ..InitRequest::default()
    })
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    const MS: u64 = 1_000_000;
    const ANSWER: &[u8] = b"HTTP/1.1 204 No Content\r\n\r\n";

    #[test]
    fn a_quick_answer_is_the_last() {
        assert!(!may_be_late(5, 5 + 20 * MS));
        assert!(may_be_late(5, 6 + 20 * MS));
        // A clock that went back says nothing about the guest's.
        assert!(!may_be_late(5, 0));
    }

    /// Requests that a guest hears which takes so long for each answer.
    async fn requests(takes: Duration) -> u32 {
        let (ours, mut guest) = UnixStream::pair().unwrap();
        tell_again(&ours, Duration::from_secs(60));
        // From here on only the task holds our end.
        drop(ours);
        let (mut seen, mut count) = (Vec::new(), 0);
        loop {
            let n = guest.read_buf(&mut seen).await.unwrap();
            if n == 0 {
                return count;
            }
            while let Some(end) = seen.windows(4).position(|w| w == b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&seen[..end]).into_owned();
                let length = head.rsplit(' ').next().unwrap().parse::<usize>().unwrap();
                if seen.len() < end + 4 + length {
                    break;
                }
                let body: serde_json::Value =
                    serde_json::from_slice(&seen[end + 4..end + 4 + length]).unwrap();
                let keys: Vec<_> = body.as_object().unwrap().keys().collect();
                assert_eq!(keys, ["timestamp"]);
                seen.drain(..end + 4 + length);
                count += 1;
                tokio::time::sleep(takes).await;
                guest.write_all(ANSWER).await.unwrap();
            }
        }
    }

    #[tokio::test]
    async fn a_host_without_time_is_not_asked_for_ever() {
        let slow = Duration::from_nanos(2 * SLACK_NS);
        assert_eq!(requests(slow).await, AGAIN);
    }
}
