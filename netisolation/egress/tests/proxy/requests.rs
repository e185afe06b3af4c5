//! Requests over TLS to a name with a rule.

use std::{net::Ipv4Addr, sync::Arc};

use egress::control::RuleOutcome;
use hyper::{Request, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    client::{
        Answer, empty, exchange, full, get, http1, http2, is_terminated, send1, send2, statuses,
        tls,
    },
    origin::{self, Origin, acceptor},
    world::{Ca, SECRET, World},
};

const NAMES: [&str; 2] = ["api.test", "other.test"];

async fn world(protocols: &[&str]) -> (World, Origin, Ipv4Addr) {
    let servers = Arc::new(Ca::new("servers"));
    let origin = Origin::tls(&servers, &NAMES, protocols).await;
    let world = World::new(&servers, origin.address.port(), &[]);
    let guest = world.guest(origin.address, &NAMES);
    world.rule("api.test", SECRET);
    (world, origin, guest)
}

/// Sends raw requests over one connection, which the last one closes.
async fn raw(world: &World, guest: Ipv4Addr, bytes: &[u8]) -> String {
    let stream = tls(world, guest, "api.test", &["http/1.1"]).await.unwrap();
    exchange(stream, bytes).await
}

fn key(origin: &Origin, index: usize) -> Vec<String> {
    let values = origin.seen()[index]
        .headers
        .get_all("x-api-key")
        .iter()
        .cloned()
        .collect::<Vec<_>>();
    values
        .iter()
        .map(|value| value.to_str().unwrap().to_owned())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http1_requests_get_the_header_of_the_rule() {
    let (world, origin, guest) = world(&["h2", "http/1.1"]).await;
    let stream = tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap();
    assert!(is_terminated(&world, &stream));
    let mut sender = http1(stream).await;
    let request = Request::post("/sink?q=1").header("host", "API.test");
    let request = request
        .header("x-API-key", "own")
        .header("x-api-key", "own 2")
        .body(full("hello"))
        .unwrap();
    let answer = send1(&mut sender, request).await;
    assert_eq!(answer.text, "5 ");
    assert_eq!(key(&origin, 0), [SECRET]);
    assert_eq!(origin.seen()[0].headers["host"], "api.test");
    let call = world.call(guest, |call| call.status == Some(200));
    assert_eq!(
        (call.method.as_deref(), call.path.as_deref()),
        (Some("POST"), Some("/sink"))
    );
    assert_eq!(
        (call.name.as_deref(), call.rule.as_deref()),
        (Some("api.test"), Some("api.test"))
    );
    assert_eq!((call.bytes_out, call.bytes_in), (5, 2));
    assert_eq!((call.secrets, call.refused), (vec!["key".to_owned()], None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_requests_get_the_header_of_the_rule() {
    let (world, origin, guest) = world(&["h2", "http/1.1"]).await;
    let stream = tls(&world, guest, "api.test", &["h2", "http/1.1"])
        .await
        .unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let mut sender = http2(stream).await;
    for _ in 0..3 {
        let request = Request::get("https://api.test/")
            .header("x-api-key", "own")
            .body(empty())
            .unwrap();
        assert_eq!(send2(&mut sender, request).await.text, "ok");
    }
    for index in 0..3 {
        assert_eq!(key(&origin, index), [SECRET]);
        assert_eq!(origin.seen()[index].uri, "https://api.test/");
    }
    assert_eq!(origin.connections(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_guest_is_offered_what_the_server_speaks() {
    let (world, origin, guest) = world(&["http/1.1"]).await;
    let stream = tls(&world, guest, "api.test", &["h2", "http/1.1"])
        .await
        .unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    assert_eq!(
        send1(&mut http1(stream).await, get("api.test", "/"))
            .await
            .text,
        "ok"
    );
    let stream = tls(&world, guest, "api.test", &[]).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), None);
    assert_eq!(
        send1(&mut http1(stream).await, get("api.test", "/"))
            .await
            .text,
        "ok"
    );
    assert_eq!(origin.connections(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_for_other_hosts_are_misdirected() {
    let (world, origin, guest) = world(&["http/1.1"]).await;
    let port = origin.address.port();
    for (host, status) in [
        ("other.test", 421),
        ("a.api.test", 421),
        ("api.test:80", 421),
        ("api.test:0443", 421),
        ("127.0.0.1", 400),
        ("2130706433", 400),
        ("0x7f.1", 400),
        ("[::1]", 400),
        ("user@api.test", 400),
        ("api.test@other.test", 400),
        ("api.test:443:443", 400),
        ("api.test, other.test", 400),
        ("api.test/", 400),
        ("b\u{fc}cher.test", 400),
        ("", 400),
    ] {
        let request = format!(
            "GET / HTTP/1.1\r\nHost: {host}\r\n\r\nGET / HTTP/1.1\r\nHost: api.test\r\n\r\n"
        );
        let answer = raw(&world, guest, request.as_bytes()).await;
        // The connection ends with the refusal. The second request is not read.
        assert_eq!(statuses(&answer), [status], "{host}: {answer}");
    }
    assert_eq!(origin.seen().len(), 0);
    for host in ["api.test.", &format!("Api.Test:{port}")] {
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        assert_eq!(
            statuses(&raw(&world, guest, request.as_bytes()).await),
            [200],
            "{host}"
        );
    }
    let hosts: Vec<_> = origin
        .seen()
        .iter()
        .map(|seen| seen.headers["host"].clone())
        .collect();
    assert_eq!(hosts, ["api.test", &format!("api.test:{port}")]);
    let call = world.call(guest, |call| call.name.as_deref() == Some("other.test"));
    assert_eq!(
        call.refused.unwrap(),
        "the request is for other.test, but the connection is for api.test"
    );
    assert_eq!((call.status, call.secrets.len()), (Some(421), 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ambiguous_requests_are_refused() {
    let (world, origin, guest) = world(&["http/1.1"]).await;
    for request in [
        "GET https://api.test/ HTTP/1.1\r\nHost: api.test\r\n\r\n",
        "GET http://other.test/ HTTP/1.1\r\nHost: api.test\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: api.test\r\nHost: other.test\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: api.test\r\nHost: api.test\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : api.test\r\n\r\n",
        "GET / HTTP/1.1\r\n Host: api.test\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: api.test\r\nA: b\r\n c: d\r\n\r\n",
        "GET / HTTP/1.1\nHost: api.test\n\n",
        "GET /\0 HTTP/1.1\r\nHost: api.test\r\n\r\n",
        "CONNECT api.test:443 HTTP/1.1\r\nHost: api.test\r\n\r\n",
        "CONNECT other.test:443 HTTP/1.1\r\nHost: other.test\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: api.test\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: api.test\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: api.test\r\nContent-Length: -1\r\n\r\n",
        "POST / HTTP/1.0\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ] {
        let second = "GET /second HTTP/1.1\r\nHost: api.test\r\n\r\n";
        let answer = raw(&world, guest, format!("{request}{second}").as_bytes()).await;
        assert_eq!(statuses(&answer), [400], "{request}: {answer}");
    }
    assert_eq!(origin.seen().len(), 0);
    let http2 = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    assert_eq!(raw(&world, guest, http2.as_bytes()).await, "");
    let trace = "TRACE / HTTP/1.1\r\nHost: api.test\r\n\r\n";
    assert_eq!(statuses(&raw(&world, guest, trace.as_bytes()).await), [405]);
    let long = format!(
        "GET / HTTP/1.1\r\nHost: api.test\r\nA: {}\r\n\r\n",
        "a".repeat(70_000)
    );
    assert_eq!(statuses(&raw(&world, guest, long.as_bytes()).await), [431]);
    assert_eq!(origin.seen().len(), 0);
    world.call(guest, |call| {
        let both = "Content-Length and Transfer-Encoding are both given";
        call.refused.as_deref() == Some(both) && call.status == Some(400)
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelined_requests_are_checked_each() {
    let (world, origin, guest) = world(&["http/1.1"]).await;
    let requests = "GET /1 HTTP/1.1\r\nHost: api.test\r\n\r\nGET /2 HTTP/1.1\r\nHost: api.test\r\n\r\n\
        GET /3 HTTP/1.1\r\nHost: other.test\r\n\r\nGET /4 HTTP/1.1\r\nHost: api.test\r\n\r\n";
    let answer = raw(&world, guest, requests.as_bytes()).await;
    assert_eq!(statuses(&answer), [200, 200, 421]);
    let paths: Vec<_> = origin.seen().iter().map(|seen| seen.uri.clone()).collect();
    assert_eq!(paths, ["/1", "/2"]);
    // A body that looks like a request is still a body.
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: other.test\r\n\r\n";
    let request = format!(
        "POST /sink HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{smuggled}",
        smuggled.len()
    );
    let answer = raw(&world, guest, request.as_bytes()).await;
    assert!(
        answer.ends_with(&format!("{} ", smuggled.len())),
        "{answer}"
    );
    assert_eq!(origin.seen().len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_pseudo_headers_must_agree_with_the_connection() {
    let (world, origin, guest) = world(&["h2"]).await;
    let mut sender = http2(tls(&world, guest, "api.test", &["h2"]).await.unwrap()).await;
    let request = |uri: &str| Request::get(uri).body(empty()).unwrap();
    // A client that reuses the connection for another name (RFC 9113, section 9.1.1) must open a new one.
    assert_eq!(
        send2(&mut sender, request("https://other.test/"))
            .await
            .status,
        421
    );
    assert_eq!(
        send2(&mut sender, request("http://api.test/")).await.status,
        400
    );
    assert_eq!(
        send2(&mut sender, request("https://127.0.0.1/"))
            .await
            .status,
        400
    );
    assert_eq!(
        send2(&mut sender, request("https://user@api.test/"))
            .await
            .status,
        400
    );
    let connect = Request::connect("other.test:443").body(empty()).unwrap();
    assert_eq!(send2(&mut sender, connect).await.status, 400);
    let host = Request::get("https://api.test/")
        .header("host", "other.test")
        .body(empty())
        .unwrap();
    assert_eq!(send2(&mut sender, host).await.status, 400);
    assert_eq!(origin.seen().len(), 0);
    // The connection continues.
    let host = Request::get("https://api.test/")
        .header("host", "api.test")
        .body(empty())
        .unwrap();
    assert_eq!(send2(&mut sender, host).await.text, "ok");
    assert!(!origin.seen()[0].headers.contains_key("host"));
    assert_eq!(key(&origin, 0), [SECRET]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_applies_to_the_next_request() {
    let (world, origin, guest) = world(&["http/1.1"]).await;
    let mut sender = http1(tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap()).await;
    send1(&mut sender, get("api.test", "/")).await;
    world.rule("api.test", "rotated");
    send1(&mut sender, get("api.test", "/")).await;
    world.outcome(
        "api.test",
        RuleOutcome::Failed {
            rule: "api.test".to_owned(),
            reason: "secret key is deleted".to_owned(),
        },
    );
    let failed = send1(&mut sender, get("api.test", "/")).await;
    assert_eq!(failed.status, StatusCode::BAD_GATEWAY);
    let text: serde_json::Value = serde_json::from_str(&failed.text).unwrap();
    assert_eq!(text["rule"], "api.test");
    assert!(
        text["message"]
            .as_str()
            .unwrap()
            .contains("secret key is deleted"),
        "{text}"
    );
    world.outcome("api.test", RuleOutcome::None);
    send1(&mut sender, get("api.test", "/")).await;
    let keys: Vec<_> = (0..3).map(|index| key(&origin, index)).collect();
    assert_eq!(
        keys,
        [vec![SECRET.to_owned()], vec!["rotated".to_owned()], vec![]]
    );
    assert_eq!((origin.seen().len(), origin.connections()), (3, 1));
    let call = world.call(guest, |call| call.status == Some(502));
    assert!(call.refused.unwrap().contains("secret key is deleted"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_that_cannot_be_made_are_not_sent() {
    let (world, origin, guest) = world(&["http/1.1"]).await;
    let mut sender = http1(tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap()).await;
    let injected = format!("{SECRET}\r\nHost: other.test");
    for (name, value) in [
        ("x-key", injected.as_str()),
        ("x\r\ny", SECRET),
        ("Host", SECRET),
        ("content-length", "0"),
    ] {
        let headers = vec![(name.to_owned(), value.to_owned())];
        world.outcome("api.test", World::headers("api.test", headers));
        let answer = send1(&mut sender, get("api.test", "/")).await;
        assert_eq!(answer.status, 502, "{name}");
        assert!(!answer.text.contains(SECRET), "{}", answer.text);
    }
    assert_eq!(origin.seen().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_guest_cannot_remove_or_double_a_header_of_the_rule() {
    let (world, origin, guest) = world(&["http/1.1"]).await;
    let requests = "POST /sink HTTP/1.1\r\nHost: api.test\r\nConnection: close, x-api-key\r\nX-Api-Key: own\r\n\
        Proxy-Authorization: own\r\nKeep-Alive: 1\r\nTrailer: x-api-key, x-check\r\nTransfer-Encoding: chunked\r\n\r\n\
        2\r\nab\r\n0\r\nx-api-key: own\r\nx-check: 1\r\n\r\n";
    let answer = raw(&world, guest, requests.as_bytes()).await;
    assert!(answer.contains("2 x-check"), "{answer}");
    assert_eq!(key(&origin, 0), [SECRET]);
    let seen = &origin.seen()[0].headers;
    for name in ["proxy-authorization", "keep-alive", "connection"] {
        assert!(!seen.contains_key(name), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redirects_go_to_the_guest_and_other_ways_to_a_server_do_not() {
    let (world, origin, guest) = world(&["http/1.1"]).await;
    let mut sender = http1(tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap()).await;
    let answer = send1(&mut sender, get("api.test", "/redirect")).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.headers["location"]),
        (302, &"https://evil.test/".parse().unwrap())
    );
    let Answer { headers, .. } = send1(&mut sender, get("api.test", "/alternative")).await;
    for name in ["alt-svc", "x-hop", "connection"] {
        assert!(!headers.contains_key(name), "{name}: {headers:?}");
    }
    assert_eq!(origin.connections(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_cannot_be_split() {
    let servers = Arc::new(Ca::new("servers"));
    let tls_acceptor = acceptor(&servers, &NAMES, &["http/1.1"]);
    let address = origin::raw(move |stream| {
        let acceptor = tls_acceptor.clone();
        async move {
            let Ok(mut stream) = acceptor.accept(stream).await else { return };
            let mut request = vec![0; 4096];
            let read = stream.read(&mut request).await.unwrap();
            let text = String::from_utf8_lossy(&request[..read]).into_owned();
            let answer = match text.split(' ').nth(1).unwrap() {
                "/cr" => "HTTP/1.1 200 OK\r\nA: b\rX: y\r\nContent-Length: 0\r\n\r\n",
                "/nul" => "HTTP/1.1 200 OK\r\nA: b\0\r\nContent-Length: 0\r\n\r\n",
                "/fold" => "HTTP/1.1 200 OK\r\nA: b\r\n X: y\r\nContent-Length: 0\r\n\r\n",
                "/lengths" => "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
                "/both" => "HTTP/1.1 200 OK\r\nContent-Length: 100\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
                "/more" => "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabHTTP/1.1 200 OK\r\nX: smuggled\r\n\r\n",
                _ => "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
            };
            let _ = stream.write_all(answer.as_bytes()).await;
            let _ = stream.shutdown().await;
        }
    })
    .await;
    let world = World::new(&servers, address.port(), &[]);
    let guest = world.guest(address, &NAMES);
    world.rule("api.test", SECRET);
    for (path, status) in [
        ("/cr", 502),
        ("/nul", 502),
        ("/fold", 502),
        ("/lengths", 502),
        ("/both", 200),
        ("/more", 200),
        ("/switch", 502),
    ] {
        let request = format!("GET {path} HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n");
        let answer = raw(&world, guest, request.as_bytes()).await;
        assert_eq!(statuses(&answer), [status], "{path}: {answer}");
        assert!(
            !answer.contains("smuggled") && !answer.contains(SECRET),
            "{path}: {answer}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_a_valid_certificate_gets_no_request() {
    let others = Ca::new("others");
    let servers = Arc::new(Ca::new("servers"));
    let stranger = Origin::tls(&others, &NAMES, &["http/1.1"]).await;
    let world = World::new(&servers, stranger.address.port(), &[]);
    let guest = world.guest(stranger.address, &NAMES);
    world.rule("api.test", SECRET);
    let mut sender = http1(tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap()).await;
    let answer = send1(&mut sender, get("api.test", "/")).await;
    assert_eq!(answer.status, 502);
    assert!(answer.text.contains("UnknownIssuer"), "{}", answer.text);
    let misnamed = Origin::tls(&servers, &["other.test"], &["http/1.1"]).await;
    let world = World::new(&servers, misnamed.address.port(), &[]);
    let guest = world.guest(misnamed.address, &NAMES);
    world.rule("api.test", SECRET);
    let mut sender = http1(tls(&world, guest, "api.test", &["http/1.1"]).await.unwrap()).await;
    let answer = send1(&mut sender, get("api.test", "/")).await;
    assert!(
        answer.status == 502 && answer.text.contains("not valid for name"),
        "{}",
        answer.text
    );
    assert_eq!((stranger.seen().len(), misnamed.seen().len()), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_are_not_resumed_so_there_is_no_early_data() {
    let (world, _origin, guest) = world(&["http/1.1"]).await;
    let mut config = crate::client::config(&world, &["http/1.1"]);
    config.enable_early_data = true;
    let config = Arc::new(config);
    for _ in 0..2 {
        let connector = tokio_rustls::TlsConnector::from(Arc::clone(&config));
        let stream = crate::client::connect(&world, guest).await;
        let stream = connector
            .connect("api.test".try_into().unwrap(), stream)
            .await
            .unwrap();
        assert_eq!(
            stream.get_ref().1.handshake_kind(),
            Some(rustls::HandshakeKind::Full)
        );
        let mut sender = http1(stream).await;
        assert_eq!(send1(&mut sender, get("api.test", "/")).await.text, "ok");
    }
}
