//! Refused requests and their answers.

use std::time::Duration;

use serde_json::json;

use crate::{
    http,
    process::{JSON, Sandbox, Server, happens, until},
};

pub(crate) fn kvm_wrong_requests_are_told_in_json() {
    let server = Server::open();
    let create = |body| server.post("/v2/sandboxes", &body);
    create(json!({"templateID": "no/such"})).expect(404);
    create(json!({"timeout": 5})).expect(400);
    create(json!({"templateID": "base", "timeout": 100_000_000})).expect(400);
    create(json!({"templateID": "base", "metadata": {"a": 1}})).expect(400);
    let domain = json!({"templateID": "base", "network": {"allowOut": ["a.test"]}});
    create(domain).expect(400);
    let local = json!({"egressProxy": {"address": "127.0.0.1:1080"}});
    create(json!({"templateID": "base", "network": local})).expect(400);
    let agent = json!({"httpsPorts": [49_983]});
    create(json!({"templateID": "base", "network": agent})).expect(400);
    let many = "x".repeat(300_000);
    create(json!({"templateID": "base", "metadata": {"a": many}})).expect(400);
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let raw = |body: &[u8]| http::send(server.address, "POST", "/v2/sandboxes", &JSON, body);
    raw(deep.as_bytes()).expect(400);
    raw(b"").expect(400);
    raw(&vec![b' '; 2 << 20]).expect(413);
    for path in [
        "/sandboxes/none",
        "/sandboxes/iaaaaaaaaaaaaaaaaaaa",
        "/templates/aliases/none",
    ] {
        server.get(path).expect(404);
    }
    server.get("/no/such/route").expect(404);
    server.put("/v2/sandboxes", &json!({})).expect(405);
    let answer = server.get("/volumes").expect(501).json();
    assert!(
        answer["message"]
            .as_str()
            .unwrap()
            .starts_with("not supported by this server: ")
    );
    let alias = server.get("/templates/aliases/base").expect(200).json();
    let list = server.get("/templates").expect(200).json();
    assert_eq!(list[0]["templateID"], alias["templateID"]);
    assert_eq!(list[0]["buildStatus"], "ready");
    assert_eq!(server.get("/v2/sandboxes").expect(200).json(), json!([]));
}

pub(crate) fn kvm_a_repeated_create_with_its_idempotency_key_makes_one_sandbox() {
    let server = Server::open();
    let create = |path: &str, timeout: u32| {
        let fields = [JSON[0], ("Idempotency-Key", "order-7")];
        let body = json!({"templateID": "base", "timeout": timeout}).to_string();
        http::send(server.address, "POST", path, &fields, body.as_bytes())
    };
    let answers = std::thread::scope(|scope| {
        let both = [(); 2].map(|()| scope.spawn(|| create("/v2/sandboxes", 60).expect(201)));
        both.map(|answer| answer.join().unwrap())
    });
    let sandbox = Sandbox::of(&answers[0].json());
    assert_eq!(answers[0].body, answers[1].body);
    let replayed = |answer: &http::Answer| answer.header("idempotency-replayed").is_some();
    assert_ne!(replayed(&answers[0]), replayed(&answers[1]));
    for (path, timeout) in [("/v2/sandboxes", 61), ("/sandboxes", 60)] {
        let refused = create(path, timeout).expect(409).json();
        assert_eq!(refused["error_code"], "idempotency_request_mismatch");
    }
    server.delete(&sandbox.path("")).expect(204);
    assert_eq!(
        create("/v2/sandboxes", 60).expect(201).body,
        answers[0].body
    );
    assert_eq!(server.get("/v2/sandboxes").expect(200).json(), json!([]));
}

