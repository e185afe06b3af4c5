//! The peer of an exchange: listens outside and measures.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket,
};

use crate::{clock, event::Exchanged};

/// Length of a request and of its response in bytes.
const REQUEST: usize = 64;
/// Largest read or write in bytes.
const CHUNK: usize = 256 << 10;
/// Longest part of a first command's line that is read and echoed, in bytes.
const LINE: usize = 256;

/// Accepts the connection of one sandbox.
#[derive(Debug)]
pub(super) struct Listener {
    socket: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Listens on a free port of this address, in the network namespace of the calling thread.
    pub(super) fn bind(at: Ipv4Addr) -> io::Result<Self> {
        let socket = TcpListener::bind((at, 0))?;
        let address = socket.local_addr()?;
        Ok(Self { socket, address })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts the first connection. `patience` is the timeout of the wait for it, and of each later read and write on
    /// it.
    pub(super) fn accept(&self, patience: Duration) -> io::Result<TcpStream> {
        if !self.is_called(patience)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let (stream, _) = self.socket.accept()?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        Ok(stream)
    }

    /// Whether a connection is waiting to be accepted.
    pub(super) fn has_caller(&self) -> io::Result<bool> {
        self.is_called(Duration::ZERO)
    }

    /// Stops listening and wakes a thread that waits in [`Self::accept`].
    pub(super) fn close(&self) {
        // Fails only if the socket has already been shut down.
        let _ = socket::shutdown(self.socket.as_raw_fd(), socket::Shutdown::Both);
    }

    fn is_called(&self, patience: Duration) -> io::Result<bool> {
        let bound = PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        Ok(poll(&mut fds, bound)? > 0)
    }
}

/// Echoes the first line, at most [`LINE`] bytes of it. Returns the time at which its first byte arrived, in
/// nanoseconds of CLOCK_MONOTONIC.
pub(super) fn answer_line(mut stream: TcpStream) -> io::Result<u64> {
    let mut line = vec![0; LINE];
    let mut length = stream.read(&mut line)?;
    let heard_ns = clock::monotonic_ns();
    while length > 0 && length < LINE && line[length - 1] != b'\n' {
        match stream.read(&mut line[length..])? {
            0 => break,
            more => length += more,
        }
    }
    if length == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    stream.write_all(&line[..length])?;
    Ok(heard_ns)
}

/// Sends `count` requests and measures the time until each is echoed.
pub(super) fn echo(mut stream: TcpStream, count: u32) -> io::Result<Exchanged> {
    let mut times_ns = Vec::new();
    let mut back = [0; REQUEST];
    for number in 0..count {
        // Consecutive requests differ, so that a late response is not mistaken for the response to this request.
        let request = [number.to_le_bytes()[0]; REQUEST];
        let asked = clock::monotonic_ns();
        stream.write_all(&request)?;
        stream.read_exact(&mut back)?;
        times_ns.push(clock::monotonic_ns() - asked);
        if back != request {
            return Err(io::Error::other("a response differs from its request"));
        }
    }
    Ok(Exchanged {
        times_ns,
        ..Exchanged::default()
    })
}

/// Sends a byte that starts the transfer, receives `bytes`, and measures the time from that byte until the last one was
/// read.
pub(super) fn take(mut stream: TcpStream, bytes: u64) -> io::Result<Exchanged> {
    let mut chunk = vec![0; CHUNK];
    let mut left = bytes;
    let began = clock::monotonic_ns();
    stream.write_all(&[1])?;
    while left > 0 {
        match stream.read(&mut chunk)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => left = left.saturating_sub(length as u64),
        }
    }
    Ok(moved(bytes, clock::monotonic_ns() - began))
}

/// Sends `bytes` and measures the time until the sandbox has confirmed that it read them all.
pub(super) fn give(mut stream: TcpStream, bytes: u64) -> io::Result<Exchanged> {
    let chunk = vec![0; CHUNK];
    let mut left = bytes;
    let began = clock::monotonic_ns();
    while left > 0 {
        let length = usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK));
        stream.write_all(&chunk[..length])?;
        left -= length as u64;
    }
    stream.shutdown(Shutdown::Write)?;
    let mut taken = [0; 8];
    stream.read_exact(&mut taken)?;
    let took = clock::monotonic_ns() - began;
    match u64::from_le_bytes(taken) {
        taken if taken == bytes => Ok(moved(bytes, took)),
        taken => Err(io::Error::other(format!(
            "{taken} of {bytes} bytes arrived"
        ))),
    }
}

