//! The unix socket of the host's side: clients that ask for a guest port.

use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use nix::sys::socket::{MsgFlags, recv};

/// Longest `CONNECT <port>` line, with its end.
const LINE_MAX: usize = 32;

/// The socket at which clients ask for guest ports.
#[derive(Debug)]
pub(super) struct Listener {
    socket: UnixListener,
}

impl Listener {
    /// Takes a listening socket.
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        let socket = UnixListener::from(socket);
        socket.set_nonblocking(true)?;
        Ok(Self { socket })
    }

    pub(super) fn socket(&self) -> &UnixListener {
        &self.socket
    }

    /// The next client, or `None` when nobody waits.
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

/// How far a client is with its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// It has not sent all of it.
    Partial,
    /// It asks for this guest port.
    Port(u32),
    /// It is gone or asks for something else.
    Bad,
}

/// Takes the `CONNECT <port>` line from a client and leaves what follows it in the socket.
pub(super) fn read_line(client: &UnixStream) -> Line {
    let mut bytes = [0; LINE_MAX];
    let seen = match recv(client.as_raw_fd(), &mut bytes, MsgFlags::MSG_PEEK) {
        Ok(0) => return Line::Bad,
        Ok(seen) => &bytes[..seen],
        Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => return Line::Partial,
        Err(_) => return Line::Bad,
    };
    let Some(end) = seen.iter().position(|byte| *byte == b'\n') else {
        return if seen.len() < LINE_MAX {
            Line::Partial
        } else {
            Line::Bad
        };
    };
    let line = parse_line(&seen[..end]);
    let mut taken = [0; LINE_MAX];
    match recv(client.as_raw_fd(), &mut taken[..=end], MsgFlags::empty()) {
        Ok(len) if len == end + 1 => line,
        _ => Line::Bad,
    }
}

/// The port in a line without its end.
pub(super) fn parse_line(line: &[u8]) -> Line {
    let text = std::str::from_utf8(line).unwrap_or("");
    let port = text.strip_prefix("CONNECT ").unwrap_or("");
    match (port.bytes().all(|byte| byte.is_ascii_digit()), port.parse()) {
        (true, Ok(port)) => Line::Port(port),
        _ => Line::Bad,
    }
}
