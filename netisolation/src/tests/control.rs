//! Policies, name pins and limits that change while packets flow, and the events and counters about them.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use model::guest;

use super::{
    frame::{
        ACK, ICMP, Packet, SYN, TCP, UDP, checksum, echo, fix_header4, pseudo, sum_at, tcp, udp,
    },
    world::{Guest, PEER4, PEER6, World, config, eventually, in_namespace, ip, write_with},
};
use crate::{
    Access, Destinations, Direction, ForbiddenAddresses, Isolation, MAX_TAPS, Policy, Protocol,
    Reason, Rule, RuleAction, enforcement::Enforcement,
};

const OTHER4: &str = "198.51.100.8";

fn allow(block: &str, access: &[(Protocol, u16, u16)]) -> Rule {
    let access = access.iter().map(|&(protocol, first, last)| Access {
        protocol,
        first,
        last,
    });
    Rule {
        block: block.parse().unwrap(),
        action: RuleAction::Allow(access.collect()),
    }
}

fn deny(block: &str) -> Rule {
    Rule {
        block: block.parse().unwrap(),
        action: RuleAction::Deny,
    }
}

fn policy(rules: Vec<Rule>) -> Policy {
    Policy {
        rules,
        ..Policy::default()
    }
}

fn datagram(peer: &str, port: u16) -> Packet {
    Packet::from_guest(ip(peer), UDP, udp(4000, port, b"x"))
}

#[test]
fn net_the_longest_rule_decides_by_address_protocol_and_port() {
    in_namespace(|| {
        let world = World::new();
        let rules = vec![
            allow(
                "198.51.100.0/24",
                &[(Protocol::Udp, 100, 200), (Protocol::Tcp, 80, 80)],
            ),
            deny("198.51.100.8/32"),
            allow("2001:db8:7::/48", &[(Protocol::Icmp, 0, 0)]),
            allow("::/0", &[(Protocol::Udp, 9, 9)]),
        ];
        let guest = world.guest(&policy(rules));
        for port in [100, 200] {
            world.pass(&guest, &datagram(PEER4, port));
        }
        world.pass(
            &guest,
            &Packet::from_guest(ip(PEER4), TCP, tcp(1, 80, SYN, b"")),
        );
        world.pass(&guest, &datagram("2001:db8:8::1", 9));
        for (peer, port) in [
            (PEER4, 99),
            (PEER4, 201),
            (OTHER4, 100),
            (PEER6, 9),
            ("203.0.113.9", 9),
        ] {
            world.refused(&guest, &datagram(peer, port).bytes(), Reason::Policy);
        }
        let closed = Packet::from_guest(ip(PEER4), TCP, tcp(1, 81, SYN, b""));
        world.refused(&guest, &closed.bytes(), Reason::Policy);
    });
}

#[test]
fn net_an_exception_opens_a_forbidden_range_that_the_policy_still_has_to_allow() {
    in_namespace(|| {
        let mut config = config();
        let opened = destinations("10.1.0.0/16", Some(80));
        config.forbidden = ForbiddenAddresses::new(vec![opened], Vec::new());
        let world = World::with(config);
        let open = world.guest(&Policy::internet());
        world.pass(&open, &datagram("10.1.2.3", 80));
        world.refused(&open, &datagram("10.1.2.3", 81).bytes(), Reason::Forbidden);
        world.refused(&open, &datagram("10.2.0.1", 80).bytes(), Reason::Forbidden);
        let closed = world.guest(&policy(vec![allow("198.51.100.0/24", &[])]));
        world.refused(&closed, &datagram("10.1.2.3", 80).bytes(), Reason::Policy);
    });
}

/// A block, or one of its UDP ports.
fn destinations(block: &str, port: Option<u16>) -> Destinations {
    let access = port.map(|port| Access {
        protocol: Protocol::Udp,
        first: port,
        last: port,
    });
    Destinations {
        block: block.parse().unwrap(),
        access: access.into_iter().collect(),
    }
}

