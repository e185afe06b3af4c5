//! Flows that are redirected to the proxy. The test acts as the proxy, and the guest either has the network stack of
//! Linux or sends single frames.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, AsRawFd},
    thread,
    time::{Duration, Instant},
};

use model::{SandboxId, guest};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrIn, SockaddrIn6, SockaddrLike, bind, connect,
        setsockopt, socket, sockopt,
    },
};

use super::{
    frame::{ACK, Packet, RST, SYN, TCP, UDP, tcp, udp},
    server::start_server,
    stack::Stack,
    world::{Guest, PATIENCE, PEER4, PEER6, World, command, config, eventually, in_namespace, ip},
};
use crate::{
    Access, Counters, Destinations, Direction, ForbiddenAddresses, HandedFlow, Isolation,
    IsolationConfig, Policy, Protocol, Reason, Rule, RuleAction,
    datapath::{
        flows::FlowMaps,
        layout::{Flow, FlowKey, WireKey, mark},
    },
    taps::device,
};

const OTHER4: &str = "198.51.100.8";
/// TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 (`linux/if_tun.h`).
const SEGMENTATION: u32 = 1 | 2 | 4;
const DAY: Duration = Duration::from_secs(86400);

fn with_proxy() -> IsolationConfig {
    IsolationConfig {
        proxy: true,
        ..config()
    }
}

/// A policy with names only.
fn named() -> Policy {
    Policy {
        names: vec!["*.good.test".parse().unwrap()],
        ..Policy::default()
    }
}

/// An open policy with header rules for a name.
fn ruled() -> Policy {
    Policy {
        ruled: vec!["*.good.test".parse().unwrap()],
        ..Policy::internet()
    }
}

fn allow(block: &str, access: &[(Protocol, u16)]) -> Rule {
    let access = access.iter().map(|&(protocol, port)| Access {
        protocol,
        first: port,
        last: port,
    });
    Rule {
        block: block.parse().unwrap(),
        action: RuleAction::Allow(access.collect()),
    }
}

fn pin(world: &World, guest: &Guest, peer: &str, name: &str) {
    let (index, sandbox) = (guest.index, &guest.sandbox);
    let pinned = world.isolation.pin(index, sandbox, ip(peer), name, DAY);
    pinned.unwrap();
}

fn syn(peer: &str, from: u16, to: u16) -> Packet {
    Packet::from_guest(ip(peer), TCP, tcp(from, to, SYN, b""))
}

/// The proxy of a test.
struct Proxy {
    listener: TcpListener,
}

impl Proxy {
    fn of(isolation: &Isolation) -> Self {
        let listener = isolation.proxy_listener().unwrap();
        Self { listener }
    }

    fn is_asked(&self, timeout: PollTimeout) -> bool {
        let mut waiting = [PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        poll(&mut waiting, timeout).unwrap() > 0
    }

    fn accept(&self) -> (TcpStream, SocketAddr) {
        assert!(self.is_asked(PATIENCE.try_into().unwrap()), "no connection");
        let (stream, peer) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        (stream, peer)
    }

    fn accept_of(&self, isolation: &Isolation) -> (TcpStream, HandedFlow) {
        let (stream, peer) = self.accept();
        (stream, isolation.handed(peer).unwrap())
    }
}

fn open(stack: &Stack, remote: SocketAddr) -> TcpStream {
    stack.run(move || {
        let stream = TcpStream::connect_timeout(&remote, PATIENCE).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    })
}

fn receive(stream: &mut TcpStream, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, expected);
}

/// Sends a word from each side.
fn talk(guest: &mut TcpStream, proxy: &mut TcpStream) {
    guest.write_all(b"from the guest").unwrap();
    receive(proxy, b"from the guest");
    proxy.write_all(b"from the proxy").unwrap();
    receive(guest, b"from the proxy");
}

/// Refusals of a guest with a stack, which sends multicast listener reports on its own.
fn refused(counters: &Counters) -> BTreeMap<Reason, u64> {
    let mut refused = counters.refused.clone();
    refused.retain(|reason, _| !matches!(reason, Reason::Spoofed | Reason::Protocol));
    refused
}

/// The reply to a frame that opens a redirected flow, as seen by the guest.
fn handed(guest: &Guest, syn: &Packet) -> Packet {
    guest.send(syn);
    let ports = (syn.destination_port(), syn.source_port());
    loop {
        // Skips repeated replies to earlier frames.
        let answer = guest.next();
        if (answer.source_port(), answer.destination_port()) == ports {
            assert_eq!(
                (answer.source, answer.destination),
                (syn.destination, syn.source)
            );
            break answer;
        }
    }
}

