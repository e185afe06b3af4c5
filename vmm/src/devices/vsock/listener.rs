//! The unix socket through which host processes connect to guest ports.

use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use nix::sys::socket::{MsgFlags, recv};

/// Longest `CONNECT <port>` line in bytes, newline included.
const LINE_MAX: usize = 32;

#[derive(Debug)]
pub(super) struct Listener {
    socket: UnixListener,
}

impl Listener {
    /// `socket` must be listening.
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        let socket = UnixListener::from(socket);
        socket.set_nonblocking(true)?;
        Ok(Self { socket })
    }

    pub(super) fn socket(&self) -> &UnixListener {
        &self.socket
    }

    /// The next waiting client. Returns `None` if there is none, and if `accept` fails.
    pub(super) fn accept(&self) -> Option<UnixStream> {
        loop {
            match self.socket.accept() {
                Ok((client, _)) => {
                    if client.set_nonblocking(true).is_ok() {
                        return Some(client);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
    }
}

/// The part of its `CONNECT` line that a client has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectLine {
    Partial,
    /// The whole line, with this guest port.
    Port(u32),
    /// The client has disconnected, or sent anything other than a `CONNECT` line.
    Invalid,
}

/// Reads the `CONNECT <port>` line of a client. Bytes after the line stay in the socket.
pub(super) fn read_line(client: &UnixStream) -> ConnectLine {
    let mut bytes = [0; LINE_MAX];
    let seen = match recv(client.as_raw_fd(), &mut bytes, MsgFlags::MSG_PEEK) {
        Ok(0) => return ConnectLine::Invalid,
        Ok(seen) => &bytes[..seen],
        Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => return ConnectLine::Partial,
        Err(_) => return ConnectLine::Invalid,
    };
    let Some(end) = seen.iter().position(|byte| *byte == b'\n') else {
        return if seen.len() < LINE_MAX {
            ConnectLine::Partial
        } else {
            ConnectLine::Invalid
        };
    };
    let line = parse_line(&seen[..end]);
    let mut taken = [0; LINE_MAX];
    match recv(client.as_raw_fd(), &mut taken[..=end], MsgFlags::empty()) {
        Ok(len) if len == end + 1 => line,
        _ => ConnectLine::Invalid,
    }
}

/// Parses a line without its newline.
pub(super) fn parse_line(line: &[u8]) -> ConnectLine {
    let text = std::str::from_utf8(line).unwrap_or("");
    let port = text.strip_prefix("CONNECT ").unwrap_or("");
    match (port.bytes().all(|byte| byte.is_ascii_digit()), port.parse()) {
        (true, Ok(port)) => ConnectLine::Port(port),
        _ => ConnectLine::Invalid,
    }
}
