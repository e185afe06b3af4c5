//! The resolver on real sockets, between hostile clients and hostile upstream servers.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod upstream;
mod world;

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use hickory_proto::{
    op::{Message, ResponseCode},
    rr::{Name, RecordType},
};
use netisolation::{Destinations, ForbiddenAddresses, Policy, Protocol, Reason};
use tokio::{io::AsyncReadExt, net::UdpSocket, time::timeout};

use self::{
    upstream::{By, Upstream, answer, coded, is_for, record},
    world::{Pinned, World, addresses, ask_on, names, query, sandbox, until},
};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[tokio::test]
async fn an_allowed_name_is_answered_and_pinned_for_its_sandbox_only() {
    let upstream = Upstream::with(vec![record("www.good.test.", 300, "192.0.2.1")]).await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["*.good.test"]));
    world.confine(2, names(&["other.test"]));
    let reply = world.ask(1, "wWw.Good.test.", RecordType::A).await;
    let pinned = Pinned {
        tap: 1,
        address: ip("192.0.2.1"),
        name: "www.good.test".into(),
        ttl_s: 300,
    };
    assert_eq!(world.pinned(), [pinned]);
    assert_eq!(addresses(&reply), [ip("192.0.2.1")]);
    assert_eq!(reply.queries[0].name.to_ascii(), "wWw.Good.test.");
    assert_eq!(
        world.code(2, "www.good.test.", RecordType::A).await,
        ResponseCode::Refused
    );
    assert_eq!(
        world.addresses(1, "www.good.test.").await,
        [ip("192.0.2.1")]
    );
    assert_eq!(
        upstream.asked().len(),
        1,
        "the second answer comes from the cache"
    );
    assert_eq!(world.pinned().len(), 2, "a cached answer is pinned too");
}

#[tokio::test]
async fn a_query_for_a_name_outside_the_policy_never_leaves_the_host() {
    let upstream = Upstream::with(vec![record("secret.evil.test.", 300, "192.0.2.1")]).await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["good.test", "*.good.test"]));
    for name in [
        "secret.evil.test.",
        "good.test.evil.test.",
        "badgood.test.",
        "test.",
        ".",
    ] {
        for kind in [RecordType::A, RecordType::AAAA] {
            assert_eq!(
                world.code(1, name, kind).await,
                ResponseCode::Refused,
                "{name}"
            );
        }
    }
    for kind in [
        RecordType::TXT,
        RecordType::ANY,
        RecordType::CNAME,
        RecordType::NULL,
        RecordType::PTR,
    ] {
        assert_eq!(
            world.code(1, "good.test.", kind).await,
            ResponseCode::Refused,
            "{kind}"
        );
    }
    let services = world.ask(1, "good.test.", RecordType::HTTPS).await;
    assert_eq!(addresses(&services), Vec::<IpAddr>::new());
    assert_eq!(upstream.asked(), Vec::<String>::new());
    let event = world.event(Reason::Name).await;
    assert_eq!(event.name.as_deref(), Some("secret.evil.test"));
    assert_eq!(
        (event.sandbox, event.protocol, event.destination.port()),
        (sandbox(1), Protocol::Udp, 53)
    );
}

#[tokio::test]
async fn an_open_policy_gets_answers_for_every_name_and_no_pins() {
    let upstream = Upstream::with(vec![record("any.test.", 300, "192.0.2.1")]).await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, Policy::internet());
    assert_eq!(world.addresses(1, "any.test.").await, [ip("192.0.2.1")]);
    assert_eq!(world.pinned(), []);
}