#[test]
fn net_a_flow_that_only_a_name_allows_is_handed_to_the_proxy_with_its_names() {
    in_namespace(|| {
        let world = World::with(with_proxy());
        let guest = world.guest(&named());
        let proxy = Proxy::of(&world.isolation);
        let stack = Stack::new(&guest, 0);
        for peer in [PEER4, PEER6] {
            for name in ["a.good.test", "b.good.test"] {
                pin(&world, &guest, peer, name);
            }
            for port in [80, 443] {
                let remote = SocketAddr::new(ip(peer), port);
                let mut of_guest = open(&stack, remote);
                let (mut of_proxy, flow) = proxy.accept_of(&world.isolation);
                let expected = HandedFlow {
                    sandbox: guest.sandbox.clone(),
                    remote,
                    names: vec!["a.good.test".to_owned(), "b.good.test".to_owned()],
                    admitted_by_address: false,
                    is_of_all: false,
                };
                assert_eq!(flow, expected);
                assert_eq!(of_guest.peer_addr().unwrap(), remote);
                talk(&mut of_guest, &mut of_proxy);
                drop(of_proxy);
                assert_eq!(of_guest.read(&mut [0]).unwrap(), 0);
            }
        }
        let counters = world.counters(&guest);
        assert_eq!(counters.flows, 4);
        assert_eq!(refused(&counters), BTreeMap::new());
        world.nothing_on_wire();
        // Without a name, or at another port, no flow is redirected.
        drop(stack);
        world.refused(&guest, &syn(OTHER4, 1, 443).bytes(), Reason::Policy);
        assert_eq!(
            world.pass(&guest, &syn(PEER4, 1, 22)).destination,
            ip(PEER4)
        );
        assert!(!proxy.is_asked(PollTimeout::ZERO));
        // Peers that are not a flow, have another family, or are not on the resolver's device.
        for peer in [
            "198.18.0.1:5000",
            "[fdcb:0:0:53::2]:5000",
            "203.0.113.9:443",
        ] {
            assert_eq!(world.isolation.handed(peer.parse().unwrap()), None);
        }
    });
}

#[test]
fn net_two_flows_from_one_port_of_the_guest_are_kept_apart() {
    in_namespace(|| {
        let world = World::with(with_proxy());
        let guest = world.guest(&named());
        let proxy = Proxy::of(&world.isolation);
        let stack = Stack::new(&guest, SEGMENTATION);
        let remotes = [(PEER4, 443), (OTHER4, 443), (PEER4, 80)];
        for (peer, _) in remotes {
            pin(&world, &guest, peer, "a.good.test");
        }
        let remotes = remotes.map(|(peer, port)| SocketAddr::new(ip(peer), port));
        let mut of_guest = stack.run(move || remotes.map(|remote| connect_from(5000, remote)));
        let mut of_proxy = BTreeMap::new();
        for _ in remotes {
            let (stream, flow) = proxy.accept_of(&world.isolation);
            of_proxy.insert(flow.remote, stream);
        }
        for (remote, stream) in remotes.iter().zip(&mut of_guest) {
            let word = remote.to_string();
            stream.write_all(word.as_bytes()).unwrap();
            let other = of_proxy.get_mut(remote).unwrap();
            receive(other, word.as_bytes());
            other.write_all(word.as_bytes()).unwrap();
            receive(stream, word.as_bytes());
        }
    });
}

/// A connection from a port of the guest.
fn connect_from(port: u16, remote: SocketAddr) -> TcpStream {
    let of = |address: SocketAddr| -> Box<dyn SockaddrLike> {
        match address {
            SocketAddr::V4(v4) => Box::new(SockaddrIn::from(v4)),
            SocketAddr::V6(v6) => Box::new(SockaddrIn6::from(v6)),
        }
    };
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Inet, SockType::Stream, flags, None).unwrap();
    setsockopt(&socket, sockopt::ReuseAddr, &true).unwrap();
    let local = SocketAddr::from((guest::IPV4, port));
    bind(socket.as_raw_fd(), of(local).as_ref()).unwrap();
    connect(socket.as_raw_fd(), of(remote).as_ref()).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

