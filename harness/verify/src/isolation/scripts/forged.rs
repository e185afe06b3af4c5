//! ICMP errors that speak of no flow of the guest's: who sends them wants to be heard, or to end connections.

use std::{
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::Duration,
};

use netprobe::{Action, frame::checksum};

use super::{
    BLOCKED_MS, Found, PASS_MS, SILENT, ScriptError, address, allowing, heard_nothing, host_of,
    numbered, probe,
};
use crate::isolation::{Stage, world::HOST4};

const TCP: u8 = 6;
const UDP: u8 = 17;
/// How often each is sent.
const TIMES: usize = 3;

/// The packet that an error quotes.
#[derive(Clone, Copy)]
struct Quoted {
    protocol: u8,
    from: (Ipv4Addr, u16),
    to: (Ipv4Addr, u16),
}

/// Errors from somebody on the way, of which only that about the guest's own flow may reach it.
pub(super) fn errors(stage: &mut Stage, name: &str) -> Result<Found, ScriptError> {
    let guest = stage.customer.create(&allowing(&[&host_of(SILENT)]))?;
    let friend = stage.world.socket_at(address(SILENT))?;
    let router = stage.world.icmp_socket()?;
    let words = ["port", "peer", "service", "protocol", "sender", "reverse"];
    let word = |what: &str| format!("{name}-{what}");
    let until = word("end");
    let hear = Action::Hear {
        words: words.map(word).to_vec(),
        until: until.clone(),
    };
    let hear = probe(name.to_owned(), hear, PASS_MS);
    let speak = numbered(&word("own"), SILENT, 4 * BLOCKED_MS);
    let findings = thread::scope(|scope| {
        let probing = scope.spawn(|| guest.probe(&[hear, speak]));
        let (_, mapped) = friend.recv_from(&mut [0; 128])?;
        let own = Quoted {
            protocol: UDP,
            from: (HOST4, mapped.port()),
            to: of(address(SILENT)),
        };
        for (what, quoted) in words.iter().zip(forgeries(own)) {
            for _ in 0..TIMES {
                router.send(&error(quoted, &word(what)), HOST4)?;
            }
        }
        // The ear may open late. What was sent before is heard before.
        for _ in 0..10 {
            thread::sleep(Duration::from_millis(100));
            router.send(&error(own, &until), HOST4)?;
        }
        let findings = probing
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, ScriptError>(findings?)
    })?;
    Ok(heard_nothing(&findings, name))
}

/// Each differs from the guest's flow in one thing; in the order of the words.
fn forgeries(own: Quoted) -> [Quoted; 6] {
    let ((host, port), (peer, service)) = (own.from, own.to);
    let other = Ipv4Addr::from_bits(peer.to_bits() ^ 1);
    [
        Quoted {
            from: (host, port ^ 1),
            ..own
        },
        Quoted {
            to: (other, service),
            ..own
        },
        Quoted {
            to: (peer, service ^ 1),
            ..own
        },
        Quoted {
            protocol: TCP,
            ..own
        },
        Quoted {
            from: (other, port),
            ..own
        },
        Quoted {
            from: own.to,
            to: own.from,
            ..own
        },
    ]
}

fn of(address: SocketAddr) -> (Ipv4Addr, u16) {
    match address {
        SocketAddr::V4(v4) => (*v4.ip(), v4.port()),
        SocketAddr::V6(v6) => (Ipv4Addr::UNSPECIFIED, v6.port()),
    }
}

/// Port unreachable (RFC 792), with the word after the quoted ports.
fn error(quoted: Quoted, word: &str) -> Vec<u8> {
    let inner = u16::try_from(8 + word.len()).unwrap_or(u16::MAX);
    let mut ip = vec![0x45, 0];
    ip.extend((20 + inner).to_be_bytes());
    ip.extend([0, 0, 0, 0, 64, quoted.protocol, 0, 0]);
    ip.extend(quoted.from.0.octets());
    ip.extend(quoted.to.0.octets());
    let sum = checksum(&[&ip]).to_be_bytes();
    ip[10..12].copy_from_slice(&sum);
    let ports = [quoted.from.1, quoted.to.1, inner, 0];
    let mut body = vec![3, 3, 0, 0, 0, 0, 0, 0];
    body.extend(ip);
    body.extend(ports.map(u16::to_be_bytes).concat());
    body.extend(word.as_bytes());
    let sum = checksum(&[&body]).to_be_bytes();
    body[2..4].copy_from_slice(&sum);
    body
}