#[test]
fn net_no_policy_and_no_exception_opens_what_the_operator_denies() {
    in_namespace(|| {
        let mut config = config();
        let exceptions = ["10.1.0.0/16", "198.51.100.0/24", "64:ff9b::/96"];
        let exceptions = exceptions.map(|block| destinations(block, None));
        let denied = [
            destinations("198.51.100.64/26", None),
            destinations("10.1.2.0/24", None),
            destinations("198.51.100.0/24", Some(81)),
            destinations("2001:db8:7::/48", Some(81)),
        ];
        config.forbidden = ForbiddenAddresses::new(exceptions.into(), denied.into());
        let world = World::with(config);
        let narrow = ["198.51.100.65/32", "198.51.100.7/32", "10.1.2.3/32", "::/0"];
        let narrow = narrow.map(|block| allow(block, &[])).into();
        for policy in [Policy::internet(), policy(narrow)] {
            let guest = world.guest(&policy);
            for (peer, port) in [(PEER4, 80), (PEER6, 80), ("64:ff9b::808:808", 80)] {
                world.pass(&guest, &datagram(peer, port));
            }
            world.pass(
                &guest,
                &Packet::from_guest(ip(PEER4), ICMP, echo(ip(PEER4), true, 1)),
            );
            for (peer, port) in [
                (PEER4, 81),
                (PEER6, 81),
                ("198.51.100.65", 80),
                ("198.51.100.65", 81),
                ("64:ff9b::198.51.100.65", 80),
                ("64:ff9b::198.51.100.7", 81),
                ("10.1.2.3", 80),
                ("168.63.129.16", 80),
            ] {
                let packet = datagram(peer, port);
                world.refused(&guest, &packet.bytes(), Reason::Forbidden);
            }
            // A TCP port stays open if only the UDP port is denied.
            world.pass(
                &guest,
                &Packet::from_guest(ip(PEER4), TCP, tcp(1, 81, SYN, b"")),
            );
        }
    });
}

#[test]
fn net_a_new_policy_cuts_only_the_connections_that_it_denies() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        let opened = |peer: &str| {
            let syn = world.pass(
                &guest,
                &Packet::from_guest(ip(peer), TCP, tcp(5000, 80, SYN, b"")),
            );
            world.send_on_wire(&syn.answer(tcp(80, syn.source_port(), SYN | ACK, b"")));
            guest.next();
            syn
        };
        let (kept, cut) = (opened(PEER4), opened(OTHER4));
        let narrow = policy(vec![allow("198.51.100.7/32", &[])]);
        world.isolation.update(guest.index, &narrow).unwrap();
        let data = |peer: &str| Packet::from_guest(ip(peer), TCP, tcp(5000, 80, ACK, b"data"));
        world.refused(&guest, &data(OTHER4).bytes(), Reason::Policy);
        world.send_on_wire(&cut.answer(tcp(80, cut.source_port(), ACK, b"late")));
        eventually("the late answer is refused", || {
            world.counters(&guest).refused[&Reason::Policy] == 2
        });
        assert_eq!(
            world.pass(&guest, &data(PEER4)).source_port(),
            kept.source_port()
        );
        world.send_on_wire(&kept.answer(tcp(80, kept.source_port(), ACK, b"on")));
        assert_eq!(&guest.next().body[20..], b"on");
    });
}

#[test]
fn net_two_flows_to_the_same_remote_end_get_different_ports() {
    in_namespace(|| {
        let world = World::new();
        let (a, b) = (
            world.guest(&Policy::internet()),
            world.guest(&Policy::internet()),
        );
        let mut ports = std::collections::BTreeSet::new();
        for n in 0..100 {
            for guest in [&a, &b] {
                let sent = Packet::from_guest(ip(PEER4), UDP, udp(4000 + n, 7, b"x"));
                let out = world.pass(guest, &sent);
                assert!(ports.insert(out.source_port()), "{out:?}");
                world.send_on_wire(&out.answer(udp(7, out.source_port(), &n.to_be_bytes())));
                let back = guest.next();
                assert_eq!(
                    (back.destination_port(), &back.body[8..]),
                    (4000 + n, &n.to_be_bytes()[..])
                );
            }
        }
        assert!(a.has_nothing() && b.has_nothing());
    });
}

