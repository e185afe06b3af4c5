//! The stream interface of the client: reads and writes with timeouts.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    time::Duration,
};

/// A connected byte stream. After a timeout, a read or write fails with [`io::ErrorKind::WouldBlock`] or
/// [`io::ErrorKind::TimedOut`].
pub trait Transport: Read + Write {
    /// Sets the timeout of each later read. `None`: no timeout.
    ///
    /// # Errors
    /// Returns an error if the timeout is zero or the socket option cannot be set.
    fn bound_reads(&self, timeout: Option<Duration>) -> io::Result<()>;

    /// Sets the timeout of each later write. `None`: no timeout.
    ///
    /// # Errors
    /// Returns an error if the timeout is zero or the socket option cannot be set.
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
