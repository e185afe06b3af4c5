//! Packets from outside that belong to no flow of the guest.

use std::{thread, time::Duration};

use netprobe::Action;

use super::{
    outcome::ScriptError,
    traffic::{
        SILENT, address, allowing, host_of, join, numbered, probe, received_nothing, send_until,
    },
};
use crate::isolation::{
    observed::Observed,
    stage::Stage,
    timing::{ECHO, PASS_MS},
    world::HOST4,
};

/// Datagrams to the ports of the address translation, from hosts and ports that the guest never contacted.
pub(super) fn unsolicited(stage: &mut Stage, name: &str) -> Result<Observed, ScriptError> {
    let guest = stage.customer.create(&allowing(&[&host_of(SILENT)]))?;
    let peer = stage.world.socket_at(address(SILENT))?;
    let other_port = stage.world.socket_at(address("198.51.100.10:7003"))?;
    let stranger = stage.world.socket_at(address("203.0.113.9:7002"))?;
    let payloads = ["port", "strange", "sweep"].map(|suffix| format!("{name}-{suffix}"));
    let until = format!("{name}-end");
    let listen = probe(
        name.to_owned(),
        Action::Hear {
            words: payloads.to_vec(),
            until: until.clone(),
        },
        PASS_MS,
    );
    let send = numbered(&format!("{name}-own"), SILENT, 6000);
    let findings = thread::scope(|scope| {
        let probing = scope.spawn(|| guest.probe(&[listen, send]));
        let (_, mapped) = peer.recv_from(&mut [0; 128])?;
        other_port.send_to(payloads[0].as_bytes(), mapped)?;
        stranger.send_to(payloads[1].as_bytes(), mapped)?;
        for port in (mapped.port().saturating_sub(64)..).take(128) {
            stranger.send_to(payloads[2].as_bytes(), (HOST4, port))?;
        }
        // `until` belongs to the guest's open flow. It arrives after everything that was sent before it.
        thread::sleep(Duration::from_millis(300));
        for _ in 0..10 {
            peer.send_to(until.as_bytes(), mapped)?;
            thread::sleep(Duration::from_millis(100));
        }
        let findings = join(probing);
        Ok::<_, ScriptError>(findings?)
    })?;
    Ok(received_nothing(&findings, name))
}

/// Datagrams to a port that the address translation assigned to an ended sandbox. They must not reach later
/// sandboxes.
pub(super) fn late(stage: &mut Stage, name: &str) -> Result<Observed, ScriptError> {
    let first = stage.customer.create(&allowing(&[&host_of(SILENT)]))?;
    let peer = stage.world.socket_at(address(SILENT))?;
    first.probe(&[numbered(&format!("{name}-first"), SILENT, 200)])?;
    let (_, mapped) = peer.recv_from(&mut [0; 128])?;
    drop(first);
    let payload = format!("{name}-word");
    let mut found = Observed::default();
    for turn in 0..4 {
        let next = stage
            .customer
            .create(&allowing(&[&host_of(SILENT), &host_of(ECHO)]))?;
        let until = format!("{name}-end-{turn}");
        let listen = Action::Hear {
            words: vec![payload.clone()],
            until: until.clone(),
        };
        let listen = probe(name.to_owned(), listen, PASS_MS);
        let findings = thread::scope(|scope| {
            let listening = scope.spawn(|| next.probe(&[listen]));
            for _ in 0..10 {
                peer.send_to(payload.as_bytes(), mapped)?;
                thread::sleep(Duration::from_millis(30));
            }
            send_until(|| listening.is_finished(), &next, until);
            let findings = join(listening);
            Ok::<_, ScriptError>(findings?)
        })?;
        found.add(received_nothing(&findings, name));
    }
    Ok(found)
}
