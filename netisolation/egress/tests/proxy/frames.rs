//! Hand-made HTTP/2, for heads that no client library sends.

use std::sync::Arc;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use crate::{
    client::{LIMIT, tls},
    origin::Origin,
    world::{Ca, SECRET, World},
};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(content.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), content].concat()
}

/// Literal fields without indexing (RFC 7541, section 6.2.2).
fn fields(list: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in list {
        bytes.push(0);
        for text in [name, value] {
            bytes.push(u8::try_from(text.len()).unwrap());
            bytes.extend_from_slice(text.as_bytes());
        }
    }
    bytes
}

/// Outcome of the first stream of a connection.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    /// A response with these encoded fields.
    Answer(Vec<u8>),
    Reset,
    Connection,
}

async fn send(world: &World, guest: std::net::Ipv4Addr, list: &[(&str, &str)]) -> Ended {
    let mut stream = tls(world, guest, "api.test", &["h2"]).await.unwrap();
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    bytes.extend(frame(HEADERS, END_STREAM | END_HEADERS, 1, &fields(list)));
    stream.write_all(&bytes).await.unwrap();
    loop {
        let mut head = [0; 9];
        if timeout(LIMIT, stream.read_exact(&mut head))
            .await
            .unwrap()
            .is_err()
        {
            return Ended::Connection;
        }
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let mut content = vec![0; length];
        timeout(LIMIT, stream.read_exact(&mut content))
            .await
            .unwrap()
            .unwrap();
        match head[3] {
            HEADERS => return Ended::Answer(content),
            RST_STREAM => return Ended::Reset,
            GOAWAY => return Ended::Connection,
            DATA => panic!("data before an answer"),
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pseudo_headers_cannot_be_used_for_tricks() {
    const METHOD: (&str, &str) = (":method", "GET");
    const SCHEME: (&str, &str) = (":scheme", "https");
    const AUTHORITY: (&str, &str) = (":authority", "api.test");
    const PATH: (&str, &str) = (":path", "/");
    let servers = Arc::new(Ca::new("servers"));
    let origin = Origin::tls(&servers, &["api.test"], &["h2"]).await;
    let world = World::new(&servers, origin.address.port(), &[]);
    let guest = world.guest(origin.address, &["api.test", "other.test"]);
    world.rule("api.test", SECRET);
    let cases: [&[(&str, &str)]; 18] = [
        &[
            METHOD,
            SCHEME,
            AUTHORITY,
            PATH,
            (":authority", "other.test"),
        ],
        &[
            METHOD,
            SCHEME,
            (":authority", "other.test"),
            PATH,
            AUTHORITY,
        ],
        &[
            METHOD,
            SCHEME,
            AUTHORITY,
            PATH,
            ("host", "api.test"),
            ("host", "other.test"),
        ],
        &[METHOD, SCHEME, AUTHORITY, ("x-a", "b"), PATH],
        &[METHOD, SCHEME, AUTHORITY, PATH, (":path", "/2")],
        &[METHOD, SCHEME, AUTHORITY, PATH, (":status", "200")],
        &[METHOD, SCHEME, AUTHORITY, PATH, ("X-Upper", "b")],
        &[METHOD, SCHEME, AUTHORITY, PATH, ("connection", "close")],
        &[
            METHOD,
            SCHEME,
            AUTHORITY,
            PATH,
            ("transfer-encoding", "chunked"),
        ],
        &[
            METHOD,
            SCHEME,
            AUTHORITY,
            PATH,
            ("x-a", "b\r\nhost: other.test"),
        ],
        &[METHOD, SCHEME, AUTHORITY, PATH, ("x-a\r\nx-b", "c")],
        &[METHOD, SCHEME, AUTHORITY, PATH, ("content-length", "5")],
        &[METHOD, SCHEME, AUTHORITY, (":path", "/ HTTP/1.1\r\nx: y")],
        &[METHOD, SCHEME, (":authority", "api.test\r\nx: y"), PATH],
        &[METHOD, SCHEME, (":authority", "api.test/other.test"), PATH],
        &[METHOD, SCHEME, PATH],
        &[
            (":method", "CONNECT"),
            (":protocol", "websocket"),
            SCHEME,
            AUTHORITY,
            PATH,
        ],
        &[(":method", "CONNECT"), (":authority", "other.test:443")],
    ];
    for case in cases {
        let ended = send(&world, guest, case).await;
        // A response with status 200 begins with an entry of the static table.
        let is_success = matches!(&ended, Ended::Answer(fields) if fields.first() == Some(&0x88));
        assert!(
            !is_success && origin.seen().is_empty(),
            "{case:?}: {ended:?}"
        );
    }
    let ended = send(
        &world,
        guest,
        &[METHOD, SCHEME, AUTHORITY, PATH, ("host", "API.test")],
    )
    .await;
    assert!(
        matches!(&ended, Ended::Answer(fields) if fields.first() == Some(&0x88)),
        "{ended:?}"
    );
    assert_eq!(origin.seen().len(), 1);
}
