//! What a connection is doing, and how long it may go on doing it.
//!
//! ```text
//!             whole head                 answer sent          first byte             whole head
//! silent ────────────────► busy (1 or more) ────────► idle ────────────► head read ───────────► busy
//! HEAD_READ                no limit, but WRITE_PAUSE  IDLE               HEAD_READ
//! ```
//! A connection is silent until its first request, whether or not bytes of it have come: a client that connects
//! has something to ask.
//! The state is written where bytes and requests pass, and read by the one task that runs the connection.
//! Times are milliseconds since the connection was accepted, so that they fit an atomic.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::Version;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use nix::libc::linger;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;

use super::clients::Client;
use super::limits::Limits;

/// Shared by all parts of one connection.
#[derive(Debug)]
pub(super) struct Activity {
    accepted: Instant,
    requests: AtomicUsize,
    /// A request has come.
    has_asked: AtomicBool,
    /// Until the first request: since when the connection can carry one.
    idle_since: AtomicU64,
    /// 0: no head is being read.
    head_since: AtomicU64,
    /// 0: no write is waiting.
    write_since: AtomicU64,
    /// An answer broke off that only the end of the connection can tell from a whole one.
    broken: AtomicBool,
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
            has_asked: AtomicBool::new(false),
            idle_since: AtomicU64::new(0),
            head_since: AtomicU64::new(0),
            write_since: AtomicU64::new(0),
            broken: AtomicBool::new(false),
        })
    }

    /// Never 0.
    fn now(&self) -> u64 {
        let elapsed = self.accepted.elapsed().as_millis();
        u64::try_from(elapsed).unwrap_or(u64::MAX).max(1)
    }

    /// The handshake is done; the time for a first request runs from here.
    pub(super) fn opened(&self) {
        self.idle_since.store(self.now(), Ordering::Relaxed);
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
    pub(super) fn begin(self: &Arc<Self>, version: Version) -> Request {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.has_asked.store(true, Ordering::Relaxed);
        self.head_since.store(0, Ordering::Relaxed);
        Request {
            activity: Arc::clone(self),
            version,
        }
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
        if !self.has_asked.load(Ordering::Relaxed) {
            return Some(after(&self.idle_since, limits.head_read, Overdue::Head));
        }
        Some(match self.head_since.load(Ordering::Relaxed) {
            0 => after(&self.idle_since, limits.idle, Overdue::Idle),
            _ => after(&self.head_since, limits.head_read, Overdue::Head),
        })
    }
}

/// How little a connection would be missed, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Standing {
    /// It has never asked.
    Silent,
    /// It waits for the next request.
    Idle,
    /// It has been answered, and takes its time to read the answer.
    Reading,
    /// A request is under way.
    Busy,
}

