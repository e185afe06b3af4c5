//! Sharing of the uplink's ports among sandboxes, and addresses that are added to the host.

use std::{
    net::{IpAddr, UdpSocket},
    process::Command,
};

use super::{
    frame::{Packet, SYN, TCP, UDP, tcp, udp},
    world::{Guest, PEER4, PEER6, World, command, config, eventually, in_namespace, ip, write},
};
use crate::{IsolationConfig, Policy, Reason};

/// Open flows that the server allows per sandbox by default: more than there are ports.
const MAX_FLOWS: u16 = 4096;

fn world() -> World {
    World::with(IsolationConfig {
        max_flows: u32::from(MAX_FLOWS),
        ..config()
    })
}

fn open(guest: &Guest, peer: IpAddr, ports: std::ops::Range<u16>) {
    for port in ports {
        write(
            &guest.fd,
            &Packet::from_guest(peer, TCP, tcp(port, 443, SYN, b"")).bytes(),
        );
    }
}

#[test]
fn net_a_sandbox_gets_ports_although_others_use_up_the_common_ones() {
    in_namespace(|| {
        let world = world();
        for peer in [ip(PEER4), ip(PEER6)] {
            for attackers in 1..=3_u64 {
                let attacker = world.guest(&Policy::internet());
                open(&attacker, peer, 10_000..10_000 + MAX_FLOWS);
                let counters = world.counters(&attacker);
                assert!(counters.flows < u64::from(MAX_FLOWS), "{counters:?}");
                assert_eq!(
                    counters.refused.keys().copied().collect::<Vec<_>>(),
                    [Reason::Flows]
                );
                let neighbour = world.guest(&Policy::internet());
                open(&neighbour, peer, 20_000..20_020);
                let counters = world.counters(&neighbour);
                assert_eq!(counters.flows, 20, "{attackers} neighbours");
                assert!(counters.refused.is_empty(), "{:?}", counters.refused);
            }
        }
    });
}

#[test]
fn net_a_single_sandbox_can_use_most_ports_towards_one_remote_end() {
    in_namespace(|| {
        let world = world();
        let guest = world.guest(&Policy::internet());
        open(&guest, ip(PEER4), 10_000..12_000);
        let counters = world.counters(&guest);
        assert_eq!(counters.flows, 2000, "{:?}", counters.refused);
    });
}

fn is_local(address: IpAddr) -> bool {
    let family = if address.is_ipv4() { "-4" } else { "-6" };
    let shown = Command::new("ip")
        .args([family, "route", "show", "table", "local"])
        .arg(address.to_string())
        .output();
    !shown.unwrap().stdout.is_empty()
}

/// The rules follow the host's addresses with a delay of up to two seconds, but the programs look up the route of every
/// packet.
#[test]
fn net_a_new_address_of_the_host_is_unreachable_immediately() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        for n in 1..=20 {
            for (address, prefix) in [
                (format!("198.51.100.{}", 100 + n), 32),
                (format!("2001:db8:7::{n}"), 128),
            ] {
                let gained = ip(&address);
                let frame = |port| Packet::from_guest(gained, UDP, udp(port, 7, b"word"));
                // Opens the flow that later must not continue.
                world.pass(&guest, &frame(4000));
                let before = world.counters(&guest);
                let mut add = vec!["addr", "add"];
                let block = format!("{address}/{prefix}");
                add.extend([block.as_str(), "dev", if n % 2 == 0 { "wan" } else { "lo" }]);
                add.extend(gained.is_ipv6().then_some("nodad"));
                command(&add);
                // For IPv6 the kernel adds the route asynchronously. Until then the host does not receive packets
                // either.
                eventually("the route", || is_local(gained));
                let host = UdpSocket::bind((gained, 7)).unwrap();
                host.set_nonblocking(true).unwrap();
                guest.send(&frame(4000));
                guest.send(&frame(4001));
                let after = world.counters(&guest);
                assert_eq!(after.packets_out, before.packets_out, "{address}");
                let refused = |c: &crate::Counters| {
                    let of = |reason| c.refused.get(&reason).copied().unwrap_or(0);
                    of(Reason::Host) + of(Reason::NoRoute)
                };
                assert_eq!(refused(&after), refused(&before) + 2, "{address}");
                assert!(host.recv(&mut [0; 16]).is_err(), "{address}");
            }
        }
    });
}
