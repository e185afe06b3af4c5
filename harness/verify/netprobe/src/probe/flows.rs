//! Actions with many packets: floods, numbered datagrams and lines, sequences of requests.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use netprobe::Outcome;

use super::{
    Result,
    talk::{self, socket_to, time_left},
};

pub(crate) fn flood(to: Ipv4Addr, addresses: u32, ports: u16, word: &str) -> Result {
    let socket = match UdpSocket::bind("0.0.0.0:0") {
        Ok(socket) => socket,
        Err(error) => return Result::not_tried(&error),
    };
    let mut sent = 0;
    let mut last = String::new();
    for address in (0..addresses).filter_map(|n| u32::from(to).checked_add(n)) {
        for port in 1..=ports {
            match socket.send_to(word.as_bytes(), (Ipv4Addr::from(address), port)) {
                Ok(_) => sent += 1,
                Err(error) => last = error.to_string(),
            }
        }
    }
    Result::new(Outcome::Ok, last).counted(sent)
}

/// The count is the number of datagrams that came back; the figure is the number sent.
pub(crate) fn numbered(to: SocketAddr, every_ms: u64, word: &str, deadline: Instant) -> Result {
    let socket = match socket_to(to) {
        Ok(socket) => socket,
        Err(error) => return Result::of_error(&error),
    };
    let every = Duration::from_millis(every_ms.max(1));
    let (mut sent, mut back) = (0_u64, 0);
    let mut buffer = [0; 2048];
    let mut next = Instant::now();
    while Instant::now() < deadline {
        // An ICMP error about one datagram must not stop the others.
        if socket.send(format!("{word} {sent}").as_bytes()).is_ok() {
            sent += 1;
        }
        next += every;
        loop {
            let wait = next.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                break;
            }
            let bounded = socket.set_read_timeout(Some(wait.max(Duration::from_millis(1))));
            match bounded.and_then(|()| socket.recv(&mut buffer)) {
                Ok(_) => back += 1,
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
    }
    let outcome = if back > 0 {
        Outcome::Ok
    } else {
        Outcome::Timeout
    };
    let mut result = Result::new(outcome, format!("{back} of {sent} came back")).counted(back);
    result.figures = vec![sent];
    result
}

/// [`Outcome::Ok`] if the connection lasts until the deadline; otherwise the outcome of the error.
pub(crate) fn stream(to: SocketAddr, every_ms: u64, word: &str, deadline: Instant) -> Result {
    let mut back = 0;
    match lines(to, every_ms, word, deadline, &mut back) {
        Ok(()) => Result::new(Outcome::Ok, "open until the deadline").counted(back),
        Err(error) => Result::of_error(&error).counted(back),
    }
}

fn lines(
    to: SocketAddr,
    every_ms: u64,
    word: &str,
    deadline: Instant,
    back: &mut u64,
) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, time_left(deadline))?;
    stream.set_nodelay(true)?;
    while Instant::now() < deadline {
        let line = format!("{word} {back}\n");
        stream.set_write_timeout(Some(time_left(deadline)))?;
        stream.write_all(line.as_bytes())?;
        let mut echo = vec![0; line.len()];
        stream.set_read_timeout(Some(time_left(deadline)))?;
        stream.read_exact(&mut echo)?;
        *back += 1;
        thread::sleep(Duration::from_millis(every_ms));
    }
    Ok(())
}

pub(crate) fn requests(to: SocketAddr, count: u32, word: &str, deadline: Instant) -> Result {
    let mut figures = Vec::new();
    let mut lost = 0;
    let mut last = String::new();
    for _ in 0..count {
        if Instant::now() >= deadline {
            break;
        }
        let start = Instant::now();
        match talk::exchange(to, word, deadline) {
            Ok(_) => figures.push(u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX)),
            Err(error) => {
                lost += 1;
                last = error.to_string();
            }
        }
    }
    let answered = u64::try_from(figures.len()).unwrap_or(u64::MAX);
    let outcome = if answered == u64::from(count) {
        Outcome::Ok
    } else {
        Outcome::Timeout
    };
    let said = format!("{answered} of {count} answered, {lost} lost {last}");
    let mut result = Result::new(outcome, said).counted(answered);
    result.figures = figures;
    result
}
