//! Frames whose virtio header asks the host to complete or split them in a way that does not fit the frame. They are
//! sent from inside a guest, and written to the TAP by code that has a VMM's descriptor of the TAP.
//!
//! The policy allows one address of each family. Whatever the header requests, nothing may arrive at another
//! address, from another sender, or in fragments.

use std::{
    fs::File,
    io::Write,
    net::{IpAddr, SocketAddr},
};

use netprobe::{
    Action, Outcome,
    frame::FrameError,
    offload::{Header, each_unfit, partial_frames},
};

use super::{
    outcome::ScriptError,
    traffic::{address, allowing, is_reported, probe, summary},
    vmm::Vmm,
};
use crate::{
    isolation::{
        observed::Observed,
        stage::Stage,
        timing::PASS_MS,
        world::{Finishing, HOST4, Place, Seen},
    },
    sandbox::Sandbox,
};

/// The receivers that the policy allows.
const ALLOWED: [&str; 2] = ["198.51.100.21", "2001:db8:100::21"];
/// Ports of the receivers: frames whose header does not fit go to the first, frames whose header fits to the second.
/// The ports for the TAP differ, because packets that the guest's frames caused may still arrive late.
const OF_GUEST: [u16; 2] = [5000, 5001];
const OF_TAP: [u16; 2] = [5002, 5003];
/// IPv6 address of the uplink.
const HOST6: &str = "2001:db8:1::2";
/// First port that the address translation uses.
const FIRST_PORT: u16 = 61_000;
/// Part of the payload of every frame that these scripts send.
const PAYLOAD: &[u8] = b"offload-";
/// Length of the virtio header before each frame of a TAP as VMMs open it (`virtio_net_hdr_mrg_rxbuf`).
const TAP_HEADER: usize = 12;

/// Sends the frames of a script to a receiver.
type Send<'a> = &'a mut dyn FnMut(&mut Stage, SocketAddr) -> Result<(), ScriptError>;

/// Frames from inside the guest. The guest's kernel or the device may correct a header, so frames to the allowed
/// receiver may arrive.
pub(super) fn from_guest(
    stage: &mut Stage,
    name: &str,
    finishing: Finishing,
) -> Result<Observed, ScriptError> {
    let mut found = Observed::default();
    let guest = stage.customer.create(&allowing(&ALLOWED))?;
    stage.world.set_finishing(finishing)?;
    let done = receivers(OF_GUEST)
        .into_iter()
        .try_for_each(|[unfit, fit]| {
            let mut send = |_: &mut Stage, to: SocketAddr| {
                let sweep = probe(name.to_owned(), Action::Unfit(to), PASS_MS * 6);
                let findings = guest.probe(&[sweep])?;
                let sent = findings.iter().map(|finding| finding.count).sum::<u64>();
                found.doubt_unless(sent > 1000, format!("only {sent} frames were sent"));
                found.guest += &summary(&findings);
                Ok(())
            };
            let strays = strays(stage, unfit, &mut send)?;
            found.breaches.extend(strays.describe(finishing));
            let controls = [("udp", Action::Udp(fit)), ("tcp", Action::Tcp(fit))];
            let controls =
                controls.map(|(kind, action)| probe(format!("{name}-{kind}"), action, PASS_MS));
            let findings = guest.probe(&controls)?;
            // The server reports the first refusal of a flow at once, so if a frame above was refused, the event
            // already exists.
            let is_refused = guest
                .events()?
                .iter()
                .any(|event| event.reason == "offload");
            found.doubt_unless(
                !is_refused,
                "the device passed on frames whose header does not fit",
            );
            let is_ok = findings
                .iter()
                .all(|finding| finding.outcome == Outcome::Ok);
            found.doubt_unless(
                is_ok,
                format!("the guest does not reach {fit}: {}", summary(&findings)),
            );
            Ok(())
        });
    stage.world.set_finishing(Finishing::ByUplink)?;
    done.map(|()| found)
}

/// Frames written to the TAP, where neither guest nor device corrects them: none may arrive, and the server reports the
/// refusals.
pub(super) fn at_tap(
    stage: &mut Stage,
    name: &str,
    finishing: Finishing,
) -> Result<Observed, ScriptError> {
    let mut found = Observed::default();
    let guest = stage.customer.create(&allowing(&ALLOWED))?;
    let tap = File::from(Vmm::of(&guest)?.take_tap()?);
    stage.world.set_finishing(finishing)?;
    let done = receivers(OF_TAP).into_iter().try_for_each(|[unfit, fit]| {
        let mut sent = 0_u64;
        let mut send = |_: &mut Stage, to: SocketAddr| {
            each_unfit(to, name, |header, frame| {
                sent += u64::from(write(&tap, header, frame))
            })
            .map_err(no_frame)
        };
        let strays = strays(stage, unfit, &mut send)?;
        found.breaches.extend(strays.describe(finishing));
        found.breach_if(
            strays.as_allowed > 0,
            format!(
                "{} frames whose header does not fit arrived at {unfit}",
                strays.as_allowed
            ),
        );
        found.doubt_unless(sent > 1000, format!("only {sent} frames were written"));
        check_fitting_frames(stage, &tap, fit, name, &mut found)?;
        found.doubt_unless(
            is_refusal_reported(&guest, unfit.ip())?,
            format!("no event reports the frames to {unfit}"),
        );
        found.guest += &format!("{sent} frames to {unfit}; ");
        Ok(())
    });
    stage.world.set_finishing(Finishing::ByUplink)?;
    done.map(|()| found)
}

