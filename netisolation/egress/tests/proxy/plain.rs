//! Connections without TLS, on which each request names its host.

use std::{net::Ipv4Addr, sync::Arc};

use egress::control::{Ask, RuleOutcome};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    client::{connect, exchange, get, http1, send1, statuses},
    origin::{self, Origin},
    world::{Ca, SECRET, World},
};

async fn world() -> (World, Origin, Ipv4Addr) {
    let origin = Origin::plain().await;
    let world = World::new(&Arc::new(Ca::new("servers")), 443, &[]);
    let guest = world.guest(origin.address, &["api.test", "free.test"]);
    world.rule("api.test", SECRET);
    (world, origin, guest)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_request_of_a_connection_has_its_own_rule() {
    let (world, origin, guest) = world().await;
    let mut sender = http1(connect(&world, guest).await).await;
    let free = format!("FREE.test.:{}", origin.address.port());
    for host in ["api.test", &free, "api.test"] {
        assert_eq!(send1(&mut sender, get(host, "/")).await.text, "ok");
    }
    let keys: Vec<_> = origin
        .seen()
        .iter()
        .map(|seen| seen.headers.contains_key("x-api-key"))
        .collect();
    assert_eq!(keys, [true, false, true]);
    // Requests for different names, and therefore of different rules, share no connection.
    assert_eq!(origin.connections(), 3);
    let call = world.call(guest, |call| call.name.as_deref() == Some("free.test"));
    assert_eq!((call.rule, call.status), (None, Some(200)));
}

/// A guest must not be able to send a secret out of this host in clear text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_for_tls_only_is_answered_with_426() {
    let (world, origin, guest) = world().await;
    let rule = "api.test".to_owned();
    world.outcome("api.test", RuleOutcome::NeedsTls { rule });
    let mut sender = http1(connect(&world, guest).await).await;
    let refused = send1(&mut sender, get("api.test", "/")).await;
    assert_eq!(refused.status, 426);
    assert_eq!(refused.headers["upgrade"], "TLS/1.2, HTTP/1.1");
    for cure in ["https://", "plain", "\"rule\":\"api.test\""] {
        assert!(refused.text.contains(cure), "{}", refused.text);
    }
    // Other names on the connection are served.
    assert_eq!(send1(&mut sender, get("free.test", "/")).await.text, "ok");
    assert_eq!(origin.seen().len(), 1);
    let asked = ["api.test", "free.test"].map(|name| (name.to_owned(), Ask::HeadersInClear));
    assert_eq!(world.rule_questions(), asked);
    let call = world.call(guest, |call| call.status == Some(426));
    assert!(call.refused.is_some() && call.rule.as_deref() == Some("api.test"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_host_does_not_pass() {
    let (world, origin, guest) = world().await;
    let requests = "GET /1 HTTP/1.1\r\nHost: free.test\r\n\r\nGET /2 HTTP/1.1\r\nHost: evil.test\r\n\r\n\
        GET /3 HTTP/1.1\r\nHost: free.test\r\n\r\n";
    let answer = exchange(connect(&world, guest).await, requests.as_bytes()).await;
    assert_eq!(statuses(&answer), [200, 421]);
    assert_eq!(origin.seen().len(), 1);
    let call = world.call(guest, |call| call.refused.is_some());
    assert_eq!(
        call.refused.unwrap(),
        "evil.test was not resolved to this address"
    );
    for bytes in [
        "\x16\x03\x01\0\x05\x01\0\0\x01\0",
        "SSH-2.0-x\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let answer = exchange(connect(&world, guest).await, bytes.as_bytes()).await;
        assert!(
            statuses(&answer)
                .first()
                .is_none_or(|status| *status == 400),
            "{bytes:?}: {answer}"
        );
    }
    assert_eq!(origin.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flow_that_an_address_admits_speaks_anything() {
    let (world, origin, _) = world().await;
    let address = origin::raw(|mut stream: TcpStream| async move {
        let mut buffer = [0; 1024];
        while let Ok(read @ 1..) = stream.read(&mut buffer).await {
            stream.write_all(&buffer[..read]).await.unwrap();
        }
    })
    .await;
    let guest = world.guest_by_address(address, &["api.test"]);
    for text in [
        "not HTTP",
        "GET / HTTP/1.1\r\nHost: else.test\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
    ] {
        let mut stream = connect(&world, guest).await;
        stream.write_all(text.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        assert_eq!(exchange(stream, b"").await, text);
    }
    // A connection to a name with a rule is read. Other names on it get no header.
    world.rule("else.test", SECRET);
    let guest = world.guest_by_address(origin.address, &["api.test"]);
    let mut sender = http1(connect(&world, guest).await).await;
    for host in ["api.test", "else.test"] {
        assert_eq!(send1(&mut sender, get(host, "/")).await.text, "ok");
    }
    let keys: Vec<_> = origin
        .seen()
        .iter()
        .map(|seen| seen.headers.contains_key("x-api-key"))
        .collect();
    assert_eq!(keys, [true, false]);
}
