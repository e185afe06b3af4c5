//! Packets to the guest: replies, ICMP errors, and unsolicited packets.

use std::net::{IpAddr, Ipv4Addr};

use model::guest;

use super::{
    frame::{
        ACK, Packet, SYN, TCP, UDP, checksum, echo, fix_header4, guest_for, header4, icmp, tcp, udp,
    },
    world::{PEER4, PEER6, World, in_namespace, ip, write},
};
use crate::{Policy, Reason};

#[test]
fn net_the_gateway_answers_arp_and_neighbour_discovery() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::default());
        let mut ask = vec![0xff; 6];
        ask.extend(guest::MAC);
        ask.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        ask.extend(guest::MAC);
        ask.extend(guest::IPV4.octets());
        ask.extend([0; 6]);
        ask.extend(guest::GATEWAY4.octets());
        write(&guest.fd, &ask);
        let answer = guest.next_frame();
        assert_eq!(answer[..12], [guest::MAC, guest::GATEWAY_MAC].concat());
        assert_eq!(answer[20..22], [0, 2]);
        assert_eq!(answer[22..28], guest::GATEWAY_MAC);
        assert_eq!(answer[28..32], guest::GATEWAY4.octets());

        for source in [guest::IPV6, "fe80::cb:ff:fe00:15".parse().unwrap()] {
            let mut body = vec![135, 0, 0, 0, 0, 0, 0, 0];
            body.extend(guest::GATEWAY6.octets());
            body.extend([1, 1]);
            body.extend(guest::MAC);
            let ask = Packet {
                source: source.into(),
                ttl: 255,
                ..Packet::from_guest(ip("ff02::1:ff00:16"), 58, body)
            };
            guest.send(&ask);
            let answer = guest.next();
            assert_eq!(
                (answer.source, answer.destination),
                (guest::GATEWAY6.into(), source.into())
            );
            assert_eq!((answer.body[0], answer.ttl), (136, 255));
            assert_eq!(answer.body[8..24], guest::GATEWAY6.octets());
            assert_eq!(answer.body[26..32], guest::GATEWAY_MAC);
        }
    });
}

#[test]
fn net_packets_from_outside_reach_a_guest_only_as_replies() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        for peer in [ip(PEER4), ip(PEER6)] {
            let out = world.pass(&guest, &Packet::from_guest(peer, UDP, udp(4000, 7, b"a")));
            let port = out.source_port();
            let strangers = [
                Packet {
                    source: neighbour(peer),
                    ..out.answer(udp(7, port, b"x"))
                },
                out.answer(udp(8, port, b"x")),
                out.answer(udp(7, port ^ 1, b"x")),
                Packet {
                    protocol: TCP,
                    ..out.answer(tcp(7, port, SYN, b""))
                },
            ];
            for stranger in &strangers {
                world.send_on_wire(stranger);
            }
            world.send_on_wire(&out.answer(udp(7, port, b"expected")));
            assert_eq!(&guest.next().body[8..], b"expected");
        }
        assert_eq!(world.counters(&guest).packets_in, 2);
    });
}

#[test]
fn net_the_hosts_own_traffic_is_not_affected() {
    in_namespace(|| {
        let world = World::new();
        let _guest = world.guest(&Policy::internet());
        let socket = std::net::UdpSocket::bind("203.0.113.2:62000").unwrap();
        socket
            .set_read_timeout(Some(std::time::Duration::from_secs(20)))
            .unwrap();
        socket.send_to(b"ask", (ip(PEER4), 9)).unwrap();
        let asked = world.next_on_wire();
        assert_eq!(asked.source_port(), 62000);
        world.send_on_wire(&asked.answer(udp(9, 62000, b"answer")));
        let mut buffer = [0; 64];
        let (len, from) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], from.ip()), (&b"answer"[..], ip(PEER4)));
    });
}

#[test]
fn net_icmp_errors_about_known_flows_are_delivered() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        for peer in [ip(PEER4), ip(PEER6)] {
            let asks = [
                Packet::from_guest(peer, UDP, udp(4000, 7, b"large")),
                Packet::from_guest(peer, TCP, tcp(4001, 7, SYN, b"")),
                Packet::from_guest(peer, icmp(peer), echo(peer, true, 5)),
            ];
            for ask in asks {
                let out = world.pass(&guest, &ask);
                world.send_on_wire(&too_big(&out));
                let error = guest.next();
                assert_eq!(error.destination, guest_for(peer));
                let quoted = inner(&error);
                assert_eq!(
                    (quoted.source, quoted.destination),
                    (ask.source, ask.destination)
                );
                assert_eq!(quoted.body[..2], ask.body[..2]);
                assert_eq!(quoted.body[4..6], ask.body[4..6]);
                assert_eq!(u16::from_be_bytes([error.body[6], error.body[7]]), 1280);
            }
            let unknown = Packet::from_guest(peer, UDP, udp(1, 2, b"never sent"));
            world.send_on_wire(&too_big(
                &Packet {
                    source: ip(super::world::WAN4),
                    ..unknown
                }
                .same_family(peer),
            ));
        }
        assert_eq!(world.counters(&guest).packets_in, 6);
        assert!(guest.has_nothing());
    });
}