fn moved(bytes: u64, took_ns: u64) -> Exchanged {
    Exchanged {
        times_ns: vec![took_ns],
        bytes,
        ..Exchanged::default()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Connects `sandbox` to `peer` over loopback and returns the result of `peer`.
    fn met<T: Send>(
        peer: impl FnOnce(TcpStream) -> io::Result<T> + Send,
        sandbox: impl FnOnce(TcpStream),
    ) -> io::Result<T> {
        let listener = Listener::bind(Ipv4Addr::LOCALHOST).unwrap();
        let patience = Duration::from_secs(30);
        thread::scope(|scope| {
            let peer = scope.spawn(|| peer(listener.accept(patience)?));
            sandbox(TcpStream::connect(listener.address()).unwrap());
            peer.join().unwrap()
        })
    }

    #[test]
    fn round_trips_are_counted_and_compared() {
        let honest = |mut stream: TcpStream| {
            let mut request = [0; REQUEST];
            while stream.read_exact(&mut request).is_ok() {
                stream.write_all(&request).unwrap();
            }
        };
        assert_eq!(met(|s| echo(s, 20), honest).unwrap().times_ns.len(), 20);
        // Always sends the same response, which is correct only for the first request.
        let wrong = |mut stream: TcpStream| {
            let mut request = [0; REQUEST];
            while stream.read_exact(&mut request).is_ok() {
                let _ = stream.write_all(&[0; REQUEST]);
            }
        };
        assert!(met(|s| echo(s, 1), wrong).is_ok());
        assert!(met(|s| echo(s, 2), wrong).is_err());
    }

    #[test]
    fn missing_bytes_fail_a_transfer() {
        let some = |mut stream: TcpStream| {
            stream.read_exact(&mut [0]).unwrap();
            stream.write_all(&[0; 1000]).unwrap();
        };
        assert_eq!(met(|s| take(s, 1000), some).unwrap().bytes, 1000);
        assert!(met(|s| take(s, 1001), some).is_err());
        let liar = |mut stream: TcpStream| {
            io::copy(&mut stream, &mut io::sink()).unwrap();
            stream.write_all(&999_u64.to_le_bytes()).unwrap();
        };
        assert_eq!(met(|s| give(s, 999), liar).unwrap().bytes, 999);
        assert!(met(|s| give(s, 1000), liar).is_err());
    }

    #[test]
    fn a_line_is_echoed_and_a_closed_connection_is_an_error() {
        let mut answer = String::new();
        let speaks = |mut stream: TcpStream| {
            stream.write_all(b"o").unwrap();
            stream.write_all(b"k\n").unwrap();
            stream.read_to_string(&mut answer).unwrap();
        };
        let before = clock::monotonic_ns();
        let heard = met(answer_line, speaks).unwrap();
        assert!(heard >= before && heard <= clock::monotonic_ns());
        assert_eq!(answer, "ok\n");
        assert!(met(answer_line, drop).is_err());
    }

    #[test]
    fn waiting_connections_are_detected_and_close_ends_a_wait() {
        let listener = Listener::bind(Ipv4Addr::LOCALHOST).unwrap();
        assert!(!listener.has_caller().unwrap());
        let short = Duration::from_millis(10);
        assert_eq!(
            listener.accept(short).unwrap_err().kind(),
            io::ErrorKind::TimedOut
        );
        let _caller = TcpStream::connect(listener.address()).unwrap();
        assert!(listener.has_caller().unwrap());
        let other = Listener::bind(Ipv4Addr::LOCALHOST).unwrap();
        thread::scope(|scope| {
            let waits = scope.spawn(|| other.accept(Duration::from_secs(600)));
            other.close();
            assert!(waits.join().unwrap().is_err());
        });
    }
}
