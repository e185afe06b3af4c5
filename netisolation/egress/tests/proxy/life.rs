//! Limits, cuts, and the end of the proxy or its owner.

use std::{
    net::Ipv4Addr,
    os::unix::process::ExitStatusExt,
    sync::Arc,
    time::{Duration, Instant},
};

use egress::control::ToProxy;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    client::{connect, exchange, get, http1, send1, statuses, tls, until_end},
    origin::{self, Origin},
    world::{Ca, SECRET, World},
};

async fn world(options: &[&str]) -> (World, Origin, Ipv4Addr) {
    let servers = Arc::new(Ca::new("servers"));
    let origin = Origin::tls(&servers, &["api.test", "free.test"], &["http/1.1"]).await;
    let world = World::new(&servers, origin.address.port(), options);
    let guest = world.guest(origin.address, &["api.test", "free.test"]);
    world.rule("api.test", SECRET);
    (world, origin, guest)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_sends_too_many_requests_is_refused() {
    let (world, origin, guest) = world(&["--sandbox-requests", "5"]).await;
    let other = world.guest(origin.address, &["api.test"]);
    let mut sender = http1(tls(&world, guest, "api.test", &[]).await.unwrap()).await;
    let mut codes = Vec::new();
    for _ in 0..14 {
        codes.push(
            send1(&mut sender, get("api.test", "/"))
                .await
                .status
                .as_u16(),
        );
    }
    assert!(
        codes.starts_with(&[200; 10]) && codes.contains(&429),
        "{codes:?}"
    );
    let mut sender = http1(tls(&world, other, "api.test", &[]).await.unwrap()).await;
    assert_eq!(send1(&mut sender, get("api.test", "/")).await.status, 200);
    let call = world.call(guest, |call| call.status == Some(429));
    assert_eq!(call.refused.unwrap(), "the sandbox sends too many requests");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_with_too_many_connections_is_refused() {
    let (world, origin, guest) = world(&["--sandbox-connections", "2"]).await;
    let other = world.guest(origin.address, &["free.test"]);
    let one = tls(&world, guest, "free.test", &[]).await.unwrap();
    let two = tls(&world, guest, "api.test", &[]).await.unwrap();
    tls(&world, guest, "free.test", &[]).await.unwrap_err();
    let call = world.call(guest, |call| call.refused.is_some());
    assert_eq!(
        call.refused.unwrap(),
        "the sandbox has too many connections"
    );
    tls(&world, other, "free.test", &[]).await.unwrap();
    drop((one, two));
    world.call(guest, |call| call.name.as_deref() == Some("free.test"));
    tls(&world, guest, "free.test", &[]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_the_limit_of_all_the_longest_idle_connection_of_the_sandbox_with_most_is_closed() {
    let (world, origin, guest) = world(&["--connections", "4"]).await;
    let other = world.guest(origin.address, &["free.test"]);
    let mut greedy = Vec::new();
    for _ in 0..4 {
        let stream = tls(&world, guest, "free.test", &[]).await.unwrap();
        greedy.push(http1(stream).await);
    }
    // In use again. Now the second has been idle for the longest time.
    for number in [0, 2, 3] {
        let answer = send1(&mut greedy[number], get("free.test", "/")).await;
        assert_eq!(answer.text, "ok");
    }
    let mut sender = http1(tls(&world, other, "free.test", &[]).await.unwrap()).await;
    assert_eq!(send1(&mut sender, get("free.test", "/")).await.text, "ok");
    let limit = Instant::now() + Duration::from_secs(10);
    while !greedy[1].is_closed() {
        assert!(Instant::now() < limit, "the idle connection stays open");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for number in [0, 2, 3] {
        let answer = send1(&mut greedy[number], get("free.test", "/")).await;
        assert_eq!(answer.text, "ok", "{number}");
    }
    let call = world.call(guest, |call| call.refused.is_some());
    let reason = call.refused.unwrap();
    assert!(reason.contains("idle for the longest time"), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_ends_all_connections_of_the_sandbox_alone() {
    let (world, origin, guest) = world(&[]).await;
    let other = world.guest(origin.address, &["api.test"]);
    let spliced = tls(&world, guest, "free.test", &[]).await.unwrap();
    let idle = tls(&world, guest, "api.test", &[]).await.unwrap();
    let waiting = connect(&world, guest).await;
    let mut kept = http1(tls(&world, other, "api.test", &[]).await.unwrap()).await;
    world.send(&ToProxy::Cut {
        sandbox: World::sandbox(guest),
    });
    for text in [
        until_end(spliced).await,
        until_end(idle).await,
        until_end(waiting).await,
    ] {
        assert_eq!(text, "");
    }
    assert_eq!(send1(&mut kept, get("api.test", "/")).await.status, 200);
    // The sandbox may connect again, under its current policy.
    tls(&world, guest, "api.test", &[]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_the_control_socket_only_unread_connections_continue() {
    let (mut world, _origin, guest) = world(&[]).await;
    let mut spliced = http1(tls(&world, guest, "free.test", &[]).await.unwrap()).await;
    let idle = tls(&world, guest, "api.test", &[]).await.unwrap();
    world.close_control();
    assert_eq!(until_end(idle).await, "");
    // The listener is closed: no process accepts, or the kernel refuses.
    let limit = Instant::now() + Duration::from_secs(10);
    while TcpStream::connect(world.address).await.is_ok() {
        assert!(Instant::now() < limit, "the listener stays open");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(send1(&mut spliced, get("free.test", "/")).await.text, "ok");
    assert!(world.process.try_wait().unwrap().is_none());
    drop(spliced);
    let status = tokio::task::block_in_place(|| world.process.wait().unwrap());
    assert!(status.success(), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_the_process_ends_all_connections() {
    let (mut world, _origin, guest) = world(&[]).await;
    let spliced = tls(&world, guest, "free.test", &[]).await.unwrap();
    let idle = tls(&world, guest, "api.test", &[]).await.unwrap();
    world.process.kill().unwrap();
    assert_eq!(world.process.wait().unwrap().signal(), Some(9));
    assert_eq!(until_end(spliced).await + &until_end(idle).await, "");
    TcpStream::connect(world.address).await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_an_answer_nothing_is_forwarded() {
    let (world, origin, guest) = world(&[]).await;
    let plain = Origin::plain().await;
    let plain_guest = world.guest(plain.address, &["api.test"]);
    let mut tls_sender = http1(tls(&world, guest, "api.test", &[]).await.unwrap()).await;
    let mut plain_sender = http1(connect(&world, plain_guest).await).await;
    send1(&mut plain_sender, get("api.test", "/")).await;
    world.silence();
    let refused = tls(&world, guest, "api.test", &[]);
    let (one, two, refused) = tokio::join!(
        send1(&mut tls_sender, get("api.test", "/")),
        send1(&mut plain_sender, get("api.test", "/")),
        refused
    );
    assert_eq!((one.status.as_u16(), two.status.as_u16()), (503, 503));
    refused.unwrap_err();
    assert_eq!((origin.seen().len(), plain.seen().len()), (0, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_heads_and_handshakes_end() {
    let (world, _origin, guest) = world(&[]).await;
    let plain = Origin::plain().await;
    let plain_guest = world.guest(plain.address, &["api.test"]);
    let nothing = connect(&world, guest).await;
    let mut partial = connect(&world, guest).await;
    partial.write_all(&[22, 3, 1]).await.unwrap();
    let head = connect(&world, plain_guest).await;
    let mut later = connect(&world, plain_guest).await;
    later
        .write_all(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n")
        .await
        .unwrap();
    let mut answer = [0; 12];
    later.read_exact(&mut answer).await.unwrap();
    // They are not closed at once: another connection is served first.
    let mut sender = http1(tls(&world, guest, "api.test", &[]).await.unwrap()).await;
    assert_eq!(send1(&mut sender, get("api.test", "/")).await.status, 200);
    for open in [&nothing, &partial, &head] {
        let read = open.try_read(&mut [0]).map_err(|error| error.kind());
        assert_eq!(read, Err(std::io::ErrorKind::WouldBlock));
    }
    let (nothing, partial, head, later) = tokio::join!(
        until_end(nothing),
        until_end(partial),
        exchange(head, b"GET / HTTP/1.1\r\nHost: api"),
        exchange(later, b"GET / HTTP/1.1\r\nA: ")
    );
    assert_eq!((nothing.len(), partial.len()), (7, 7));
    assert!(statuses(&head).is_empty(), "{head}");
    assert!(!later.contains("HTTP/1.1 2"), "{later}");
    let call = world.call(plain_guest, |call| call.refused.is_some());
    assert_eq!(call.refused.unwrap(), "the head of a request took too long");
}

/// Requests over the sandbox's limit are refused without a question to the server or a request to the origin, so their
/// number is a matter of the proxy's speed only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_that_do_not_fit_are_counted() {
    const RECORDS: usize = 6000;
    let (world, _origin, _) = world(&["--sandbox-requests", "1"]).await;
    let plain = Origin::plain().await;
    let guest = world.guest_by_address(plain.address, &["api.test"]);
    let mut stream = connect(&world, guest).await;
    // The host is one of the address's names, so the requests are read. The proxy asks the server about no other name.
    let first = "GET / HTTP/1.1\r\nHost: api.test\r\n\r\n";
    stream.write_all(first.as_bytes()).await.unwrap();
    world.call(guest, |call| call.status == Some(200));
    let held = world.hold();
    let (mut reader, mut writer) = stream.into_split();
    let reading = tokio::spawn(async move {
        let mut text = String::new();
        reader.read_to_string(&mut text).await.map(|_| text)
    });
    let request = "GET / HTTP/1.1\r\nHost: else.test\r\n\r\n";
    writer
        .write_all(request.repeat(RECORDS - 1).as_bytes())
        .await
        .unwrap();
    let last = "GET / HTTP/1.1\r\nHost: else.test\r\nConnection: close\r\n\r\n";
    writer.write_all(last.as_bytes()).await.unwrap();
    let text = reading.await.unwrap().unwrap();
    assert_eq!(statuses(&text).len(), 1 + RECORDS);
    drop(held);
    let all = RECORDS as u64 + 2;
    // The count of lost records follows the next record.
    let mut stream = connect(&world, guest).await;
    stream.write_all(first.as_bytes()).await.unwrap();
    let limit = Instant::now() + Duration::from_secs(20);
    while world.counted() < all {
        assert!(Instant::now() < limit, "{} of {}", world.counted(), all);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(world.lost() > 1000, "{}", world.lost());
    assert_eq!(world.counted(), all);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_has_no_rights() {
    let (world, _origin, guest) = world(&[]).await;
    tls(&world, guest, "api.test", &[]).await.unwrap();
    let path = format!("/proc/{}", world.process.id());
    let status = std::fs::read_to_string(format!("{path}/status")).unwrap();
    let field = |name: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap();
        line.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(field("NoNewPrivs:"), ["1"]);
    assert_eq!(field("Seccomp:"), ["2"]);
    assert_eq!(field("CapEff:"), ["0000000000000000"]);
    assert_eq!(field("CapPrm:"), ["0000000000000000"]);
    if nix::unistd::geteuid().is_root() {
        assert_eq!(field("Uid:"), ["65534"; 4]);
        assert_eq!(field("Gid:"), ["65534"; 4]);
        assert!(field("Groups:").is_empty());
        // A process that is not dumpable belongs to root in /proc.
        let owner = std::os::unix::fs::MetadataExt::uid(
            &std::fs::metadata(format!("{path}/environ")).unwrap(),
        );
        assert_eq!(owner, 0);
    }
    let limits = std::fs::read_to_string(format!("{path}/limits")).unwrap();
    let core = limits
        .lines()
        .find(|line| line.starts_with("Max core file size"))
        .unwrap();
    assert_eq!(
        core.split_whitespace().filter(|word| *word == "0").count(),
        2,
        "{core}"
    );
}

#[test]
fn root_without_a_user_is_refused() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (_ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let output = std::process::Command::new("sh")
        .args([
            "-c",
            r#"exec "$0" 3<&1 1>/dev/null"#,
            env!("CARGO_BIN_EXE_cube-egress"),
        ])
        .stdin(std::os::fd::OwnedFd::from(theirs))
        .stdout(std::os::fd::OwnedFd::from(listener))
        .stderr(std::process::Stdio::piped())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && text.contains("refusing to run as root"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_server_resets_the_guest() {
    let servers = Arc::new(Ca::new("servers"));
    let address = origin::raw(|mut stream: TcpStream| async move {
        let mut buffer = [0; 4096];
        let _ = stream.read(&mut buffer).await;
        let _ = stream.write_all(b"part").await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        stream.set_zero_linger().unwrap();
    })
    .await;
    let world = World::new(&servers, 1, &[]);
    let guest = world.guest_by_address(address, &[]);
    let mut stream = connect(&world, guest).await;
    stream.write_all(b"anything").await.unwrap();
    let mut all = Vec::new();
    let ended = stream.read_to_end(&mut all).await;
    assert_eq!(all, b"part");
    assert_eq!(
        ended.unwrap_err().kind(),
        std::io::ErrorKind::ConnectionReset
    );
}
