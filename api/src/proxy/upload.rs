//! The body of a request on its way to a sandbox or to the control plane.
//!
//! Many clients write the whole body before they read the response. If an early response closed the connection while
//! body data is in transit, the kernel would reset the connection, and the client would see the reset instead of the
//! response. Therefore the unread rest of the body is read and discarded before the response is sent, within limits.

use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};

/// Maximum number of bytes that are discarded before an early response.
const DROPPED_MAX: u64 = 64 << 20;
/// Time limit for discarding the rest of a body.
const DROPPING_LIMIT: Duration = Duration::from_secs(10);

/// The body could not be read to its end.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// The connection failed, or the data is not a valid body.
    #[error("cannot read the request body")]
    Client(#[source] hyper::Error),
    /// The client paused for longer than allowed.
    #[error("the request body was not received in time")]
    Stalled,
}

/// How far a request body has been read. Shared with the code that waits for the response.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: AtomicU8,
    /// The unread rest of a body that was dropped before its end.
    left: Mutex<Option<Incoming>>,
}

impl Shared {
    fn take_left(&self) -> Option<Incoming> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.take()
    }
}

const IN_PROGRESS: u8 = 0;
const COMPLETE: u8 = 1;
const STALLED: u8 = 2;

impl Progress {
    /// Whether the whole body has been read.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.0.state.load(Ordering::Acquire) == COMPLETE
    }

    /// Whether the client paused for too long.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.0.state.load(Ordering::Acquire) == STALLED
    }

    /// Reads and discards the unread rest of a dropped body, up to `DROPPED_MAX` bytes and for at most
    /// `DROPPING_LIMIT`.
    pub async fn drop_rest(&self) {
        let Some(mut rest) = self.0.take_left() else {
            return;
        };
        let dropping = async {
            let mut dropped = 0;
            while dropped < DROPPED_MAX
                && let Some(Ok(frame)) = rest.frame().await
            {
                let length = frame.data_ref().map_or(0, Bytes::len);
                dropped += u64::try_from(length).unwrap_or(u64::MAX);
            }
        };
        // After the time limit, the client gets the response and the connection is closed.
        let _late = tokio::time::timeout(DROPPING_LIMIT, dropping).await;
    }
}

/// A request body that fails if the client pauses for longer than `patience` while the recipient waits for data. Time
/// in which the recipient does not read does not count.
#[derive(Debug)]
pub struct Upload {
    inner: Option<Incoming>,
    patience: Option<Duration>,
    /// Timer of the current pause. It is kept between pauses, since resetting a timer is cheaper than creating one.
    pause: Option<Pin<Box<Sleep>>>,
    waiting: bool,
    progress: Progress,
}

impl Upload {
    /// A body without a limit for pauses.
    #[must_use]
    pub fn new(inner: Incoming) -> Self {
        let progress = Progress::default();
        if inner.is_end_stream() {
            progress.0.state.store(COMPLETE, Ordering::Release);
        }
        Self {
            inner: Some(inner),
            patience: None,
            pause: None,
            waiting: false,
            progress,
        }
    }

    /// Limits each pause to `patience`.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    #[must_use]
    pub fn none() -> Self {
        let progress = Progress::default();
        progress.0.state.store(COMPLETE, Ordering::Release);
        Self {
            inner: None,
            patience: None,
            pause: None,
            waiting: false,
            progress,
        }
    }

    #[must_use]
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    fn poll_pause(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(patience) = self.patience else {
            return Poll::Pending;
        };
        if !self.waiting {
            self.waiting = true;
            let deadline = Instant::now() + patience;
            match &mut self.pause {
                Some(pause) => pause.as_mut().reset(deadline),
                None => self.pause = Some(Box::pin(sleep_until(deadline))),
            }
        }
        match &mut self.pause {
            Some(pause) => pause.as_mut().poll(cx),
            None => Poll::Pending,
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if self.progress.0.state.load(Ordering::Acquire) == IN_PROGRESS {
            let left = self.progress.0.left.lock();
            *left.unwrap_or_else(PoisonError::into_inner) = self.inner.take();
        }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = UploadError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        let Some(inner) = &mut self.inner else {
            return Poll::Ready(None);
        };
        let Poll::Ready(frame) = Pin::new(inner).poll_frame(cx) else {
            if self.poll_pause(cx).is_pending() {
                return Poll::Pending;
            }
            self.progress.0.state.store(STALLED, Ordering::Release);
            return Poll::Ready(Some(Err(UploadError::Stalled)));
        };
        self.waiting = false;
        if frame.is_none() || (matches!(frame, Some(Ok(_))) && self.is_end_stream()) {
            self.progress.0.state.store(COMPLETE, Ordering::Release);
        }
        Poll::Ready(frame.map(|frame| frame.map_err(UploadError::Client)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Some(inner) => inner.size_hint(),
            None => SizeHint::with_exact(0),
        }
    }
}
