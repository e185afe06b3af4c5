//! Actions that send and receive frames past the guest's own network stack.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Instant,
};

use model::{guest, hex};
use netprobe::{
    Frame, Outcome,
    frame::{self, FrameError},
    link::{Layer, Link},
    offload,
};

use super::{Result, talk::RETRY_INTERVAL};

pub(crate) fn send(what: &Frame, word: &str, deadline: Instant) -> Result {
    until_answered(frame::build(what, word.as_bytes()), what.to, deadline)
}

pub(crate) fn arp(asked: Ipv4Addr, deadline: Instant) -> Result {
    until_answered(Ok(frame::arp_request(asked)), Some(asked.into()), deadline)
}

pub(crate) fn solicit(asked: Ipv6Addr, deadline: Instant) -> Result {
    until_answered(frame::solicitation(asked), Some(asked.into()), deadline)
}

/// Sends the frame repeatedly until a frame arrives from `from`.
fn until_answered(
    bytes: std::result::Result<Vec<u8>, FrameError>,
    from: Option<IpAddr>,
    deadline: Instant,
) -> Result {
    let bytes = match bytes {
        Ok(bytes) => bytes,
        Err(FrameError(why)) => return Result::new(Outcome::Failed, why),
    };
    match exchange(&bytes, from, deadline) {
        Ok(Some(answer)) => Result::new(Outcome::Ok, hex(answer.get(..48).unwrap_or(&answer))),
        Ok(None) => Result::new(Outcome::Timeout, "no frame came back"),
        Err(error) => Result::not_tried(&error),
    }
}

fn exchange(bytes: &[u8], from: Option<IpAddr>, deadline: Instant) -> io::Result<Option<Vec<u8>>> {
    let link = Link::open(guest::CARD, Layer::Ethernet)?;
    loop {
        link.send(bytes)?;
        let again = (Instant::now() + RETRY_INTERVAL).min(deadline);
        while let Some(answer) = link.receive(again)? {
            if frame::sender(&answer) == from {
                return Ok(Some(answer));
            }
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
    }
}

pub(crate) fn unfit(to: SocketAddr, word: &str) -> Result {
    let link = match Link::open_with_headers(guest::CARD) {
        Ok(link) => link,
        Err(error) => return Result::not_tried(&error),
    };
    let (mut sent, mut tried) = (0, 0_u64);
    let done = offload::each_unfit(to, word, |header, frame| {
        tried += 1;
        // The guest's own kernel rejects some of the headers.
        sent += u64::from(link.send(&[&header.bytes(), frame].concat()).is_ok());
    });
    match done {
        Ok(()) => Result::new(Outcome::Ok, format!("{sent} of {tried} accepted")).counted(sent),
        Err(FrameError(why)) => Result::new(Outcome::Failed, why),
    }
}

pub(crate) fn begin(to: SocketAddr, count: u16, deadline: Instant) -> Result {
    let frames = (10_000..).take(usize::from(count)).map(|port| {
        let frame = Frame {
            to: Some(to.ip()),
            port: to.port(),
            source_port: Some(port),
            ..Frame::default()
        };
        frame::build(&frame, b"")
    });
    let frames = match frames.collect::<std::result::Result<Vec<_>, _>>() {
        Ok(frames) => frames,
        Err(FrameError(why)) => return Result::new(Outcome::Failed, why),
    };
    match send_until(&frames, deadline) {
        Ok(sent) => Result::new(Outcome::Ok, format!("{sent} sent")).counted(sent),
        Err(error) => Result::not_tried(&error),
    }
}

fn send_until(frames: &[Vec<u8>], deadline: Instant) -> io::Result<u64> {
    let link = Link::open(guest::CARD, Layer::Ethernet)?;
    let mut sent = 0;
    loop {
        for frame in frames {
            // If the card's queue is full, the frame is lost.
            sent += u64::from(link.send(frame).is_ok());
        }
        if Instant::now() >= deadline {
            return Ok(sent);
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
}

pub(crate) fn hear(words: &[String], until: &str, deadline: Instant) -> Result {
    match listen(words, until, deadline) {
        Err(error) => Result::not_tried(&error),
        Ok(None) => Result::new(Outcome::Failed, format!("no frame contained {until:?}")),
        Ok(Some(heard)) if heard.is_empty() => Result::new(Outcome::Timeout, ""),
        Ok(Some(heard)) => Result::new(Outcome::Ok, heard.join(" ")),
    }
}

fn listen(words: &[String], until: &str, deadline: Instant) -> io::Result<Option<Vec<String>>> {
    let mut heard: Vec<String> = Vec::new();
    let link = Link::open(guest::CARD, Layer::Ethernet)?;
    while let Some(frame) = link.receive(deadline)? {
        let contains = |word: &str| {
            frame
                .windows(word.len().max(1))
                .any(|w| w == word.as_bytes())
        };
        for word in words.iter().filter(|word| contains(word)) {
            if !heard.contains(word) {
                heard.push(word.clone());
            }
        }
        if contains(until) {
            return Ok(Some(heard));
        }
    }
    Ok(None)
}
