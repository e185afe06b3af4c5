//! Connections to the TLS port before any request: allowed names, which pass unread.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use egress::control::Ask;
use rustls::{ClientConnection, pki_types::ServerName};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    client::{self, connect, exchange, get, http1, is_terminated, send1, tls, until_end},
    origin::{self, Origin},
    world::{Ca, World},
};

async fn world() -> (World, Origin) {
    let servers = Arc::new(Ca::new("servers"));
    let names = ["api.test", "other.test", "xn--bcher-kva.test"];
    let origin = Origin::tls(&servers, &names, &["http/1.1"]).await;
    let world = World::new(&servers, origin.address.port(), &[]);
    (world, origin)
}

/// Ends the input of a recording server.
const END: &[u8] = b"<the end>";

/// A server that records its input, on the TLS port of a new proxy.
async fn keeping_world() -> (World, SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keeping = Arc::clone(&kept);
    let address = origin::raw(move |mut stream: TcpStream| {
        let keeping = Arc::clone(&keeping);
        async move {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                keeping.lock().unwrap().extend_from_slice(&buffer[..read]);
                if keeping.lock().unwrap().ends_with(END) {
                    let _ = stream.write_all(b"kept").await;
                    return;
                }
            }
        }
    })
    .await;
    let world = World::new(&Arc::new(Ca::new("servers")), address.port(), &[]);
    (world, address, kept)
}

fn hello(world: &World, name: &str, protocols: &[&str]) -> Vec<u8> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let config = Arc::new(client::config(world, protocols));
    let mut bytes = Vec::new();
    ClientConnection::new(config, name)
        .unwrap()
        .write_tls(&mut bytes)
        .unwrap();
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_without_rule_passes_unread() {
    let (world, origin) = world().await;
    let guest = world.guest(origin.address, &["api.test"]);
    let stream = tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap();
    assert!(!is_terminated(&world, &stream));
    let mut sender = http1(stream).await;
    // In an unread connection the proxy does not check the host.
    assert_eq!(send1(&mut sender, get("api.test", "/")).await.text, "ok");
    drop(sender);
    let call = world.call(guest, |call| call.refused.is_none());
    assert_eq!(call.name.as_deref(), Some("api.test"));
    assert_eq!(
        (call.status, &call.method, &call.path),
        (None, &None, &None)
    );
    assert!(call.bytes_out > 100 && call.bytes_in > 100, "{call:?}");
    assert_eq!(call.remote, origin.address);
    assert_eq!(
        world.rule_questions(),
        [("api.test".to_owned(), Ask::Existence)]
    );
}

