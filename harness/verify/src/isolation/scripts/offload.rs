//! Headers before frames that have the host write where they say: from inside a guest, and from whoever has a VMM's
//! descriptor of its TAP.
//!
//! One address is allowed. Whatever the header says, nothing may arrive elsewhere, from elsewhere, or in pieces.

use std::{
    fs::File,
    io::Write,
    net::{IpAddr, SocketAddr},
};

use netprobe::{
    Action, Outcome,
    frame::NoFrame,
    offload::{Header, each_unfit, left},
};

use super::{
    Found, PASS_MS, ScriptError, Stage, address, allowing, probe, summary, told, vmm::Vmm,
};
use crate::isolation::{
    sandbox::Guest,
    world::{Finishing, HOST4, Place, Seen},
};

/// The only receivers.
const ALLOWED: [&str; 2] = ["198.51.100.21", "2001:db8:100::21"];
/// Their ports: what does not fit is sent to the first, what fits to the second. What the guest sends is answered, and
/// packets of that may come late; so the TAP's are others.
const OF_GUEST: [u16; 2] = [5000, 5001];
const OF_TAP: [u16; 2] = [5002, 5003];
/// Address of the uplink.
const HOST6: &str = "2001:db8:1::2";
/// Of flows on the wire.
const FIRST_PORT: u16 = 61_000;
/// In every frame that is sent here.
const WORD: &[u8] = b"offload-";
/// Bytes before each frame of a TAP, as VMMs have it, of which the last two count buffers.
const TAP_HEADER: usize = 12;

/// What a script sends to a receiver, and what it says of it.
type Send<'a> = &'a mut dyn FnMut(&mut Stage, SocketAddr) -> Result<(), ScriptError>;

/// The guest's own kernel and the device may help: some of the frames arrive as what they are.
pub(super) fn from_guest(
    stage: &mut Stage,
    name: &str,
    finishing: Finishing,
) -> Result<Found, ScriptError> {
    let mut found = Found::default();
    let guest = stage.customer.create(&allowing(&ALLOWED))?;
    stage.world.set_finishing(finishing)?;
    let done = ends(OF_GUEST).into_iter().try_for_each(|[unfit, fit]| {
        let mut send = |_: &mut Stage, to: SocketAddr| {
            let sweep = probe(name.to_owned(), Action::Unfit(to), PASS_MS * 6);
            let findings = guest.probe(&[sweep])?;
            let sent = findings.iter().map(|finding| finding.count).sum::<u64>();
            found.doubt_unless(sent > 1000, format!("only {sent} frames were tried"));
            found.guest += &summary(&findings);
            Ok(())
        };
        let strays = strays(stage, unfit, &mut send)?;
        found.breaches.extend(strays.describe(finishing));
        let talk = [("udp", Action::Udp(fit)), ("tcp", Action::Tcp(fit))];
        let talk = talk.map(|(word, action)| probe(format!("{name}-{word}"), action, PASS_MS));
        let findings = guest.probe(&talk)?;
        // The first refusal of a flow is told of at once: that of the sweep is there by now.
        let reached = guest
            .events()?
            .iter()
            .any(|event| event.reason == "offload");
        found.doubt_unless(!reached, "the device let pass what does not fit");
        let is_ok = findings
            .iter()
            .all(|finding| finding.outcome == Outcome::Ok);
        found.doubt_unless(
            is_ok,
            format!("{fit} is not reached: {}", summary(&findings)),
        );
        Ok(())
    });
    stage.world.set_finishing(Finishing::ByUplink)?;
    done.map(|()| found)
}

/// Nobody helps: nothing arrives at all, and the server tells of it.
pub(super) fn at_tap(
    stage: &mut Stage,
    name: &str,
    finishing: Finishing,
) -> Result<Found, ScriptError> {
    let mut found = Found::default();
    let guest = stage.customer.create(&allowing(&ALLOWED))?;
    let tap = File::from(Vmm::of(&guest)?.take_tap()?);
    stage.world.set_finishing(finishing)?;
    let done = ends(OF_TAP).into_iter().try_for_each(|[unfit, fit]| {
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
                "{} frames passed to {unfit} all the same",
                strays.as_allowed
            ),
        );
        found.doubt_unless(sent > 1000, format!("only {sent} frames were tried"));
        fit_arrives(stage, &tap, fit, name, &mut found)?;
        found.doubt_unless(
            is_told(&guest, unfit.ip())?,
            format!("no event tells of {unfit}"),
        );
        found.guest += &format!("{sent} frames to {unfit}; ");
        Ok(())
    });
    stage.world.set_finishing(Finishing::ByUplink)?;
    done.map(|()| found)
}

