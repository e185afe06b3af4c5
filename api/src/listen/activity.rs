//! State of each connection, and the deadline that follows from it.
//!
//! ```text
//!             whole head                 response sent        first byte             whole head
//! silent ────────────────► busy (1 or more) ────────► idle ────────────► head read ───────────► busy
//! HEAD_READ                no limit, but WRITE_PAUSE  IDLE               HEAD_READ
//! ```
//! A connection is silent until its first request head is complete, whether or not bytes of that head have arrived.
//! [`TrackedStream`], [`InFlight`] and [`TrackedBody`] update the state; the task that serves the connection and the
//! admission loop read it. Times are milliseconds since the connection was accepted, so that each time fits into an
//! atomic.

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
use tokio::net::{TcpStream, UnixStream};
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;

use super::clients::ClientPermit;
use super::limits::Limits;

/// State of one connection, shared by its task, its stream and its requests.
#[derive(Debug)]
pub(super) struct Activity {
    accepted: Instant,
    requests: AtomicUsize,
    /// At least one request has arrived.
    has_asked: AtomicBool,
    /// When the last request ended. Before that: when the connection became ready for its first request.
    idle_since: AtomicU64,
    /// When the first byte of the current head arrived; 0: no head is being read.
    head_since: AtomicU64,
    /// When the pending write began to wait for the client; 0: no write is pending.
    write_since: AtomicU64,
    /// The connection speaks HTTP/2.
    is_http2: AtomicBool,
    /// A response on HTTP/1 was cut short; only the end of the connection can signal this to the client.
    aborted: AtomicBool,
}

/// Why the server closes a connection.
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
            is_http2: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
        })
    }

    /// Milliseconds since the connection was accepted, at least 1: the fields use 0 for "not set".
    fn now(&self) -> u64 {
        let elapsed = self.accepted.elapsed().as_millis();
        u64::try_from(elapsed).unwrap_or(u64::MAX).max(1)
    }

    /// Records that the connection can carry requests. The time limit for the first request head starts now.
    pub(super) fn note_opened(&self) {
        self.idle_since.store(self.now(), Ordering::Relaxed);
    }

    fn note_read(&self) {
        let waits = self.requests.load(Ordering::Relaxed) == 0;
        if waits && self.head_since.load(Ordering::Relaxed) == 0 {
            self.head_since.store(self.now(), Ordering::Relaxed);
        }
    }

    fn note_write_blocked(&self) {
        if self.write_since.load(Ordering::Relaxed) == 0 {
            self.write_since.store(self.now(), Ordering::Relaxed);
        }
    }

    fn note_written(&self) {
        if self.write_since.load(Ordering::Relaxed) != 0 {
            self.write_since.store(0, Ordering::Relaxed);
        }
    }

    /// Records a new request. The request is in flight until the returned value is dropped.
    pub(super) fn begin(self: &Arc<Self>, version: Version) -> InFlight {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.has_asked.store(true, Ordering::Relaxed);
        self.head_since.store(0, Ordering::Relaxed);
        if version == Version::HTTP_2 {
            self.is_http2.store(true, Ordering::Relaxed);
        }
        InFlight {
            activity: Arc::clone(self),
            version,
        }
    }

    /// Whether a request has shown that the connection speaks HTTP/2.
    pub(super) fn is_http2(&self) -> bool {
        self.is_http2.load(Ordering::Relaxed)
    }

    /// When the current state of the connection exceeds its limit. `None`: the state has no limit.
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

/// How much a client loses if the connection is closed, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EvictionRank {
    /// No request has arrived yet.
    Silent,
    /// The connection waits for its next request.
    Idle,
    /// All requests have been served, but the client has not read the whole response.
    Reading,
    /// A request is in flight.
    Busy,
}

