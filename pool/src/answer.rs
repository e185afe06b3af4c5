//! The responses to callers.

use tokio::sync::oneshot;

use crate::error::PoolError;

/// Sends one response to a caller. If the caller no longer waits, the response is dropped. If this value is dropped, the
/// caller sees that the driver has ended.
#[derive(Debug)]
pub(crate) struct Reply<T>(oneshot::Sender<T>);

/// The response to a request that can fail.
pub(crate) type Answer<T> = Reply<Result<T, PoolError>>;

impl<T> Reply<T> {
    pub(crate) fn new() -> (Self, oneshot::Receiver<T>) {
        let (sender, receiver) = oneshot::channel();
        (Self(sender), receiver)
    }

    pub(crate) fn send(self, response: T) {
        let _ = self.0.send(response);
    }

    /// Whether the caller no longer waits.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.0.is_closed()
    }
}

impl<T> Answer<T> {
    /// Returns what the request needs, and the answer, which is still to be sent. If there is an error, sends it.
    pub(crate) fn or_refuse<U, E: Into<PoolError>>(
        self,
        needed: Result<U, E>,
    ) -> Option<(U, Self)> {
        match needed {
            Ok(needed) => Some((needed, self)),
            Err(error) => {
                self.send(Err(error.into()));
                None
            }
        }
    }
}
