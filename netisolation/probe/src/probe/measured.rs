//! The guest's end of what is measured at the other end: it does as little as it can and tells no times.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use netprobe::Outcome;

use super::{
    Result,
    talk::{left, socket_to},
};

/// Bytes of one system call.
const CHUNK: usize = 256 << 10;

/// The count is that of the bytes that were sent back.
pub(crate) fn echo(to: SocketAddr, deadline: Instant) -> Result {
    told(connect(to, deadline).and_then(send_back))
}

/// The count is that of the bytes that were sent.
pub(crate) fn source(to: SocketAddr, deadline: Instant) -> Result {
    told(connect(to, deadline).and_then(pour))
}

/// The count is that of the bytes that came.
pub(crate) fn sink(to: SocketAddr, deadline: Instant) -> Result {
    told(connect(to, deadline).and_then(swallow))
}

/// The count is that of the datagrams that were sent.
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

fn told(done: io::Result<u64>) -> Result {
    match done {
        Ok(bytes) => Result::new(Outcome::Ok, format!("{bytes} bytes")).counted(bytes),
        Err(error) => Result::of_error(&error),
    }
}

/// A connection on which each system call ends in time; the other end bounds the whole.
fn connect(to: SocketAddr, deadline: Instant) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, left(deadline))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(left(deadline)))?;
    stream.set_write_timeout(Some(left(deadline)))?;
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

fn pour(mut stream: TcpStream) -> io::Result<u64> {
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

fn swallow(mut stream: TcpStream) -> io::Result<u64> {
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

    /// What the guest's end tells, and what `peer` makes of the connection at the other end.
    fn between<T: Send>(
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
    fn an_echo_sends_back_what_came_until_the_end() {
        let (told, ()) = between(echo, |mut stream| {
            for word in ["one", "another"] {
                stream.write_all(word.as_bytes()).unwrap();
                let mut back = vec![0; word.len()];
                stream.read_exact(&mut back).unwrap();
                assert_eq!(back, word.as_bytes());
            }
        });
        assert_eq!((told.outcome, told.count), (Outcome::Ok, 10));
    }

    #[test]
    fn a_source_waits_for_its_sign_and_ends_with_the_connection() {
        let (told, early) = between(source, |mut stream| {
            stream
                .set_read_timeout(Some(Duration::from_millis(30)))
                .unwrap();
            let early = stream.read(&mut [0]).is_ok();
            stream.set_read_timeout(None).unwrap();
            stream.write_all(&[1]).unwrap();
            stream.read_exact(&mut vec![0; 1 << 20]).unwrap();
            early
        });
        assert!(!early, "it sent before it was told to");
        assert_eq!(told.outcome, Outcome::Ok);
        assert!(told.count >= 1 << 20, "{}", told.count);
    }

    #[test]
    fn a_sink_tells_how_much_it_took() {
        let (told, said) = between(sink, |mut stream| {
            stream.write_all(&vec![7; 300_000]).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let mut said = [0; 8];
            stream.read_exact(&mut said).unwrap();
            u64::from_le_bytes(said)
        });
        assert_eq!(
            (told.outcome, told.count, said),
            (Outcome::Ok, 300_000, 300_000)
        );
    }

    #[test]
    fn a_pulse_goes_on_whatever_it_is_told() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        let every = Duration::from_micros(200);
        let soon = || Instant::now() + Duration::from_millis(100);
        let told = pulse(to, every, "word", soon());
        assert!(told.outcome == Outcome::Ok && told.count > 1, "{told:?}");
        let mut heard = [0; 8];
        assert_eq!(socket.recv(&mut heard).unwrap(), 4);
        drop(socket);
        // From now on each is answered with "port unreachable".
        assert!(pulse(to, every, "word", soon()).count > 1);
    }

    #[test]
    fn nobody_there_is_told() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = free.local_addr().unwrap();
        drop(free);
        let deadline = Instant::now() + Duration::from_secs(5);
        assert_eq!(echo(to, deadline).outcome, Outcome::Refused);
    }
}
