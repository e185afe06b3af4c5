//! Actions that send a word to an echo server with ordinary sockets.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use netprobe::Outcome;

use super::Result;

/// Interval between two attempts when a packet may be lost.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_millis(400);

/// Time until the deadline, at least 1 ms, because sockets do not accept a timeout of zero.
pub(crate) fn time_left(deadline: Instant) -> Duration {
    let left = deadline.saturating_duration_since(Instant::now());
    left.max(Duration::from_millis(1))
}

pub(crate) fn tcp(to: SocketAddr, word: &str, deadline: Instant) -> Result {
    match exchange(to, word, deadline) {
        Ok(from) => Result::new(Outcome::Ok, format!("echo from {to} to {from}")),
        Err(error) => Result::of_error(&error),
    }
}

/// Sends the word and waits for its echo. Returns the connection's local address.
pub(crate) fn exchange(to: SocketAddr, word: &str, deadline: Instant) -> io::Result<SocketAddr> {
    let mut stream = TcpStream::connect_timeout(&to, time_left(deadline))?;
    stream.set_read_timeout(Some(time_left(deadline)))?;
    stream.set_write_timeout(Some(time_left(deadline)))?;
    stream.write_all(word.as_bytes())?;
    let mut back = vec![0; word.len()];
    stream.read_exact(&mut back)?;
    if back == word.as_bytes() {
        stream.local_addr()
    } else {
        Err(io::Error::other("the answer is not the word that was sent"))
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
        socket.set_read_timeout(Some(RETRY_INTERVAL.min(time_left(deadline))))?;
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

/// A UDP socket that is connected to `to`.
pub(crate) fn socket_to(to: SocketAddr) -> io::Result<UdpSocket> {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    Ok(socket)
}
