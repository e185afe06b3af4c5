//! The unix sockets of the host's side: clients that ask for a guest port, and ports of the host.

use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv, socket,
};

/// Longest `CONNECT <port>` line, with its end.
const LINE_MAX: usize = 32;

/// The socket at which clients ask for guest ports. Its file goes when it goes.
#[derive(Debug)]
pub(super) struct Listener {
    socket: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Listens at `path`. A socket there that nobody serves any more is replaced.
    pub(super) fn bind(path: PathBuf) -> io::Result<Self> {
        let socket = match UnixListener::bind(&path) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && is_stale(&path) => {
                fs::remove_file(&path)?;
                UnixListener::bind(&path)?
            }
            other => other?,
        };
        socket.set_nonblocking(true)?;
        Ok(Self { socket, path })
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

    /// Connects to the host's socket for `port`, never waiting for it.
    pub(super) fn connect_host(&self, port: u32) -> io::Result<UnixStream> {
        let mut name = OsString::from(&self.path);
        name.push(format!("_{port}"));
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        connect(socket.as_raw_fd(), &UnixAddr::new(Path::new(&name))?)?;
        Ok(socket.into())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _gone = fs::remove_file(&self.path);
    }
}

fn is_stale(path: &Path) -> bool {
    matches!(UnixStream::connect(path), Err(error) if error.kind() == ErrorKind::ConnectionRefused)
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
        return match seen.len() < LINE_MAX {
            true => Line::Partial,
            false => Line::Bad,
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