fn is_told(guest: &Guest, to: IpAddr) -> Result<bool, ScriptError> {
    told(guest, |event| {
        event.reason == "offload" && event.destination.ip() == to
    })
}

/// Frames whose headers fit, written in the same way, arrive: so the others were tried.
fn fit_arrives(
    stage: &mut Stage,
    tap: &File,
    to: SocketAddr,
    name: &str,
    found: &mut Found,
) -> Result<(), ScriptError> {
    let word = format!("{name}-fit");
    for fit in left(to, &word, 0).map_err(no_frame)? {
        stage.world.witness.forget();
        let is_written = write(tap, fit.header, &fit.frame);
        stage.world.witness.settle()?;
        let arrived = |seen: &Seen| {
            seen.place == Place::Outside && seen.to == Some(to.ip()) && seen.has(word.as_bytes())
        };
        found.doubt_unless(
            is_written && stage.world.witness.seen().iter().any(arrived),
            format!("what fits does not arrive at {to}"),
        );
    }
    Ok(())
}

fn write(mut tap: &File, header: Header, frame: &[u8]) -> bool {
    let mut bytes = header.bytes().to_vec();
    bytes.resize(TAP_HEADER, 0);
    bytes.extend(frame);
    // The kernel refuses some headers by itself.
    tap.write_all(&bytes).is_ok()
}

fn no_frame(NoFrame(why): NoFrame) -> ScriptError {
    ScriptError::Stuck(why.to_owned())
}

/// What left the host meanwhile.
#[derive(Debug, Default)]
struct Strays {
    as_allowed: usize,
    elsewhere: Vec<Seen>,
}

impl Strays {
    fn describe(&self, finishing: Finishing) -> Option<String> {
        let first = self.elsewhere.first()?;
        let (count, from, to) = (self.elsewhere.len(), first.from, first.to);
        let ports = (first.from_port, first.port);
        Some(format!(
            "{count} packets left that nothing allows ({finishing:?}), the first of protocol {} from {from:?} to {to:?}, \
             ports {ports:?}",
            first.protocol
        ))
    }
}

fn strays(stage: &mut Stage, to: SocketAddr, send: Send<'_>) -> Result<Strays, ScriptError> {
    stage.world.witness.settle()?;
    stage.world.witness.forget();
    send(stage, to)?;
    stage.world.witness.settle()?;
    let mut strays = Strays::default();
    let outside = stage.world.witness.seen().iter();
    for seen in outside.filter(|seen| seen.place == Place::Outside) {
        match kind(seen, to) {
            Kind::HostsOwn => {}
            Kind::Allowed => strays.as_allowed += 1,
            Kind::Stray => strays.elsewhere.push(seen.clone()),
        }
    }
    Ok(strays)
}

/// What a packet on the uplink is.
enum Kind {
    HostsOwn,
    Allowed,
    Stray,
}

fn kind(seen: &Seen, to: SocketAddr) -> Kind {
    let is_from_host = seen.from == Some(IpAddr::from(HOST4)) || is_at(seen.from, HOST6);
    let is_allowed = is_from_host && ALLOWED.iter().any(|address| is_at(seen.to, address));
    let is_from_flow = seen.from_port.is_some_and(|port| port >= FIRST_PORT);
    let is_own_port = |port| OF_GUEST.contains(&port) || OF_TAP.contains(&port);
    match seen.protocol {
        6 | 17 if is_mark(seen) => Kind::HostsOwn,
        6 | 17 if is_allowed && is_from_flow && seen.port.is_some_and(is_own_port) => {
            if (seen.to, seen.port) == (Some(to.ip()), Some(to.port())) {
                Kind::Allowed
            } else {
                Kind::HostsOwn
            }
        }
        6 | 17 => Kind::Stray,
        1 | 58 if is_echo(seen) && is_allowed => Kind::Allowed,
        // Neighbour discovery, groups, and errors about answers that came late.
        1 | 58 if !is_echo(seen) => Kind::HostsOwn,
        _ if !seen.has(WORD) => Kind::HostsOwn,
        _ => Kind::Stray,
    }
}

fn is_at(found: Option<IpAddr>, address: &str) -> bool {
    found.is_some_and(|found| address.parse() == Ok(found))
}

/// Of each family, at these ports.
fn ends(ports: [u16; 2]) -> [[SocketAddr; 2]; 2] {
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

/// A request of either family.
fn is_echo(seen: &Seen) -> bool {
    matches!(seen.payload.first(), Some(8 | 128))
}

/// The witness's own.
fn is_mark(seen: &Seen) -> bool {
    seen.port == Some(9) && seen.has(b"mark ")
}