/// The documented remedy against domain fronting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_without_headers_compares_the_host_and_adds_none() {
    let (world, origin) = world().await;
    let guest = world.guest(origin.address, &["api.test", "other.test"]);
    world.outcome("api.test", World::headers("api.test", Vec::new()));
    for (host, status) in [("api.test", 200), ("other.test", 421)] {
        let stream = tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap();
        assert!(is_terminated(&world, &stream));
        let answer = send1(&mut http1(stream).await, get(host, "/")).await;
        assert_eq!(answer.status, status, "{host}");
    }
    let seen = origin.seen();
    assert_eq!(seen.len(), 1);
    let names: Vec<_> = seen[0].headers.keys().map(|name| name.as_str()).collect();
    assert_eq!(names, ["host"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spellings_of_an_answered_name_pass() {
    let (world, origin) = world().await;
    let guest = world.guest(origin.address, &["api.test", "xn--bcher-kva.test"]);
    for name in ["API.Test", "api.test", "XN--BCHER-KVA.test"] {
        let stream = tls(&world, guest, name, &[]).await.unwrap();
        assert!(!is_terminated(&world, &stream), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_names_are_refused_before_the_server_sees_a_byte() {
    let (world, origin) = world().await;
    let guest = world.guest(origin.address, &["api.test"]);
    for name in ["other.test", "a.api.test", "test", "api.test.other.test"] {
        let error = tls(&world, guest, name, &[]).await.unwrap_err();
        assert!(error.to_string().contains("AccessDenied"), "{error}");
        let call = world.call(guest, |call| call.name.as_deref() == Some(name));
        assert!(
            call.refused
                .unwrap()
                .contains("was not resolved to this address")
        );
    }
    // An address as server name, which rustls does not send.
    tls(&world, guest, "127.0.0.1", &[]).await.unwrap_err();
    let call = world.call(guest, |call| call.name.is_none());
    assert_eq!(call.refused.unwrap(), "the ClientHello has no server name");
    assert_eq!(origin.connections(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_are_no_client_hello_are_refused() {
    let (world, origin) = world().await;
    let guest = world.guest(origin.address, &["api.test"]);
    let address_as_name = replaced(&hello(&world, "aaa.b.c.d", &[]), b"aaa.b.c.d", b"127.0.0.1");
    let no_name = replaced(
        &hello(&world, "aaa.b.c.d", &[]),
        b"aaa.b.c.d",
        b"aaa b/c\0d",
    );
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n"[..],
        b"SSH-2.0-OpenSSH_9.2\r\n",
        &[0x80, 0x2e, 1, 0, 2, 0, 5, 0, 0],
        &[22, 3, 1, 0, 4, 2, 0, 0, 0],
        &address_as_name,
        &no_name,
    ] {
        let answer = exchange(connect(&world, guest).await, bytes).await;
        assert_eq!(
            answer.as_bytes().get(..2),
            Some(&[21, 3][..]),
            "{bytes:?}: {answer:?}"
        );
    }
    // A client that sends nothing and disconnects.
    connect(&world, guest).await.shutdown().await.unwrap();
    world.call(guest, |call| {
        call.refused.as_deref() == Some("the connection does not begin with a TLS ClientHello")
    });
    assert_eq!(origin.connections(), 0);
}

fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes
        .windows(from.len())
        .position(|part| part == from)
        .unwrap();
    [&bytes[..at], to, &bytes[at + from.len()..]].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_hello_in_fragments_reaches_the_server_unchanged() {
    let (world, address, kept) = keeping_world().await;
    let guest = world.guest(address, &["api.test"]);
    // Many protocols make the message longer than one record.
    let long: Vec<String> = (0..120).map(|n| format!("{n:0250}")).collect();
    let long: Vec<&str> = long.iter().map(String::as_str).collect();
    for (bytes, size) in [
        (hello(&world, "api.test", &[]), 1),
        (hello(&world, "API.test", &["h2"]), 7),
        (hello(&world, "api.test", &long), 5000),
    ] {
        let mut stream = connect(&world, guest).await;
        for part in bytes.chunks(size) {
            stream.write_all(part).await.unwrap();
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        stream.write_all(END).await.unwrap();
        assert_eq!(until_end(stream).await, "kept");
        let kept = std::mem::take(&mut *kept.lock().unwrap());
        assert!(kept == [&bytes[..], END].concat(), "{size}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn encrypted_client_hello_is_judged_by_its_outer_name() {
    let (world, address, kept) = keeping_world().await;
    let guest = world.guest(address, &["outer.test"]);
    // An outer hello (RFC 9849, section 5): suite, number of the configuration, encapsulated key, payload.
    let encrypted = [&[0, 0, 1, 0, 1, 7, 0, 32][..], &[9; 32], &[0, 48], &[8; 48]].concat();
    for (name, passes) in [("outer.test", true), ("other.test", false)] {
        let mut bytes = with_extension(&hello(&world, name, &[]), 0xfe0d, &encrypted);
        bytes.extend(END);
        let answer = exchange(connect(&world, guest).await, &bytes).await;
        assert_eq!(answer == "kept", passes, "{name}");
        assert_eq!(*kept.lock().unwrap() == bytes, passes);
        kept.lock().unwrap().clear();
    }
}

/// The hello, one record, with another extension at its end.
fn with_extension(hello: &[u8], kind: u16, content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(content.len()).unwrap();
    let extension = [&kind.to_be_bytes()[..], &length.to_be_bytes(), content].concat();
    let added = u16::try_from(extension.len()).unwrap();
    let mut bytes = [hello, &extension].concat();
    // After record header, message header, version and random: session, suites, compression, extensions.
    let session = 5 + 4 + 2 + 32;
    let suites = session + 1 + usize::from(bytes[session]);
    let number = |bytes: &[u8], at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let compression = suites + 2 + usize::from(number(&bytes, suites));
    let extensions = compression + 1 + usize::from(bytes[compression]);
    for at in [3, 7, extensions] {
        let longer = number(&bytes, at) + added;
        bytes[at..at + 2].copy_from_slice(&longer.to_be_bytes());
    }
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_server_names_are_refused() {
    let (world, origin) = world().await;
    let guest = world.guest(origin.address, &["api.test"]);
    // rustls sends no server name for an address, so the extension is not there yet.
    let second = b"\0\x13\0\0\x08api.test\0\0\x05evil.";
    let bytes = with_extension(&hello(&world, "127.0.0.1", &[]), 0, second);
    let answer = exchange(connect(&world, guest).await, &bytes).await;
    assert_eq!(answer.as_bytes().first(), Some(&21));
    assert_eq!(origin.connections(), 0);
    // With a single name, this is a valid start of a connection.
    let one = b"\0\x0b\0\0\x08api.test";
    let bytes = with_extension(&hello(&world, "127.0.0.1", &[]), 0, one);
    let mut stream = connect(&world, guest).await;
    stream.write_all(&bytes).await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), 22);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flow_that_an_address_admits_passes_in_any_case() {
    let (world, origin) = world().await;
    let guest = world.guest_by_address(origin.address, &["api.test"]);
    world.rule("api.test", "unused");
    let stream = tls(&world, guest, "other.test", &[]).await.unwrap();
    assert!(!is_terminated(&world, &stream));
    let stream = tls(&world, guest, "api.test", &[]).await.unwrap();
    assert!(is_terminated(&world, &stream));
    let (world, address, kept) = keeping_world().await;
    let guest = world.guest_by_address(address, &[]);
    assert_eq!(exchange(connect(&world, guest).await, END).await, "kept");
    assert_eq!(*kept.lock().unwrap(), END);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_without_a_flow_are_closed() {
    let (world, _origin) = world().await;
    let stream = connect(&world, [127, 0, 9, 250].into()).await;
    assert_eq!(until_end(stream).await, "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_server_resets_the_guest() {
    let (world, origin) = world().await;
    let remote = SocketAddr::new([127, 0, 8, 1].into(), origin.address.port());
    let guest = world.guest(remote, &["api.test"]);
    tls(&world, guest, "api.test", &[]).await.unwrap_err();
    let call = world.call(guest, |call| call.refused.is_some());
    assert!(
        call.refused
            .unwrap()
            .contains("cannot connect to 127.0.8.1")
    );
}
