//! Limits on the resources that clients can hold, with values that are small enough for tests.

use std::time::Duration;

use api::listen::Limits;

use crate::guest::read_head;
use crate::wire::Wire;
use crate::world::{Setup, World, soon};

const SHORT: Duration = Duration::from_millis(200);
const ENVD: u16 = 49_983;

async fn limited(limits: Limits) -> World {
    let setup = Setup {
        limits,
        ..Setup::default()
    };
    World::with_guest(setup, async |_| {}).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slowly_sent_head_is_cut_off() {
    let world = limited(Limits {
        head_read: SHORT,
        ..Limits::default()
    })
    .await;
    let mut wire = Wire::connect(world.address).await;
    // Each single byte arrives in time.
    let (mut reading, mut writing) = wire.stream.split();
    let drip = async {
        use tokio::io::AsyncWriteExt;
        for byte in b"GET /control HTTP/1.1\r\nHost: localhost\r\nX: "
            .iter()
            .chain([b'x'; 4096].iter())
        {
            if writing.write_all(&[*byte]).await.is_err() {
                return;
            }
            tokio::time::sleep(SHORT / 20).await;
        }
        panic!("the whole head was read");
    };
    let cut = async {
        use tokio::io::AsyncReadExt;
        let mut rest = Vec::new();
        reading.read_to_end(&mut rest).await.ok();
        rest
    };
    let (rest, ()) = soon("the cut", async { tokio::join!(cut, drip) }).await;
    assert_eq!(rest, b"");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_connection_is_closed_and_a_busy_one_is_kept() {
    let limits = Limits {
        idle: SHORT,
        head_read: SHORT,
        ..Limits::default()
    };
    let setup = Setup {
        limits,
        ..Setup::default()
    };
    let world = World::with_guest(setup, async |mut client| {
        use tokio::io::AsyncWriteExt;
        client.write_all(b"OK 1\n").await.unwrap();
        read_head(&mut client).await;
        tokio::time::sleep(SHORT * 5).await;
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        client.write_all(answer).await.unwrap();
    })
    .await;
    assert!(Wire::connect(world.address).await.is_closed().await);
    let mut wire = Wire::connect(world.address).await;
    let reply = wire.ask("GET /", &world.to(ENVD)).await;
    assert_eq!((reply.status, reply.text()), (200, "ok"));
    assert!(wire.is_closed().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn heads_above_the_limit_are_refused() {
    let world = limited(Limits::default()).await;
    let mut wire = Wire::connect(world.address).await;
    let much = format!("Host: x\r\nX: {}\r\n", "x".repeat(65 << 10));
    assert_eq!(wire.ask("GET /control", &much).await.status, 431);
    let mut wire = Wire::connect(world.address).await;
    let many = format!("Host: x\r\n{}", "X: 1\r\n".repeat(200));
    assert_eq!(wire.ask("GET /control", &many).await.status, 431);
    let mut wire = Wire::connect(world.address).await;
    let fits = format!(
        "Host: x\r\nX: {}\r\n{}",
        "x".repeat(60 << 10),
        "X: 1\r\n".repeat(100)
    );
    assert_eq!(wire.ask("GET /control", &fits).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_heads_need_no_more_memory_than_their_limit() {
    let world = limited(Limits::default()).await;
    let before = resident_kib();
    let mut wires = Vec::new();
    for _ in 0..64 {
        let mut wire = Wire::connect(world.address).await;
        // The client sends a header of 1 MiB; the server stops reading after 64 KiB.
        let flood = vec![b'x'; 1 << 20];
        let sent = async {
            use tokio::io::AsyncWriteExt;
            wire.stream.write_all(b"GET / HTTP/1.1\r\nX: ").await.ok();
            wire.stream.write_all(&flood).await.ok();
        };
        let _stuck = tokio::time::timeout(SHORT, sent).await;
        wires.push(wire);
    }
    let grown = resident_kib().saturating_sub(before);
    assert!(grown < 32 << 10, "{grown} KiB");
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A server with a sandbox that reads requests and never answers.
async fn patient(limits: Limits) -> World {
    let setup = Setup {
        limits,
        ..Setup::default()
    };
    World::with_guest(setup, async |mut client| {
        use tokio::io::AsyncWriteExt;
        client.write_all(b"OK 1\n").await.ok();
        std::future::pending::<()>().await;
    })
    .await
}

/// A connection with a request in flight that the server has read.
async fn busy(world: &World, from: [u8; 4]) -> Wire {
    let mut wire = connect_from(world, from).await;
    let to = world.to(ENVD);
    let wait = "Content-Length: 1\r\nExpect: 100-continue\r\n";
    wire.send(format!("POST / HTTP/1.1\r\n{to}{wait}\r\n"))
        .await;
    assert_eq!(wire.head().await.status, 100);
    wire
}

/// Connects from the loopback address `from`. The server counts each address as a separate peer.
async fn connect_from(world: &World, from: [u8; 4]) -> Wire {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    let stream = soon("connecting", socket.connect(world.address)).await;
    Wire::over(stream.unwrap())
}

async fn is_served(mut wire: Wire) -> bool {
    wire.send("GET /control HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await;
    !wire.rest().await.is_empty()
}

const HERE: [u8; 4] = [127, 0, 0, 1];
const THERE: [u8; 4] = [127, 0, 0, 2];

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_limited_per_peer_and_in_total() {
    for (in_all, of_peer) in [(3, 100), (100, 3)] {
        let world = patient(Limits {
            connections: in_all,
            connections_of_peer: of_peer,
            ..Limits::default()
        })
        .await;
        let mut wires = Vec::new();
        for _ in 0..3 {
            wires.push(busy(&world, HERE).await);
        }
        assert!(Wire::connect(world.address).await.is_closed().await);
        wires.pop();
        // The permit is released when the server has noticed the end of the connection.
        while !is_served(Wire::connect(world.address).await).await {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_without_a_request_is_closed_after_the_time_of_a_head() {
    let world = limited(Limits {
        head_read: SHORT,
        ..Limits::default()
    })
    .await;
    assert!(Wire::connect(world.address).await.is_closed().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_make_room_for_new_ones() {
    let files = api::listen::raise_file_limit().unwrap();
    // Half of the file limit, because this process holds both ends of each connection.
    let limits = Limits::within(files / 2);
    let (in_all, of_peer) = (limits.connections, limits.connections_of_peer);
    let world = limited(limits).await;
    // A client that has been served before has no advantage.
    let mut known = Wire::connect(world.address).await;
    let reply = known.ask("GET /control", "Host: x\r\n").await;
    assert_eq!(reply.status, 200);
    let mut silent = Vec::new();
    for at in 0..in_all + 8 {
        let from = if at < of_peer + 8 { HERE } else { THERE };
        silent.push(connect_from(&world, from).await);
    }
    for from in [HERE, THERE, [127, 0, 0, 3]] {
        assert!(is_served(connect_from(&world, from).await).await);
    }
    let reply = known.ask("GET /control", "Host: x\r\n").await;
    assert_eq!(reply.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_holds_all_connections_loses_one_to_another_client() {
    let world = patient(Limits {
        connections: 4,
        connections_of_peer: 4,
        ..Limits::default()
    })
    .await;
    let mut hog = Vec::new();
    for _ in 0..4 {
        hog.push(busy(&world, HERE).await);
    }
    assert!(!is_served(connect_from(&world, HERE).await).await);
    let _first = busy(&world, THERE).await;
    let _second = busy(&world, THERE).await;
    // Now both clients have two connections, so no request of either is interrupted for the other.
    assert!(!is_served(connect_from(&world, THERE).await).await);
    assert!(!is_served(connect_from(&world, HERE).await).await);
    for (at, wire) in hog.iter_mut().enumerate() {
        if at < 2 {
            assert!(wire.is_closed().await)
        } else {
            assert!(is_open(wire))
        }
    }
}

/// Whether neither data nor the end of the stream has arrived.
fn is_open(wire: &Wire) -> bool {
    let read = wire.stream.try_read(&mut [0]);
    read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_behind_a_trusted_proxy_are_limited_by_their_requests() {
    let world = patient(Limits {
        connections_of_peer: 2,
        trusted_proxies: vec!["127.0.0.1/32".parse().unwrap()].into(),
        ..Limits::default()
    })
    .await;
    let to = world.to(ENVD);
    let wait = "Content-Length: 1\r\nExpect: 100-continue\r\n";
    let mut wires = Vec::new();
    for _ in 0..2 {
        let mut wire = connect_from(&world, HERE).await;
        let client = "X-Forwarded-For: 192.0.2.1\r\n";
        wire.send(format!("POST / HTTP/1.1\r\n{to}{client}{wait}\r\n"))
            .await;
        assert_eq!(wire.head().await.status, 100);
        wires.push(wire);
    }
    let ask = async |from, client: &str| {
        let mut wire = connect_from(&world, from).await;
        let fields = format!("Host: x\r\nX-Forwarded-For: {client}\r\n");
        wire.ask("GET /control", &fields).await
    };
    let reply = ask(HERE, "192.0.2.1").await;
    assert_eq!((reply.status, reply.field("retry-after")), (429, Some("1")));
    assert_eq!(reply.json()["connectionLimit"], 2);
    assert_eq!(ask(HERE, "192.0.2.2").await.status, 200);
    // A client cannot impersonate another one with its own X-Forwarded-For.
    assert_eq!(ask(HERE, "192.0.2.2, 192.0.2.1").await.status, 429);
    // X-Forwarded-For from a peer that is not a trusted proxy is ignored.
    assert_eq!(ask(THERE, "192.0.2.1").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_upload_is_given_up() {
    let limits = Limits {
        body_pause: SHORT,
        ..Limits::default()
    };
    let setup = Setup {
        limits,
        ..Setup::default()
    };
    let world = World::with(setup).await;
    let length = "Content-Length: 100\r\n";
    let mut wire = Wire::connect(world.address).await;
    let path = world.dir.path().join("never");
    let head = format!("POST /files?path={} HTTP/1.1\r\n", path.display());
    let kind = "Content-Type: application/octet-stream\r\n";
    wire.send(format!("{head}{}{kind}{length}\r\nhalf", world.to(ENVD)))
        .await;
    let reply = wire.head().await;
    assert_eq!(reply.status, 408, "{reply:?}");
    assert!(wire.is_closed().await);
    // For the control plane the limit applies with and without a known length.
    for framing in [length, "Transfer-Encoding: chunked\r\n"] {
        let mut wire = Wire::connect(world.address).await;
        wire.send(format!("POST /length HTTP/1.1\r\nHost: x\r\n{framing}\r\n"))
            .await;
        assert!(wire.head().await.status >= 400);
        assert!(wire.is_closed().await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_that_takes_too_long_is_cut_off() {
    let limits = Limits {
        handshake: SHORT,
        ..Limits::default()
    };
    let setup = Setup {
        limits,
        tls: true,
        ..Setup::default()
    };
    let world = World::with_guest(setup, async |_| {}).await;
    assert!(Wire::connect(world.address).await.is_closed().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_completes_requests_in_flight() {
    let setup = Setup::default();
    let (begun, mut has_begun) = tokio::sync::mpsc::channel(1);
    let go = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    let gate = std::sync::Arc::clone(&go);
    let mut world = World::with_guest(setup, move |mut client| {
        let (begun, gate) = (begun.clone(), std::sync::Arc::clone(&gate));
        async move {
            use tokio::io::AsyncWriteExt;
            client.write_all(b"OK 1\n").await.unwrap();
            read_head(&mut client).await;
            begun.send(()).await.unwrap();
            gate.acquire().await.unwrap().forget();
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
            client.write_all(answer).await.unwrap();
        }
    })
    .await;
    let mut idle = Wire::connect(world.address).await;
    idle.ask("GET /control", "Host: x\r\n").await;
    let mut wire = Wire::connect(world.address).await;
    wire.send(format!("GET / HTTP/1.1\r\n{}\r\n", world.to(ENVD)))
        .await;
    soon("the request", has_begun.recv()).await.unwrap();
    world.stop();
    assert!(idle.is_closed().await);
    assert!(tokio::net::TcpStream::connect(world.address).await.is_err());
    go.add_permits(1);
    assert_eq!(wire.answer(false).await.text(), "ok");
    assert!(wire.is_closed().await);
    soon("the server's end", &mut world.serving).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_closes_connections_after_the_drain_time() {
    let limits = Limits {
        drain: SHORT,
        ..Limits::default()
    };
    let setup = Setup {
        limits,
        ..Setup::default()
    };
    let mut world = World::with_guest(setup, async |mut client| {
        use tokio::io::AsyncWriteExt;
        client.write_all(b"OK 1\n").await.unwrap();
        client
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
            .await
            .unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    let mut wire = Wire::connect(world.address).await;
    wire.send(format!("GET / HTTP/1.1\r\n{}\r\n", world.to(ENVD)))
        .await;
    wire.head().await;
    world.stop();
    soon("the server's end", &mut world.serving).await.unwrap();
    assert!(wire.is_closed().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_in_flight_to_a_sandbox_are_limited() {
    let world = World::with_guest(Setup::default(), async |mut client| {
        use tokio::io::AsyncWriteExt;
        client.write_all(b"OK 1\n").await.unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    let mut wires = Vec::new();
    let line = format!("GET / HTTP/1.1\r\n{}\r\n", world.to(ENVD));
    for _ in 0..api::proxy::IN_FLIGHT_MAX {
        let mut wire = Wire::connect(world.address).await;
        wire.send(&line).await;
        wires.push(wire);
    }
    // The server may not have read all of these requests yet, so a further request may still be admitted.
    let reply = loop {
        let mut wire = Wire::connect(world.address).await;
        wire.send(&line).await;
        let reply = tokio::time::timeout(SHORT * 5, wire.answer(false)).await;
        if let Ok(reply) = reply {
            break reply;
        }
        wires.push(wire);
    };
    assert_eq!(reply.status, 429);
    assert_eq!(reply.field("retry-after"), Some("1"));
    assert_eq!(reply.json()["connectionLimit"], api::proxy::IN_FLIGHT_MAX);
    assert!(wires.len() < api::proxy::IN_FLIGHT_MAX + 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_nothing_is_disconnected() {
    let limits = Limits {
        write_pause: SHORT,
        ..Limits::default()
    };
    let setup = Setup {
        limits,
        ..Setup::default()
    };
    let (ended, mut has_ended) = tokio::sync::mpsc::channel(1);
    let world = World::with_guest(setup, move |mut client| {
        let ended = ended.clone();
        async move {
            use tokio::io::AsyncWriteExt;
            client.write_all(b"OK 1\n").await.unwrap();
            read_head(&mut client).await;
            let head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n";
            client.write_all(head).await.unwrap();
            let piece = vec![b'x'; 1 << 20];
            while client.write_all(&piece).await.is_ok() {}
            ended.send(()).await.unwrap();
        }
    })
    .await;
    let mut wire = Wire::connect(world.address).await;
    wire.send(format!("GET / HTTP/1.1\r\n{}\r\n", world.to(ENVD)))
        .await;
    wire.head().await;
    soon("the end of the sandbox's stream", has_ended.recv())
        .await
        .unwrap();
}