#[test]
fn net_large_transfers_arrive_whole_with_and_without_segmentation_by_the_host() {
    in_namespace(|| {
        const BYTES: usize = 24 << 20;
        let world = World::with(with_proxy());
        let guest = world.guest(&named());
        let proxy = Proxy::of(&world.isolation);
        for offloads in [0, SEGMENTATION] {
            let stack = Stack::new(&guest, offloads);
            for peer in [PEER4, PEER6] {
                pin(&world, &guest, peer, "a.good.test");
                let of_guest = open(&stack, SocketAddr::new(ip(peer), 443));
                let (of_proxy, _) = proxy.accept_of(&world.isolation);
                let before = world.counters(&guest);
                for (mut from, mut to) in [(&of_guest, &of_proxy), (&of_proxy, &of_guest)] {
                    thread::scope(|scope| {
                        scope.spawn(move || from.write_all(&pattern(BYTES)).unwrap());
                        let mut received = vec![0; BYTES];
                        to.read_exact(&mut received).unwrap();
                        assert!(received == pattern(BYTES));
                    });
                }
                let after = world.counters(&guest);
                let segments = u64::try_from(BYTES / 1448).unwrap();
                let out = after.packets_out - before.packets_out;
                // The guest's acknowledgements count as well.
                assert_eq!(out < segments, offloads != 0, "{out} of {segments}");
                assert_eq!(refused(&after), BTreeMap::new());
            }
        }
        world.nothing_on_wire();
    });
}

/// Bytes for which no shifted or reordered copy is equal.
fn pattern(len: usize) -> Vec<u8> {
    let words = (0..u32::try_from(len / 4).unwrap()).map(|n| n.wrapping_mul(0x9e37_79b1));
    words.flat_map(u32::to_le_bytes).collect()
}

#[test]
fn net_a_flow_that_a_rule_by_address_allows_is_not_handed() {
    in_namespace(|| {
        let world = World::with(with_proxy());
        let policy = Policy {
            rules: vec![
                allow("198.51.100.7/32", &[]),
                allow("198.51.100.8/32", &[(Protocol::Tcp, 80)]),
            ],
            ..named()
        };
        let guest = world.guest(&policy);
        for peer in [PEER4, OTHER4] {
            pin(&world, &guest, peer, "a.good.test");
        }
        for port in [80, 443] {
            assert_eq!(world.pass(&guest, &syn(PEER4, 5000, port)).ttl, 63);
        }
        let datagram = Packet::from_guest(ip(PEER4), UDP, udp(5000, 443, b"initial"));
        world.pass(&guest, &datagram);
        // A rule applies only to its services.
        world.pass(&guest, &syn(OTHER4, 5000, 80));
        assert_eq!(
            handed(&guest, &syn(OTHER4, 5000, 443)).tcp_flags(),
            SYN | ACK
        );
        world.nothing_on_wire();
    });
}

#[test]
fn net_flows_to_a_ruled_name_are_handed_although_the_policy_is_open() {
    in_namespace(|| {
        let world = World::with(with_proxy());
        let guest = world.guest(&ruled());
        let proxy = Proxy::of(&world.isolation);
        for peer in [PEER4, PEER6] {
            // The flow is not redirected before the name is resolved.
            world.pass(&guest, &syn(peer, 5000, 443));
            pin(&world, &guest, peer, "a.good.test");
            for port in [80, 443] {
                handed(&guest, &syn(peer, 5001, port));
            }
            world.pass(&guest, &syn(peer, 5001, 22));
            let datagram = |port| Packet::from_guest(ip(peer), UDP, udp(5001, port, b"initial"));
            world.refused(&guest, &datagram(443).bytes(), Reason::Policy);
            world.pass(&guest, &datagram(80));
        }
        world.pass(&guest, &syn(OTHER4, 5001, 443));
        let stack = Stack::new(&guest, 0);
        let mut of_guest = open(&stack, SocketAddr::new(ip(PEER4), 443));
        let (mut of_proxy, flow) = proxy.accept_of(&world.isolation);
        assert!(flow.admitted_by_address);
        assert_eq!(flow.names, ["a.good.test"]);
        talk(&mut of_guest, &mut of_proxy);
    });
}

#[test]
fn net_a_ruled_name_opens_nothing() {
    in_namespace(|| {
        let world = World::with(with_proxy());
        let mut policy = ruled();
        policy.rules.push(Rule {
            block: "198.51.100.7/32".parse().unwrap(),
            action: RuleAction::Deny,
        });
        let guest = world.guest(&policy);
        pin(&world, &guest, PEER4, "a.good.test");
        for port in [443, 22] {
            world.refused(&guest, &syn(PEER4, 5000, port).bytes(), Reason::Policy);
        }
        policy.rules.retain(|rule| rule.action == RuleAction::Deny);
        world.isolation.update(guest.index, &policy).unwrap();
        let (index, sandbox) = (guest.index, &guest.sandbox);
        let pinned = world
            .isolation
            .pin(index, sandbox, ip(PEER4), "a.good.test", DAY);
        pinned.unwrap_err();
        world.refused(&guest, &syn(PEER4, 5000, 443).bytes(), Reason::Policy);
        assert!(!Proxy::of(&world.isolation).is_asked(PollTimeout::ZERO));
    });
}

