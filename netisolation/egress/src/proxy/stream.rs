//! The guest's side of a connection: bytes that were already read come first, all bytes count as activity, and
//! [`Framing`] checks HTTP/1 requests.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use egress::framing::{Framing, Violation};
use hyper::body::Bytes;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::sleep,
};

/// Time at which a connection last passed a byte.
#[derive(Debug)]
pub(crate) struct Activity {
    began: Instant,
    last_ms: AtomicU64,
}

impl Activity {
    pub(crate) fn new() -> Arc<Self> {
        let (began, last_ms) = (Instant::now(), AtomicU64::new(0));
        Arc::new(Self { began, last_ms })
    }

    pub(crate) fn touch(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(now, Ordering::Relaxed);
    }

    /// Time since the last byte passed.
    pub(crate) fn idle_at(&self, now: Instant) -> Duration {
        let last = Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
        now.saturating_duration_since(self.began)
            .saturating_sub(last)
    }

    /// Waits until no byte has passed for this time.
    pub(crate) async fn idle(&self, limit: Duration) {
        loop {
            let last = Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
            let end = last.saturating_add(limit);
            match end.checked_sub(self.began.elapsed()) {
                Some(left) if !left.is_zero() => sleep(left).await,
                Some(_) | None => return,
            }
        }
    }
}

/// A stream whose first bytes have already been read.
pub(crate) struct Guest<S> {
    first: Bytes,
    stream: S,
    activity: Arc<Activity>,
}

impl<S> Guest<S> {
    pub(crate) fn new(first: Bytes, stream: S, activity: Arc<Activity>) -> Self {
        Self {
            first,
            stream,
            activity,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guest<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.first.is_empty() {
            let length = self.first.len().min(buffer.remaining());
            let part = self.first.split_to(length);
            buffer.put_slice(&part);
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        if buffer.filled().len() > before {
            self.activity.touch();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guest<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes))?;
        self.activity.touch();
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, parts))?;
        self.activity.touch();
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Findings of [`Framing`] in the requests of an HTTP/1 connection.
pub(crate) struct Framed {
    framing: Mutex<(Framing, Option<Instant>)>,
}

impl Framed {
    pub(crate) fn new() -> Arc<Self> {
        let framing = Mutex::default();
        Arc::new(Self { framing })
    }

    pub(crate) fn violation(&self) -> Option<Violation> {
        self.lock().0.violation()
    }

    /// Waits until a head has been incomplete for this time. For a first request, the time counts from now.
    pub(crate) async fn slow_head(&self, limit: Duration) {
        let began = Instant::now();
        loop {
            let (requests, head_began) = {
                let guard = self.lock();
                (guard.0.requests(), guard.1)
            };
            let since = match (requests, head_began) {
                (0, _) => Some(began),
                (_, head_began) => head_began,
            };
            let left = since.map_or(limit, |since| limit.saturating_sub(since.elapsed()));
            if left.is_zero() {
                return;
            }
            // A head that begins during this sleep may take up to twice the limit.
            sleep(left).await;
        }
    }

    fn read(&self, bytes: &[u8]) {
        let mut guard = self.lock();
        let (framing, head_began) = &mut *guard;
        framing.read(bytes);
        *head_began = match (framing.is_in_head(), *head_began) {
            (false, _) => None,
            (true, Some(began)) => Some(began),
            (true, None) => Some(Instant::now()),
        };
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (Framing, Option<Instant>)> {
        self.framing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream whose incoming bytes pass through [`Framed`].
pub(crate) struct Followed<S> {
    pub(crate) stream: S,
    pub(crate) framed: Arc<Framed>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Followed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        self.framed.read(&buffer.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Followed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