#[tokio::test]
async fn one_forbidden_address_makes_the_whole_answer_refused() {
    let forbidden = [
        "127.0.0.1",
        "169.254.169.254",
        "10.0.0.1",
        "0.0.0.0",
        "::1",
        "fd00:ec2::254",
        "::ffff:192.0.2.1",
    ];
    for address in forbidden {
        let upstream = Upstream::start(move |query, _| {
            let public = if address.contains(':') {
                "2001:db8::1"
            } else {
                "192.0.2.1"
            };
            let records = [public, address].map(|address| record("a.good.test.", 300, address));
            vec![answer(query, &records)]
        })
        .await;
        let world = World::start(vec![upstream.address]);
        let kind = if address.contains(':') {
            RecordType::AAAA
        } else {
            RecordType::A
        };
        for policy in [names(&["*.good.test"]), Policy::internet()] {
            world.confine(1, policy);
            assert_eq!(
                world.code(1, "a.good.test.", kind).await,
                ResponseCode::Refused,
                "{address}"
            );
        }
        assert_eq!(world.pinned(), []);
        assert_eq!(
            world.event(Reason::Rebinding).await.name.as_deref(),
            Some("a.good.test")
        );
    }
}

#[tokio::test]
async fn the_operator_can_open_a_forbidden_address() {
    let upstream = Upstream::with(vec![record("git.corp.test.", 300, "10.0.0.7")]).await;
    let forbidden = ForbiddenAddresses::new(all_of("10.0.0.7/32"), Vec::new());
    let world = World::start_with(vec![upstream.address], forbidden);
    world.confine(1, names(&["git.corp.test"]));
    assert_eq!(world.addresses(1, "git.corp.test.").await, [ip("10.0.0.7")]);
}

/// All services of a block.
fn all_of(block: &str) -> Vec<Destinations> {
    vec![Destinations {
        block: block.parse().unwrap(),
        access: Vec::new(),
    }]
}

#[tokio::test]
async fn an_answer_with_an_address_that_the_operator_denies_is_refused() {
    for (denied, kind, address) in [
        ("198.51.100.0/24", RecordType::A, "198.51.100.7"),
        ("2001:db8:7::/48", RecordType::AAAA, "2001:db8:7::7"),
    ] {
        let upstream = Upstream::with(vec![record("a.test.", 300, address)]).await;
        let open = World::start(vec![upstream.address]);
        open.confine(1, Policy::internet());
        assert_eq!(open.code(1, "a.test.", kind).await, ResponseCode::NoError);
        let forbidden = ForbiddenAddresses::new(Vec::new(), all_of(denied));
        let world = World::start_with(vec![upstream.address], forbidden);
        world.confine(1, Policy::internet());
        assert_eq!(world.code(1, "a.test.", kind).await, ResponseCode::Refused);
        world.event(Reason::Rebinding).await;
    }
}

#[tokio::test]
async fn a_policys_dns_servers_that_are_forbidden_or_of_this_host_are_not_asked() {
    let upstream = Upstream::with(vec![record("a.test.", 300, "192.0.2.1")]).await;
    let other = Upstream::with(vec![record("a.test.", 300, "192.0.2.2")]).await;
    let with_servers = |dns_servers: &[SocketAddr]| Policy {
        dns_servers: dns_servers.to_vec(),
        ..Policy::internet()
    };
    let world = World::start(vec![upstream.address]);
    world.confine(1, with_servers(&[other.address]));
    let code = world.code(1, "a.test.", RecordType::A).await;
    assert_eq!(code, ResponseCode::ServFail);
    assert!(other.asked().is_empty() && upstream.asked().is_empty());
    // The operator's own servers may have any address.
    world.confine(2, Policy::internet());
    assert_eq!(world.addresses(2, "a.test.").await, [ip("192.0.2.1")]);
}

#[tokio::test]
async fn cname_chains_are_followed_and_unrelated_records_ignored() {
    let upstream = Upstream::start(|query, _| {
        let records = if is_for(query, "cdn.other.test.", RecordType::A) {
            vec![record("cdn.other.test.", 10, "192.0.2.3")]
        } else {
            vec![
                record("evil.test.", 300, "192.0.2.66"),
                record("www.good.test.", 300, "mid.other.test."),
                record("mid.other.test.", 300, "cdn.other.test."),
            ]
        };
        vec![answer(query, &records)]
    })
    .await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["www.good.test"]));
    let reply = world.ask(1, "www.good.test.", RecordType::A).await;
    assert_eq!(addresses(&reply), [ip("192.0.2.3")]);
    assert_eq!(reply.answers[0].name.to_ascii(), "www.good.test.");
    assert_eq!(reply.answers[0].ttl, 10);
    let [pinned] = &world.pinned()[..] else {
        panic!("one address is pinned");
    };
    assert_eq!((pinned.name.as_str(), pinned.ttl_s), ("www.good.test", 60));
}

