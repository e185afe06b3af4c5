//! A word to somebody and back, as any program would.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use netprobe::Outcome;

use super::Result;

/// Between two tries of what may get lost.
pub(crate) const AGAIN: Duration = Duration::from_millis(400);

/// What is left until then; never zero, which sockets take for "no limit".
pub(crate) fn left(deadline: Instant) -> Duration {
    let left = deadline.saturating_duration_since(Instant::now());
    left.max(Duration::from_millis(1))
}

pub(crate) fn tcp(to: SocketAddr, word: &str, deadline: Instant) -> Result {
    match exchange(to, word, deadline) {
        Ok(from) => Result::new(Outcome::Ok, format!("echo from {to} to {from}")),
        Err(error) => Result::of_error(&error),
    }
}

/// The own address of the connection, once the word has come back.
pub(crate) fn exchange(to: SocketAddr, word: &str, deadline: Instant) -> io::Result<SocketAddr> {
    let mut stream = TcpStream::connect_timeout(&to, left(deadline))?;
    stream.set_read_timeout(Some(left(deadline)))?;
    stream.set_write_timeout(Some(left(deadline)))?;
    stream.write_all(word.as_bytes())?;
    let mut back = vec![0; word.len()];
    stream.read_exact(&mut back)?;
    if back == word.as_bytes() {
        stream.local_addr()
    } else {
        Err(io::Error::other("somebody answered, but not with the same"))
    }
}

pub(crate) fn udp(to: SocketAddr, word: &str, deadline: Instant) -> Result {
    match datagrams(to, word, deadline) {
        Ok(()) => Result::new(Outcome::Ok, format!("echo from {to}")),
        Err(error) => Result::of_error(&error),
    }
}

fn datagrams(to: SocketAddr, word: &str, deadline: Instant) -> io::Result<()> {
    let socket = socket_to(to)?;
    let mut buffer = [0; 2048];
    loop {
        socket.send(word.as_bytes())?;
        socket.set_read_timeout(Some(AGAIN.min(left(deadline))))?;
        match socket.recv(&mut buffer) {
            Ok(length) if &buffer[..length] == word.as_bytes() => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            Err(_) => {}
        }
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

/// A datagram socket whose peer is fixed.
pub(crate) fn socket_to(to: SocketAddr) -> io::Result<UdpSocket> {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    Ok(socket)
}
