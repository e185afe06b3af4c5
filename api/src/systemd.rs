//! The two protocols of systemd: sockets that it passes to the server (sd_listen_fds(3)), and notifications of the
//! server's state (sd_notify(3)). Without systemd, both do nothing.

mod sys;

use std::env;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};

use nix::sys::socket::{getsockopt, sockopt};

/// A socket passed by systemd that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error("LISTEN_FDS is {0:?}, not a number from 1 to {MAX_SOCKETS}")]
    Count(String),
    #[error(
        "descriptor {0} of the socket unit is not a listening TCP socket: use ListenStream= with an address and a port"
    )]
    Kind(usize),
    #[error("cannot use descriptor {0} of the socket unit")]
    Io(usize, #[source] io::Error),
}

/// Maximum number of sockets of a socket unit.
const MAX_SOCKETS: usize = 48;
/// The first descriptor passed by systemd.
const FIRST: usize = 3;

/// The listening sockets that systemd passed to this process, with their addresses. Empty if it passed none. Must be
/// called once, before this process opens any descriptor that it does not close again.
///
/// # Errors
/// Returns [`SocketError`] if a descriptor is not a listening TCP socket.
pub fn listening_sockets() -> Result<Vec<(SocketAddr, TcpListener)>, SocketError> {
    let pid = env::var("LISTEN_PID").ok();
    if pid.and_then(|pid| pid.parse().ok()) != Some(std::process::id()) {
        return Ok(Vec::new());
    }
    let count = env::var("LISTEN_FDS").unwrap_or_default();
    let fds = count.parse().ok().filter(|n| (1..=MAX_SOCKETS).contains(n));
    let fds: usize = fds.ok_or(SocketError::Count(count))?;
    (FIRST..FIRST + fds)
        .map(|number| {
            listening(
                number,
                sys::take(number).map_err(|e| SocketError::Io(number, e))?,
            )
        })
        .collect()
}

fn listening(number: usize, fd: OwnedFd) -> Result<(SocketAddr, TcpListener), SocketError> {
    let is_listening = getsockopt(&fd.as_fd(), sockopt::AcceptConn) == Ok(true);
    let listener = TcpListener::from(fd);
    match listener.local_addr() {
        Ok(address) if is_listening => Ok((address, listener)),
        Ok(_) | Err(_) => Err(SocketError::Kind(number)),
    }
}

/// The state of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Ready,
    Reloading,
    /// The process with this id serves from now on.
    MovedTo(u32),
    Stopping,
}

/// Notifies systemd of the server's state. A failure is only logged, because it does not affect the service.
pub fn notify(state: State) {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    if let Err(error) = send(path.as_bytes(), &message(state)) {
        tracing::warn!(%error, "cannot notify systemd");
    }
}

fn message(state: State) -> String {
    match state {
        State::Ready => "READY=1\n".to_owned(),
        State::Reloading => {
            let now_us = model::clock::monotonic_ns() / 1000;
            format!("RELOADING=1\nMONOTONIC_USEC={now_us}\n")
        }
        State::MovedTo(pid) => format!("MAINPID={pid}\nREADY=1\n"),
        State::Stopping => "STOPPING=1\n".to_owned(),
    }
}

fn send(path: &[u8], message: &str) -> io::Result<()> {
    let address = match path.strip_prefix(b"@") {
        Some(name) => UnixAddr::from_abstract_name(name)?,
        None => UnixAddr::from_pathname(std::ffi::OsStr::from_bytes(path))?,
    };
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_reach_the_notification_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let mut buffer = [0; 256];
        for (state, expected) in [
            (State::Ready, "READY=1\n"),
            (State::Reloading, "RELOADING=1\nMONOTONIC_USEC="),
            (State::MovedTo(7), "MAINPID=7\nREADY=1\n"),
            (State::Stopping, "STOPPING=1\n"),
        ] {
            send(path.as_os_str().as_bytes(), &message(state)).unwrap();
            let length = socket.recv(&mut buffer).unwrap();
            let text = std::str::from_utf8(&buffer[..length]).unwrap();
            assert!(text.starts_with(expected), "{text:?}");
        }
        let name = format!("cube-test-{}", std::process::id());
        let address = UnixAddr::from_abstract_name(&name).unwrap();
        let hidden = UnixDatagram::bind_addr(&address).unwrap();
        send(format!("@{name}").as_bytes(), "READY=1\n").unwrap();
        assert_eq!(hidden.recv(&mut buffer).unwrap(), 8);
    }

    #[test]
    fn the_units_in_the_documentation_are_valid() {
        let dir = tempfile::tempdir().unwrap();
        let text = include_str!("../../docs/operate/reload.md");
        let mut units = Vec::new();
        for unit in text.split("```ini\n# ").skip(1) {
            let (name, rest) = unit.split_once('\n').unwrap();
            let (unit, _) = rest.split_once("```").unwrap();
            let path = dir.path().join(name);
            std::fs::write(&path, unit.replace("/usr/local/bin/cube-api", "/bin/true")).unwrap();
            units.push(path);
        }
        assert_eq!(units.len(), 2);
        let verify = std::process::Command::new("systemd-analyze")
            .args(["verify", "--man=no"])
            .args(units)
            .output();
        match verify {
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success() && said.is_empty(), "{said}");
            }
            Err(why) => eprintln!("skipped: systemd-analyze does not run here: {why}"),
        }
    }

    #[test]
    fn only_listening_tcp_sockets_are_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(listening(3, listener.into()).unwrap().0, address);
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let why = listening(4, udp.into()).unwrap_err().to_string();
        assert!(why.contains("descriptor 4"), "{why}");
        let dir = tempfile::tempdir().unwrap();
        let unix = std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap();
        assert!(matches!(
            listening(5, unix.into()),
            Err(SocketError::Kind(5))
        ));
    }
}