impl Activity {
    /// The rank, and when the last request ended (if none has: when the connection became ready).
    pub(super) fn eviction_rank(&self) -> (EvictionRank, Instant) {
        let is_busy = self.requests.load(Ordering::Relaxed) != 0;
        let rank = match self.write_since.load(Ordering::Relaxed) {
            _ if is_busy => EvictionRank::Busy,
            0 if !self.has_asked.load(Ordering::Relaxed) => EvictionRank::Silent,
            0 => EvictionRank::Idle,
            _ => EvictionRank::Reading,
        };
        let since = Duration::from_millis(self.idle_since.load(Ordering::Relaxed));
        (rank, self.accepted + since)
    }
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct InFlight {
    activity: Arc<Activity>,
    version: Version,
}

impl InFlight {
    /// Records that the response was cut short. Not needed on HTTP/2, where hyper resets only the response's stream and
    /// the connection stays usable.
    fn note_aborted(&self) {
        if self.version != Version::HTTP_2 {
            self.activity.aborted.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let activity = &self.activity;
        activity.idle_since.store(activity.now(), Ordering::Relaxed);
        activity.head_since.store(0, Ordering::Relaxed);
        activity.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A response body. Until it is dropped, its request is in flight and counts towards its client's limit.
#[derive(Debug)]
pub(super) struct TrackedBody {
    inner: Body,
    request: InFlight,
    _client: Option<ClientPermit>,
}

impl TrackedBody {
    pub(super) fn new(inner: Body, request: InFlight, client: Option<ClientPermit>) -> Self {
        Self {
            inner,
            request,
            _client: client,
        }
    }
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        if let Poll::Ready(Some(Err(_))) = &polled {
            self.request.note_aborted();
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

/// A client's stream: TCP, TLS over TCP, or a unix stream from a forwarding process.
pub(super) trait ClientStream:
    AsyncRead + AsyncWrite + std::fmt::Debug + Send + Unpin
{
    /// `None` if not TCP.
    fn tcp(&self) -> Option<&TcpStream>;
}

impl ClientStream for TcpStream {
    fn tcp(&self) -> Option<&TcpStream> {
        Some(self)
    }
}

impl ClientStream for TlsStream<TcpStream> {
    fn tcp(&self) -> Option<&TcpStream> {
        Some(self.get_ref().0)
    }
}

impl ClientStream for UnixStream {
    fn tcp(&self) -> Option<&TcpStream> {
        None
    }
}

/// A stream that records its reads and writes in the connection's [`Activity`].
#[derive(Debug)]
pub(super) struct TrackedStream {
    /// Boxed, so that hyper's connections are compiled once.
    stream: Box<dyn ClientStream>,
    activity: Arc<Activity>,
}

impl Drop for TrackedStream {
    /// Resets the connection after a response that was cut short. If the stream merely ended, clients would report a
    /// server error. After a reset, they check whether the sandbox was killed. The reset discards unsent data. A
    /// forwarding process sees the end of an incomplete response and resets its client's connection.
    fn drop(&mut self) {
        let aborted = self.activity.aborted.load(Ordering::Relaxed);
        let Some(tcp) = self.stream.tcp().filter(|_| aborted) else {
            return;
        };
        let at_once = linger {
            l_onoff: 1,
            l_linger: 0,
        };
        if let Err(error) = setsockopt(tcp, sockopt::Linger, &at_once) {
            tracing::debug!(%error, "cannot set SO_LINGER: the connection is closed instead of reset");
        }
    }
}

impl TrackedStream {
    pub(super) fn new(stream: Box<dyn ClientStream>, activity: Arc<Activity>) -> Self {
        Self { stream, activity }
    }

    fn note<T>(&self, written: &Poll<std::io::Result<T>>) {
        match written {
            Poll::Pending => self.activity.note_write_blocked(),
            Poll::Ready(_) => self.activity.note_written(),
        }
    }
}

impl AsyncRead for TrackedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, into);
        if into.filled().len() > before {
            self.activity.note_read();
        }
        read
    }
}

impl AsyncWrite for TrackedStream {
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
    fn each_state_of_a_connection_has_its_limit() {
        let limits = Limits::default();
        let activity = Activity::new();
        let why = |activity: &Activity| activity.deadline(&limits).map(|(_, why)| why);
        assert_eq!(why(&activity), Some(Overdue::Head));
        assert_eq!(activity.eviction_rank().0, EvictionRank::Silent);
        activity.note_read();
        assert_eq!(why(&activity), Some(Overdue::Head));
        assert_eq!(activity.eviction_rank().0, EvictionRank::Silent);
        let (first, second) = (
            activity.begin(Version::HTTP_11),
            activity.begin(Version::HTTP_11),
        );
        activity.note_read();
        assert_eq!(why(&activity), None);
        activity.note_write_blocked();
        assert_eq!(why(&activity), Some(Overdue::Write));
        activity.note_written();
        drop(first);
        assert_eq!(why(&activity), None);
        assert_eq!(activity.eviction_rank().0, EvictionRank::Busy);
        activity.note_write_blocked();
        drop(second);
        assert_eq!(activity.eviction_rank().0, EvictionRank::Reading);
        activity.note_written();
        assert_eq!(why(&activity), Some(Overdue::Idle));
        assert_eq!(activity.eviction_rank().0, EvictionRank::Idle);
        activity.note_read();
        assert_eq!(why(&activity), Some(Overdue::Head));
        assert_eq!(activity.eviction_rank().0, EvictionRank::Idle);
    }

    #[test]
    fn a_new_connection_has_the_time_of_one_head_for_its_first_request() {
        let limits = Limits::default();
        let activity = Activity::new();
        let due = activity.deadline(&limits).unwrap().0;
        assert_eq!(due, activity.accepted + limits.head_read);
        // The arrival of its first bytes does not extend the limit.
        activity.head_since.store(9000, Ordering::Relaxed);
        assert_eq!(activity.deadline(&limits).unwrap().0, due);
    }

    #[test]
    fn the_limit_of_a_later_head_runs_from_its_first_byte() {
        let limits = Limits::default();
        let activity = Activity::new();
        drop(activity.begin(Version::HTTP_11));
        activity.head_since.store(5, Ordering::Relaxed);
        activity.note_read();
        let (deadline, _) = activity.deadline(&limits).unwrap();
        let expected = activity.accepted + Duration::from_millis(5) + limits.head_read;
        assert_eq!(deadline, expected);
    }
}