#[tokio::test]
async fn answers_with_ttl_zero_are_pinned_for_a_minute_and_not_cached() {
    let upstream = Upstream::with(vec![record("a.test.", 0, "192.0.2.1")]).await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["a.test"]));
    for times in 1..=2 {
        let reply = world.ask(1, "a.test.", RecordType::A).await;
        assert_eq!(
            (reply.answers[0].ttl, world.pinned()[times - 1].ttl_s),
            (0, 60)
        );
        assert_eq!(upstream.asked().len(), times);
    }
}

#[tokio::test]
async fn long_ttls_are_reduced_to_the_maximum() {
    let upstream = Upstream::with(vec![record("a.test.", 2_000_000, "192.0.2.1")]).await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["a.test"]));
    let reply = world.ask(1, "a.test.", RecordType::A).await;
    assert_eq!(
        (reply.answers[0].ttl, world.pinned()[0].ttl_s),
        (3600, 3600)
    );
}

#[tokio::test]
async fn an_address_that_cannot_be_pinned_is_not_answered() {
    let upstream = Upstream::with(vec![record("a.test.", 300, "192.0.2.1")]).await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["a.test"]));
    world.fill();
    assert_eq!(
        world.code(1, "a.test.", RecordType::A).await,
        ResponseCode::ServFail
    );
    world.event(Reason::Internal).await;
}

#[tokio::test]
async fn a_name_denied_during_the_upstream_query_is_not_answered() {
    let upstream = Upstream::with(vec![record("a.test.", 300, "192.0.2.1")]).await;
    upstream.gate.forget_permits(1_000_000);
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["a.test"]));
    let asking = tokio::spawn({
        let world = world.clone();
        async move { world.code(1, "a.test.", RecordType::A).await }
    });
    until(async || (!upstream.asked().is_empty()).then_some(())).await;
    world.confine(1, names(&["b.test"]));
    upstream.gate.add_permits(1000);
    assert_eq!(asking.await.unwrap(), ResponseCode::Refused);
    assert_eq!(world.pinned(), []);
}

#[tokio::test]
async fn a_late_answer_is_not_sent_to_the_taps_next_sandbox() {
    let records = ["a.test.", "b.test."].map(|name| record(name, 300, "192.0.2.1"));
    let upstream = Upstream::with(records.to_vec()).await;
    upstream.gate.forget_permits(1_000_000);
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["a.test"]));
    let socket = world.socket(1).await;
    socket.send(&query("a.test.", RecordType::A)).await.unwrap();
    until(async || (!upstream.asked().is_empty()).then_some(())).await;
    world.hand_over(1, 2, names(&["b.test"]));
    upstream.gate.add_permits(1000);
    // The first answer that the next sandbox receives is its own.
    socket.send(&query("b.test.", RecordType::A)).await.unwrap();
    let mut buffer = [0; 4096];
    let length = socket.recv(&mut buffer).await.unwrap();
    let answer = Message::from_vec(&buffer[..length]).unwrap();
    assert_eq!(answer.queries[0].name().to_ascii(), "b.test.");
}