#[test]
fn net_icmp_errors_about_unknown_flows_are_not_delivered() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        for peer in [ip(PEER4), ip(PEER6)] {
            let ask = Packet::from_guest(peer, UDP, udp(4000, 7, b"ask"));
            let out = world.pass(&guest, &ask);
            let port = out.source_port();
            // Each quoted packet differs from the flow in one property.
            let forged = [
                Packet {
                    destination: neighbour(peer),
                    ..out.clone()
                },
                Packet {
                    source: neighbour(out.source),
                    ..out.clone()
                },
                Packet {
                    body: udp(port ^ 1, 7, b"x"),
                    ..out.clone()
                },
                Packet {
                    body: udp(port, 8, b"x"),
                    ..out.clone()
                },
                Packet {
                    protocol: TCP,
                    body: tcp(port, 7, ACK, b"x"),
                    ..out.clone()
                },
                out.answer(udp(7, port, b"x")),
            ];
            for quoted in forged {
                // The error itself always goes to the address of the uplink.
                world.send_on_wire(&Packet {
                    destination: out.source,
                    ..too_big(&quoted)
                });
            }
            world.send_on_wire(&too_big(&out));
            assert_eq!(inner(&guest.next()).body[..4], ask.body[..4]);
        }
        assert_eq!(world.counters(&guest).packets_in, 2);
        assert!(guest.has_nothing());
    });
}

#[test]
fn net_malformed_replies_are_refused_with_their_reason() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        let out = world.pass(
            &guest,
            &Packet::from_guest(ip(PEER4), UDP, udp(4000, 7, b"ask")),
        );
        let answer = out.answer(udp(7, out.source_port(), b"answer"));
        let changed = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut frame = answer.bytes();
            change(&mut frame);
            fix_header4(&mut frame);
            write(&world.wan.fd, &frame);
        };
        changed(&|f| f[20] = 0x20);
        changed(&|f| {
            f[14] = 0x46;
            f[17] += 4;
            f.splice(34..34, [1, 1, 1, 1]);
        });
        changed(&|f| f[22] = 1);
        let refused = world.counters(&guest).refused;
        let expected = [
            (Reason::Fragment, 1),
            (Reason::Options, 1),
            (Reason::NoRoute, 1),
        ];
        assert_eq!(refused, expected.into());
        let event = world.event();
        assert_eq!(event.direction, crate::Direction::In);
        assert_eq!(event.source, (ip(PEER4), 7).into());
        assert!(guest.has_nothing());
    });
}

#[test]
fn net_a_sandbox_gets_no_packets_of_its_taps_previous_sandbox() {
    in_namespace(|| {
        let world = World::new();
        let guest = world.guest(&Policy::internet());
        let syn = world.pass(
            &guest,
            &Packet::from_guest(ip(PEER4), TCP, tcp(4000, 80, SYN, b"")),
        );
        let other = model::SandboxId::from_random([200; 19]);
        world
            .isolation
            .confine(guest.index, &other, &Policy::internet())
            .unwrap();
        world.send_on_wire(&syn.answer(tcp(80, syn.source_port(), SYN | ACK, b"")));
        super::world::eventually("the answer is refused", || {
            world
                .counters(&guest)
                .refused
                .contains_key(&Reason::Unsolicited)
        });
        assert!(guest.has_nothing());
        assert_eq!(world.event().sandbox, other);
    });
}

/// Another address in the same network.
fn neighbour(peer: IpAddr) -> IpAddr {
    match peer {
        IpAddr::V4(v4) => Ipv4Addr::from_bits(v4.to_bits() ^ 1).into(),
        IpAddr::V6(v6) => std::net::Ipv6Addr::from_bits(v6.to_bits() ^ 1).into(),
    }
}

/// An ICMP error from a router on the path: the packet exceeds the MTU of 1280 bytes.
fn too_big(out: &Packet) -> Packet {
    let mut body = match out.source {
        IpAddr::V4(_) => vec![3, 4, 0, 0, 0, 0, 5, 0],
        IpAddr::V6(_) => vec![2, 0, 0, 0, 0, 0, 5, 0],
    };
    body.extend(&out.bytes()[14..]);
    let router = match out.source {
        IpAddr::V4(_) => ip("192.0.2.77"),
        IpAddr::V6(_) => ip("2001:db8:77::1"),
    };
    Packet {
        source: router,
        protocol: icmp(out.source),
        ..out.answer(body)
    }
}

/// The packet that an error quotes. For IPv4, checks its header checksum.
fn inner(error: &Packet) -> Packet {
    let mut frame = vec![0; 12];
    match error.source {
        IpAddr::V4(_) => frame.extend([8, 0]),
        IpAddr::V6(_) => frame.extend([0x86, 0xdd]),
    }
    frame.extend(&error.body[8..]);
    Packet::read_headers(&frame).unwrap()
}

impl Packet {
    /// Sets the source to the uplink's IPv6 address if `peer` is IPv6.
    fn same_family(mut self, peer: IpAddr) -> Self {
        if peer.is_ipv6() {
            self.source = ip(super::world::WAN6);
        }
        self
    }
}

#[test]
fn the_tests_checksum_matches_rfc_1071() {
    assert_eq!(
        checksum(&[&[0, 1, 0xf2, 3, 0xf4, 0xf5, 0xf6, 0xf7]]),
        !0xddf2
    );
    let header = header4(guest::IPV4, guest::GATEWAY4, 64, 17, 0);
    assert_eq!(checksum(&[&header]), 0);
}
