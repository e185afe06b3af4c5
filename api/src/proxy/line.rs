//! The stream below a connection to a sandbox.
//!
//! A guest may close a kept connection while its next request is on the way to the task that writes it. The kernel
//! accepts bytes for a connection that is closed in the other direction only, and the runtime may not have noticed the
//! end yet. The stream therefore checks the socket right before the first byte of each later request. If the connection
//! has ended, nothing is written, and the request can be sent on another connection, whatever its method.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Whether any byte of a connection's current request has been written.
#[derive(Debug)]
pub(super) struct Line {
    is_used: AtomicBool,
}

impl Line {
    /// Must be called before a request on a kept connection.
    pub(super) fn begin(&self) {
        self.is_used.store(false, Ordering::Release);
    }

    pub(super) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Acquire)
    }
}

/// A connection to a sandbox: a unix stream, or TLS over one.
pub(super) trait GuestStream: AsyncRead + AsyncWrite + AsRawFd + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + AsRawFd + Send + Unpin> GuestStream for S {}

/// A stream that notes its first write of each request.
pub(super) struct LineStream {
    /// Boxed, so that hyper's connections are compiled once.
    stream: Box<dyn GuestStream>,
    line: Arc<Line>,
}

impl LineStream {
    /// `stream` must be newly opened.
    pub(super) fn new(stream: Box<dyn GuestStream>) -> (Self, Arc<Line>) {
        let is_used = AtomicBool::new(true);
        let line = Arc::new(Line { is_used });
        let shared = Arc::clone(&line);
        (Self { stream, line }, shared)
    }

    fn poll_first(
        &mut self,
        write: impl FnOnce(Pin<&mut dyn GuestStream>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if !self.line.is_used() {
            check_open(self.stream.as_raw_fd())?;
        }
        let written = ready!(write(Pin::new(&mut *self.stream)))?;
        self.line.is_used.store(true, Ordering::Release);
        Poll::Ready(Ok(written))
    }
}

/// Fails if the other side has closed the connection, or has sent anything.
fn check_open(socket: RawFd) -> io::Result<()> {
    let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    match recv(socket, &mut [0], peek) {
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err(io::ErrorKind::ConnectionAborted.into()),
    }
}

impl AsyncRead for LineStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for LineStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_first(|stream| stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_first(|stream| stream.poll_write_vectored(cx, slices))
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
