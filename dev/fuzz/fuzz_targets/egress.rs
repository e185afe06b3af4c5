//! The first parsers of guest input in the egress proxy: ClientHello, boundaries of HTTP/1 requests, host names.
//! The result must not depend on the sizes of the pieces in which bytes arrive.
#![no_main]

use std::net::{IpAddr, Ipv4Addr};

use egress::{
    framing::{Framing, MAX_HEAD},
    hello::{HelloReader, MAX_HELLO},
    name::{HostName, HostPort},
};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let [choice, piece, bytes @ ..] = bytes else {
        return;
    };
    let piece = usize::from(*piece) + 1;
    match choice % 3 {
        0 => framing(bytes, piece),
        1 => hello(bytes, piece),
        _ => name(&String::from_utf8_lossy(bytes)),
    }
});

fn framing(bytes: &[u8], piece: usize) {
    let read = |piece| {
        let mut framing = Framing::default();
        bytes.chunks(piece).for_each(|part| framing.read(part));
        (framing.requests(), framing.violation(), framing.is_in_head())
    };
    let whole = read(bytes.len().max(1));
    assert_eq!(whole, read(piece));
    assert_eq!(whole, read(1));
    assert!(whole.0 <= (bytes.len() / 4) as u64 && bytes.len() < MAX_HEAD);
}

fn hello(bytes: &[u8], piece: usize) {
    let read = |piece| {
        let mut reader = HelloReader::default();
        for part in bytes.chunks(piece) {
            match reader.read(part) {
                Ok(None) => {}
                Ok(Some(hello)) => return Some(Some(hello)),
                Err(_) => return None,
            }
        }
        Some(None)
    };
    let whole = read(bytes.len().max(1));
    assert_eq!(whole, read(piece));
    assert_eq!(whole, read(1));
    assert!(bytes.len() < MAX_HELLO);
    if let Some(Some(hello)) = whole
        && let Some(found) = hello.name
    {
        name(found.as_str());
    }
}

fn name(text: &str) {
    if let Ok(host) = HostPort::parse(text) {
        assert!(host.port != Some(0));
    }
    let Ok(name) = HostName::parse(text) else {
        return;
    };
    let text = name.as_str();
    assert_eq!(HostName::parse(text).as_ref(), Ok(&name));
    assert!(text.len() <= 253 && text.is_ascii() && !text.ends_with('.'));
    assert_eq!(text, text.to_ascii_lowercase());
    assert!(text.parse::<IpAddr>().is_err());
    // As inet_aton(3) reads a single number.
    assert!(text.parse::<u32>().map(Ipv4Addr::from).is_err());
}
