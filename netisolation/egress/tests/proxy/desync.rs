//! A server with the CL.0 vulnerability: it ignores the bodies of some requests, and parses them as the next request.

use std::sync::{Arc, Mutex};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::TlsAcceptor;

use crate::{
    client::{exchange, tls},
    origin::{self, acceptor},
    world::{Ca, SECRET, World},
};

/// Path at which the server reads the body of a request.
const STORE: &str = "/store";
/// The request whose header the guest wants to read.
const VICTIM: &str = "GET / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n";

/// The requests that a server has stored.
type Stored = Arc<Mutex<String>>;

async fn serve(stream: TcpStream, acceptor: TlsAcceptor, stored: Stored) {
    if let Ok(stream) = acceptor.accept(stream).await {
        // A proxy that closes the connection is not an error.
        let _ = answer(stream, &stored).await;
    }
}

async fn answer(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    stored: &Stored,
) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    loop {
        let head = next(&mut stream, &mut bytes).await?;
        if head.contains(STORE) {
            // As long as the attacker claims. A complete head is enough.
            let body = next(&mut stream, &mut bytes).await?;
            *stored.lock().unwrap() += &body;
        }
        let status = if head.contains("/moved") { 301 } else { 200 };
        let answer = format!("HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n");
        stream.write_all(answer.as_bytes()).await?;
        stream.flush().await?;
    }
}

/// Bytes up to the next empty line.
async fn next(
    stream: &mut (impl AsyncRead + Unpin),
    bytes: &mut Vec<u8>,
) -> std::io::Result<String> {
    loop {
        if let Some(at) = bytes.windows(4).position(|part| part == b"\r\n\r\n") {
            return Ok(String::from_utf8(bytes.drain(..at + 4).collect()).unwrap());
        }
        if stream.read_buf(bytes).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
}

async fn world() -> (World, std::net::Ipv4Addr, Stored) {
    let servers = Arc::new(Ca::new("servers"));
    let acceptor = acceptor(&servers, &["api.test"], &["http/1.1"]);
    let stored = Stored::default();
    let kept = Arc::clone(&stored);
    let address = origin::raw(move |stream| serve(stream, acceptor.clone(), Arc::clone(&kept)));
    let address = address.await;
    let world = World::new(&servers, address.port(), &[]);
    let guest = world.guest(address, &["api.test"]);
    world.rule("api.test", SECRET);
    (world, guest, stored)
}

fn smuggled() -> String {
    format!("POST {STORE} HTTP/1.1\r\nHost: api.test\r\nContent-Length: 68\r\n\r\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_the_server_ignores_does_not_take_the_headers_of_the_next_request() {
    for first in [
        "GET /",
        "HEAD /",
        "OPTIONS /",
        "DELETE /",
        "PROPFIND /",
        "POST /moved",
    ] {
        let (world, guest, stored) = world().await;
        let smuggled = smuggled();
        let length = smuggled.len();
        let head =
            format!("{first} HTTP/1.1\r\nHost: api.test\r\nContent-Length: {length}\r\n\r\n");
        let stream = tls(&world, guest, "api.test", &[]).await.unwrap();
        let bytes = head + &smuggled + VICTIM;
        let answers = exchange(stream, bytes.as_bytes()).await;
        assert_eq!(
            answers.matches("HTTP/1.1 ").count(),
            2,
            "{first}: {answers}"
        );
        let stored = stored.lock().unwrap().clone();
        assert!(!stored.contains(SECRET), "{first}: {stored}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_ends_after_the_answer_does_not_take_the_headers_of_the_next_request() {
    let (world, guest, stored) = world().await;
    let smuggled = smuggled();
    let length = smuggled.len();
    let head = format!("POST / HTTP/1.1\r\nHost: api.test\r\nContent-Length: {length}\r\n\r\n");
    let mut stream = tls(&world, guest, "api.test", &[]).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        assert!(stream.read_buf(&mut answer).await.unwrap() > 0);
    }
    let bytes = smuggled + VICTIM;
    let answers = exchange(stream, bytes.as_bytes()).await;
    assert_eq!(answers.matches("HTTP/1.1 ").count(), 1, "{answers}");
    let stored = stored.lock().unwrap().clone();
    assert!(!stored.contains(SECRET), "{stored}");
}
