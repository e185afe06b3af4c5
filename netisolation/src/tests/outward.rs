//! Packets from the guest.

use std::net::IpAddr;

use super::{
    frame::{ACK, FIN, Packet, RST, SYN, TCP, UDP, echo, fix_header4, icmp, tcp, udp},
    world::{PEER4, PEER6, WAN4, WAN6, World, command, config, in_namespace, ip},
};
use crate::{Isolation, Policy, Reason};

const PEERS: [(&str, &str); 2] = [(PEER4, WAN4), (PEER6, WAN6)];

#[test]
fn net_a_datagram_leaves_with_the_hosts_address_and_its_reply_is_delivered() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        for (peer, wan) in PEERS.map(|(a, b)| (ip(a), ip(b))) {
            let sent = Packet::from_guest(peer, UDP, udp(4000, 7, b"hello"));
            let out = world.pass(&guest, &sent);
            assert_eq!((out.source, out.destination, out.ttl), (wan, peer, 63));
            assert_eq!(out.destination_port(), 7);
            assert!(out.source_port() >= 61000);
            assert_eq!(&out.body[8..], b"hello");
            world.send_on_wire(&out.answer(udp(7, out.source_port(), b"hi")));
            let back = guest.next();
            assert_eq!(
                (back.source, back.destination, back.ttl),
                (peer, sent.source, 63)
            );
            assert_eq!((back.source_port(), back.destination_port()), (7, 4000));
            assert_eq!(
                (back.to_mac, back.from_mac),
                (model::guest::MAC, model::guest::GATEWAY_MAC)
            );
            assert_eq!(&back.body[8..], b"hi");
        }
        let counters = world.counters(&guest);
        assert_eq!(
            (counters.packets_out, counters.packets_in, counters.flows),
            (2, 2, 2)
        );
        assert!(counters.refused.is_empty());
    });
}

#[test]
fn net_a_tcp_connection_is_translated_from_open_to_close() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        for (peer, wan) in PEERS.map(|(a, b)| (ip(a), ip(b))) {
            let send = |flags, data: &[u8]| {
                world.pass(
                    &guest,
                    &Packet::from_guest(peer, TCP, tcp(5000, 80, flags, data)),
                )
            };
            let syn = send(SYN, b"");
            assert_eq!(
                (syn.source, syn.destination_port(), syn.tcp_flags()),
                (wan, 80, SYN)
            );
            let port = syn.source_port();
            let receive = |flags, data: &[u8]| {
                world.send_on_wire(&syn.answer(tcp(80, port, flags, data)));
                let back = guest.next();
                assert_eq!((back.source_port(), back.destination_port()), (80, 5000));
                assert_eq!((back.tcp_flags(), &back.body[20..]), (flags, data));
            };
            receive(SYN | ACK, b"");
            assert_eq!(send(ACK, b"GET").source_port(), port);
            receive(ACK, b"200");
            receive(FIN | ACK, b"");
            assert_eq!(send(FIN | ACK, b"").source_port(), port);
            receive(RST, b"");
        }
    });
}

/// A TCP segment with options. Their length must be a multiple of four.
fn with_options(from: u16, to: u16, flags: u8, options: &[u8]) -> Vec<u8> {
    let mut segment = tcp(from, to, flags, b"");
    segment[12] = u8::try_from(5 + options.len() / 4).unwrap() << 4;
    segment.extend(options);
    segment
}

