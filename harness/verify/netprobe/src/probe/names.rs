//! Actions that resolve names and connect to the addresses.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use model::guest;
use netprobe::{Outcome, Over, Query, Service, dns};

use super::{
    Result,
    talk::{self, RETRY_INTERVAL, socket_to, time_left},
};

/// Minimum time limit for a name server's response.
const MIN_ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) fn ask(query: &Query, deadline: Instant) -> Result {
    match lookup(query, deadline) {
        Ok(answer) if answer.code == 0 && !answer.addresses.is_empty() => {
            Result::new(Outcome::Ok, format!("{:?}", answer.addresses))
        }
        Ok(answer) => {
            let why = format!("code {}, {} addresses", answer.code, answer.addresses.len());
            Result::new(Outcome::Refused, why)
        }
        Err(error) => Result::of_error(&error),
    }
}

/// `within` limits the time on the connection. The preceding DNS query may take longer ([`MIN_ANSWER_TIMEOUT`]).
pub(crate) fn reach(service: &Service, word: &str, within: Duration) -> Result {
    let query = Query {
        server: None,
        name: service.name.clone(),
        kind: service.kind,
        over: Over::Udp,
    };
    let answer = match lookup(&query, Instant::now() + within.max(MIN_ANSWER_TIMEOUT)) {
        Ok(answer) => answer,
        Err(error) => return Result::of_error(&error),
    };
    match answer.addresses.first() {
        Some(address) if answer.code == 0 => {
            std::thread::sleep(Duration::from_millis(service.pause_ms));
            let to = SocketAddr::new(*address, service.port);
            talk::tcp(to, word, Instant::now() + within)
        }
        _ => Result::new(Outcome::Refused, format!("code {}", answer.code)),
    }
}

fn lookup(query: &Query, deadline: Instant) -> io::Result<dns::Answer> {
    let server = query
        .server
        .unwrap_or(SocketAddr::from((guest::GATEWAY4, 53)));
    // A predictable id is enough: the test network contains no forged answers.
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH);
    let nanos = nanos.map_or(0, |since| since.subsec_nanos());
    let id = u16::try_from(nanos & 0xffff).unwrap_or(0);
    let question = dns::question(id, &query.name, query.kind);
    match query.over {
        Over::Udp => by_datagram(server, id, &question, deadline),
        Over::Tcp => by_connection(server, id, &question, deadline),
    }
}

fn by_datagram(
    server: SocketAddr,
    id: u16,
    question: &[u8],
    deadline: Instant,
) -> io::Result<dns::Answer> {
    let socket = socket_to(server)?;
    let mut buffer = [0; 4096];
    let mut interval = RETRY_INTERVAL;
    loop {
        socket.send(question)?;
        interval = (interval * 2).min(Duration::from_secs(5));
        socket.set_read_timeout(Some(interval.min(time_left(deadline))))?;
        match socket.recv(&mut buffer) {
            Ok(length) => {
                if let Some(answer) = dns::answer(id, &buffer[..length]) {
                    return Ok(answer);
                }
            }
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            Err(_) => {}
        }
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

fn by_connection(
    server: SocketAddr,
    id: u16,
    question: &[u8],
    deadline: Instant,
) -> io::Result<dns::Answer> {
    let mut stream = TcpStream::connect_timeout(&server, time_left(deadline))?;
    stream.set_read_timeout(Some(time_left(deadline)))?;
    let length = u16::try_from(question.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), question].concat())?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut message = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut message)?;
    dns::answer(id, &message)
        .ok_or_else(|| io::Error::other("the message does not answer the query"))
}