#[test]
fn net_sweeps_look_at_the_flows_while_there_are_any() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        let before = world.isolation.sweep();
        assert_eq!(world.isolation.sweep(), before, "no flow is open");
        let datagram = Packet::from_guest(ip(PEER4), UDP, udp(1000, 7, b"x"));
        guest.send(&datagram);
        let full = world.isolation.sweep();
        assert!(full > before);
        assert!(world.isolation.sweep() > full);
    });
}

#[test]
fn net_a_flood_of_flows_uses_up_only_its_sandboxs_limit() {
    in_namespace(|| {
        let mut config = config();
        config.max_flows = 20;
        let world = World::with(config);
        let (bad, good) = (
            world.guest(&Policy::internet()),
            world.guest(&Policy::internet()),
        );
        for port in 0..60 {
            bad.send(&Packet::from_guest(
                ip(PEER4),
                UDP,
                udp(1000 + port, 7, b"x"),
            ));
        }
        let counters = world.counters(&bad);
        assert_eq!((counters.flows, counters.refused[&Reason::Flows]), (20, 40));
        for port in 0..20 {
            good.send(&Packet::from_guest(
                ip(PEER4),
                UDP,
                udp(1000 + port, 7, b"x"),
            ));
        }
        let counters = world.counters(&good);
        assert_eq!((counters.flows, counters.refused.len()), (20, 0));
    });
}

#[test]
fn net_new_flows_are_limited_to_their_rate() {
    in_namespace(|| {
        let world = World::new();
        let limited = Policy {
            flows_per_s: Some(10),
            ..Policy::internet()
        };
        let guest = world.guest(&limited);
        let began = Instant::now();
        for port in 0..100 {
            guest.send(&Packet::from_guest(
                ip(PEER4),
                UDP,
                udp(1000 + port, 7, b"x"),
            ));
        }
        let counters = world.counters(&guest);
        // A burst of one second's flows, and the refill since then.
        let earned = 10 + began.elapsed().as_millis() / 100 + 1;
        assert!(
            (9..=earned).contains(&u128::from(counters.flows)),
            "{counters:?}"
        );
        assert_eq!(counters.refused[&Reason::Flows], 100 - counters.flows);
    });
}

#[test]
fn net_bandwidth_is_limited_in_each_direction_within_ten_percent() {
    in_namespace(|| {
        // At this rate, the burst (64 KiB and a tenth of a second) covers a pause of this thread.
        const RATE: u64 = 100_000;
        let world = World::new();
        let limited = Policy {
            bytes_per_s: Some(RATE),
            ..Policy::internet()
        };
        let guest = world.guest(&limited);
        let payload = [0; 1000];
        let ask = Packet::from_guest(ip(PEER4), UDP, udp(4000, 7, &payload));
        let out = world.pass(&guest, &ask);
        let answer = out.answer(udp(7, out.source_port(), &payload));
        let is_limited = |send: &dyn Fn(), passed: &dyn Fn() -> u64| {
            // Use up the burst first.
            (0..200).for_each(|_| send());
            let (before, began) = (passed(), Instant::now());
            while began.elapsed() < Duration::from_secs(3) {
                send();
                thread::sleep(Duration::from_millis(2));
            }
            let bytes = u128::from(passed() - before);
            let earned = u128::from(RATE) * began.elapsed().as_micros() / 1_000_000;
            let tenth = earned / 10;
            assert!(
                (earned - tenth..=earned + tenth).contains(&bytes),
                "{bytes} of {earned}"
            );
        };
        is_limited(&|| guest.send(&ask), &|| world.counters(&guest).bytes_out);
        is_limited(&|| world.send_on_wire(&answer), &|| {
            world.counters(&guest).bytes_in
        });
        let refused = world.counters(&guest).refused;
        assert_eq!(refused.into_keys().collect::<Vec<_>>(), [Reason::Bandwidth]);
    });
}

