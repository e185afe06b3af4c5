//! `CONNECT 127.0.0.1:PORT`: a byte stream between a connection and a TCP port on the guest's loopback interface.
//!
//! ```text
//! connecting ── 127.0.0.1 refuses ──► connecting to ::1 ── refuses ──► 502
//!     └──────────── accepts ─────────────┴──► 200, then bytes both ways until both have ended
//! ```
//! Either side may close first: the close is passed on and the other direction continues. At most one piece is read
//! ahead in each direction, so a slow side stops the fast one, whose socket fills up. Only loopback can be reached: a
//! tunnel must not bypass the sandbox's network policy.

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

use transport::{After, Exchange, Gone, Key, Received, Rest, Step, Token, http};

use super::core::{Conn, Core};

/// How long a port may take to accept the connection.
const CONNECT: Duration = Duration::from_secs(10);
const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";
/// Clients compare this text.
const NOT_OPEN: &str = "The sandbox is running but port is not open";

/// The guest's side of a tunnel.
pub(crate) struct Tunnel {
    socket: OwnedFd,
    port: u16,
    stage: Stage,
    readable: bool,
    writable: bool,
    /// The client sends nothing more, or the port does not read.
    client_ended: bool,
    /// The sending side of `socket` is shut down.
    port_shut: bool,
    /// The port sends nothing more.
    port_ended: bool,
    /// The connection's sending side is shut down.
    client_shut: bool,
}

/// The state of the connection to the port.
enum Stage {
    Connecting(Family),
    Open,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

/// Why a target is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BadTarget {
    /// Not of the form `host:port`.
    Malformed,
    /// A host other than the guest's loopback.
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

/// Handles a `CONNECT`. The response is sent once the port has accepted or refused.
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
        core.io.watch(&tunnel.socket, Token::Exchange(key), flags)?;
        Ok(tunnel)
    });
    match made {
        Ok(tunnel) => {
            conn.wake = Some(Instant::now() + CONNECT);
            conn.begin(tunnel);
        }
        Err(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) => {
            conn.refuse(503, "the sandbox has no room for another connection");
        }
        Err(_) => retry(core, key, conn, port, family),
    }
}

/// Called when the port cannot be reached on one address family. Tries IPv6 after IPv4, and answers 502 after IPv6.
fn retry(core: &mut Core, key: Key, conn: &mut Conn, port: u16, family: Family) {
    match family {
        Family::V4 => dial(core, key, conn, port, Family::V6),
        Family::V6 => refuse(conn, port),
    }
}

fn refuse(conn: &mut Conn, port: u16) {
    let body = format!(r#"{{"code":502,"message":"{NOT_OPEN}","port":{port}}}"#);
    // Bytes that the client has sent ahead are meant for the port and must not be read as a request.
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

impl Exchange<Core> for Tunnel {
    /// Moves at most one piece each way.
    #[inline(never)]
    fn step(&mut self, core: &mut Core, key: Key, conn: &mut Conn) -> Result<Step, Gone> {
        if let Stage::Connecting(family) = self.stage {
            if !self.writable {
                return wait_for_peer(conn);
            }
            match self.connected() {
                Ok(()) => {
                    self.stage = Stage::Open;
                    conn.wake = None;
                    conn.out.extend_from_slice(ESTABLISHED);
                }
                Err(_) => {
                    retry(core, key, conn, self.port, family);
                    return Ok(Step::Again);
                }
            }
        }
        let up = self.send_up(conn, &mut core.io.scratch)?;
        let down = self.send_down(conn, &mut core.io.scratch)?;
        match (up, down) {
            (Moved::Nothing, Moved::Nothing) if self.port_shut && self.client_shut => Err(Gone),
            (Moved::Nothing, Moved::Nothing) if self.client_ended && !self.port_ended => {
                wait_for_peer(conn)
            }
            (Moved::Nothing, Moved::Nothing) => Ok(Step::Wait),
            (Moved::Some, _) | (_, Moved::Some) => Ok(Step::Again),
        }
    }

    /// Answers 504, because the port has not accepted the connection in time.
    #[cold]
    fn expire(&mut self, _: &mut Core, _: Key, conn: &mut Conn, _: Instant) -> Result<(), Gone> {
        conn.refuse(504, "the port did not accept the connection in time");
        Ok(())
    }

    fn ready(&mut self, flags: EpollFlags) {
        let gone = EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR;
        self.readable |= flags.intersects(gone | EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP);
        self.writable |= flags.intersects(gone | EpollFlags::EPOLLOUT);
    }
}

/// Waits for events. A client that has closed its sending side may still receive; one that has closed both is gone.
fn wait_for_peer(conn: &Conn) -> Result<Step, Gone> {
    if conn.hangup && !conn.is_peer_receiving() {
        Err(Gone)
    } else {
        Ok(Step::Wait)
    }
}

/// Whether bytes or a close were passed on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moved {
    Nothing,
    Some,
}

impl Tunnel {
    /// Begins to connect. The poller reports the result.
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
        // Send small pieces at once (disables Nagle's algorithm).
        setsockopt(&socket, sockopt::TcpNoDelay, &true)?;
        match connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
            Ok(()) | Err(Errno::EINPROGRESS) => Ok(Self {
                socket,
                port,
                stage: Stage::Connecting(family),
                readable: false,
                writable: false,
                client_ended: false,
                port_shut: false,
                port_ended: false,
                client_shut: false,
            }),
            Err(errno) => Err(errno),
        }
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
        if self.port_shut {
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
        self.port_shut = true;
        // Fails only if the port is gone, which the next read reports.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Write);
        Ok(Moved::Some)
    }

    /// Writes the client's bytes.
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
            // The port no longer reads, but it may still send.
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
        if self.client_shut || conn.backlog() > 0 {
            return Ok(Moved::Nothing);
        }
        if self.port_ended {
            self.client_shut = true;
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
    fn only_loopback_ports_are_accepted_as_targets() {
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
        fn only_loopback_names_are_accepted(host in "[a-z0-9.:@]{0,12}", port: u16) {
            let parsed = parse_target(&format!("{host}:{port}"));
            let own = host == "127.0.0.1" || host == "localhost";
            prop_assert_eq!(parsed.is_ok(), own && port > 0);
        }
    }
}
