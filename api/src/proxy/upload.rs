//! The body of a request on its way to a sandbox or to the control plane.
//!
//! Clients write bodies without looking for an early answer. If such an answer ended the connection while
//! the body is on its way, the kernel would reset it, and the client would see that instead of the answer. So
//! what nobody wants is read and dropped first, within limits.

use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};

/// Bytes that are dropped for the sake of an early answer.
const DROPPED_MAX: u64 = 64 << 20;
/// How long that may take.
const DROPPING_LIMIT: Duration = Duration::from_secs(10);

/// A body broke off.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// The client's connection failed, or what came is no body.
    #[error("the client's body cannot be read")]
    Client(#[source] hyper::Error),
    /// Nothing came for too long.
    #[error("the client's body stopped coming")]
    Stalled,
}

/// How far a body is; shared with whoever waits for the answer.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: AtomicU8,
    /// What is left of a body that was dropped before its end.
    left: Mutex<Option<Incoming>>,
}

impl Shared {
    fn take_left(&self) -> Option<Incoming> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.take()
    }
}

const UNDER_WAY: u8 = 0;
const COMPLETE: u8 = 1;
const STALLED: u8 = 2;

impl Progress {
    /// The whole body has been read.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.0.state.load(Ordering::Acquire) == COMPLETE
    }

    /// The client stopped sending.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.0.state.load(Ordering::Acquire) == STALLED
    }

    /// Reads what nobody wanted.
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
        // Whoever takes longer gets the answer and the end of the connection.
        let _late = tokio::time::timeout(DROPPING_LIMIT, dropping).await;
    }
}

/// A client's body that fails when the client pauses for longer than `patience` while more is wanted.
/// Waiting for whoever reads it does not count.
#[derive(Debug)]
pub struct Upload {
    inner: Option<Incoming>,
    patience: Option<Duration>,
    /// Armed while the client is waited for; kept, since arming anew costs less than making one.
    pause: Option<Pin<Box<Sleep>>>,
    waiting: bool,
    progress: Progress,
}

impl Upload {
    /// The client may pause for ever.
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

    /// The client may pause for `patience`.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// No body.
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

    /// How far it is.
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
        if self.progress.0.state.load(Ordering::Acquire) == UNDER_WAY {
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