fn is_refusal_reported(guest: &Sandbox, to: IpAddr) -> Result<bool, ScriptError> {
    is_reported(guest, |event| {
        event.reason == "offload" && event.destination.ip() == to
    })
}

/// Writes frames whose headers fit, in the same way as the other frames. They must arrive, which shows that the other
/// frames reached the host too.
fn check_fitting_frames(
    stage: &mut Stage,
    tap: &File,
    to: SocketAddr,
    name: &str,
    found: &mut Observed,
) -> Result<(), ScriptError> {
    let payload = format!("{name}-fit");
    for fit in partial_frames(to, &payload, 0).map_err(no_frame)? {
        stage.world.capture.forget();
        let is_written = write(tap, fit.header, &fit.frame);
        stage.world.capture.settle()?;
        let arrived = |seen: &Seen| {
            seen.place == Place::Outside && seen.to == Some(to.ip()) && seen.has(payload.as_bytes())
        };
        found.doubt_unless(
            is_written && stage.world.capture.seen().iter().any(arrived),
            format!("a frame whose header fits does not arrive at {to}"),
        );
    }
    Ok(())
}

fn write(mut tap: &File, header: Header, frame: &[u8]) -> bool {
    let mut bytes = header.bytes().to_vec();
    bytes.resize(TAP_HEADER, 0);
    bytes.extend(frame);
    // The kernel itself refuses some headers.
    tap.write_all(&bytes).is_ok()
}

fn no_frame(FrameError(why): FrameError) -> ScriptError {
    ScriptError::Failed(why.to_owned())
}

/// Packets that left the host because of the frames.
#[derive(Debug, Default)]
struct Strays {
    /// Packets to the receiver of the frames.
    as_allowed: usize,
    /// Packets that nothing allows.
    elsewhere: Vec<Seen>,
}

impl Strays {
    fn describe(&self, finishing: Finishing) -> Option<String> {
        let first = self.elsewhere.first()?;
        let (count, from, to) = (self.elsewhere.len(), first.from, first.to);
        let ports = (first.from_port, first.port);
        Some(format!(
            "{count} packets left the host that no policy allows ({finishing:?}); the first has protocol {}, from \
             {from:?} to {to:?}, ports {ports:?}",
            first.protocol
        ))
    }
}

fn strays(stage: &mut Stage, to: SocketAddr, send: Send<'_>) -> Result<Strays, ScriptError> {
    stage.world.capture.settle()?;
    stage.world.capture.forget();
    send(stage, to)?;
    stage.world.capture.settle()?;
    let mut strays = Strays::default();
    let outside = stage.world.capture.seen().iter();
    for seen in outside.filter(|seen| seen.place == Place::Outside) {
        match kind(seen, to) {
            Kind::Unrelated => {}
            Kind::Allowed => strays.as_allowed += 1,
            Kind::Stray => strays.elsewhere.push(seen.clone()),
        }
    }
    Ok(strays)
}

/// Relation of a packet on the uplink to the frames of the script.
enum Kind {
    /// Sent by the host itself, or by an earlier part of the script.
    Unrelated,
    Allowed,
    Stray,
}

fn kind(seen: &Seen, to: SocketAddr) -> Kind {
    let is_from_host = seen.from == Some(IpAddr::from(HOST4)) || is_at(seen.from, HOST6);
    let is_allowed = is_from_host && ALLOWED.iter().any(|address| is_at(seen.to, address));
    let is_from_flow = seen.from_port.is_some_and(|port| port >= FIRST_PORT);
    let is_own_port = |port| OF_GUEST.contains(&port) || OF_TAP.contains(&port);
    match seen.protocol {
        6 | 17 if is_mark(seen) => Kind::Unrelated,
        6 | 17 if is_allowed && is_from_flow && seen.port.is_some_and(is_own_port) => {
            if (seen.to, seen.port) == (Some(to.ip()), Some(to.port())) {
                Kind::Allowed
            } else {
                Kind::Unrelated
            }
        }
        6 | 17 => Kind::Stray,
        1 | 58 if is_echo(seen) && is_allowed => Kind::Allowed,
        // Neighbour discovery, multicast group reports, and errors about late replies.
        1 | 58 if !is_echo(seen) => Kind::Unrelated,
        _ if !seen.has(PAYLOAD) => Kind::Unrelated,
        _ => Kind::Stray,
    }
}

fn is_at(found: Option<IpAddr>, address: &str) -> bool {
    found.is_some_and(|found| address.parse() == Ok(found))
}

/// The allowed receiver of each family, at these ports.
fn receivers(ports: [u16; 2]) -> [[SocketAddr; 2]; 2] {
    ALLOWED.map(|host| {
        let at = |port| {
            if host.contains(':') {
                address(&format!("[{host}]:{port}"))
            } else {
                address(&format!("{host}:{port}"))
            }
        };
        ports.map(at)
    })
}

/// Whether it is an echo request of ICMP or ICMPv6.
fn is_echo(seen: &Seen) -> bool {
    matches!(seen.payload.first(), Some(8 | 128))
}

/// Whether it is a mark that the packet capture sent itself.
fn is_mark(seen: &Seen) -> bool {
    seen.port == Some(9) && seen.has(b"mark ")
}
