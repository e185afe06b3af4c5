//! The guest's side of measurements that are taken at the other end. It does as little work as possible.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use netprobe::Outcome;

use super::{
    Result,
    talk::{socket_to, time_left},
};

/// Bytes per system call.
const CHUNK: usize = 256 << 10;

/// The count is the number of bytes sent back.
pub(crate) fn echo(to: SocketAddr, deadline: Instant) -> Result {
    result_of(connect(to, deadline).and_then(send_back))
}

/// The count is the number of bytes sent.
pub(crate) fn source(to: SocketAddr, deadline: Instant) -> Result {
    result_of(connect(to, deadline).and_then(send_zeros))
}

/// The count is the number of bytes received.
pub(crate) fn sink(to: SocketAddr, deadline: Instant) -> Result {
    result_of(connect(to, deadline).and_then(receive_all))
}

/// The count is the number of datagrams sent.
pub(crate) fn pulse(to: SocketAddr, every: Duration, word: &str, deadline: Instant) -> Result {
    let socket = match socket_to(to) {
        Ok(socket) => socket,
        Err(error) => return Result::of_error(&error),
    };
    let mut sent = 0;
    while Instant::now() < deadline {
        if socket.send(word.as_bytes()).is_ok() {
            sent += 1;
        }
        thread::sleep(every);
    }
    Result::new(Outcome::Ok, format!("{sent} sent")).counted(sent)
}

fn result_of(done: io::Result<u64>) -> Result {
    match done {
        Ok(bytes) => Result::new(Outcome::Ok, format!("{bytes} bytes")).counted(bytes),
        Err(error) => Result::of_error(&error),
    }
}

/// Connects with timeouts for each system call. The other end limits the total time.
fn connect(to: SocketAddr, deadline: Instant) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, time_left(deadline))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(time_left(deadline)))?;
    stream.set_write_timeout(Some(time_left(deadline)))?;
    Ok(stream)
}

fn send_back(mut stream: TcpStream) -> io::Result<u64> {
    let mut chunk = vec![0; CHUNK];
    let mut all = 0;
    loop {
        match stream.read(&mut chunk)? {
            0 => return Ok(all),
            length => {
                stream.write_all(&chunk[..length])?;
                all += u64::try_from(length).unwrap_or(0);
            }
        }
    }
}

fn send_zeros(mut stream: TcpStream) -> io::Result<u64> {
    stream.read_exact(&mut [0])?;
    let zeros = vec![0; CHUNK];
    let mut all = 0;
    loop {
        match stream.write(&zeros) {
            Ok(length) => all += u64::try_from(length).unwrap_or(0),
            Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                return Ok(all);
            }
            Err(e) => return Err(e),
        }
    }
}

fn receive_all(mut stream: TcpStream) -> io::Result<u64> {
    let mut chunk = vec![0; CHUNK];
    let mut all = 0_u64;
    loop {
        match stream.read(&mut chunk)? {
            0 => break,
            length => all += u64::try_from(length).unwrap_or(0),
        }
    }
    stream.write_all(&all.to_le_bytes())?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener};

    use super::*;

    /// Runs an action against `peer` at the other end of its connection. Returns the results of both.
    fn run_against<T: Send>(
        act: fn(SocketAddr, Instant) -> Result,
        peer: impl FnOnce(TcpStream) -> T,
    ) -> (Result, T) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        thread::scope(|scope| {
            let guest = scope.spawn(move || act(to, deadline));
            let outcome = peer(listener.accept().unwrap().0);
            (guest.join().unwrap(), outcome)
        })
    }

    #[test]
    fn echo_returns_all_bytes_until_the_connection_closes() {
        let (result, ()) = run_against(echo, |mut stream| {
            for word in ["one", "another"] {
                stream.write_all(word.as_bytes()).unwrap();
                let mut back = vec![0; word.len()];
                stream.read_exact(&mut back).unwrap();
                assert_eq!(back, word.as_bytes());
            }
        });
        assert_eq!((result.outcome, result.count), (Outcome::Ok, 10));
    }

    #[test]
    fn source_waits_for_a_byte_and_sends_until_the_connection_closes() {
        let (result, early) = run_against(source, |mut stream| {
            stream
                .set_read_timeout(Some(Duration::from_millis(30)))
                .unwrap();
            let early = stream.read(&mut [0]).is_ok();
            stream.set_read_timeout(None).unwrap();
            stream.write_all(&[1]).unwrap();
            stream.read_exact(&mut vec![0; 1 << 20]).unwrap();
            early
        });
        assert!(!early, "the source sent data before it received a byte");
        assert_eq!(result.outcome, Outcome::Ok);
        assert!(result.count >= 1 << 20, "{}", result.count);
    }

    #[test]
    fn sink_reports_how_many_bytes_it_received() {
        let (result, reported) = run_against(sink, |mut stream| {
            stream.write_all(&vec![7; 300_000]).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let mut reported = [0; 8];
            stream.read_exact(&mut reported).unwrap();
            u64::from_le_bytes(reported)
        });
        assert_eq!(
            (result.outcome, result.count, reported),
            (Outcome::Ok, 300_000, 300_000)
        );
    }

    #[test]
    fn pulse_continues_after_errors() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        let every = Duration::from_micros(200);
        let soon = || Instant::now() + Duration::from_millis(100);
        let result = pulse(to, every, "word", soon());
        assert!(
            result.outcome == Outcome::Ok && result.count > 1,
            "{result:?}"
        );
        let mut received = [0; 8];
        assert_eq!(socket.recv(&mut received).unwrap(), 4);
        drop(socket);
        // From now on, the kernel responds to each datagram with "port unreachable".
        assert!(pulse(to, every, "word", soon()).count > 1);
    }

    #[test]
    fn a_closed_port_is_reported_as_refused() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = free.local_addr().unwrap();
        drop(free);
        let deadline = Instant::now() + Duration::from_secs(5);
        assert_eq!(echo(to, deadline).outcome, Outcome::Refused);
    }
}