#[test]
fn net_a_policy_cannot_raise_the_hosts_bandwidth_limit() {
    in_namespace(|| {
        // At this rate, nearly all packets that pass are from the burst of 64 KiB.
        const RATE: u64 = 1000;
        let mut config = config();
        config.bytes_per_s = Some(RATE);
        let world = World::with(config);
        let asking = |bytes_per_s| Policy {
            bytes_per_s,
            ..Policy::internet()
        };
        let guest = world.guest(&asking(None));
        let in_force = || {
            let index = guest.index.0;
            let entry = |maps: &mut Enforcement| maps.taps.get(index).unwrap().entry;
            world.isolation.inspect(entry).bytes_per_s
        };
        let began = Instant::now();
        let packet = Packet::from_guest(ip(PEER4), UDP, udp(4000, 7, &[0; 1000]));
        (0..200).for_each(|_| guest.send(&packet));
        let passed = world.counters(&guest).bytes_out;
        let most = 65536 + RATE / 10 + RATE * (began.elapsed().as_secs() + 1);
        assert!((60_000..=most).contains(&passed), "{passed} of {most}");
        for (asked, given) in [
            (Some(RATE * 9), RATE),
            (Some(RATE / 2), RATE / 2),
            (Some(0), 1),
        ] {
            world.isolation.update(guest.index, &asking(asked)).unwrap();
            assert_eq!(in_force(), given, "{asked:?}");
        }
    });
}

#[test]
fn net_a_pinned_address_is_reachable_until_the_answer_expires_or_the_policy_drops_the_name() {
    in_namespace(|| {
        let world = World::new();
        let named = Policy {
            names: vec!["example.com".parse().unwrap()],
            ..Policy::default()
        };
        let guest = world.guest(&named);
        let pin_of = |sandbox, name: &str, ttl| {
            let (tap, peer) = (guest.index, ip(PEER4));
            world.isolation.pin(tap, sandbox, peer, name, ttl)
        };
        let pin = |name: &str, ttl| pin_of(&guest.sandbox, name, ttl);
        world.refused(&guest, &datagram(PEER4, 7).bytes(), Reason::Policy);
        pin("example.org", Duration::from_secs(60)).unwrap_err();
        let before = model::SandboxId::from_random([77; 19]);
        pin_of(&before, "example.com", Duration::from_secs(60)).unwrap_err();
        world.refused(&guest, &datagram(PEER4, 7).bytes(), Reason::Policy);
        pin("example.com", Duration::from_secs(60)).unwrap();
        world.pass(&guest, &datagram(PEER4, 7));
        // After the answer has expired, open flows continue and new ones are refused.
        pin("example.com", Duration::ZERO).unwrap();
        world.pass(&guest, &datagram(PEER4, 7));
        world.refused(&guest, &datagram(PEER4, 8).bytes(), Reason::Policy);
        let last = world.events.try_iter().last().unwrap();
        assert_eq!(last.name.as_deref(), Some("example.com"));
        // A new policy with the name keeps the flow, and a policy without the name ends it. Both have the same rules.
        world.isolation.update(guest.index, &named).unwrap();
        world.pass(&guest, &datagram(PEER4, 7));
        world
            .isolation
            .update(guest.index, &Policy::default())
            .unwrap();
        world.refused(&guest, &datagram(PEER4, 7).bytes(), Reason::Policy);
    });
}

