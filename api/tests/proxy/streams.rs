//! Bodies in both directions are forwarded immediately and with back-pressure, and arrive either complete or visibly
//! truncated.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use envd::{Blob, frame};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Semaphore, mpsc};

use crate::guest::Program;
use crate::wire::Wire;
use crate::world::{World, soon, until};

const ENVD: u16 = 49_983;
const MIB: usize = 1 << 20;
/// More bytes than all buffers between the two ends can hold.
const MUCH: usize = 64 * MIB;

/// Runs a command with `process.Process/Start`, as the SDKs do.
async fn start(wire: &mut Wire, world: &World, script: &str) {
    let message = serde_json::json!({
        "process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": false,
    });
    let message = message.to_string();
    let mut body = vec![0];
    body.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    body.extend(message.as_bytes());
    let length = body.len();
    let kind = "Content-Type: application/connect+json\r\nConnect-Protocol-Version: 1\r\n";
    wire.send(format!(
        "POST /process.Process/Start HTTP/1.1\r\n{}{kind}Content-Length: {length}\r\n\r\n",
        world.to(ENVD)
    ))
    .await;
    wire.send(body).await;
}

/// The output of a command whose stream has been read completely.
fn output(stream: &[u8]) -> String {
    let mut rest = stream;
    let mut text = Vec::new();
    while let Ok(Some((frame, used))) = frame::decode(rest, 1 << 20) {
        rest = &rest[used..];
        let event: serde_json::Value = serde_json::from_slice(frame.body).unwrap();
        if let Some(data) = event["event"]["data"]["stdout"].as_str() {
            text.extend(Blob::decode(data.as_bytes()).unwrap());
        }
    }
    String::from_utf8(text).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_of_a_command_is_forwarded_unchanged() {
    let world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    for round in 0..3 {
        start(&mut wire, &world, &format!("echo {round}")).await;
        let reply = wire.answer(false).await;
        assert_eq!(reply.status, 200);
        assert_eq!(
            reply.field("content-type"),
            Some("application/connect+json")
        );
        assert_eq!(output(&reply.body), format!("{round}\n"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_streams_run_concurrently() {
    const STREAMS: usize = 200;
    let world = Arc::new(World::new().await);
    let mut running = tokio::task::JoinSet::new();
    // Each stream waits for a file, so that no stream ends before all have started.
    let gate = world.dir.path().join("gate");
    let (begun, mut all_begun) = mpsc::channel(STREAMS);
    for at in 0..STREAMS {
        let (world, begun) = (Arc::clone(&world), begun.clone());
        let gate = gate.display().to_string();
        running.spawn(async move {
            let mut wire = Wire::connect(world.address).await;
            let script = format!("while ! [ -e {gate} ]; do sleep 0.5; done; echo {at}");
            start(&mut wire, &world, &script).await;
            assert_eq!(wire.head().await.status, 200);
            let mut stream = wire.chunk().await.unwrap();
            begun.send(()).await.unwrap();
            loop {
                let chunk = wire.chunk().await.expect("a complete stream");
                if chunk.is_empty() {
                    break;
                }
                stream.extend(chunk);
            }
            assert_eq!(output(&stream), format!("{at}\n"));
        });
    }
    for _ in 0..STREAMS {
        soon("the start of all streams", all_begun.recv())
            .await
            .unwrap();
    }
    // Other requests are served meanwhile.
    let mut wire = Wire::connect(world.address).await;
    assert_eq!(wire.ask("GET /health", &world.to(ENVD)).await.status, 204);
    std::fs::write(gate, "").unwrap();
    while let Some(done) = running.join_next().await {
        done.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_event_arrives_before_the_next_is_sent() {
    let world = World::new().await;
    let seen = Arc::new(Semaphore::new(0));
    let reply = Arc::clone(&seen);
    let program = Program::start(move |mut wire| {
        let seen = Arc::clone(&reply);
        async move {
            wire.request_head().await;
            wire.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
                .await;
            for at in 0..20 {
                wire.send(format!("9\r\ndata: {at:02}\n\r\n")).await;
                seen.acquire().await.unwrap().forget();
            }
            wire.send("0\r\n\r\n").await;
        }
    })
    .await;
    let mut wire = Wire::connect(world.address).await;
    wire.send(format!("GET / HTTP/1.1\r\n{}\r\n", world.to(program.port)))
        .await;
    let head = wire.head().await;
    assert_eq!(head.field("content-type"), Some("text/event-stream"));
    for at in 0..20 {
        let chunk = wire.chunk().await.unwrap();
        assert_eq!(chunk, format!("data: {at:02}\n").into_bytes());
        seen.add_permits(1);
    }
    assert_eq!(wire.chunk().await.unwrap(), b"");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_killed_during_a_stream_truncates_it() {
    let mut world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    start(&mut wire, &world, "echo first; sleep 1000").await;
    assert_eq!(wire.head().await.status, 200);
    wire.chunk().await.unwrap();
    world.kill();
    while let Some(chunk) = wire.chunk().await {
        assert!(!chunk.is_empty(), "the truncated stream looks complete");
    }
    let mut wire = Wire::connect(world.address).await;
    let reply = wire.ask("GET /health", &world.to(ENVD)).await;
    assert_eq!(reply.status, 502);
    assert!(reply.text().contains("was not found"));
}

/// After a reset, clients check whether the sandbox is still running. If a stream merely ends early, some clients
/// report an error of the server.
#[tokio::test(flavor = "multi_thread")]
async fn a_truncated_stream_is_reset_and_a_complete_one_is_not() {
    let mut world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    start(&mut wire, &world, "echo whole").await;
    assert_eq!(output(&wire.answer(false).await.body), "whole\n");
    start(&mut wire, &world, "echo first; sleep 1000").await;
    assert_eq!(wire.head().await.status, 200);
    wire.chunk().await.unwrap();
    world.kill();
    assert_eq!(end_of(&mut wire).await, Some(ErrorKind::ConnectionReset));

    let world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    let last = format!("{}Connection: close\r\n", world.to(ENVD));
    wire.send(format!("GET /health HTTP/1.1\r\n{last}\r\n"))
        .await;
    assert_eq!(end_of(&mut wire).await, None);
}

/// The error that ends a connection. `None`: a plain end.
async fn end_of(wire: &mut Wire) -> Option<ErrorKind> {
    let mut rest = Vec::new();
    let ended = soon("the end", wire.stream.read_to_end(&mut rest)).await;
    ended.err().map(|error| error.kind())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_guest_sees_the_disconnect_of_a_client() {
    let world = World::new().await;
    let (gone, mut is_gone) = mpsc::channel(1);
    let program = Program::start(move |mut wire| {
        let gone = gone.clone();
        async move {
            wire.request_head().await;
            wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
                .await;
            wire.is_closed().await;
            gone.send(()).await.unwrap();
        }
    })
    .await;
    // A disconnect after the head of the response, and one before it.
    let mut wire = Wire::connect(world.address).await;
    wire.send(format!("GET / HTTP/1.1\r\n{}\r\n", world.to(program.port)))
        .await;
    wire.head().await;
    wire.chunk().await.unwrap();
    drop(wire);
    soon("the end of the program's connection", is_gone.recv())
        .await
        .unwrap();

    let silent = Program::start({
        let (gone, is_gone_too) = mpsc::channel(1);
        is_gone = is_gone_too;
        move |mut wire| {
            let gone = gone.clone();
            async move {
                wire.request_head().await;
                gone.send(()).await.unwrap();
                wire.is_closed().await;
                gone.send(()).await.unwrap();
            }
        }
    })
    .await;
    let mut wire = Wire::connect(world.address).await;
    wire.send(format!("GET / HTTP/1.1\r\n{}\r\n", world.to(silent.port)))
        .await;
    soon("the request", is_gone.recv()).await.unwrap();
    drop(wire);
    soon("the end of the pending request", is_gone.recv())
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_client_slows_the_sandbox_down() {
    let world = World::new().await;
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&sent);
    let program = Program::start(move |mut wire| {
        let sent = Arc::clone(&counter);
        async move {
            wire.request_head().await;
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {MUCH}\r\n\r\n");
            wire.send(head).await;
            let piece = vec![b'x'; MIB];
            for _ in 0..MUCH / MIB {
                if wire.stream.write_all(&piece).await.is_err() {
                    return;
                }
                sent.fetch_add(MIB, Ordering::Relaxed);
            }
        }
    })
    .await;
    let mut wire = Wire::connect(world.address).await;
    wire.send(format!("GET / HTTP/1.1\r\n{}\r\n", world.to(program.port)))
        .await;
    wire.head().await;
    settled(&sent).await;
    assert!(sent.load(Ordering::Relaxed) < MUCH / 2, "{sent:?}");
    let body = wire.exactly(MUCH).await.unwrap();
    assert_eq!(body.len(), MUCH);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_sandbox_slows_the_client_down() {
    let world = World::new().await;
    let go = Arc::new(Semaphore::new(0));
    let reply = Arc::clone(&go);
    let program = Program::start(move |mut wire| {
        let go = Arc::clone(&reply);
        async move {
            wire.request_head().await;
            go.acquire().await.unwrap().forget();
            let body = wire.exactly(MUCH).await.unwrap();
            let reply = body.len().to_string();
            let length = reply.len();
            wire.send(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{reply}"
            ))
            .await;
            wire.is_closed().await;
        }
    })
    .await;
    let wire = Wire::connect(world.address).await;
    let (mut reading, mut writing) = wire.stream.into_split();
    let head = format!(
        "POST / HTTP/1.1\r\n{}Connection: close\r\nContent-Length: {MUCH}\r\n\r\n",
        world.to(program.port)
    );
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&sent);
    let sending = tokio::spawn(async move {
        writing.write_all(head.as_bytes()).await.unwrap();
        let piece = vec![b'x'; MIB];
        for _ in 0..MUCH / MIB {
            writing.write_all(&piece).await.unwrap();
            counter.fetch_add(MIB, Ordering::Relaxed);
        }
        writing
    });
    settled(&sent).await;
    assert!(sent.load(Ordering::Relaxed) < MUCH / 2, "{sent:?}");
    go.add_permits(1);
    let _open = soon("sending", sending).await.unwrap();
    let mut reply = String::new();
    soon("the answer", reading.read_to_string(&mut reply))
        .await
        .unwrap();
    assert!(reply.ends_with(&MUCH.to_string()), "{reply}");
}

/// Waits until a count is positive and does not change for a while.
async fn settled(count: &AtomicUsize) {
    let mut last = 0;
    let mut since = std::time::Instant::now();
    until("standstill", || {
        let now = count.load(Ordering::Relaxed);
        if now != last {
            last = now;
            since = std::time::Instant::now();
        }
        last > 0 && since.elapsed() > Duration::from_millis(300)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_all_sizes_are_forwarded_in_both_directions() {
    let world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    for size in [0, 1, 70_000, 5 * MIB + 3] {
        let content: Vec<u8> = (0..size)
            .map(|at| u8::try_from(at % 251).unwrap())
            .collect();
        let path = world.dir.path().join("file");
        let url = format!("/files?path={}", path.display());
        let kind = "Content-Type: application/octet-stream\r\n";
        let fields = format!("{}{kind}", world.to(ENVD));
        let reply = wire.post(&url, &fields, &content).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        assert!(std::fs::read(&path).unwrap() == content);
        let reply = wire.ask(&format!("GET {url}"), &world.to(ENVD)).await;
        assert!(reply.status == 200 && reply.body == content, "{size}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_and_trailers_are_forwarded_in_both_directions() {
    let world = World::new().await;
    let program = Program::start(async |mut wire| {
        let head = wire.request_head().await.to_ascii_lowercase();
        assert!(head.contains("transfer-encoding: chunked"), "{head}");
        assert!(head.contains("te: trailers"), "{head}");
        let mut body = Vec::new();
        loop {
            let chunk = wire.chunk().await.unwrap();
            if chunk.is_empty() {
                break;
            }
            body.extend(chunk);
        }
        let trailer = wire.line().await.to_ascii_lowercase();
        assert_eq!(
            (body.as_slice(), trailer.as_str()),
            (&b"abcdef"[..], "x-sum: 1")
        );
        wire.send(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Back\r\n\r\n\
             3\r\nxyz\r\n0\r\nX-Back: 2\r\n\r\n",
        )
        .await;
        wire.is_closed().await;
    })
    .await;
    let mut wire = Wire::connect(world.address).await;
    let to = world.to(program.port);
    wire.send(format!(
        "POST / HTTP/1.1\r\n{to}Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\nTE: trailers\r\nConnection: TE\r\n\r\n"
    ))
    .await;
    wire.send("3\r\nabc\r\n3\r\ndef\r\n0\r\nX-Sum: 1\r\n\r\n")
        .await;
    let reply = wire.answer(false).await;
    assert_eq!((reply.status, reply.text()), (200, "xyz"));
    assert_eq!(reply.trailers, ["x-back: 2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_without_a_body_keep_their_length() {
    let world = World::new().await;
    let program = Program::start(async |mut wire| {
        let head = wire.request_head().await;
        assert!(head.starts_with("HEAD "), "{head}");
        wire.send("HTTP/1.1 200 OK\r\nContent-Length: 12345\r\nETag: \"x\"\r\n\r\n")
            .await;
        wire.is_closed().await;
    })
    .await;
    let mut wire = Wire::connect(world.address).await;
    for _ in 0..2 {
        let reply = wire.ask("HEAD /", &world.to(program.port)).await;
        assert_eq!(
            (reply.status, reply.field("content-length")),
            (200, Some("12345"))
        );
        assert_eq!(reply.field("etag"), Some("\"x\""));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn expect_100_continue_is_answered() {
    let world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    let path = world.dir.path().join("expected");
    let to = world.to(ENVD);
    wire.send(format!(
        "POST /files?path={} HTTP/1.1\r\n{to}Content-Type: application/octet-stream\r\n\
         Expect: 100-continue\r\nContent-Length: 4\r\n\r\n",
        path.display()
    ))
    .await;
    assert_eq!(wire.head().await.status, 100);
    wire.send("four").await;
    assert_eq!(wire.answer(false).await.status, 200);
    assert_eq!(std::fs::read(path).unwrap(), b"four");
    // The server does not send `100 Continue` for a body that it will not forward.
    let gone = "Host: x\r\nE2b-Sandbox-Id: i0000000000000000000\r\nE2b-Sandbox-Port: 80\r\n";
    wire.send(format!(
        "POST / HTTP/1.1\r\n{gone}Expect: 100-continue\r\nContent-Length: 4\r\n\r\n"
    ))
    .await;
    assert_eq!(wire.head().await.status, 502);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_early_response_reaches_a_client_that_still_sends_its_body() {
    let world = World::new().await;
    let gone = "Host: x\r\nE2b-Sandbox-Id: i0000000000000000000\r\nE2b-Sandbox-Port: 49983\r\n";
    for (fields, expected) in [(gone, 502), ("Host: x\r\n", 404)] {
        let mut wire = Wire::connect(world.address).await;
        // The client sends its whole body without reading, and then a second request on the same connection.
        let body = vec![b'x'; 8 * MIB];
        let reply = wire.post("/nowhere", fields, &body).await;
        assert_eq!(reply.status, expected);
        let reply = wire.ask("GET /control", "Host: x\r\n").await;
        assert_eq!(reply.status, 200);
    }
}

/// nginx forwards such an answer as it arrives, whatever its configuration.
#[tokio::test(flavor = "multi_thread")]
async fn every_stream_asks_reverse_proxies_not_to_buffer_it() {
    let world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    start(&mut wire, &world, "echo").await;
    let reply = wire.answer(false).await;
    assert_eq!(reply.field("x-accel-buffering"), Some("no"));
    let reply = wire.ask("GET /stream", "Host: localhost\r\n").await;
    assert_eq!(reply.field("x-accel-buffering"), Some("no"));
    for (path, fields) in [
        ("/control", "Host: localhost\r\n"),
        ("/metrics", &world.to(ENVD)),
    ] {
        let reply = wire.ask(&format!("GET {path}"), fields).await;
        assert_eq!(reply.field("x-accel-buffering"), None, "{path}");
    }
}
