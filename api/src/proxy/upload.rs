//! The body of a request on its way to a sandbox or to the control plane.
//!
//! Many clients write the whole body before they read the response. If an early response closed the connection while
//! body data is in transit, the kernel would reset the connection, and the client would see the reset instead of the
//! response. Therefore the unread rest of the body is read and discarded before the response is sent, within limits.
//!
//! While a request may have to be sent again, the body keeps the frames that it has passed on ([`Upload::keep`]).

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};

use super::line::Line;

/// Maximum number of bytes that are discarded before an early response.
const DROPPED_MAX: u64 = 64 << 20;
/// Time limit for discarding the rest of a body.
const DROPPING_LIMIT: Duration = Duration::from_secs(10);
/// Maximum number of bytes of a body that are kept. Before hyper writes, it takes less than `max_buf_size` (64 KiB) and
/// one frame, which is at most as long.
const KEPT_MAX: usize = 128 << 10;

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
    /// Whether the request may have to be sent again.
    is_kept: AtomicBool,
    /// The frames that a dropped body has passed on. `None`: not all of them were kept.
    kept: Mutex<Option<VecDeque<Bytes>>>,
}

impl Shared {
    fn take_left(&self) -> Option<Incoming> {
        lock(&self.left).take()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Frees the kept frames, because the request is not sent again.
    pub(super) fn forget(&self) {
        self.0.is_kept.store(false, Ordering::Release);
        *lock(&self.0.kept) = None;
    }

    /// A dropped body from its start, or `None` if the start was not kept.
    pub(super) fn rewind(&self, patience: Option<Duration>) -> Option<Upload> {
        let again = lock(&self.0.kept).take()?;
        if self.is_stalled() {
            return None;
        }
        let mut upload = Upload::with(self.0.take_left(), self.clone());
        upload.again = again;
        upload.patience = patience;
        let state = if upload.is_end_stream() {
            COMPLETE
        } else {
            IN_PROGRESS
        };
        self.0.state.store(state, Ordering::Release);
        Some(upload)
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
    /// Frames of a body that is sent again. They come before those of `inner`.
    again: VecDeque<Bytes>,
    kept: Option<Kept>,
}

/// The frames that a body has passed on.
#[derive(Debug)]
struct Kept {
    frames: VecDeque<Bytes>,
    bytes: usize,
    until: KeepUntil,
}

/// How long a request may have to be sent again.
#[derive(Debug)]
pub(super) enum KeepUntil {
    /// Until the response arrives. The sandbox may see the request twice.
    Answered,
    /// Until its first byte is written.
    Written(Arc<Line>),
}

impl Upload {
    /// A body without a limit for pauses.
    #[must_use]
    pub fn new(inner: Incoming) -> Self {
        let progress = Progress::default();
        if inner.is_end_stream() {
            progress.0.state.store(COMPLETE, Ordering::Release);
        }
        Self::with(Some(inner), progress)
    }

    fn with(inner: Option<Incoming>, progress: Progress) -> Self {
        Self {
            inner,
            patience: None,
            pause: None,
            waiting: false,
            progress,
            again: VecDeque::new(),
            kept: None,
        }
    }

    /// Limits each pause to `patience`.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    #[must_use]
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    pub(super) fn patience(&self) -> Option<Duration> {
        self.patience
    }

    /// Keeps the frames that are read from now on. None may have been read before.
    pub(super) fn keep(&mut self, until: KeepUntil) {
        self.progress.0.is_kept.store(true, Ordering::Release);
        let (frames, bytes) = (VecDeque::new(), 0);
        self.kept = Some(Kept {
            frames,
            bytes,
            until,
        });
    }

    fn note(&mut self, frame: Option<&Result<Frame<Bytes>, UploadError>>) {
        let is_kept = self.progress.0.is_kept.load(Ordering::Acquire);
        self.kept = self
            .kept
            .take()
            .filter(|_| is_kept)
            .and_then(|kept| kept.and(frame));
    }

    fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        if let Some(data) = self.again.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        let Some(inner) = &mut self.inner else {
            return Poll::Ready(None);
        };
        if let Poll::Ready(frame) = Pin::new(inner).poll_frame(cx) {
            self.waiting = false;
            return Poll::Ready(frame.map(|frame| frame.map_err(UploadError::Client)));
        }
        if self.poll_pause(cx).is_pending() {
            return Poll::Pending;
        }
        self.progress.0.state.store(STALLED, Ordering::Release);
        Poll::Ready(Some(Err(UploadError::Stalled)))
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

impl Kept {
    /// Adds a frame. Returns `None` if it cannot be kept, or need not be.
    fn and(mut self, frame: Option<&Result<Frame<Bytes>, UploadError>>) -> Option<Self> {
        if matches!(&self.until, KeepUntil::Written(line) if line.is_used()) {
            return None;
        }
        if let Some(frame) = frame {
            let data = frame.as_ref().ok()?.data_ref()?;
            self.bytes += data.len();
            self.frames.push_back(data.clone());
        }
        (self.bytes <= KEPT_MAX).then_some(self)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let shared = &self.progress.0;
        if shared.state.load(Ordering::Acquire) == IN_PROGRESS {
            *lock(&shared.left) = self.inner.take();
        }
        if shared.is_kept.load(Ordering::Acquire) {
            *lock(&shared.kept) = self.kept.take().map(|kept| kept.frames);
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
        let Poll::Ready(frame) = self.poll_next(cx) else {
            return Poll::Pending;
        };
        self.note(frame.as_ref());
        if frame.is_none() || (matches!(frame, Some(Ok(_))) && self.is_end_stream()) {
            self.progress.0.state.store(COMPLETE, Ordering::Release);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.again.is_empty() && self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let again = self.again.iter().map(Bytes::len).sum::<usize>();
        let again = u64::try_from(again).unwrap_or(u64::MAX);
        let mut hint = self
            .inner
            .as_ref()
            .map_or(SizeHint::with_exact(0), Body::size_hint);
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(again));
        }
        hint.set_lower(hint.lower().saturating_add(again));
        hint
    }
}