#[test]
fn net_a_refused_flow_is_reported_at_once_and_then_in_sums() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::default());
        for _ in 0..1000 {
            guest.send(&datagram(PEER4, 7));
        }
        let first = world.event();
        assert_eq!(
            (&first.sandbox, first.reason, first.count),
            (&guest.sandbox, Reason::Policy, 1)
        );
        assert_eq!(first.destination, SocketAddr::new(ip(PEER4), 7));
        assert_eq!(
            (first.source, first.direction),
            (SocketAddr::new(guest::IPV4.into(), 4000), Direction::Out)
        );
        let mut count = first.count;
        while count < 1000 {
            let next = world.event();
            assert_eq!(next.destination, first.destination);
            count += next.count;
        }
        assert_eq!(count, 1000);
        assert_eq!(world.counters(&guest).events_lost, 0);
    });
}

#[test]
fn net_refusals_beyond_the_record_rate_are_counted_as_lost_events() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::default());
        for port in 0..5000 {
            guest.send(&datagram(PEER4, port));
        }
        let counters = world.counters(&guest);
        let reported: u64 = world.events.try_iter().map(|event| event.count).sum();
        let refused: u64 = counters.refused.values().sum();
        assert_eq!(refused, 5000);
        assert!(counters.events_lost > 0);
        assert_eq!(reported + counters.events_lost, refused);
    });
}

#[test]
fn net_dns_queries_reach_the_resolver_with_an_address_that_identifies_their_tap() {
    in_namespace(|| {
        let mut config = config();
        (config.max_taps, config.max_flows) = (MAX_TAPS, 16);
        let world = World::with(config);
        // The address of the last TAP is the furthest from the resolver's.
        world
            .isolation
            .inspect(|maps: &mut Enforcement| maps.taps.next_index = MAX_TAPS);
        let guest = world.guest(&Policy::default());
        assert_eq!(guest.index.0, MAX_TAPS);
        let sockets = world.isolation.resolver_sockets().unwrap();
        let (udp_socket, listener) = (sockets.udp, sockets.tcp);
        udp_socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        for gateway in [IpAddr::from(guest::GATEWAY4), guest::GATEWAY6.into()] {
            guest.send(&Packet::from_guest(gateway, UDP, udp(4000, 53, b"query")));
            let mut buffer = [0; 64];
            let (len, peer) = udp_socket.recv_from(&mut buffer).unwrap();
            assert_eq!(&buffer[..len], b"query");
            let (index, sandbox, _) = world.isolation.tap_of(peer).unwrap();
            assert_eq!(
                (index, &sandbox, peer.port()),
                (guest.index, &guest.sandbox, 4000)
            );
            udp_socket.send_to(b"answer", peer).unwrap();
            let answer = guest.next();
            assert_eq!((answer.source, answer.source_port()), (gateway, 53));
            assert_eq!(
                (answer.destination_port(), &answer.body[8..]),
                (4000, &b"answer"[..])
            );
            ask_by_tcp(&world, &guest, gateway, &listener);
        }
        // Programs on the host can also send to the socket. Their addresses do not identify a TAP.
        let port = udp_socket.local_addr().unwrap().port();
        let stranger = UdpSocket::bind("0.0.0.0:0").unwrap();
        stranger.send_to(b"intruder", ("198.18.0.1", port)).unwrap();
        let (_, peer) = udp_socket.recv_from(&mut [0; 64]).unwrap();
        assert_eq!(world.isolation.tap_of(peer), None);
    });
}