#[test]
fn net_quic_to_a_name_that_the_proxy_would_check_is_refused() {
    in_namespace(|| {
        let world = World::with(with_proxy());
        let guest = world.guest(&named());
        for peer in [PEER4, PEER6] {
            pin(&world, &guest, peer, "a.good.test");
            let datagram = |port| Packet::from_guest(ip(peer), UDP, udp(5000, port, b"initial"));
            world.refused(&guest, &datagram(443).bytes(), Reason::Policy);
            world.pass(&guest, &datagram(7));
        }
    });
}

#[test]
fn net_a_new_policy_cuts_a_handed_flow_in_both_directions_or_keeps_it() {
    in_namespace(|| {
        let world = World::with(with_proxy());
        for peer in [PEER4, PEER6] {
            let guest = world.guest(&named());
            let proxy = Proxy::of(&world.isolation);
            pin(&world, &guest, peer, "a.good.test");
            let stack = Stack::new(&guest, 0);
            let remote = SocketAddr::new(ip(peer), 443);
            let mut of_guest = open(&stack, remote);
            let (mut of_proxy, address) = proxy.accept();
            // Policies that keep the flow, by its name and by its address. The proxy sends first.
            let wider = Policy {
                names: vec!["a.good.test".parse().unwrap()],
                ..Policy::internet()
            };
            for policy in [named(), wider, ruled(), named()] {
                world.isolation.update(guest.index, &policy).unwrap();
                of_proxy.write_all(b"word").unwrap();
                receive(&mut of_guest, b"word");
                talk(&mut of_guest, &mut of_proxy);
            }
            let none = Policy::default();
            world.isolation.update(guest.index, &none).unwrap();
            let before = world.counters(&guest);
            assert!(
                world
                    .isolation
                    .handed(address)
                    .is_none_or(|flow| { flow.names.is_empty() && !flow.admitted_by_address })
            );
            let refused = |direction| loop {
                let event = world.event();
                if (event.direction, event.reason) == (direction, Reason::Policy) {
                    break event;
                }
            };
            of_guest.write_all(b"late").unwrap();
            assert_eq!(refused(Direction::Out).destination, remote);
            of_proxy.write_all(b"late").unwrap();
            assert_eq!(refused(Direction::In).source, remote);
            let after = world.counters(&guest);
            assert_eq!(
                (after.packets_out, after.packets_in),
                (before.packets_out, before.packets_in)
            );
            // The flow does not belong to a later sandbox.
            let next = SandboxId::from_random([201; 19]);
            let confined = world.isolation.confine(guest.index, &next, &named());
            confined.unwrap();
            assert_eq!(world.isolation.handed(address), None);
            world.isolation.release(guest.index);
            assert_eq!(world.isolation.handed(address), None);
            world.events.try_iter().for_each(drop);
        }
    });
}

#[test]
fn net_a_new_policy_cuts_flows_that_it_would_hand_to_the_proxy() {
    in_namespace(|| {
        let world = World::with(with_proxy());
        let guest = world.guest(&Policy {
            names: named().names,
            ..Policy::internet()
        });
        pin(&world, &guest, PEER4, "a.good.test");
        let out = world.pass(&guest, &syn(PEER4, 5000, 443));
        let data = Packet::from_guest(ip(PEER4), TCP, tcp(5000, 443, ACK, b"data"));
        world.isolation.update(guest.index, &named()).unwrap();
        world.refused(&guest, &data.bytes(), Reason::Policy);
        world.send_on_wire(&out.answer(tcp(443, out.source_port(), SYN | ACK, b"")));
        eventually("the answer is refused", || {
            world.counters(&guest).refused[&Reason::Policy] == 2
        });
        assert!(guest.has_nothing());
    });
}

