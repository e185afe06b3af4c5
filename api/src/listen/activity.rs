//! What a connection is doing, and how long it may go on doing it.
//!
//! ```text
//!        first byte             whole head                 answer sent
//! idle ────────────► head read ───────────► busy (1 or more) ────────► idle
//! IDLE               HEAD_READ              no limit, but WRITE_PAUSE
//! ```
//! The state is written where bytes and requests pass, and read by the one task that runs the connection.
//! Times are milliseconds since the connection was accepted, so that they fit an atomic.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use super::limits::Limits;

/// Shared by all parts of one connection.
#[derive(Debug)]
pub(super) struct Activity {
    accepted: Instant,
    requests: AtomicUsize,
    idle_since: AtomicU64,
    /// 0: no head is being read.
    head_since: AtomicU64,
    /// 0: no write is waiting.
    write_since: AtomicU64,
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    Idle,
    Head,
    Write,
}

impl Activity {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            accepted: Instant::now(),
            requests: AtomicUsize::new(0),
            idle_since: AtomicU64::new(0),
            head_since: AtomicU64::new(0),
            write_since: AtomicU64::new(0),
        })
    }

    /// Never 0.
    fn now(&self) -> u64 {
        let elapsed = self.accepted.elapsed().as_millis();
        u64::try_from(elapsed).unwrap_or(u64::MAX).max(1)
    }

    fn read(&self) {
        let waits = self.requests.load(Ordering::Relaxed) == 0;
        if waits && self.head_since.load(Ordering::Relaxed) == 0 {
            self.head_since.store(self.now(), Ordering::Relaxed);
        }
    }

    fn write_waits(&self) {
        if self.write_since.load(Ordering::Relaxed) == 0 {
            self.write_since.store(self.now(), Ordering::Relaxed);
        }
    }

    fn written(&self) {
        if self.write_since.load(Ordering::Relaxed) != 0 {
            self.write_since.store(0, Ordering::Relaxed);
        }
    }

    /// A request has come; it is under way until what is returned is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> Request {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.head_since.store(0, Ordering::Relaxed);
        Request(Arc::clone(self))
    }

    /// When what the connection does now is overdue; `None` when it may take as long as it likes.
    pub(super) fn deadline(&self, limits: &Limits) -> Option<(Instant, Overdue)> {
        let after = |since: &AtomicU64, limit: Duration, why| {
            let since = Duration::from_millis(since.load(Ordering::Relaxed));
            (self.accepted + since + limit, why)
        };
        if self.write_since.load(Ordering::Relaxed) != 0 {
            return Some(after(&self.write_since, limits.write_pause, Overdue::Write));
        }
        if self.requests.load(Ordering::Relaxed) != 0 {
            return None;
        }
        Some(match self.head_since.load(Ordering::Relaxed) {
            0 => after(&self.idle_since, limits.idle, Overdue::Idle),
            _ => after(&self.head_since, limits.head_read, Overdue::Head),
        })
    }
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Request(Arc<Activity>);

impl Drop for Request {
    fn drop(&mut self) {
        let activity = &self.0;
        activity.idle_since.store(activity.now(), Ordering::Relaxed);
        activity.head_since.store(0, Ordering::Relaxed);
        activity.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An answer whose request is under way until its last byte is taken.
#[derive(Debug)]
pub(super) struct Answer {
    inner: Body,
    _request: Request,
}

impl Answer {
    pub(super) fn new(inner: Body, request: Request) -> Self {
        Self {
            inner,
            _request: request,
        }
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A stream whose bytes are noticed.
#[derive(Debug)]
pub(super) struct Noticed<S> {
    stream: S,
    activity: Arc<Activity>,
}

impl<S> Noticed<S> {
    pub(super) fn new(stream: S, activity: Arc<Activity>) -> Self {
        Self { stream, activity }
    }

    fn note<T>(&self, written: &Poll<std::io::Result<T>>) {
        match written {
            Poll::Pending => self.activity.write_waits(),
            Poll::Ready(_) => self.activity.written(),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Noticed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, into);
        if into.filled().len() > before {
            self.activity.read();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Noticed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.note(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.note(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.note(&flushed);
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.note(&shut);
        shut
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_has_its_limit() {
        let limits = Limits::default();
        let activity = Activity::new();
        let why = |activity: &Activity| activity.deadline(&limits).map(|(_, why)| why);
        assert_eq!(why(&activity), Some(Overdue::Idle));
        activity.read();
        assert_eq!(why(&activity), Some(Overdue::Head));
        let (first, second) = (activity.begin(), activity.begin());
        activity.read();
        assert_eq!(why(&activity), None);
        activity.write_waits();
        assert_eq!(why(&activity), Some(Overdue::Write));
        activity.written();
        drop(first);
        assert_eq!(why(&activity), None);
        drop(second);
        assert_eq!(why(&activity), Some(Overdue::Idle));
    }

    #[test]
    fn a_head_s_limit_runs_from_its_first_byte() {
        let limits = Limits::default();
        let activity = Activity::new();
        activity.head_since.store(5, Ordering::Relaxed);
        activity.read();
        let (deadline, _) = activity.deadline(&limits).unwrap();
        let expected = activity.accepted + Duration::from_millis(5) + limits.head_read;
        assert_eq!(deadline, expected);
    }
}
