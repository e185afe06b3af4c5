//! Bodies: streamed in both directions, in bounded memory, with trailers and 100 Continue.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Request,
    body::{Bytes, Frame},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::mpsc,
    time::timeout,
};

use crate::{
    client::{self, LIMIT, empty, get, http1, http2, send1, send2, tls},
    origin::{self, Origin, acceptor, bytes},
    world::{Ca, SECRET, World},
};

/// Upper limit of the proxy's memory in bytes, whatever passes.
const MEMORY: u64 = 48 << 20;

/// 1 GiB with `CUBE_LONG` in the environment.
fn long() -> u64 {
    if std::env::var_os("CUBE_LONG").is_some() {
        1 << 30
    } else {
        64 << 20
    }
}

async fn world(protocol: &str) -> (World, Origin, Ipv4Addr) {
    let servers = Arc::new(Ca::new("servers"));
    let origin = Origin::tls(&servers, &["api.test"], &[protocol]).await;
    let world = World::new(&servers, origin.address.port(), &[]);
    let guest = world.guest(origin.address, &["api.test"]);
    world.rule("api.test", SECRET);
    (world, origin, guest)
}

/// Reads a body without storing it.
async fn length(mut body: hyper::body::Incoming) -> u64 {
    let mut length = 0;
    while let Some(frame) = timeout(LIMIT, body.frame()).await.unwrap() {
        length += frame.unwrap().data_ref().map_or(0, Bytes::len) as u64;
    }
    length
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_bodies_pass_in_bounded_memory() {
    for protocol in ["http/1.1", "h2"] {
        let (world, _origin, guest) = world(protocol).await;
        let stream = tls(&world, guest, "api.test", &[protocol]).await.unwrap();
        let path = format!("/bytes/{}", long());
        let up = Request::put("https://api.test/sink")
            .header("host", "api.test")
            .body(bytes(long()))
            .unwrap();
        if protocol == "h2" {
            let mut sender = http2(stream).await;
            let down = Request::get(format!("https://api.test{path}"))
                .body(empty())
                .unwrap();
            let response = sender.send_request(down).await.unwrap();
            assert_eq!(length(response.into_body()).await, long());
            let response = sender.send_request(up).await.unwrap();
            assert_eq!(client::answer(response).await.text, format!("{} ", long()));
        } else {
            let mut sender = http1(stream).await;
            let response = sender.send_request(get("api.test", &path)).await.unwrap();
            assert_eq!(length(response.into_body()).await, long());
            sender.ready().await.unwrap();
            let (mut parts, body) = up.into_parts();
            parts.uri = "/sink".parse().unwrap();
            let response = sender
                .send_request(Request::from_parts(parts, body))
                .await
                .unwrap();
            assert_eq!(client::answer(response).await.text, format!("{} ", long()));
        }
        let call = world.call(guest, |call| call.method.as_deref() == Some("PUT"));
        assert_eq!(call.bytes_out, long());
        let memory = world.peak_memory();
        println!(
            "{protocol}: {} MiB each way, at most {} MiB resident",
            long() >> 20,
            memory >> 20
        );
        assert!(memory < MEMORY, "{protocol}: {memory} bytes");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_does_not_read_stops_the_server() {
    for protocol in ["http/1.1", "h2"] {
        let (world, _origin, guest) = world(protocol).await;
        let stream = tls(&world, guest, "api.test", &[protocol]).await.unwrap();
        let path = format!("/bytes/{}", 1_u64 << 30);
        let response = if protocol == "h2" {
            let request = Request::get(format!("https://api.test{path}"))
                .body(empty())
                .unwrap();
            http2(stream).await.send_request(request).await.unwrap()
        } else {
            http1(stream)
                .await
                .send_request(get("api.test", &path))
                .await
                .unwrap()
        };
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(
            world.peak_memory() < MEMORY,
            "{protocol}: {} bytes",
            world.peak_memory()
        );
        drop(response);
        let call = world.call(guest, |call| call.status == Some(200));
        assert!(call.bytes_in < 64 << 20, "{call:?}");
    }
}

/// A body whose frames are sent while it is in flight.
fn channel() -> (mpsc::Sender<Frame<Bytes>>, client::Body) {
    let (sender, mut receiver) = mpsc::channel(1);
    let frames = Polled(move |cx: &mut std::task::Context<'_>| {
        receiver.poll_recv(cx).map(|frame| frame.map(Ok))
    });
    (
        sender,
        BodyExt::boxed(Unsync(std::sync::Mutex::new(frames))),
    )
}

struct Polled<F>(F);
struct Unsync<F>(std::sync::Mutex<Polled<F>>);

impl<F> hyper::body::Body for Unsync<F>
where
    F: FnMut(
            &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<Frame<Bytes>, hyper::Error>>>
        + Unpin,
{
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        (self.0.lock().unwrap().0)(cx)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_are_streamed_with_trailers() {
    for protocol in ["http/1.1", "h2"] {
        let (world, _origin, guest) = world(protocol).await;
        let stream = tls(&world, guest, "api.test", &[protocol]).await.unwrap();
        let (sender, body) = channel();
        let is_http2 = protocol == "h2";
        let uri = if is_http2 {
            "https://api.test/echo"
        } else {
            "/echo"
        };
        let request = Request::post(uri)
            .header("te", "trailers")
            .header("trailer", "x-check");
        let request = if is_http2 {
            request
        } else {
            request.header("host", "api.test")
        };
        let request = request.body(body).unwrap();
        let response = if is_http2 {
            http2(stream).await.send_request(request).await
        } else {
            http1(stream).await.send_request(request).await
        };
        let mut body = response.unwrap().into_body();
        for part in ["one", "two"] {
            // Each part comes back before the next is sent.
            sender.send(Frame::data(Bytes::from(part))).await.unwrap();
            let frame = timeout(LIMIT, body.frame())
                .await
                .unwrap()
                .unwrap()
                .unwrap();
            assert_eq!(frame.into_data().unwrap(), part, "{protocol}");
        }
        let mut trailers = HeaderMap::new();
        trailers.insert("x-check", "sum".parse().unwrap());
        trailers.insert("x-api-key", "own".parse().unwrap());
        sender.send(Frame::trailers(trailers)).await.unwrap();
        drop(sender);
        let frame = timeout(LIMIT, body.frame())
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        let trailers = frame.into_trailers().unwrap();
        assert_eq!(trailers["x-check"], "sum", "{protocol}");
        assert!(!trailers.contains_key("x-api-key"), "{protocol}");
        assert!(body.frame().await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_hundred_continue_is_the_servers() {
    let servers = Arc::new(Ca::new("servers"));
    let acceptor = acceptor(&servers, &["api.test"], &["http/1.1"]);
    let (arrived, mut early) = mpsc::channel(10);
    let address = origin::raw(move |stream| {
        let (acceptor, arrived) = (acceptor.clone(), arrived.clone());
        async move {
            let Ok(mut stream) = acceptor.accept(stream).await else {
                return;
            };
            let mut buffer = vec![0; 4096];
            let read = stream.read(&mut buffer).await.unwrap();
            let head = String::from_utf8_lossy(&buffer[..read]).into_owned();
            assert!(
                head.to_ascii_lowercase().contains("expect: 100-continue"),
                "{head}"
            );
            if head.starts_with("PUT /refused") {
                stream
                    .write_all(b"HTTP/1.1 417 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    .await
                    .unwrap();
                let _ = stream.shutdown().await;
                return;
            }
            // No part of the body comes before the response.
            let more = timeout(Duration::from_millis(100), stream.read(&mut buffer)).await;
            arrived.send(more.is_ok()).await.unwrap();
            stream
                .write_all(b"HTTP/1.1 100 Continue\r\n\r\n")
                .await
                .unwrap();
            let read = stream.read(&mut buffer).await.unwrap();
            let answer =
                format!("HTTP/1.1 200 OK\r\nContent-Length: {read}\r\nConnection: close\r\n\r\n");
            stream.write_all(answer.as_bytes()).await.unwrap();
            stream.write_all(&buffer[..read]).await.unwrap();
            let _ = stream.shutdown().await;
        }
    })
    .await;
    let world = World::new(&servers, address.port(), &[]);
    let guest = world.guest(address, &["api.test"]);
    world.rule("api.test", SECRET);
    let head = |path: &str| {
        format!(
            "PUT {path} HTTP/1.1\r\nHost: api.test\r\nContent-Length: 5\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
        )
    };
    let mut stream = tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap();
    stream.write_all(head("/").as_bytes()).await.unwrap();
    let mut buffer = [0; 25];
    timeout(LIMIT, stream.read_exact(&mut buffer))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(&buffer, b"HTTP/1.1 100 Continue\r\n\r\n");
    let answer = client::exchange(stream, b"hello").await;
    assert!(
        answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("hello"),
        "{answer}"
    );
    assert_eq!(early.recv().await, Some(false));
    let stream = tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap();
    let answer = client::exchange(stream, head("/refused").as_bytes()).await;
    assert_eq!(client::statuses(&answer), [417], "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_may_answer_before_the_body_is_read() {
    let (world, _origin, guest) = world("h2").await;
    let mut sender = http2(tls(&world, guest, "api.test", &["h2"]).await.unwrap()).await;
    let request = Request::put("https://api.test/early")
        .body(bytes(1 << 20))
        .unwrap();
    assert_eq!(send2(&mut sender, request).await.status, 413);
    let request = Request::get("https://api.test/").body(empty()).unwrap();
    assert_eq!(send2(&mut sender, request).await.text, "ok");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_and_empty_bodies_keep_their_length() {
    let (world, _origin, guest) = world("http/1.1").await;
    let mut sender = http1(tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap()).await;
    let head = Request::head("/bytes/1000")
        .header("host", "api.test")
        .body(empty())
        .unwrap();
    assert_eq!(send1(&mut sender, head).await.text, "");
    let answer = send1(&mut sender, get("api.test", "/")).await;
    assert_eq!(
        (answer.text.as_str(), &answer.headers["content-length"]),
        ("ok", &"2".parse().unwrap())
    );
    assert!(answer.trailers.is_none());
    // A GET with a chunked body keeps it.
    let (parts, frames) = channel();
    let request = Request::get("/sink")
        .header("host", "api.test")
        .header("transfer-encoding", "chunked");
    let send = async {
        parts.send(Frame::data(Bytes::from("abc"))).await.unwrap();
        drop(parts);
    };
    let ((), answer) = tokio::join!(send, send1(&mut sender, request.body(frames).unwrap()));
    assert_eq!(answer.text, "3 ");
}
