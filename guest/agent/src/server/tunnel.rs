//! `CONNECT 127.0.0.1:PORT`: a byte stream between a connection and a TCP port of the guest's own loopback.
//!
//! ```text
//! connecting ── 127.0.0.1 refuses ──► connecting to ::1 ── refuses ──► 502
//!     └────────────── made ──────────────┴──► 200, then bytes both ways until both have ended
//! ```
//! Either side may end first: its end is passed on and the other way goes on. What was read from one side
//! and not yet taken by the other is at most one piece, so a slow side stops the fast one by its full
//! socket. Only loopback can be reached: the guest's network is not this program's to open.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::{
        epoll::EpollFlags,
        socket::{
            AddressFamily, Shutdown, SockFlag, SockType, SockaddrStorage, connect, setsockopt,
            shutdown, socket, sockopt,
        },
    },
    unistd,
};

use super::{
    Core, Token,
    conn::{Conn, Gone, Phase, Received, Rest},
    http::{self, After},
    request::Step,
    slots::Key,
};

/// How long a port may take to accept.
const CONNECT: Duration = Duration::from_secs(10);
const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";
/// The text that official clients know.
const NOT_OPEN: &str = "The sandbox is running but port is not open";

/// The guest's side of a tunnel.
pub(crate) struct Tunnel {
    socket: OwnedFd,
    port: u16,
    stage: Stage,
    readable: bool,
    writable: bool,
    /// The client sends nothing more, or nobody takes it.
    client_ended: bool,
    /// The client's end was passed on.
    told_port: bool,
    /// The port sends nothing more.
    port_ended: bool,
    /// The port's end was passed on.
    told_client: bool,
}

/// How far the connection to the port is.
enum Stage {
    Connecting(Family),
    Open,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

/// A target that is not connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BadTarget {
    /// No `host:port`.
    Malformed,
    /// Another host.
    Forbidden,
}

/// The port of `127.0.0.1:PORT` or `localhost:PORT`.
fn parse_target(target: &str) -> Result<u16, BadTarget> {
    let (host, port) = target.rsplit_once(':').ok_or(BadTarget::Malformed)?;
    let digits = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    let port = port.parse().ok().filter(|port| digits && *port > 0);
    let port = port.ok_or(BadTarget::Malformed)?;
    if host == "127.0.0.1" || host.eq_ignore_ascii_case("localhost") {
        Ok(port)
    } else {
        Err(BadTarget::Forbidden)
    }
}

/// Answers a `CONNECT` whose head is there; the answer comes once the port has accepted or refused.
#[cold]
#[inline(never)]
pub(crate) fn begin(core: &mut Core, key: Key, conn: &mut Conn, target: &str) {
    match parse_target(target) {
        Ok(port) => dial(core, key, conn, port, Family::V4),
        Err(BadTarget::Malformed) => conn.refuse(400, "the target must be host:port"),
        Err(BadTarget::Forbidden) => conn.refuse(403, "only ports of the sandbox can be reached"),
    }
}

fn dial(core: &mut Core, key: Key, conn: &mut Conn, port: u16, family: Family) {
    let made = Tunnel::connect(port, family).and_then(|tunnel| {
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLRDHUP;
        core.watch(&tunnel.socket, Token::Tunnel(key), flags)?;
        Ok(tunnel)
    });
    match made {
        Ok(tunnel) => {
            conn.wake = Some(Instant::now() + CONNECT);
            conn.phase = Phase::Tunnel(Box::new(tunnel));
        }
        Err(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) => {
            conn.refuse(503, "the sandbox has no room for another connection");
        }
        Err(_) => retry(core, key, conn, port, family),
    }
}

/// The port has refused on one family: tries the other, then says so.
fn retry(core: &mut Core, key: Key, conn: &mut Conn, port: u16, family: Family) {
    match family {
        Family::V4 => dial(core, key, conn, port, Family::V6),
        Family::V6 => refuse(conn, port),
    }
}

fn refuse(conn: &mut Conn, port: u16) {
    let body = format!(r#"{{"code":502,"message":"{NOT_OPEN}","port":{port}}}"#);
    // What the client has sent ahead is meant for the port: it must not be read as a request.
    conn.after = After::Close;
    http::push_answer(
        &mut conn.out,
        502,
        http::JSON,
        body.as_bytes(),
        After::Close,
    );
    conn.end_request(Rest::Unread);
}

/// Does one piece of work each way.
///
/// # Errors
/// One side is gone for good, or both have ended.
#[inline(never)]
pub(crate) fn step(core: &mut Core, key: Key, conn: &mut Conn) -> Result<Step, Gone> {
    let Phase::Tunnel(mut tunnel) = std::mem::replace(&mut conn.phase, Phase::Head) else {
        return Err(Gone);
    };
    if let Stage::Connecting(family) = tunnel.stage {
        if !tunnel.writable {
            conn.phase = Phase::Tunnel(tunnel);
            return alive(conn).map(|()| Step::Wait);
        }
        match tunnel.connected() {
            Ok(()) => {
                tunnel.stage = Stage::Open;
                conn.wake = None;
                conn.out.extend_from_slice(ESTABLISHED);
            }
            Err(_) => {
                retry(core, key, conn, tunnel.port, family);
                return Ok(Step::Again);
            }
        }
    }
    let up = tunnel.send_up(conn, &mut core.scratch)?;
    let down = tunnel.send_down(conn, &mut core.scratch)?;
    let over = tunnel.told_port && tunnel.told_client;
    let half = tunnel.client_ended && !tunnel.port_ended;
    conn.phase = Phase::Tunnel(tunnel);
    match (up, down) {
        (Moved::Nothing, Moved::Nothing) if over => Err(Gone),
        (Moved::Nothing, Moved::Nothing) if half => alive(conn).map(|()| Step::Wait),
        (Moved::Nothing, Moved::Nothing) => Ok(Step::Wait),
        (Moved::Some, _) | (_, Moved::Some) => Ok(Step::Again),
    }
}

/// The port has not accepted in time.
#[cold]
#[inline(never)]
pub(crate) fn expire(conn: &mut Conn) {
    conn.refuse(504, "the port did not accept the connection in time");
}

/// Who sends nothing more may still listen; who is gone altogether need not be waited for.
fn alive(conn: &Conn) -> Result<(), Gone> {
    if conn.hangup && !conn.listens() {
        Err(Gone)
    } else {
        Ok(())
    }
}

/// Whether there was something to do.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moved {
    Nothing,
    Some,
}