#[test]
fn net_neither_the_proxys_port_nor_the_flows_of_others_can_be_addressed() {
    // The block of the resolver's device, even if an operator opened it by mistake.
    let opened = Destinations {
        block: "198.18.0.0/15".parse().unwrap(),
        access: Vec::new(),
    };
    for exceptions in [Vec::new(), vec![opened]] {
        in_namespace(move || {
            let world = World::with(IsolationConfig {
                forbidden: ForbiddenAddresses::new(exceptions, Vec::new()),
                ..with_proxy()
            });
            let proxy = Proxy::of(&world.isolation);
            let (victim, attacker) = (world.guest(&named()), world.guest(&Policy::internet()));
            pin(&world, &victim, PEER4, "a.good.test");
            handed(&victim, &syn(PEER4, 5000, 443));
            let port = proxy.listener.local_addr().unwrap().port();
            let (_, flow) = handed_flow(&world);
            let of_victim = format!("198.18.0.{}", 1 + victim.index.0);
            let ends = [("198.18.0.1", port), (&of_victim, u16::from_be(flow.port))];
            for (to, port) in ends {
                let before = world.counters(&attacker);
                attacker.send(&syn(to, 5000, port));
                attacker.send(&Packet::from_guest(ip(to), TCP, tcp(443, port, ACK, b"x")));
                let after = world.counters(&attacker);
                assert_eq!(after.packets_out, before.packets_out);
                let count = |counters: &Counters| counters.refused.values().sum::<u64>();
                assert_eq!(count(&after), count(&before) + 2);
            }
            assert!(attacker.has_nothing());
        });
    }
}

/// Returns the only flow.
fn handed_flow(world: &World) -> (FlowKey, Flow) {
    let flows: Vec<_> = flow_maps(world).flows.iter().flatten().collect();
    let [(key, flow)] = flows[..] else {
        panic!("{flows:?}");
    };
    assert_ne!(flow.handed, 0);
    (key, flow)
}

/// Moves the only flow to another port on the wire, as if it had been assigned first. Returns its address.
fn move_flow(world: &World, port: u16, marks: u16) -> SocketAddr {
    let (key, flow) = handed_flow(world);
    let mut maps = flow_maps(world);
    let wire = WireKey {
        local: flow.local,
        remote: flow.local.before(key.tap),
        port: port.to_be(),
        remote_port: flow.handed,
        protocol: TCP,
        zero: [0; 3],
    };
    maps.wires.insert(wire, key, 0).unwrap();
    let moved = Flow {
        port: port.to_be(),
        marks,
        ..flow
    };
    maps.flows.insert(key, moved, 0).unwrap();
    SocketAddr::new(flow.local.ip(), port)
}

fn flow_maps(world: &World) -> FlowMaps {
    world
        .isolation
        .inspect(|maps| maps.datapath.flow_maps().unwrap())
}

#[test]
fn net_a_packet_from_the_wire_is_not_taken_for_one_of_the_proxy() {
    in_namespace(|| {
        let world = World::with(with_proxy());
        let proxy = Proxy::of(&world.isolation);
        let port = proxy.listener.local_addr().unwrap().port();
        for (peer, end) in [(PEER4, "198.18.0.1"), (PEER6, "fdcb:0:0:53::1")] {
            let guest = world.guest(&named());
            pin(&world, &guest, peer, "a.good.test");
            handed(&guest, &syn(peer, 5000, 443));
            // On uplinks, only packets to high ports are looked up. Flows use them when the lower ports are taken.
            let high = 62000;
            let peer = move_flow(&world, high, mark::REPLIED);
            assert!(world.isolation.handed(peer).is_some());
            let forged = Packet {
                to_mac: device::hardware_address("wan").unwrap(),
                from_mac: [2, 0, 0, 0, 0, 9],
                source: ip(end),
                destination: peer.ip(),
                ttl: 64,
                protocol: TCP,
                body: tcp(port, high, ACK, b"forged"),
            };
            world.send_on_wire(&forged);
            let refused = world.counters(&guest).refused;
            assert_eq!(refused, [(Reason::Unsolicited, 1)].into());
            world.isolation.discard(guest.index);
            drop(guest);
            eventually("the flow is removed", || {
                flow_maps(&world).flows.keys().count() == 0
            });
        }
    });
}

