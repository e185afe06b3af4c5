//! The resolver together with the eBPF programs: from a guest's query to a packet that passes because of the answer.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::Arc,
    thread::{self, JoinHandle},
};

use hickory_proto::{
    op::{Message, MessageType, Query, ResponseCode},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, AAAA},
    },
};
use tokio::sync::watch;

use super::{
    frame::{Packet, UDP, udp},
    world::{Guest, PEER4, PEER6, World, eventually, in_namespace, ip},
};
use crate::{
    ForbiddenAddresses, Hooks, Isolation, Policy, Reason, Resolver, ResolverConfig,
    ResolverSockets, guest,
};

const QUERY_PORT: u16 = 5353;

#[test]
fn net_an_address_becomes_reachable_when_its_name_is_resolved() {
    in_namespace(|| {
        let world = World::new();
        let _serving = serve(&world.isolation);
        let policy = policy(&["*.good.test"]);
        let (asking, silent) = (world.guest(&policy), world.guest(&policy));
        let ways = [
            (guest::GATEWAY4.into(), RecordType::A, ip(PEER4)),
            (guest::GATEWAY6.into(), RecordType::AAAA, ip(PEER6)),
        ];
        for (gateway, kind, peer) in ways {
            let packet = Packet::from_guest(peer, UDP, udp(4000, 7, b"hello"));
            world.refused(&asking, &packet.bytes(), Reason::Policy);
            let reply = ask(&asking, gateway, "www.good.test.", kind);
            let answered: Vec<_> = reply.answers.iter().map(|r| r.data.ip_addr()).collect();
            assert_eq!(answered, [Some(peer)]);
            assert_eq!(world.pass(&asking, &packet).destination, peer);
            world.refused(&silent, &packet.bytes(), Reason::Policy);
        }
        world
            .isolation
            .update(asking.index, &self::policy(&["other.test"]))
            .unwrap();
        let packet = Packet::from_guest(ip(PEER4), UDP, udp(4000, 7, b"hello"));
        world.refused(&asking, &packet.bytes(), Reason::Policy);
    });
}

#[test]
fn net_a_query_for_a_name_outside_the_policy_is_refused_counted_and_recorded() {
    in_namespace(|| {
        let world = World::new();
        let _serving = serve(&world.isolation);
        let guest = world.guest(&policy(&["*.good.test"]));
        for gateway in [guest::GATEWAY4.into(), guest::GATEWAY6.into()] {
            let reply = ask(&guest, gateway, "www.evil.test.", RecordType::A);
            assert_eq!(reply.metadata.response_code, ResponseCode::Refused);
        }
        let event = world.event();
        assert_eq!(
            (event.reason, event.sandbox),
            (Reason::Name, guest.sandbox.clone())
        );
        assert_eq!(event.name.as_deref(), Some("www.evil.test"));
        assert_eq!(event.source, SocketAddr::from((guest::IPV4, QUERY_PORT)));
        let counted = || world.counters(&guest).refused.get(&Reason::Name).copied();
        eventually("both queries are counted", || counted() == Some(2));
    });
}