#[test]
fn net_syn_segments_are_clamped_to_the_mtu_of_the_uplink() {
    in_namespace(|| {
        let world = World::new();
        command(&["link", "set", "wan", "mtu", "1400"]);
        world
            .isolation
            .inspect(|maps| maps.refresh_addresses().unwrap());
        let guest = world.guest(&Policy::internet());
        let scale = [3, 3, 7];
        for (peer, fits) in [(ip(PEER4), 1360_u16), (ip(PEER6), 1340)] {
            for (source, announced, agreed) in
                [(5000, 1460, fits), (5001, 9000, fits), (5002, 536, 536)]
            {
                let mss = |size: u16| [&[2, 4][..], &size.to_be_bytes()].concat();
                // The option at an even offset, and at odd offsets next to others.
                for (port, options) in [
                    (80, mss(announced)),
                    (
                        81,
                        [&[1][..], &scale, &[1], &mss(announced), &[1, 1, 1]].concat(),
                    ),
                    (82, [&[1][..], &mss(announced), &scale].concat()),
                ] {
                    let expected = |options: &[u8]| {
                        let at = options.windows(2).position(|w| w == [2, 4]).unwrap();
                        let mut options = options.to_vec();
                        options[at + 2..at + 4].copy_from_slice(&agreed.to_be_bytes());
                        options
                    };
                    let syn = with_options(source, port, SYN, &options);
                    let out = world.pass(&guest, &Packet::from_guest(peer, TCP, syn));
                    assert_eq!(out.body[20..], expected(&options));
                    let offer = with_options(port, out.source_port(), SYN | ACK, &options);
                    world.send_on_wire(&out.answer(offer));
                    assert_eq!(guest.next().body[20..], expected(&options));
                }
            }
            let ip_len = if peer.is_ipv4() { 20 } else { 40 };
            let datagram = |len| Packet::from_guest(peer, UDP, udp(4000, 7, &vec![0; len]));
            let most = 1400 - ip_len - 8;
            world.pass(&guest, &datagram(most));
            for len in [most + 1, 1500 - ip_len - 8] {
                world.refused(&guest, &datagram(len).bytes(), Reason::NoRoute);
            }
        }
    });
}

#[test]
fn net_an_uplink_below_the_minimum_mtu_is_refused_with_a_remedy() {
    in_namespace(|| {
        let world = World::new();
        command(&["link", "set", "wan", "mtu", "1200"]);
        let refused = Isolation::open(&config()).unwrap_err().to_string();
        assert!(
            refused.contains("the MTU of the uplink wan is 1200"),
            "{refused}"
        );
        assert!(refused.contains("ip link set wan mtu 1280"), "{refused}");
        drop(world);
    });
}

#[test]
fn net_icmp_echo_is_translated_by_its_identifier() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        for (peer, wan) in PEERS.map(|(a, b)| (ip(a), ip(b))) {
            let out = world.pass(
                &guest,
                &Packet::from_guest(peer, icmp(peer), echo(peer, true, 77)),
            );
            assert_eq!(out.source, wan);
            let answer = echo(peer, false, out.identifier());
            world.send_on_wire(&out.answer(answer));
            let back = guest.next();
            assert_eq!((back.source, back.identifier()), (peer, 77));
        }
    });
}

#[test]
fn net_the_default_policy_denies_everything() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::default());
        for peer in [ip(PEER4), ip(PEER6)] {
            let bodies = [
                (UDP, udp(1, 2, b"")),
                (TCP, tcp(1, 2, SYN, b"")),
                (icmp(peer), echo(peer, true, 1)),
            ];
            for (protocol, body) in bodies {
                let frame = Packet::from_guest(peer, protocol, body).bytes();
                world.refused(&guest, &frame, Reason::Policy);
            }
        }
    });
}

#[test]
fn net_no_policy_opens_a_forbidden_range() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        let forbidden = [
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "127.0.0.1",
            "169.254.169.254",
            "169.254.0.22",
            "168.63.129.16",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
            "255.255.255.255",
            "198.18.0.1",
            "::1",
            "::ffff:198.51.100.7",
            "fe80::1",
            "ff02::1",
            "fd00:ec2::254",
            "64:ff9b::a00:1",
            "2002:a00:1::1",
            "2001:0:a00:1::1",
            "fdcb::16",
        ];
        for address in forbidden {
            let frame = Packet::from_guest(ip(address), UDP, udp(1, 80, b"")).bytes();
            world.refused(&guest, &frame, Reason::Forbidden);
        }
    });
}

#[test]
fn net_the_hosts_addresses_are_unreachable() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        for address in [WAN4, WAN6] {
            let frame = Packet::from_guest(ip(address), TCP, tcp(1, 22, SYN, b"")).bytes();
            world.refused(&guest, &frame, Reason::Host);
        }
    });
}

#[test]
fn net_malformed_and_spoofed_frames_are_refused() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        for (frame, reason) in invalid_frames() {
            world.refused(&guest, &frame, reason);
        }
    });
}

/// Frames that a normal guest does not send, with the reason for their refusal.
fn invalid_frames() -> Vec<(Vec<u8>, Reason)> {
    [
        invalid_ethernet_and_source_frames(),
        frames_with_invalid_headers(),
        packets_that_no_policy_allows(),
    ]
    .concat()
}

fn valid(peer: &str) -> Packet {
    Packet::from_guest(ip(peer), UDP, udp(1, 80, b"0123456789abcdef"))
}

