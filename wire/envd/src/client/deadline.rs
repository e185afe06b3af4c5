//! The deadline of a call.

use std::{
    io,
    time::{Duration, Instant},
};

use super::ClientError;

/// A point in time. The timeout from which it was computed is kept for error messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    at: Instant,
    timeout: Duration,
}

impl Deadline {
    pub(super) fn after(timeout: Duration) -> Self {
        let now = Instant::now();
        let at = now.checked_add(timeout);
        Self {
            at: at.unwrap_or_else(|| now + Duration::from_secs(86_400)),
            timeout,
        }
    }

    pub(super) fn left(self) -> Result<Duration, ClientError> {
        let left = self.at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            Err(ClientError::Timeout(self.timeout))
        } else {
            Ok(left)
        }
    }

    pub(super) fn failed(self, doing: &'static str, source: io::Error) -> ClientError {
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                ClientError::Timeout(self.timeout)
            }
            _ => ClientError::NotReachable { doing, source },
        }
    }
}
