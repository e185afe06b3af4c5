//! What a client speaks over: a stream whose single reads and writes can be bounded in time.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    time::Duration,
};

/// A connected stream of bytes. After a bound has passed, a read or write fails with
/// [`io::ErrorKind::WouldBlock`] or [`io::ErrorKind::TimedOut`].
pub trait Transport: Read + Write {
    /// Bounds each later read; `None` waits without end.
    ///
    /// # Errors
    /// The bound is zero, or the stream is gone.
    fn bound_reads(&self, timeout: Option<Duration>) -> io::Result<()>;

    /// Bounds each later write; `None` waits without end.
    ///
    /// # Errors
    /// As [`Transport::bound_reads`].
    fn bound_writes(&self, timeout: Option<Duration>) -> io::Result<()>;
}

impl Transport for UnixStream {
    fn bound_reads(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(timeout)
    }

    fn bound_writes(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_write_timeout(timeout)
    }
}

impl Transport for TcpStream {
    fn bound_reads(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(timeout)
    }

    fn bound_writes(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_write_timeout(timeout)
    }
}
