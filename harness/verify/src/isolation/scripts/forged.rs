//! Forged ICMP errors: the packet that they quote belongs to no flow of the guest. An attacker sends such errors to get
//! packets into the guest, or to end its connections.

use std::{
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::Duration,
};

use netprobe::{Action, frame::checksum};

use super::{
    outcome::ScriptError,
    traffic::{SILENT, address, allowing, host_of, join, numbered, probe, received_nothing},
};
use crate::isolation::{
    observed::Observed,
    stage::Stage,
    timing::{BLOCKED_MS, PASS_MS},
    world::HOST4,
};

const TCP: u8 = 6;
const UDP: u8 = 17;
/// Number of times that each error is sent.
const TIMES: usize = 3;

/// The packet that an error quotes.
#[derive(Clone, Copy)]
struct Quoted {
    protocol: u8,
    from: (Ipv4Addr, u16),
    to: (Ipv4Addr, u16),
}

/// Errors from a router on the path. Only an error about the guest's own flow may reach the guest.
pub(super) fn errors(stage: &mut Stage, name: &str) -> Result<Observed, ScriptError> {
    let guest = stage.customer.create(&allowing(&[&host_of(SILENT)]))?;
    let peer = stage.world.socket_at(address(SILENT))?;
    let router = stage.world.icmp_socket()?;
    let forged = ["port", "peer", "service", "protocol", "sender", "reverse"];
    let payload = |what: &str| format!("{name}-{what}");
    let until = payload("end");
    let listen = Action::Hear {
        words: forged.map(payload).to_vec(),
        until: until.clone(),
    };
    let listen = probe(name.to_owned(), listen, PASS_MS);
    let send = numbered(&payload("own"), SILENT, 4 * BLOCKED_MS);
    let findings = thread::scope(|scope| {
        let probing = scope.spawn(|| guest.probe(&[listen, send]));
        let (_, mapped) = peer.recv_from(&mut [0; 128])?;
        let own = Quoted {
            protocol: UDP,
            from: (HOST4, mapped.port()),
            to: ipv4(address(SILENT)),
        };
        for (what, quoted) in forged.iter().zip(forgeries(own)) {
            for _ in 0..TIMES {
                router.send(&error(quoted, &payload(what)), HOST4)?;
            }
        }
        // Repeated, because the guest may start to listen late. Errors are delivered in the order in which they are
        // sent.
        for _ in 0..10 {
            thread::sleep(Duration::from_millis(100));
            router.send(&error(own, &until), HOST4)?;
        }
        let findings = join(probing);
        Ok::<_, ScriptError>(findings?)
    })?;
    Ok(received_nothing(&findings, name))
}

/// Quoted packets in the order of `forged` in [`errors`]. Each differs from the guest's flow in one field, and the last
/// one in its direction.
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

fn ipv4(address: SocketAddr) -> (Ipv4Addr, u16) {
    match address {
        SocketAddr::V4(v4) => (*v4.ip(), v4.port()),
        SocketAddr::V6(v6) => (Ipv4Addr::UNSPECIFIED, v6.port()),
    }
}

/// A port-unreachable message (RFC 792) that quotes a packet with this payload.
fn error(quoted: Quoted, payload: &str) -> Vec<u8> {
    let inner = u16::try_from(8 + payload.len()).unwrap_or(u16::MAX);
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
    body.extend(payload.as_bytes());
    let sum = checksum(&[&body]).to_be_bytes();
    body[2..4].copy_from_slice(&sum);
    body
}
