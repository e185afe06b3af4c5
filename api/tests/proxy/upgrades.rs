//! Upgraded connections.

use tokio::io::AsyncWriteExt;

use crate::guest::Program;
use crate::wire::Wire;
use crate::world::{Setup, World};

const UPGRADE: &str = "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                       Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
const SWITCH: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                      Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

async fn upgraded(world: &World, port: u16) -> Wire {
    let mut wire = Wire::connect(world.address).await;
    wire.send(format!(
        "GET /ws HTTP/1.1\r\n{}{UPGRADE}\r\n",
        world.to(port)
    ))
    .await;
    let reply = wire.head().await;
    assert_eq!(reply.status, 101);
    assert_eq!(reply.field("upgrade"), Some("websocket"));
    let accept = reply.field("sec-websocket-accept");
    assert_eq!(accept, Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    wire
}

#[tokio::test(flavor = "multi_thread")]
async fn each_direction_of_an_upgraded_connection_ends_independently() {
    let world = World::new().await;
    let program = Program::start(async |mut wire| {
        let head = wire.request_head().await.to_ascii_lowercase();
        assert!(head.contains("upgrade: websocket\r\n"), "{head}");
        assert!(
            head.contains("sec-websocket-key: dghlihnhbxbszsbub25jzq=="),
            "{head}"
        );
        // The first bytes arrive together with the head.
        wire.send(format!("{SWITCH}hello")).await;
        let asked = wire.exactly(5).await.unwrap();
        wire.send(asked).await;
        // The client has closed its sending direction; the program's is still open.
        assert_eq!(wire.rest().await, b"last");
        wire.send("after the end").await;
        wire.stream.shutdown().await.unwrap();
    })
    .await;
    let mut wire = upgraded(&world, program.port).await;
    assert_eq!(wire.exactly(5).await.unwrap(), b"hello");
    wire.send("\x01\x02\x03\x04\x05").await;
    assert_eq!(wire.exactly(5).await.unwrap(), b"\x01\x02\x03\x04\x05");
    wire.send("last").await;
    wire.stream.shutdown().await.unwrap();
    assert_eq!(wire.rest().await, b"after the end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_behind_a_path_is_upgraded() {
    let world = World::new().await;
    let program = Program::start(async |mut wire| {
        let head = wire.request_head().await;
        assert!(head.starts_with("GET /ws?a HTTP/1.1\r\n"), "{head}");
        wire.send(format!("{SWITCH}hello")).await;
        assert_eq!(wire.rest().await, b"last");
        wire.stream.shutdown().await.unwrap();
    })
    .await;
    let mut wire = Wire::connect(world.address).await;
    let (id, port) = (&world.id, program.port);
    let target = format!("GET /sandbox/{id}/{port}/ws?a HTTP/1.1\r\nHost: localhost\r\n");
    wire.send(format!("{target}{UPGRADE}\r\n")).await;
    assert_eq!(wire.head().await.status, 101);
    assert_eq!(wire.exactly(5).await.unwrap(), b"hello");
    wire.send("last").await;
    wire.stream.shutdown().await.unwrap();
    assert_eq!(wire.rest().await, b"");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_direction_to_the_client_may_end_first() {
    let world = World::new().await;
    let program = Program::start(async |mut wire| {
        wire.request_head().await;
        wire.send(SWITCH).await;
        wire.stream.shutdown().await.unwrap();
        let rest = wire.rest().await;
        assert_eq!(rest, b"still here");
    })
    .await;
    let mut wire = upgraded(&world, program.port).await;
    assert_eq!(wire.rest().await, b"");
    wire.send("still here").await;
    wire.stream.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_may_refuse_an_upgrade() {
    let world = World::new().await;
    let program = Program::start(async |mut wire| {
        wire.request_head().await;
        wire.send("HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\nno")
            .await;
        wire.is_closed().await;
    })
    .await;
    let mut wire = Wire::connect(world.address).await;
    let fields = format!("{}{UPGRADE}", world.to(program.port));
    for _ in 0..2 {
        let reply = wire.ask("GET /ws", &fields).await;
        assert_eq!((reply.status, reply.text()), (400, "no"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgraded_connection_keeps_its_permit() {
    let limits = api::listen::Limits {
        connections: 1,
        ..api::listen::Limits::default()
    };
    let setup = Setup {
        limits,
        ..Setup::default()
    };
    let world = World::with(setup).await;
    let program = Program::start(async |mut wire| {
        wire.request_head().await;
        wire.send(SWITCH).await;
        wire.is_closed().await;
    })
    .await;
    let wire = upgraded(&world, program.port).await;
    assert!(Wire::connect(world.address).await.is_closed().await);
    drop(wire);
    loop {
        let mut wire = Wire::connect(world.address).await;
        wire.send("GET /control HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .await;
        if !wire.rest().await.is_empty() {
            break;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killing_the_sandbox_ends_its_upgraded_connections() {
    let mut world = World::new().await;
    let program = Program::start(async |mut wire| {
        wire.request_head().await;
        wire.send(SWITCH).await;
        wire.is_closed().await;
    })
    .await;
    let mut wire = upgraded(&world, program.port).await;
    world.kill();
    // The client's sending direction is still open, but it receives no more data.
    assert!(wire.is_closed().await);
}