/// Queries the resolver over TCP, with hand-made segments on the guest's side.
fn ask_by_tcp(world: &World, guest: &Guest, gateway: IpAddr, listener: &std::net::TcpListener) {
    let segment = |flags, sequence: u32, acknowledged: u32, data: &[u8]| {
        let mut body = tcp(4002, 53, flags, data);
        body[4..8].copy_from_slice(&sequence.to_be_bytes());
        body[8..12].copy_from_slice(&acknowledged.to_be_bytes());
        guest.send(&Packet::from_guest(gateway, TCP, body));
    };
    segment(SYN, 10, 0, b"");
    let offer = guest.next();
    assert_eq!((offer.source_port(), offer.tcp_flags()), (53, SYN | ACK));
    let theirs = u32::from_be_bytes(offer.body[4..8].try_into().unwrap()).wrapping_add(1);
    segment(ACK, 11, theirs, b"query");
    let (mut stream, peer) = listener.accept().unwrap();
    assert_eq!(world.isolation.tap_of(peer).unwrap().0, guest.index);
    let mut buffer = [0; 5];
    stream.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"query");
    stream.write_all(b"answer").unwrap();
    loop {
        let answer = guest.next();
        let header = usize::from(answer.body[12] >> 4) * 4;
        if answer.body.len() > header {
            assert_eq!(&answer.body[header..], b"answer");
            break;
        }
    }
    segment(super::frame::RST, 16, 0, b"");
}

#[test]
fn net_offloaded_checksums_and_segmentation_are_correct_on_the_wire() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        for peer in [ip(PEER4), ip(PEER6)] {
            world.pass(
                &guest,
                &Packet::from_guest(peer, TCP, tcp(5000, 80, SYN, b"")),
            );
            let payload: Vec<u8> = (0..4200_u32).map(|n| n.to_le_bytes()[0]).collect();
            let packet = Packet::from_guest(peer, TCP, tcp(5000, 80, ACK, &payload));
            let mut frame = packet.bytes();
            let ip_len = if peer.is_ipv4() { 20 } else { 40 };
            let at = 14 + ip_len + sum_at(TCP);
            // The checksum of the pseudo header, which stacks store in the checksum field.
            let partial = !checksum(&[&pseudo(&packet, packet.body.len())]);
            frame[at..at + 2].copy_from_slice(&partial.to_be_bytes());
            if peer.is_ipv4() {
                fix_header4(&mut frame);
            }
            let start = u16::try_from(14 + ip_len).unwrap().to_le_bytes();
            // VIRTIO_NET_HDR_F_NEEDS_CSUM, and VIRTIO_NET_HDR_GSO_TCPV4 or TCPV6 with segments of 1400 bytes.
            let kind = if peer.is_ipv4() { 1 } else { 4 };
            let header = u16::try_from(14 + ip_len + 20).unwrap().to_le_bytes();
            let [low, high] = 1400_u16.to_le_bytes();
            let vnet = [
                1, kind, header[0], header[1], low, high, start[0], start[1], 16, 0,
            ];
            write_with(&guest.fd, &vnet, &frame);
            // The uplink has no offloads, so the kernel segments the packet and fills in the checksums.
            let mut received: Vec<u8> = Vec::new();
            while received.len() < payload.len() {
                let segment = world.next_on_wire();
                assert_eq!(segment.destination, peer);
                received.extend(&segment.body[20..]);
            }
            assert_eq!(received, payload);
            // A packet whose segments would exceed the uplink's MTU is refused, as is an unsegmented one that does.
            let [low, high] = 1480_u16.to_le_bytes();
            let vnet = [
                1, kind, header[0], header[1], low, high, start[0], start[1], 16, 0,
            ];
            write_with(&guest.fd, &vnet, &frame);
        }
        let counters = world.counters(&guest);
        assert_eq!(counters.packets_out, 4);
        assert_eq!(counters.refused, [(Reason::NoRoute, 2)].into());
    });
}

#[test]
fn net_without_an_uplink_no_packet_leaves() {
    in_namespace(|| {
        let (isolation, _events) = Isolation::open(&config()).unwrap();
        let tap = isolation.take().unwrap();
        let sandbox = model::SandboxId::from_random([1; 19]);
        isolation
            .confine(tap.index, &sandbox, &Policy::internet())
            .unwrap();
        super::world::write(&tap.fd, &datagram(PEER4, 7).bytes());
        let refused = isolation.counters(tap.index).unwrap().refused;
        assert_eq!(refused, [(Reason::NoRoute, 1)].into());
    });
}
