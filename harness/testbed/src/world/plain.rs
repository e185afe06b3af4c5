//! The same way out without the programs: a TAP, plain routing and masquerade, in a namespace of its own.
//!
//! ```text
//! VMM ── TAP 169.254.0.22 ── kernel: route, masquerade ── up1 192.0.2.10 ── veth ── out1 192.0.2.9 outside
//! ```
//! TAP, veth and outside are of the same kind as those of a sandbox, so that what differs is what is between them.

use std::{io, os::fd::OwnedFd};

use model::guest;

use super::{Namespace, WorldError, failed, failed_with, ip, run, settings, sys};

const TAP: &str = "tap0";
const UPLINK: &str = "up1";
const OUTSIDE: &str = "out1";

/// One guest's network; the guest's addresses are those of every guest, so there is place for one at a time.
#[derive(Debug)]
pub struct PlainNetwork(Namespace);

impl PlainNetwork {
    /// Sets it up.
    ///
    /// # Errors
    /// No right to, or a program is missing.
    pub fn new(outside: &Namespace) -> Result<Self, WorldError> {
        let inside = Namespace::new()?;
        let there = format!(
            "link add {OUTSIDE} type veth peer name {UPLINK} netns {}\n\
             address add 192.0.2.9/29 dev {OUTSIDE}\n\
             link set {OUTSIDE} up",
            inside.path()
        );
        outside
            .within(|| there.lines().try_for_each(|line| run("ip", line)))
            .map_err(failed("set up the plain uplink outside"))?;
        inside
            .within(route)
            .map_err(failed("set up the plain network"))?;
        inside
            .within(masquerade)
            .map_err(failed_with("nft", "package nftables", "masquerade"))?;
        Ok(Self(inside))
    }

    /// A descriptor of the TAP, for a VMM.
    ///
    /// # Errors
    /// Another VMM has it.
    pub fn tap(&self) -> io::Result<OwnedFd> {
        self.0.within(|| sys::open_tap(TAP))
    }
}

fn route() -> io::Result<()> {
    let text = |mac: [u8; 6]| mac.map(|b| format!("{b:02x}")).join(":");
    // The guest's card answers no ARP, as it asks nobody.
    ip(&format!(
        "tuntap add {TAP} mode tap vnet_hdr\n\
         link set {TAP} address {} mtu {} up\n\
         address add {}/{} dev {TAP}\n\
         neighbour add {} lladdr {} dev {TAP} nud permanent\n\
         address add 192.0.2.10/29 dev {UPLINK}\n\
         link set {UPLINK} up\n\
         route add default via 192.0.2.9",
        text(guest::GATEWAY_MAC),
        guest::MTU,
        guest::GATEWAY4,
        guest::IPV4_PREFIX,
        guest::IPV4,
        text(guest::MAC),
    ))?;
    settings(&[("ipv4/ip_forward", "1")])
}

fn masquerade() -> io::Result<()> {
    for line in [
        "add table ip plain",
        "add chain ip plain out { type nat hook postrouting priority 100 ; }",
    ] {
        run("nft", line)?;
    }
    run(
        "nft",
        &format!("add rule ip plain out oifname {UPLINK} masquerade"),
    )
}