impl Tunnel {
    /// Begins to connect; the poller says when that is decided.
    fn connect(port: u16, family: Family) -> Result<Self, Errno> {
        let address = match family {
            Family::V4 => SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)),
            Family::V6 => SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::LOCALHOST, port, 0, 0)),
        };
        let domain = match family {
            Family::V4 => AddressFamily::Inet,
            Family::V6 => AddressFamily::Inet6,
        };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(domain, SockType::Stream, flags, None)?;
        // What arrives in one piece leaves in one piece.
        setsockopt(&socket, sockopt::TcpNoDelay, &true)?;
        match connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
            Ok(()) | Err(Errno::EINPROGRESS) => Ok(Self {
                socket,
                port,
                stage: Stage::Connecting(family),
                readable: false,
                writable: false,
                client_ended: false,
                told_port: false,
                port_ended: false,
                told_client: false,
            }),
            Err(errno) => Err(errno),
        }
    }

    /// Notes what the poller said of the socket.
    pub(crate) fn mark(&mut self, flags: EpollFlags) {
        let gone = EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR;
        self.readable |= flags.intersects(gone | EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP);
        self.writable |= flags.intersects(gone | EpollFlags::EPOLLOUT);
    }

    fn connected(&self) -> Result<(), Errno> {
        let error = nix::sys::socket::getsockopt(&self.socket, sockopt::SocketError)?;
        match error {
            0 => Ok(()),
            errno => Err(Errno::from_raw(errno)),
        }
    }

    /// From the client to the port.
    fn send_up(&mut self, conn: &mut Conn, scratch: &mut [u8]) -> Result<Moved, Gone> {
        if self.told_port {
            return Ok(Moved::Nothing);
        }
        if !conn.input.is_empty() {
            return Ok(self.write_up(conn));
        }
        if !self.client_ended {
            return match conn.receive(scratch)? {
                Received::Some => Ok(self.write_up(conn)),
                Received::Nothing => Ok(Moved::Nothing),
                Received::End => {
                    self.client_ended = true;
                    Ok(Moved::Some)
                }
            };
        }
        self.told_port = true;
        // Fails only when the port is gone; reading from it says so.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Write);
        Ok(Moved::Some)
    }

    /// Writes what is there of the client's bytes.
    fn write_up(&mut self, conn: &mut Conn) -> Moved {
        if !self.writable {
            return Moved::Nothing;
        }
        match unistd::write(&self.socket, &conn.input) {
            Ok(n) => conn.consume(n),
            Err(Errno::EAGAIN) => {
                self.writable = false;
                return Moved::Nothing;
            }
            Err(Errno::EINTR) => {}
            // The port does not read any more. It may still have something to say.
            Err(_) => {
                conn.input = Vec::new();
                self.client_ended = true;
            }
        }
        Moved::Some
    }

    /// From the port to the client.
    fn send_down(&mut self, conn: &mut Conn, scratch: &mut [u8]) -> Result<Moved, Gone> {
        conn.flush()?;
        if self.told_client || conn.backlog() > 0 {
            return Ok(Moved::Nothing);
        }
        if self.port_ended {
            self.told_client = true;
            conn.shut_down();
            return Ok(Moved::Some);
        }
        if !self.readable {
            return Ok(Moved::Nothing);
        }
        match unistd::read(self.socket.as_fd(), scratch) {
            Ok(0) => self.port_ended = true,
            Ok(n) => {
                let bytes = scratch.get(..n).unwrap_or_default();
                conn.out.extend_from_slice(bytes);
                conn.flush()?;
            }
            Err(Errno::EAGAIN) => {
                self.readable = false;
                return Ok(Moved::Nothing);
            }
            Err(Errno::EINTR) => {}
            Err(_) => return Err(Gone),
        }
        Ok(Moved::Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_ports_of_the_own_loopback_are_targets() {
        assert_eq!(parse_target("127.0.0.1:80"), Ok(80));
        assert_eq!(parse_target("LocalHost:65535"), Ok(65_535));
        for malformed in [
            "",
            "80",
            "127.0.0.1",
            "127.0.0.1:",
            "127.0.0.1:0",
            "localhost:65536",
            "localhost:+1",
        ] {
            assert_eq!(
                parse_target(malformed),
                Err(BadTarget::Malformed),
                "{malformed}"
            );
        }
        for other in [
            "example.org:80",
            "127.0.0.2:80",
            "[::1]:80",
            ":80",
            "0.0.0.0:80",
            "a@localhost:80",
        ] {
            assert_eq!(parse_target(other), Err(BadTarget::Forbidden), "{other}");
        }
    }

    proptest! {
        #[test]
        fn a_target_is_taken_only_as_it_is_written(host in "[a-z0-9.:@]{0,12}", port: u16) {
            let parsed = parse_target(&format!("{host}:{port}"));
            let own = host == "127.0.0.1" || host == "localhost";
            prop_assert_eq!(parsed.is_ok(), own && port > 0);
        }
    }
}