#[tokio::test]
async fn missing_names_empty_answers_and_server_failures_are_reported_as_such() {
    let upstream = Upstream::start(|query, _| {
        let name = query.queries[0].name.to_ascii();
        let code = match name.as_str() {
            "gone.good.test." => ResponseCode::NXDomain,
            "empty.good.test." => ResponseCode::NoError,
            _ => ResponseCode::ServFail,
        };
        vec![coded(query, code)]
    })
    .await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["*.good.test"]));
    assert_eq!(
        world.code(1, "gone.good.test.", RecordType::A).await,
        ResponseCode::NXDomain
    );
    assert_eq!(
        world.addresses(1, "empty.good.test.").await,
        Vec::<IpAddr>::new()
    );
    assert_eq!(
        world.code(1, "broken.good.test.", RecordType::A).await,
        ResponseCode::ServFail
    );
}

#[tokio::test]
async fn answers_to_other_questions_are_ignored() {
    let upstream = Upstream::start(|query, by| {
        let forged = |change: fn(&mut Message)| {
            let mut reply = answer(query, &[record("a.test.", 300, "192.0.2.66")]);
            change(&mut reply);
            reply
        };
        let right = answer(query, &[record("a.test.", 300, "192.0.2.1")]);
        match by {
            By::Udp => vec![forged(|reply| reply.metadata.id ^= 1), right],
            By::Tcp => vec![right],
        }
    })
    .await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["a.test"]));
    assert_eq!(world.addresses(1, "a.test.").await, [ip("192.0.2.1")]);

    let upstream = Upstream::start(|query, _| {
        let mut reply = answer(query, &[record("b.test.", 300, "192.0.2.66")]);
        reply.queries[0].name = Name::from_ascii("b.test.").unwrap();
        vec![reply]
    })
    .await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["a.test", "b.test"]));
    let reply = world.ask(1, "a.test.", RecordType::A).await;
    assert!(reply.answers.is_empty(), "{reply}");
}

#[tokio::test]
async fn long_answers_use_tcp_upstream_and_downstream() {
    let long = format!("{}.{}.good.test.", "a".repeat(60), "b".repeat(60));
    let asked = long.clone();
    let upstream = Upstream::start(move |query, by| {
        let records: Vec<_> = (1..=16)
            .map(|n| record(&long, 300, &format!("2001:db8::{n}")))
            .collect();
        match by {
            By::Udp => vec![answer(query, &records).truncate()],
            By::Tcp => vec![answer(query, &records)],
        }
    })
    .await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["*.good.test"]));
    let reply = world.ask(1, &asked, RecordType::AAAA).await;
    assert!(reply.metadata.truncation && reply.answers.is_empty());
    let mut stream = world.connect(1).await;
    for _ in 0..2 {
        let reply = ask_on(&mut stream, &asked, RecordType::AAAA).await.unwrap();
        assert_eq!(addresses(&reply).len(), 16);
    }
}

#[tokio::test]
async fn each_list_of_servers_has_a_separate_cache() {
    let correct = Upstream::with(vec![record("a.test.", 300, "192.0.2.1")]).await;
    let wrong = Upstream::with(vec![record("a.test.", 300, "192.0.2.66")]).await;
    let forbidden = ForbiddenAddresses::new(all_of("127.0.0.1/32"), Vec::new());
    let world = World::start_with(vec![correct.address], forbidden);
    world.confine(1, names(&["a.test"]));
    world.confine(
        2,
        Policy {
            dns_servers: vec![wrong.address],
            ..names(&["a.test"])
        },
    );
    assert_eq!(world.addresses(2, "a.test.").await, [ip("192.0.2.66")]);
    assert_eq!(world.addresses(1, "a.test.").await, [ip("192.0.2.1")]);
}

#[tokio::test]
async fn a_dead_server_does_not_delay_the_next_one() {
    let dead = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let upstream = Upstream::with(vec![record("a.test.", 300, "192.0.2.1")]).await;
    let world = World::start(vec![dead.local_addr().unwrap(), upstream.address]);
    world.confine(1, names(&["a.test"]));
    assert_eq!(world.addresses(1, "a.test.").await, [ip("192.0.2.1")]);
}

