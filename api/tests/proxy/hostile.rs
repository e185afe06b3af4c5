//! Clients that attempt request smuggling, and guests that violate the protocol.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use crate::guest::{Program, read_head};
use crate::wire::Wire;
use crate::world::{Setup, World};

const ENVD: u16 = 49_983;

#[tokio::test(flavor = "multi_thread")]
async fn ambiguous_requests_are_not_forwarded() {
    let (world, asked) = World::counting().await;
    let to = world.to(80);
    let smuggled = format!("GET /admin HTTP/1.1\r\n{to}\r\n");
    for framing in [
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 5, 6\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: 5 5\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Content-Length: 5\r\n folded\r\n",
        "X: a\0b\r\n",
    ] {
        let mut wire = Wire::connect(world.address).await;
        wire.send(format!(
            "POST / HTTP/1.1\r\n{to}{framing}\r\n0\r\n\r\n{smuggled}"
        ))
        .await;
        let reply = wire.rest().await;
        let text = String::from_utf8_lossy(&reply);
        assert!(text.starts_with("HTTP/1.1 400 "), "{framing}: {text}");
        assert_eq!(asked.load(Ordering::Relaxed), 0, "{framing}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunked_body_is_forwarded_without_a_second_length() {
    let world = World::new().await;
    let program = Program::start(async |mut wire| {
        let head = wire.request_head().await.to_ascii_lowercase();
        assert!(head.starts_with("post /"), "{head}");
        assert!(!head.contains("content-length"), "{head}");
        assert_eq!(wire.line().await, "0");
        assert_eq!(wire.line().await, "");
        wire.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
            .await;
        assert_eq!(wire.rest().await, b"");
    })
    .await;
    let to = world.to(program.port);
    let smuggled = format!("GET /admin HTTP/1.1\r\n{to}\r\n");
    let length = format!("Content-Length: {}\r\n", smuggled.len() + 5);
    let coding = "Transfer-Encoding: chunked\r\n";
    for framing in [format!("{length}{coding}"), format!("{coding}{length}")] {
        let mut wire = Wire::connect(world.address).await;
        wire.send(format!(
            "POST / HTTP/1.1\r\n{to}{framing}\r\n0\r\n\r\n{smuggled}"
        ))
        .await;
        let reply = wire.head().await;
        assert_eq!(reply.status, 200);
        assert_eq!(reply.field("connection"), Some("close"));
        assert_eq!(wire.rest().await, b"ok");
    }
}

/// The same at the control plane, as RFC 9112, 6.1 permits: the coding counts, and the connection is closed.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_with_two_lengths_is_the_last_one_of_its_connection() {
    let world = World::counting().await.0;
    let host = "Host: localhost\r\n";
    let smuggled = format!("GET /control HTTP/1.1\r\n{host}\r\n");
    let length = format!("Content-Length: {}\r\n", smuggled.len() + 5);
    let coding = "Transfer-Encoding: chunked\r\n";
    for framing in [format!("{length}{coding}"), format!("{coding}{length}")] {
        let mut wire = Wire::connect(world.address).await;
        wire.send(format!(
            "POST /length HTTP/1.1\r\n{host}{framing}\r\n0\r\n\r\n{smuggled}"
        ))
        .await;
        let reply = wire.head().await;
        assert_eq!(reply.status, 200);
        assert_eq!(reply.field("connection"), Some("close"));
        assert_eq!(wire.rest().await, b"0");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_guesses_signatures_is_stopped() {
    let world = World::counting().await.0;
    let mut wire = Wire::connect(world.address).await;
    let host = "Host: localhost\r\n";
    let ask = |signature| format!("GET /files?path=x&signature={signature}");
    let mut refused = 0;
    let last = loop {
        let reply = wire.ask(&ask("v1_other"), host).await;
        match reply.status {
            401 => refused += 1,
            _ => break reply,
        }
        assert!(refused < 10_000);
    };
    assert_eq!((last.status, last.field("retry-after")), (429, Some("1")));
    assert!(refused >= 400, "{refused}");
    // Other connections continue.
    assert_eq!(wire.ask("GET /control", host).await.status, 200);
    let mut other = Wire::connect_from("127.0.0.2:0", world.address).await;
    assert_eq!(other.ask(&ask("v1_other"), host).await.status, 401);
}

/// A program in a sandbox must not make a reverse proxy in front of the server send files of its host.
#[tokio::test(flavor = "multi_thread")]
async fn orders_to_a_reverse_proxy_are_not_forwarded() {
    let program = Program::start(async |mut wire| {
        wire.request_head().await;
        wire.send(
            "HTTP/1.1 200 OK\r\nX-Accel-Redirect: /private/key\r\nX-Sendfile: /etc/shadow\r\n\
             X-Accel-Buffering: yes\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        )
        .await;
    })
    .await;
    let world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    let reply = wire.ask("GET /", &world.to(program.port)).await;
    assert_eq!(reply.field("x-accel-redirect"), None);
    assert_eq!(reply.field("x-sendfile"), None);
    assert_eq!(reply.field("x-accel-buffering"), Some("yes"));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_request_is_forwarded_as_exactly_one_request() {
    let world = World::new().await;
    // Answers with the request that it receives, and checks that no further data arrives on the same connection.
    let program = Program::start(async |mut wire| {
        let head = wire.request_head().await;
        let body = wire.exactly(4).await.unwrap();
        wire.send("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            .await;
        wire.send(head).await;
        wire.send(body).await;
        wire.stream.shutdown().await.unwrap();
        assert_eq!(wire.rest().await, b"");
    })
    .await;
    let to = world.to(program.port);
    let mut wire = Wire::connect(world.address).await;
    // Two requests in one write. The body of the first looks like the start of a request.
    wire.send(format!(
        "POST /a HTTP/1.1\r\n{to}Content-Length: 4\r\n\r\nGET POST /b HTTP/1.1\r\n{to}Content-Length: 4\r\n\r\nbody"
    ))
    .await;
    for (path, body) in [("/a", "GET "), ("/b", "body")] {
        let reply = wire.answer(false).await;
        let start = format!("POST {path} HTTP/1.1\r\n");
        assert!(reply.text().starts_with(&start), "{}", reply.text());
        assert!(reply.text().ends_with(body), "{}", reply.text());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_cannot_open_tunnels() {
    let world = World::new().await;
    for target in ["127.0.0.1:22", "localhost:80"] {
        let mut wire = Wire::connect(world.address).await;
        let reply = wire
            .ask(&format!("CONNECT {target}"), &world.to(ENVD))
            .await;
        assert_eq!(reply.status, 405);
    }
}

/// A guest that accepts the connection with `OK`, reads a request head and sends `answer`.
fn saying(
    answer: Vec<u8>,
) -> impl Fn(BufReader<UnixStream>) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
    let answer = Arc::new(answer);
    move |mut client| {
        let answer = Arc::clone(&answer);
        Box::pin(async move {
            client.write_all(b"OK 1\n").await.ok();
            read_head(&mut client).await;
            client.write_all(&answer).await.ok();
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_response_of_a_guest_is_a_bad_gateway() {
    let head = |field: &str| format!("HTTP/1.1 200 OK\r\n{field}\r\n\r\n").into_bytes();
    let many = vec!["x: 1"; 500].join("\r\n");
    for answer in [
        Vec::new(),
        b"HTTP/1.1 200".to_vec(),
        b"SSH-2.0-OpenSSH\r\n".to_vec(),
        vec![b'x'; 1 << 20],
        head(&format!("x: {}", "x".repeat(100 << 10))),
        head(&many),
        head("Content-Length: 1\r\nContent-Length: 2"),
        head("Content-Length: -1"),
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n".to_vec(),
        b"HTTP/1.1 999999 Big\r\n\r\n".to_vec(),
    ] {
        let start = String::from_utf8_lossy(&answer[..answer.len().min(60)]).into_owned();
        let world = World::with_guest(Setup::default(), saying(answer)).await;
        let mut wire = Wire::connect(world.address).await;
        let reply = wire.ask("GET /", &world.to(ENVD)).await;
        assert_eq!(reply.status, 502, "{start}");
        assert_eq!(reply.json()["code"], 502);
        // The server still works.
        assert_eq!(wire.ask("GET /control", "Host: x\r\n").await.status, 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signed_url_yields_neither_a_page_nor_a_script_of_the_servers_origin() {
    for kind in ["text/html", "text/javascript"] {
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nService-Worker-Allowed: /\r\nSet-Cookie: a=b\r\nContent-Length: 2\r\n\r\nhi"
        );
        let world = World::with_guest(Setup::default(), saying(answer.into())).await;
        let mut wire = Wire::connect(world.address).await;
        let target = "GET /files?path=x&signature=v1_read";
        let reply = wire.ask(target, "Host: 127.0.0.1\r\n").await;
        assert_eq!((reply.status, reply.text()), (200, "hi"));
        let bytes = Some("application/octet-stream");
        assert_eq!(reply.field("content-type"), bytes, "{kind}");
        assert_eq!(reply.field("x-content-type-options"), Some("nosniff"));
        let policy = reply.field("content-security-policy").unwrap();
        assert!(policy.starts_with("sandbox "), "{policy}");
        assert_eq!(reply.field("service-worker-allowed"), None);
        assert_eq!(reply.field("set-cookie"), None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_before_its_request_is_a_bad_gateway() {
    let early = b"OK 1\nHTTP/1.1 200 OK\r\n\r\nearly";
    for greeting in [&b"NO\n"[..], early, &[b'O'; 5000]] {
        let world = World::with_guest(Setup::default(), move |mut client| async move {
            client.write_all(greeting).await.ok();
            client.read_to_end(&mut Vec::new()).await.ok();
        })
        .await;
        let mut wire = Wire::connect(world.address).await;
        for port in [ENVD, 80] {
            let reply = wire.ask("GET /", &world.to(port)).await;
            assert_eq!(reply.status, 502, "{reply:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn truncated_responses_do_not_look_complete() {
    for answer in [
        &b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"[..],
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nzz\r\n",
    ] {
        let world = World::with_guest(Setup::default(), saying(answer.to_vec())).await;
        let mut wire = Wire::connect(world.address).await;
        wire.send(format!("GET / HTTP/1.1\r\n{}\r\n", world.to(ENVD)))
            .await;
        let reply = wire.head().await;
        assert_eq!(reply.status, 200);
        let rest = wire.rest().await;
        assert!(!rest.ends_with(b"0\r\n\r\n") && rest.len() < 20, "{rest:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hop_by_hop_headers_of_a_guest_are_not_forwarded() {
    let answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close, x-mine\r\nX-Mine: 1\r\n\
                  Keep-Alive: timeout=1\r\nUpgrade: h2c\r\nX-Other: 2\r\n\r\nok";
    let world = World::with_guest(Setup::default(), saying(answer.into())).await;
    let mut wire = Wire::connect(world.address).await;
    for _ in 0..2 {
        let reply = wire.ask("GET /", &world.to(ENVD)).await;
        assert_eq!((reply.status, reply.text()), (200, "ok"));
        assert_eq!(reply.field("x-other"), Some("2"));
        for name in ["connection", "x-mine", "keep-alive", "upgrade"] {
            assert_eq!(reply.field(name), None, "{name}");
        }
    }
}