impl Activity {
    /// What would be lost with the connection, and since when that is so; of a busy one, since it was last idle.
    pub(super) fn standing(&self) -> (Standing, Instant) {
        let is_busy = self.requests.load(Ordering::Relaxed) != 0;
        let standing = match self.write_since.load(Ordering::Relaxed) {
            _ if is_busy => Standing::Busy,
            0 if !self.has_asked.load(Ordering::Relaxed) => Standing::Silent,
            0 => Standing::Idle,
            _ => Standing::Reading,
        };
        let since = Duration::from_millis(self.idle_since.load(Ordering::Relaxed));
        (standing, self.accepted + since)
    }
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Request {
    activity: Arc<Activity>,
    version: Version,
}

impl Request {
    /// HTTP/2 resets the answer's stream, and the connection goes on.
    fn broke_off(&self) {
        if self.version != Version::HTTP_2 {
            self.activity.broken.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let activity = &self.activity;
        activity.idle_since.store(activity.now(), Ordering::Relaxed);
        activity.head_since.store(0, Ordering::Relaxed);
        activity.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An answer whose request is under way, and counts as its client's, until its last byte is taken.
#[derive(Debug)]
pub(super) struct Answer {
    inner: Body,
    request: Request,
    _client: Option<Client>,
}

impl Answer {
    pub(super) fn new(inner: Body, request: Request, client: Option<Client>) -> Self {
        Self {
            inner,
            request,
            _client: client,
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
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        if let Poll::Ready(Some(Err(_))) = &polled {
            self.request.broke_off();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A stream over TCP.
pub(super) trait OverTcp {
    fn tcp(&self) -> &TcpStream;
}

impl OverTcp for TcpStream {
    fn tcp(&self) -> &TcpStream {
        self
    }
}

impl OverTcp for TlsStream<TcpStream> {
    fn tcp(&self) -> &TcpStream {
        self.get_ref().0
    }
}

/// A stream whose bytes are noticed.
#[derive(Debug)]
pub(super) struct Noticed<S: OverTcp> {
    stream: S,
    activity: Arc<Activity>,
}

impl<S: OverTcp> Drop for Noticed<S> {
    /// After an answer that broke off the connection is reset: clients that see a mere end take it for a fault of
    /// this server, those that see a reset look whether the sandbox was killed. What has not been sent is dropped.
    fn drop(&mut self) {
        if !self.activity.broken.load(Ordering::Relaxed) {
            return;
        }
        let at_once = linger {
            l_onoff: 1,
            l_linger: 0,
        };
        if let Err(error) = setsockopt(self.stream.tcp(), sockopt::Linger, &at_once) {
            tracing::debug!(%error, "a connection is closed where it should be reset");
        }
    }
}

impl<S: OverTcp> Noticed<S> {
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

impl<S: AsyncRead + OverTcp + Unpin> AsyncRead for Noticed<S> {
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

impl<S: AsyncWrite + OverTcp + Unpin> AsyncWrite for Noticed<S> {
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
        assert_eq!(why(&activity), Some(Overdue::Head));
        assert_eq!(activity.standing().0, Standing::Silent);
        activity.read();
        assert_eq!(why(&activity), Some(Overdue::Head));
        assert_eq!(activity.standing().0, Standing::Silent);
        let (first, second) = (
            activity.begin(Version::HTTP_11),
            activity.begin(Version::HTTP_11),
        );
        activity.read();
        assert_eq!(why(&activity), None);
        activity.write_waits();
        assert_eq!(why(&activity), Some(Overdue::Write));
        activity.written();
        drop(first);
        assert_eq!(why(&activity), None);
        assert_eq!(activity.standing().0, Standing::Busy);
        activity.write_waits();
        drop(second);
        assert_eq!(activity.standing().0, Standing::Reading);
        activity.written();
        assert_eq!(why(&activity), Some(Overdue::Idle));
        assert_eq!(activity.standing().0, Standing::Idle);
        activity.read();
        assert_eq!(why(&activity), Some(Overdue::Head));
        assert_eq!(activity.standing().0, Standing::Idle);
    }

    #[test]
    fn a_first_request_is_waited_for_no_longer_than_a_head() {
        let limits = Limits::default();
        let activity = Activity::new();
        let due = activity.deadline(&limits).unwrap().0;
        assert_eq!(due, activity.accepted + limits.head_read);
        // Its first bytes give it no more time.
        activity.head_since.store(9000, Ordering::Relaxed);
        assert_eq!(activity.deadline(&limits).unwrap().0, due);
    }

    #[test]
    fn a_later_head_s_limit_runs_from_its_first_byte() {
        let limits = Limits::default();
        let activity = Activity::new();
        drop(activity.begin(Version::HTTP_11));
        activity.head_since.store(5, Ordering::Relaxed);
        activity.read();
        let (deadline, _) = activity.deadline(&limits).unwrap();
        let expected = activity.accepted + Duration::from_millis(5) + limits.head_read;
        assert_eq!(deadline, expected);
    }
}