fn invalid_ethernet_and_source_frames() -> Vec<(Vec<u8>, Reason)> {
    let from = |source: &str, peer: &str| Packet {
        source: ip(source),
        ..valid(peer)
    };
    let mut vlan = valid(PEER4).bytes();
    vlan.splice(12..12, [0x81, 0, 0, 5]);
    let mut mac = valid(PEER4);
    mac.from_mac[5] ^= 1;
    let mut arp = vec![0xff; 6];
    arp.extend(model::guest::MAC);
    arp.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
    arp.resize(42, 0);
    vec![
        (mac.bytes(), Reason::Spoofed),
        (from("169.254.0.20", PEER4).bytes(), Reason::Spoofed),
        (from(WAN4, PEER4).bytes(), Reason::Spoofed),
        (from("2001:db8::15", PEER6).bytes(), Reason::Spoofed),
        (vlan, Reason::NotIp),
        (arp, Reason::NotIp),
    ]
}

fn frames_with_invalid_headers() -> Vec<(Vec<u8>, Reason)> {
    let v4 = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = valid(PEER4).bytes();
        change(&mut frame);
        fix_header4(&mut frame);
        frame
    };
    let v6 = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = valid(PEER6).bytes();
        change(&mut frame);
        frame
    };
    vec![
        (
            v4(&|f| f[12..14].copy_from_slice(&[0x88, 0xcc])),
            Reason::NotIp,
        ),
        (v4(&|f| f[20] = 0x20), Reason::Fragment),
        (v4(&|f| f[21] = 1), Reason::Fragment),
        (v6(&|f| f[20] = 44), Reason::Fragment),
        (
            v4(&|f| {
                f[14] = 0x46;
                f[17] += 4;
                f.splice(34..34, [1, 1, 1, 1]);
            }),
            Reason::Options,
        ),
        (v6(&|f| f[20] = 0), Reason::Options),
        (v6(&|f| f[20] = 60), Reason::Options),
        (v6(&|f| f[20] = 43), Reason::Options),
        (v4(&|f| f[14] = 0x44), Reason::Malformed),
        (v4(&|f| f[14] = 0x65), Reason::Malformed),
        (v4(&|f| f[17] += 40), Reason::Malformed),
        (v4(&|f| f.extend([0; 64])), Reason::Malformed),
        (v4(&|f| f[17] = 24), Reason::Malformed),
        (v4(&|f| f[38] = 1), Reason::Malformed),
        (v6(&|f| f[19] += 1), Reason::Malformed),
        (v6(&|f| f[14] = 0x40), Reason::Malformed),
    ]
}

fn packets_that_no_policy_allows() -> Vec<(Vec<u8>, Reason)> {
    let flags = |flags| Packet::from_guest(ip(PEER4), TCP, tcp(1, 80, flags, b"")).bytes();
    let other = |peer: IpAddr, protocol| Packet {
        protocol,
        ..Packet::from_guest(peer, UDP, udp(1, 80, b"payload"))
    };
    vec![
        (valid(PEER4).bytes()[..30].to_vec(), Reason::Malformed),
        (flags(0), Reason::Malformed),
        (flags(SYN | FIN), Reason::Malformed),
        (flags(SYN | RST), Reason::Malformed),
        (flags(FIN | 8 | 32), Reason::Malformed),
        (flags(ACK), Reason::Unsolicited),
        (other(ip(PEER4), 132).bytes(), Reason::Protocol),
        (other(ip(PEER4), 47).bytes(), Reason::Protocol),
        (other(ip(PEER4), 58).bytes(), Reason::Protocol),
        (other(ip(PEER6), 132).bytes(), Reason::Protocol),
        (
            Packet::from_guest(ip(PEER4), 1, echo(ip(PEER4), false, 1)).bytes(),
            Reason::Protocol,
        ),
        (
            Packet::from_guest(ip(PEER4), 1, vec![5, 1, 0, 0, 1, 2, 3, 4]).bytes(),
            Reason::Protocol,
        ),
        (
            Packet::from_guest(ip(PEER4), UDP, udp(1, 53, b"query")).bytes(),
            Reason::Dns,
        ),
        (
            Packet::from_guest(ip(PEER6), TCP, tcp(1, 53, SYN, b"")).bytes(),
            Reason::Dns,
        ),
        (
            Packet {
                ttl: 1,
                ..valid(PEER4)
            }
            .bytes(),
            Reason::NoRoute,
        ),
    ]
}
