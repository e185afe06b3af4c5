//! The wall clock of a guest. `POST /init` carries the time at which the request was made. On a busy host the guest may
//! handle the request late. Its clock is then behind by that delay, which is at most the time until the guest's
//! response. After a slow response, the time is therefore sent again.

use std::{io, os::fd::AsFd, time::Duration};

use envd::{InitRequest, Timestamp};
use tokio::{io::AsyncWriteExt, net::UnixStream, time::timeout};

use super::{
    WorkError,
    lease::{http_request, read_init_answer},
};
use crate::host;

/// A clock that may be behind by more than this is set again. The value is less than half of the deviation that is
/// guaranteed to clones.
const SLACK_NS: u64 = 20_000_000;
/// Maximum number of corrections. On a host so busy that all of these are late, further attempts are unlikely to
/// succeed.
const AGAIN: u32 = 2;

/// Whether a guest's clock may be behind by more than [`SLACK_NS`], if the time was sent at `sent_ns` and the response
/// came at `now_ns` (both CLOCK_MONOTONIC).
pub(crate) fn may_be_late(sent_ns: u64, now_ns: u64) -> bool {
    now_ns.saturating_sub(sent_ns) > SLACK_NS
}

/// Sends the time again, up to [`AGAIN`] times, until a response is quick. The first request is sent before this
/// function returns, and therefore before any request of the sandbox's caller. A task reads the responses. Must be
/// called within a Tokio runtime.
pub(crate) fn set_again(agent: &UnixStream, bound: Duration) {
    let sent_ns = host::monotonic_ns();
    let begun = time_alone()
        .and_then(|request| send(agent, &request))
        .and_then(|()| copy(agent));
    match begun {
        Ok(agent) => {
            tokio::spawn(async move {
                match timeout(bound, set_until_quick(agent, sent_ns)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%error, "a guest's clock may be behind"),
                    Err(_) => tracing::debug!("a guest's clock may be behind: no response"),
                }
            });
        }
        Err(error) => tracing::debug!(%error, "a guest's clock may be behind"),
    }
}

/// Writes a request without waiting. Returns an error if the socket's buffer does not have room for all of it.
fn send(agent: &UnixStream, request: &[u8]) -> Result<(), WorkError> {
    let failed = |e| WorkError::Io("send the time to the guest agent", e);
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

async fn set_until_quick(mut agent: UnixStream, first_sent_ns: u64) -> Result<(), WorkError> {
    let mut sent_ns = first_sent_ns;
    for _ in 1..AGAIN {
        read_init_answer(&mut agent).await?;
        if !may_be_late(sent_ns, host::monotonic_ns()) {
            return Ok(());
        }
        sent_ns = host::monotonic_ns();
        let sent = agent.write_all(&time_alone()?).await;
        sent.map_err(|e| WorkError::Io("send the time to the guest agent", e))?;
    }
    read_init_answer(&mut agent).await
}

/// A request that contains only the current time, so that the guest's other settings do not change.
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
    fn a_quick_answer_ends_the_attempts() {
        assert!(!may_be_late(5, 5 + 20 * MS));
        assert!(may_be_late(5, 6 + 20 * MS));
        // The host's clock went backwards, so the state of the guest's clock is unknown.
        assert!(!may_be_late(5, 0));
    }

    /// Counts the requests that a guest gets if each of its responses takes this long.
    async fn requests(takes: Duration) -> u32 {
        let (ours, mut guest) = UnixStream::pair().unwrap();
        set_again(&ours, Duration::from_secs(60));
        // Only the task holds our end now.
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
    async fn a_guest_on_a_busy_host_gets_few_requests() {
        let slow = Duration::from_nanos(2 * SLACK_NS);
        assert_eq!(requests(slow).await, AGAIN);
    }
}