/// The proxy still has a connection of a sandbox that has ended, and a flow of the next sandbox on the TAP's number
/// gets the same port.
#[test]
fn net_a_connection_of_a_former_sandbox_exchanges_nothing_with_the_next_one() {
    for peer in [PEER4, PEER6] {
        in_namespace(move || {
            let world = World::with(IsolationConfig {
                max_taps: 1,
                ..with_proxy()
            });
            let proxy = Proxy::of(&world.isolation);
            let first = world.guest(&named());
            pin(&world, &first, peer, "a.good.test");
            let stack = Stack::new(&first, 0);
            let _of_first = open(&stack, SocketAddr::new(ip(peer), 443));
            let (mut stale, address) = proxy.accept();
            let address = SocketAddr::new(address.ip().to_canonical(), address.port());
            drop(stack);
            let index = first.index;
            world.isolation.discard(index);
            drop(first);
            eventually("the number is free", || {
                world
                    .isolation
                    .inspect(|maps| maps.taps.any(index.0).is_none())
            });
            let next = world.guest(&named());
            assert_eq!(next.index, index);
            pin(&world, &next, peer, "a.good.test");
            let moved = || {
                handed(&next, &syn(peer, 5000, 443));
                assert_eq!(move_flow(&world, address.port(), 0), address);
                assert_eq!(world.isolation.handed(address), None);
            };
            let unsolicited = || world.counters(&next).refused[&Reason::Unsolicited];
            let has_flows = || flow_maps(&world).flows.keys().count() > 0;
            moved();
            // Data to the old connection.
            let data = Packet::from_guest(ip(peer), TCP, tcp(5000, 443, ACK, b"data"));
            world.refused(&next, &data.bytes(), Reason::Unsolicited);
            // Data from the old connection.
            stale.write_all(b"secret").unwrap();
            assert_eq!((unsolicited(), has_flows()), (2, false));
            // Its reply to a SYN contains its sequence numbers. The next SYN gets another port.
            moved();
            next.send(&syn(peer, 5000, 443));
            assert_eq!((unsolicited(), has_flows()), (3, false));
            assert_eq!(handed(&next, &syn(peer, 5000, 443)).tcp_flags(), SYN | ACK);
            let (_, flow) = handed_flow(&world);
            assert_ne!(u16::from_be(flow.port), address.port());
            stale.set_nonblocking(true).unwrap();
            let nothing = stale.read(&mut [0]).unwrap_err();
            assert_eq!(nothing.kind(), ErrorKind::WouldBlock);
        });
    }
}

#[test]
fn net_without_a_listener_handed_flows_are_refused() {
    in_namespace(|| {
        let world = World::new();
        let config = with_proxy();
        let (mut server, guest, listener) = start_server(&config, &named(), Some("a.good.test"));
        handed(&guest, &syn(PEER4, 5000, 443));
        server.kill().unwrap();
        server.wait().unwrap();
        // The listener in this process still accepts: a proxy that outlives its server.
        assert_eq!(
            handed(&guest, &syn(PEER4, 5001, 443)).tcp_flags(),
            SYN | ACK
        );
        drop(listener);
        let frames = |guest: &Guest| loop {
            // Resets of the connections that the listener had accepted.
            let frame = guest.next();
            if frame.destination_port() == 5002 {
                break frame;
            }
        };
        guest.send(&syn(PEER4, 5002, 443));
        assert_eq!(frames(&guest).tcp_flags() & RST, RST);
        world.nothing_on_wire();
    });
}

#[test]
fn net_a_killed_servers_successor_goes_on_with_handed_flows() {
    in_namespace(|| {
        let world = World::new();
        let config = with_proxy();
        let (mut server, guest, listener) = start_server(&config, &named(), Some("a.good.test"));
        let former = Proxy {
            listener: listener.unwrap(),
        };
        let stack = Stack::new(&guest, SEGMENTATION);
        let remote = SocketAddr::new(ip(PEER4), 443);
        let mut of_guest = open(&stack, remote);
        let (mut of_proxy, address) = former.accept();
        server.kill().unwrap();
        server.wait().unwrap();
        talk(&mut of_guest, &mut of_proxy);
        // The killed server's proxy closes its listener a little later.
        let closing = thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            drop(former);
        });
        let (successor, _events) = Isolation::open(&config).unwrap();
        closing.join().unwrap();
        let proxy = Proxy::of(&successor);
        assert_eq!(proxy.listener.local_addr().unwrap().port(), 65534);
        talk(&mut of_guest, &mut of_proxy);
        assert_eq!(successor.handed(address), None);
        assert!(successor.awaits_adoption(address));
        let adopted = successor.adopt(guest.index, &guest.sandbox, &named());
        adopted.unwrap();
        talk(&mut of_guest, &mut of_proxy);
        assert_eq!(successor.handed(address).unwrap().remote, remote);
        let mut second = open(&stack, remote);
        let (mut of_successor, flow) = proxy.accept_of(&successor);
        assert_eq!(flow.names, ["a.good.test"]);
        talk(&mut second, &mut of_successor);
        drop(world);
    });
}