#[test]
fn net_queries_that_arrive_between_two_servers_are_answered_by_the_second() {
    in_namespace(|| {
        let world = World::new();
        let policy = Policy::internet();
        let guest = world.guest(&policy);
        let World {
            isolation,
            wan: _wan,
            config,
            ..
        } = world;
        drop(serve(&isolation));
        let sockets = isolation.resolver_sockets().unwrap();
        let ports = |sockets: &ResolverSockets| {
            let (udp, tcp) = (sockets.udp.local_addr(), sockets.tcp.local_addr());
            [udp.unwrap().port(), tcp.unwrap().port()]
        };
        let own = ports(&sockets);
        drop(isolation);
        let ways = [guest::GATEWAY4.into(), guest::GATEWAY6.into()];
        for gateway in ways {
            send_query(&guest, gateway, "www.good.test.", RecordType::A);
        }
        let (isolation, _events) = Isolation::open_with(&config, Some(sockets)).unwrap();
        assert_eq!(ports(&isolation.resolver_sockets().unwrap()), own);
        // The queries wait until the sandbox is adopted.
        let serving = serve(&isolation);
        isolation
            .adopt(guest.index, &guest.sandbox, &policy)
            .unwrap();
        let mut answered = ways.map(|_| {
            let packet = guest.next();
            let reply = Message::from_vec(&packet.body[8..]).unwrap();
            assert_eq!(reply.answers.len(), 1, "{reply:?}");
            packet.source
        });
        answered.sort();
        assert_eq!(answered, ways);
        drop(serving);
        // Sockets of a device that was removed are not used.
        let sockets = isolation.resolver_sockets().unwrap();
        drop(guest);
        drop(isolation);
        let (isolation, _events) = Isolation::open_with(&config, Some(sockets)).unwrap();
        let world = World {
            isolation,
            wan: _wan,
            config,
            events: _events,
        };
        let guest = world.guest(&policy);
        let _serving = serve(&world.isolation);
        let reply = ask(&guest, ways[0], "www.good.test.", RecordType::A);
        assert_eq!(reply.answers.len(), 1, "{reply:?}");
    });
}

/// A running resolver in this namespace, with an upstream server. Dropping it ends the resolver, which holds a handle
/// that keeps the isolation open.
struct Serving {
    end: Option<watch::Sender<bool>>,
    thread: Option<JoinHandle<()>>,
}

fn serve(isolation: &Isolation) -> Serving {
    let upstream = UdpSocket::bind("127.0.0.1:0").unwrap();
    let config = ResolverConfig {
        dns_servers: vec![upstream.local_addr().unwrap()],
        forbidden: ForbiddenAddresses::default(),
    };
    thread::spawn(move || answer_all(&upstream));
    let resolver = Arc::new(Resolver::new(config, Hooks::of(isolation)));
    let sockets = isolation.resolver_sockets().unwrap();
    let (end, ended) = watch::channel(false);
    let serving = async move { resolver.serve(sockets, ended).await.unwrap() };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    Serving {
        end: Some(end),
        thread: Some(thread::spawn(move || runtime.block_on(serving))),
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _panic_was_printed = thread.join();
        }
    }
}

/// Answers every query with the addresses of the test's peers.
fn answer_all(socket: &UdpSocket) {
    let mut buffer = [0; 2048];
    loop {
        let (length, source) = socket.recv_from(&mut buffer).unwrap();
        let mut reply = Message::from_vec(&buffer[..length]).unwrap();
        reply.metadata.message_type = MessageType::Response;
        let asked = reply.queries[0].clone();
        let data = match (asked.query_type, ip(PEER4), ip(PEER6)) {
            (RecordType::A, IpAddr::V4(peer), _) => RData::A(A(peer)),
            (_, _, IpAddr::V6(peer)) => RData::AAAA(AAAA(peer)),
            _ => unreachable!("the peers are of both families"),
        };
        reply.add_answer(Record::from_rdata(asked.name, 300, data));
        socket.send_to(&reply.to_vec().unwrap(), source).unwrap();
    }
}

/// Sends a query from the guest and returns the gateway's reply.
fn ask(guest: &Guest, gateway: IpAddr, name: &str, kind: RecordType) -> Message {
    send_query(guest, gateway, name, kind);
    let reply = guest.next();
    assert_eq!((reply.source, reply.source_port()), (gateway, 53));
    assert_eq!(reply.destination_port(), QUERY_PORT);
    Message::from_vec(&reply.body[8..]).unwrap()
}

fn send_query(guest: &Guest, gateway: IpAddr, name: &str, kind: RecordType) {
    let mut query = Message::query();
    query.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    let query = query.to_vec().unwrap();
    guest.send(&Packet::from_guest(
        gateway,
        UDP,
        udp(QUERY_PORT, 53, &query),
    ));
}

fn policy(patterns: &[&str]) -> Policy {
    Policy {
        names: patterns
            .iter()
            .map(|pattern| pattern.parse().unwrap())
            .collect(),
        ..Policy::default()
    }
}
