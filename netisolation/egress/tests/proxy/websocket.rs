//! Protocol switches.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::client::TlsStream;

use crate::{
    client::{LIMIT, exchange, statuses, tls, until_end},
    origin::Origin,
    world::{Ca, SECRET, World},
};

const HANDSHAKE: &str = "GET /websocket HTTP/1.1\r\nHost: api.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
    Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

async fn world() -> (World, Origin, Ipv4Addr) {
    let servers = Arc::new(Ca::new("servers"));
    let origin = Origin::tls(&servers, &["api.test"], &["http/1.1"]).await;
    let world = World::new(&servers, origin.address.port(), &[]);
    let guest = world.guest(origin.address, &["api.test"]);
    world.rule("api.test", SECRET);
    (world, origin, guest)
}

async fn open(world: &World, guest: Ipv4Addr) -> TlsStream<TcpStream> {
    let mut stream = tls(world, guest, "api.test", &["http/1.1"]).await.unwrap();
    stream.write_all(HANDSHAKE.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(timeout(LIMIT, stream.read_u8()).await.unwrap().unwrap());
    }
    let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
    assert!(
        head.starts_with("http/1.1 101 ") && head.contains("\r\nupgrade: websocket\r\n"),
        "{head}"
    );
    stream
}

async fn echoes(stream: &mut TlsStream<TcpStream>, bytes: &[u8]) {
    stream.write_all(bytes).await.unwrap();
    let mut answer = vec![0; bytes.len()];
    timeout(LIMIT, stream.read_exact(&mut answer))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(answer, bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_websocket_passes_both_ways() {
    let (world, origin, guest) = world().await;
    let mut stream = open(&world, guest).await;
    assert_eq!(origin.seen()[0].headers["x-api-key"], SECRET);
    for part in [
        &b"hello"[..],
        b"\x81\x05world",
        b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        &[0; 100_000],
    ] {
        echoes(&mut stream, part).await;
    }
    drop(stream);
    let call = world.call(guest, |call| call.status == Some(101));
    assert_eq!(call.bytes_out, call.bytes_in);
    assert!(call.bytes_out > 100_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_ends_a_websocket_and_a_closed_control_socket_does_not() {
    let (world, _origin, guest) = world().await;
    let mut stream = open(&world, guest).await;
    world.send(&egress::control::ToProxy::Cut {
        sandbox: World::sandbox(guest),
    });
    assert_eq!(until_end(&mut stream).await, "");
    let mut stream = open(&world, guest).await;
    world.close_control();
    tokio::time::sleep(Duration::from_millis(200)).await;
    echoes(&mut stream, b"still there").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_refused_change_requests_are_still_checked() {
    let (world, origin, guest) = world().await;
    let refused = HANDSHAKE.replace("/websocket", "/refused");
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: evil.test\r\n\r\n";
    let stream = tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap();
    let answer = exchange(stream, format!("{refused}{smuggled}").as_bytes()).await;
    assert_eq!(statuses(&answer), [200, 421], "{answer}");
    let paths: Vec<_> = origin.seen().iter().map(|seen| seen.uri.clone()).collect();
    assert_eq!(paths, ["/refused"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_changes_are_not_passed_on() {
    let (world, origin, guest) = world().await;
    for (from, to) in [
        (
            "Upgrade: websocket",
            "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
        ),
        ("Upgrade: websocket", "Upgrade: websocket, h2c"),
        ("Connection: Upgrade", "Connection: close"),
        ("GET /", "POST /"),
        (
            "Connection: Upgrade",
            "Connection: Upgrade, close\r\nContent-Length: 0",
        ),
    ] {
        let request = HANDSHAKE.replace(from, to);
        let second = "GET /2 HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n";
        let stream = tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap();
        let answer = exchange(stream, format!("{request}{second}").as_bytes()).await;
        assert!(
            !statuses(&answer).is_empty() && !answer.contains(" 101 "),
            "{to}: {answer}"
        );
    }
    for seen in origin.seen() {
        assert!(
            !seen.headers.contains_key("upgrade") && !seen.headers.contains_key("http2-settings"),
            "{seen:?}"
        );
    }
}