#[test]
fn net_a_successor_uses_the_listener_that_was_passed_to_it() {
    in_namespace(|| {
        let world = World::with(with_proxy());
        let guest = world.guest(&named());
        pin(&world, &guest, PEER4, "a.good.test");
        let World {
            isolation,
            wan: _wan,
            config,
            ..
        } = world;
        let sockets = isolation.resolver_sockets().unwrap();
        drop(isolation);
        let stack = Stack::new(&guest, 0);
        let remote = SocketAddr::new(ip(PEER4), 443);
        let mut of_guest = open(&stack, remote);
        let (isolation, _events) = Isolation::open_with(&config, Some(sockets)).unwrap();
        let adopted = isolation.adopt(guest.index, &guest.sandbox, &named());
        adopted.unwrap();
        let (mut of_proxy, flow) = Proxy::of(&isolation).accept_of(&isolation);
        assert_eq!(flow.remote, remote);
        talk(&mut of_guest, &mut of_proxy);
        // Without a proxy, the listener is closed.
        let sockets = isolation.resolver_sockets().unwrap();
        drop(isolation);
        let config = IsolationConfig {
            proxy: false,
            ..config
        };
        let (isolation, _events) = Isolation::open_with(&config, Some(sockets)).unwrap();
        let listener = isolation.proxy_listener();
        assert_eq!(listener.unwrap_err().kind(), ErrorKind::Unsupported);
        assert!(isolation.resolver_sockets().unwrap().proxy.is_none());
    });
}

#[test]
fn net_a_policy_that_hands_all_lets_nothing_else_out() {
    in_namespace(|| {
        let world = World::with(with_proxy());
        let proxy = Proxy::of(&world.isolation);
        let open = Policy {
            hands_all: true,
            ..Policy::internet()
        };
        let guest = world.guest(&open);
        let stack = Stack::new(&guest, 0);
        for port in [22, 80, 443, 65_000] {
            let remote = SocketAddr::new(ip(PEER4), port);
            let mut of_guest = self::open(&stack, remote);
            let (mut of_proxy, flow) = proxy.accept_of(&world.isolation);
            assert_eq!((flow.remote, flow.is_of_all), (remote, true));
            assert!(flow.admitted_by_address);
            talk(&mut of_guest, &mut of_proxy);
        }
        for port in [123, 443] {
            guest.send(&Packet::from_guest(ip(PEER4), UDP, udp(5000, port, b"x")));
        }
        world.nothing_on_wire();
        // The same for names. An address that is not allowed stays refused.
        let names = Policy {
            hands_all: true,
            ..named()
        };
        let named = world.guest(&names);
        pin(&world, &named, PEER4, "a.good.test");
        let stack = Stack::new(&named, 0);
        let remote = SocketAddr::new(ip(PEER4), 22);
        let mut of_guest = self::open(&stack, remote);
        let (mut of_proxy, flow) = proxy.accept_of(&world.isolation);
        assert!(!flow.admitted_by_address && flow.is_of_all);
        talk(&mut of_guest, &mut of_proxy);
        named.send(&syn(OTHER4, 5000, 22));
        world.nothing_on_wire();
        assert!(!proxy.is_asked(PollTimeout::ZERO));
    });
}

/// The successor has no proxy, so it must not send packets to an uplink that are only allowed through the proxy.
#[test]
fn net_without_a_proxy_a_policy_that_hands_all_lets_nothing_out() {
    in_namespace(|| {
        let world = World::new();
        let open = Policy {
            hands_all: true,
            ..Policy::internet()
        };
        let guest = world.guest(&open);
        for port in [22, 443] {
            guest.send(&syn(PEER4, 5000, port));
        }
        guest.send(&Packet::from_guest(ip(PEER4), UDP, udp(5000, 123, b"x")));
        world.nothing_on_wire();
    });
}

/// The flow's entry says that it was redirected to a proxy, but there is none, or it has another address.
#[test]
fn net_a_handed_flow_ends_with_a_successor_that_cannot_continue_it() {
    in_namespace(|| {
        let mut world = World::new();
        for has_proxy in [false, true] {
            let config = with_proxy();
            let (mut server, guest, _listener) =
                start_server(&config, &named(), Some("a.good.test"));
            handed(&guest, &syn(PEER4, 5000, 443));
            server.kill().unwrap();
            server.wait().unwrap();
            // Without its device and with its place taken, the successor has another address.
            let _taken = has_proxy.then(|| {
                command(&["link", "del", "cubedns1"]);
                device::tap("cubedns1").unwrap()
            });
            let (successor, _events) = Isolation::open(&IsolationConfig {
                proxy: has_proxy,
                ..config
            })
            .unwrap();
            let policy = Policy {
                names: named().names,
                ..Policy::internet()
            };
            let adopted = successor.adopt(guest.index, &guest.sandbox, &policy);
            adopted.unwrap();
            let former = std::mem::replace(&mut world.isolation, successor);
            let data = Packet::from_guest(ip(PEER4), TCP, tcp(5000, 443, ACK, b"data"));
            world.refused(&guest, &data.bytes(), Reason::Policy);
            world.isolation = former;
        }
    });
}