#[tokio::test]
async fn pending_queries_of_one_sandbox_do_not_delay_another() {
    let upstream = Upstream::with(vec![record("a.test.", 300, "192.0.2.1")]).await;
    let slow = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let forbidden = ForbiddenAddresses::new(all_of("127.0.0.1/32"), Vec::new());
    let world = World::start_with(vec![upstream.address], forbidden);
    let patient = Policy {
        dns_servers: vec![slow.local_addr().unwrap()],
        ..names(&["*.slow.test"])
    };
    world.confine(1, patient);
    world.confine(2, names(&["a.test"]));
    let socket = world.socket(1).await;
    for n in 0..120 {
        let query = query(&format!("{n}.slow.test."), RecordType::A);
        socket.send(&query).await.unwrap();
    }
    assert_eq!(world.event(Reason::Flows).await.sandbox, sandbox(1));
    assert_eq!(world.addresses(2, "a.test.").await, [ip("192.0.2.1")]);
}

#[tokio::test]
async fn a_flood_of_queries_is_refused_and_counted_and_other_sandboxes_are_answered() {
    let upstream = Upstream::with(vec![record("a.test.", 300, "192.0.2.1")]).await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["a.test"]));
    world.confine(2, names(&["a.test"]));
    let flood = world.socket(1).await;
    let query = query("x.evil.test.", RecordType::A);
    let flooding = async {
        while !world
            .events()
            .iter()
            .any(|event| event.reason == Reason::Flows && event.count > 1)
        {
            for _ in 0..100 {
                flood.send(&query).await.unwrap();
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(60), flooding).await.unwrap();
    assert_eq!(world.addresses(2, "a.test.").await, [ip("192.0.2.1")]);
    let reported = world.events().len();
    assert!(reported < 200, "{reported} events");
    assert_eq!(world.event(Reason::Flows).await.name, None);
}

#[tokio::test]
async fn connections_per_sandbox_are_limited() {
    let upstream = Upstream::with(vec![record("a.test.", 300, "192.0.2.1")]).await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["a.test"]));
    world.confine(2, names(&["a.test"]));
    let mut held = Vec::new();
    for _ in 0..8 {
        let mut stream = world.connect(1).await;
        assert!(
            ask_on(&mut stream, "a.test.", RecordType::A)
                .await
                .is_some()
        );
        held.push(stream);
    }
    let mut ninth = world.connect(1).await;
    assert!(ask_on(&mut ninth, "a.test.", RecordType::A).await.is_none());
    let mut neighbours = world.connect(2).await;
    assert!(
        ask_on(&mut neighbours, "a.test.", RecordType::A)
            .await
            .is_some()
    );
    held.clear();
    until(async || ask_on(&mut world.connect(1).await, "a.test.", RecordType::A).await).await;
}

#[tokio::test]
async fn queries_from_unknown_addresses_are_ignored() {
    let upstream = Upstream::with(vec![record("a.test.", 300, "192.0.2.1")]).await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, Policy::internet());
    let stranger = world.socket(9).await;
    stranger
        .send(&query("stranger.test.", RecordType::A))
        .await
        .unwrap();
    let mut stream = world.connect(9).await;
    assert!(
        ask_on(&mut stream, "stranger.test.", RecordType::A)
            .await
            .is_none()
    );
    assert_eq!(world.addresses(1, "a.test.").await, [ip("192.0.2.1")]);
    assert!(stranger.try_recv(&mut [0; 512]).is_err());
    assert_eq!(upstream.asked(), ["a.test."]);
}

#[tokio::test]
async fn a_resolver_that_stops_finishes_what_it_has_received_and_leaves_the_rest_in_its_sockets() {
    let upstream = Upstream::with(vec![record("www.good.test.", 300, "192.0.2.1")]).await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, names(&["*.good.test"]));
    let mut idle = world.connect(1).await;
    let first = ask_on(&mut idle, "www.good.test.", RecordType::A).await;
    assert!(first.is_some());
    upstream.gate.forget_permits(1_000_000);
    let socket = world.socket(1).await;
    let pending = query("late.good.test.", RecordType::A);
    socket.send(&pending).await.unwrap();
    until(async || (upstream.asked().len() == 2).then_some(())).await;
    world.stop();
    // Only the connection without a message is closed immediately.
    let closed = timeout(Duration::from_secs(60), idle.read_u8()).await;
    assert!(closed.unwrap().is_err());
    let later = world.socket(1).await;
    let left = query("www.good.test.", RecordType::A);
    later.send(&left).await.unwrap();
    upstream.gate.add_permits(1);
    let mut buffer = [0; 4096];
    let received = timeout(Duration::from_secs(60), socket.recv(&mut buffer)).await;
    assert_eq!(buffer[..2], pending[..2], "{received:?}");
    world.ended().await;
    assert!(later.try_recv(&mut buffer).is_err());
}