pub(crate) fn kvm_ports_ask_for_their_tokens() {
    let server = Server::open();
    let network = json!({"allowPublicTraffic": false, "maskRequestHost": "localhost:${PORT}",
                         "denyOut": ["0.0.0.0/0"]});
    let sandbox = server.create(&json!({"network": network}));
    assert!(sandbox.traffic_token.is_some());
    let mut stranger = sandbox.clone();
    stranger.token = "wrong".into();
    server
        .envd(&stranger, "GET", "/files?path=/etc/hostname", b"")
        .expect(401);
    let update = json!({"denyOut": ["10.0.0.0/8"]});
    server.put(&sandbox.path("/network"), &update).expect(204);
    let detail = server.get(&sandbox.path("")).expect(200).json();
    let expected = json!({"allowPublicTraffic": false, "maskRequestHost": "localhost:${PORT}",
                          "denyOut": ["10.0.0.0/8"]});
    assert_eq!(detail["network"], expected);
    server
        .put(
            &sandbox.path("/network"),
            &json!({"egressProxy": {"address": "h:0"}}),
        )
        .expect(400);
    server
        .put(&sandbox.path("/network"), &json!({"denyOut": ["a.b"]}))
        .expect(400);
    let port = [
        ("E2b-Sandbox-Id", sandbox.id.as_str()),
        ("E2b-Sandbox-Port", "8080"),
    ];
    http::send(server.address, "GET", "/", &port, b"").expect(403);
    let open = server.create(&json!({}));
    let mut code = vec![
        ("E2b-Sandbox-Id", open.id.as_str()),
        ("E2b-Sandbox-Port", "49999"),
    ];
    let execute = |fields: &[(&str, &str)]| {
        http::send(
            server.address,
            "POST",
            "/execute",
            fields,
            br#"{"code":"1"}"#,
        )
    };
    // No program listens on this port in this template, but only a client with the token may learn this.
    execute(&code).expect(401);
    http::send(server.address, "GET", "/contexts", &code, b"").expect(502);
    code.push(("X-Access-Token", open.token.as_str()));
    execute(&code).expect(502);
    let other = server.create(&json!({}));
    code[0].1 = other.id.as_str();
    execute(&code).expect(401);
    let unsecured = json!({"templateID": "base", "timeout": 300, "secure": false});
    let unsecured = Sandbox::of(&server.post("/sandboxes", &unsecured).expect(201).json());
    assert_eq!(unsecured.token, "");
    code.truncate(2);
    code[0].1 = unsecured.id.as_str();
    execute(&code).expect(502);
    let port = [
        ("E2b-Sandbox-Id", open.id.as_str()),
        ("E2b-Sandbox-Port", "8080"),
    ];
    let closed = http::send(server.address, "GET", "/", &port, b"").expect(502);
    assert!(
        closed.text().contains("port is not open"),
        "{}",
        closed.text()
    );
}

pub(crate) fn kvm_a_page_of_another_origin_changes_nothing() {
    let server = Server::open();
    let body = json!({"templateID": "base", "timeout": 300}).to_string();
    let page = |fields: &[(&str, &str)]| {
        http::send(
            server.address,
            "POST",
            "/v2/sandboxes",
            fields,
            body.as_bytes(),
        )
    };
    let (text, json) = (("Content-Type", "text/plain"), JSON[0]);
    let origin = ("Origin", "https://evil.example");
    page(&[text]).expect(415);
    page(&[]).expect(415);
    page(&[text, origin]).expect(403);
    page(&[json, origin]).expect(403);
    page(&[json, ("Origin", "null")]).expect(403);
    page(&[json, ("Sec-Fetch-Site", "cross-site")]).expect(403);
    page(&[json, ("Sec-Fetch-Site", "same-site")]).expect(403);
    let kill = server.create(&json!({}));
    let removed =
        |fields: &[(&str, &str)]| http::send(server.address, "DELETE", &kill.path(""), fields, b"");
    removed(&[origin]).expect(403);
    assert_eq!(server.list(), [kill.id.as_str()]);
    // Pages of the server's own origin, and clients that are not browsers, are accepted.
    let own = format!("http://{}", server.address);
    removed(&[("Origin", &own), ("Sec-Fetch-Site", "same-origin")]).expect(204);
    server.get("/health").expect(200);
}

pub(crate) fn kvm_a_create_that_nobody_waits_for_leaves_nothing() {
    let server = Server::open();
    let body = json!({"templateID": "base", "timeout": 300}).to_string();
    let metrics = || server.get("/metrics").expect(200).text();
    let started = || count(&metrics(), "cube_pool_warm_misses_total");
    // A server that has not read the request when its client disconnects does not start a sandbox. The next client then
    // waits longer. If it waits too long, it gets a response.
    let mut patience = Duration::from_millis(5);
    while started() < 4 {
        let before = started();
        let stream = http::open(
            server.address,
            "POST",
            "/v2/sandboxes",
            &JSON,
            body.as_bytes(),
        );
        stream.set_read_timeout(Some(patience)).unwrap();
        let _ = stream.peek(&mut [0]);
        drop(stream);
        if !happens(Duration::from_secs(1), || started() > before) {
            patience *= 2;
        }
    }
    assert!(
        answered(&metrics()) < started(),
        "no client went away early"
    );
    until("every abandoned sandbox has ended", || {
        let text = metrics();
        count(&text, "cube_pool_running") == answered(&text)
    });
}

/// The value of a metric without labels.
fn count(metrics: &str, name: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap().trim().parse().unwrap()
}

/// Number of create requests that the server answered before it noticed that the client had disconnected.
fn answered(metrics: &str) -> u64 {
    let line = metrics.lines().find_map(|line| {
        line.strip_prefix(
            "cube_api_requests_total{method=\"POST\",route=\"/v2/sandboxes\",status=\"201\"}",
        )
    });
    line.map_or(0, |count| count.trim().parse().unwrap())
}