#[test]
fn net_without_a_proxy_nothing_is_handed() {
    in_namespace(|| {
        let world = World::new();
        for policy in [named(), ruled()] {
            let guest = world.guest(&policy);
            for peer in [PEER4, PEER6] {
                pin(&world, &guest, peer, "a.good.test");
                for port in [80, 443] {
                    world.pass(&guest, &syn(peer, 5000, port));
                }
                let datagram = Packet::from_guest(ip(peer), UDP, udp(5000, 443, b"initial"));
                world.pass(&guest, &datagram);
            }
        }
        let listener = world.isolation.proxy_listener();
        assert_eq!(listener.unwrap_err().kind(), ErrorKind::Unsupported);
        let peer = "198.18.0.2:1024".parse().unwrap();
        assert_eq!(world.isolation.handed(peer), None);
    });
}

/// Names expire one by one. Open flows to the address continue.
#[test]
fn net_a_flow_has_all_names_of_its_address_that_have_not_expired() {
    in_namespace(|| {
        let world = World::with(with_proxy());
        let guest = world.guest(&named());
        let proxy = Proxy::of(&world.isolation);
        let pin = |name: &str, ttl| {
            let (index, sandbox) = (guest.index, &guest.sandbox);
            let pinned = world.isolation.pin(index, sandbox, ip(PEER4), name, ttl);
            pinned.unwrap();
        };
        pin("old.good.test", Duration::ZERO);
        world.refused(&guest, &syn(PEER4, 5000, 443).bytes(), Reason::Policy);
        pin("long.good.test", DAY);
        pin("short.good.test", Duration::ZERO);
        handed(&guest, &syn(PEER4, 5000, 443));
        // An answer for one name does not shorten the life of another, and an address keeps many names.
        for n in 0..40 {
            pin(&format!("n{n}.good.test"), DAY);
        }
        let stack = Stack::new(&guest, 0);
        let _of_guest = open(&stack, SocketAddr::new(ip(PEER4), 443));
        let names = loop {
            let (_, flow) = proxy.accept_of(&world.isolation);
            if flow.names.len() > 2 {
                break flow.names;
            }
        };
        assert!(names.contains(&"long.good.test".to_owned()), "{names:?}");
        assert!((41..=43).contains(&names.len()), "{names:?}");
        // A policy without some of the names removes them.
        let fewer = Policy {
            names: vec!["n7.good.test".parse().unwrap()],
            ..Policy::default()
        };
        world.isolation.update(guest.index, &fewer).unwrap();
        let _of_guest = open(&stack, SocketAddr::new(ip(PEER4), 80));
        let (_, flow) = proxy.accept_of(&world.isolation);
        assert_eq!(flow.names, ["n7.good.test"]);
    });
}

/// A flood of connections to the proxy uses up only the sandbox's own flows.
#[test]
fn net_a_flood_of_handed_flows_leaves_the_proxy_to_others() {
    in_namespace(|| {
        let world = World::with(IsolationConfig {
            max_flows: 100,
            ..with_proxy()
        });
        let (bad, good) = (world.guest(&named()), world.guest(&named()));
        for guest in [&bad, &good] {
            pin(&world, guest, PEER4, "a.good.test");
        }
        for port in 0..1000 {
            bad.send(&syn(PEER4, 1000 + port, 443));
        }
        let counters = world.counters(&bad);
        assert_eq!(
            (counters.flows, counters.refused[&Reason::Flows]),
            (100, 900)
        );
        let began = Instant::now();
        let proxy = Proxy::of(&world.isolation);
        let stack = Stack::new(&good, 0);
        let mut of_guest = open(&stack, SocketAddr::new(ip(PEER4), 443));
        let (mut of_proxy, flow) = proxy.accept_of(&world.isolation);
        assert_eq!(flow.sandbox, good.sandbox);
        talk(&mut of_guest, &mut of_proxy);
        assert!(began.elapsed() < PATIENCE);
    });
}