/// Queries that arrive together: more than are sent upstream at the same time for one sandbox.
const BURST: u16 = 90;

async fn send_at_once(socket: &UdpSocket) {
    for id in 0..BURST {
        let mut query = query("www.good.test.", RecordType::A);
        query[..2].copy_from_slice(&id.to_be_bytes());
        socket.send(&query).await.unwrap();
    }
}

async fn all_are_answered(socket: &UdpSocket) {
    let mut answered = Vec::new();
    while answered.len() < BURST.into() {
        let mut buffer = [0; 4096];
        let received = timeout(Duration::from_secs(60), socket.recv(&mut buffer)).await;
        let reply = Message::from_vec(&buffer[..received.unwrap().unwrap()]).unwrap();
        assert_eq!(addresses(&reply), [ip("192.0.2.1")]);
        answered.push(reply.metadata.id);
    }
    answered.sort_unstable();
    assert!(answered.into_iter().eq(0..BURST));
}

#[tokio::test]
async fn queries_that_have_waited_in_the_sockets_are_all_answered() {
    let upstream = Upstream::with(vec![record("www.good.test.", 0, "192.0.2.1")]).await;
    let world = World::start(vec![upstream.address]);
    world.confine(1, Policy::internet());
    let socket = world.socket(1).await;
    // No answer makes room for the next query.
    upstream.gate.forget_permits(usize::MAX);
    send_at_once(&socket).await;
    // The resolver receives in order, and refuses at once.
    world.confine(2, names(&["a.test"]));
    let code = world.code(2, "x.evil.test.", RecordType::A).await;
    assert_eq!(code, ResponseCode::Refused);
    upstream.gate.add_permits(1000);
    all_are_answered(&socket).await;
}

#[tokio::test]
async fn queries_of_a_sandbox_that_is_being_adopted_wait_for_it() {
    let answers = vec![record("www.good.test.", 0, "192.0.2.1")];
    let upstream = Upstream::with(answers).await;
    let world = World::start(vec![upstream.address]);
    world.expect(1);
    world.confine(2, Policy::internet());
    let socket = world.socket(1).await;
    send_at_once(&socket).await;
    let mut connection = world.connect(1).await;
    let by_tcp =
        tokio::spawn(async move { ask_on(&mut connection, "www.good.test.", RecordType::A).await });
    assert_eq!(
        world.addresses(2, "www.good.test.").await,
        [ip("192.0.2.1")]
    );
    assert!(socket.try_recv(&mut [0; 4096]).is_err());
    world.confine(1, Policy::internet());
    all_are_answered(&socket).await;
    assert!(by_tcp.await.unwrap().is_some());
}

#[tokio::test]
async fn a_query_whose_sandbox_is_adopted_while_it_is_looked_up_is_answered() {
    let upstream = Upstream::with(vec![record("www.good.test.", 300, "192.0.2.1")]).await;
    let world = World::start(vec![upstream.address]);
    world.adopt_when_asked(1, Policy::internet());
    assert_eq!(
        world.addresses(1, "www.good.test.").await,
        [ip("192.0.2.1")]
    );
    world.adopt_when_asked(2, Policy::internet());
    let mut stream = world.connect(2).await;
    let by_tcp = ask_on(&mut stream, "www.good.test.", RecordType::A).await;
    assert!(by_tcp.is_some());
}
