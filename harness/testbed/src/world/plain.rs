//! A network without the eBPF programs, for comparison: a TAP, plain routing and masquerading, in its own namespace.
//!
//! ```text
//! VMM ── TAP 169.254.0.22 ── kernel: route, masquerade ── up1 192.0.2.10 ── veth ── out1 192.0.2.9 outside
//! ```
//! TAP, veth pair and outside namespace are like those of a sandbox, so a comparison shows only the difference between
//! the eBPF programs and the network stack of the kernel.

use std::{io, os::fd::OwnedFd};

use model::guest;

use super::{Namespace, WorldError, failed, failed_with, ip, run, settings, sys};

const TAP: &str = "tap0";
const UPLINK: &str = "up1";
const OUTSIDE: &str = "out1";

/// The network of one guest. All guests have the same addresses, so there can be only one guest at a time.
#[derive(Debug)]
pub struct PlainNetwork(Namespace);

impl PlainNetwork {
    /// Creates the network.
    ///
    /// # Errors
    /// Returns an error if the process lacks privileges, or if `ip` or `nft` is missing or fails.
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

    /// Opens the TAP for a VMM.
    ///
    /// # Errors
    /// Returns an error if the TAP cannot be opened, for example because another VMM has it open.
    pub fn tap(&self) -> io::Result<OwnedFd> {
        self.0.within(|| sys::open_tap(TAP))
    }
}

fn route() -> io::Result<()> {
    let text = |mac: [u8; 6]| mac.map(|b| format!("{b:02x}")).join(":");
    // The guest's network device neither sends ARP requests nor replies to them.
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
