//! Routing of requests to sandboxes, and the answers to requests that cannot be routed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use api::registry::{Route, RouteError};
use model::SandboxId;

use tokio::io::AsyncWriteExt;

use crate::guest::{Program, read_head};
use crate::wire::Wire;
use crate::world::{Agent, Setup, Vsock, World, until};

const ENVD: u16 = 49_983;
const INTERPRETER: u16 = 49_999;

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_reached_by_headers_by_host_and_by_signature() {
    let world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    let reply = wire.ask("GET /health", &world.to(ENVD)).await;
    assert_eq!((reply.status, reply.body.len()), (204, 0));
    let host = format!("Host: {ENVD}-{}.e2b.test:8443\r\n", world.id);
    assert_eq!(wire.ask("GET /health", &host).await.status, 204);
    let path = world.dir.path().join("signed");
    std::fs::write(&path, "content").unwrap();
    let query = format!("path={}&signature=v1_read", path.display());
    let reply = wire
        .ask(&format!("GET /files?{query}"), "Host: 127.0.0.1\r\n")
        .await;
    assert_eq!((reply.status, reply.text()), (200, "content"));
    let reply = wire
        .ask(
            "GET /files?path=x&signature=v1_other",
            "Host: 127.0.0.1\r\n",
        )
        .await;
    assert_eq!(reply.status, 401);
    assert_eq!(reply.json()["code"], 401);
    let reply = wire.ask("GET /control", "Host: api.e2b.test\r\n").await;
    assert_eq!((reply.status, reply.text()), (200, "control"));
    let reply = wire.ask("GET /files?path=x", "Host: 127.0.0.1\r\n").await;
    assert_eq!((reply.status, reply.text()), (404, "no such route"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_reached_by_a_path_of_the_control_plane() {
    let world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    let host = "Host: 127.0.0.1\r\n";
    let to = |port: u16, path: &str| format!("/sandbox/{}/{port}{path}", world.id);
    let reply = wire
        .ask(&format!("GET {}", to(ENVD, "/health")), host)
        .await;
    assert_eq!(reply.status, 204);
    // The program receives the rest of the path as the client spelled it.
    for (path, expected) in [
        (
            "/a%2Fb/../%20?c=%2F",
            "GET /a%2Fb/../%20?c=%2F HTTP/1.1\r\n",
        ),
        ("?c", "GET /?c HTTP/1.1\r\n"),
        ("", "GET / HTTP/1.1\r\n"),
    ] {
        let program = Program::mirror().await;
        let reply = wire
            .ask(&format!("GET {}", to(program.port, path)), host)
            .await;
        assert_eq!(reply.status, 200);
        assert!(reply.text().starts_with(expected), "{}", reply.text());
        assert_eq!(reply.field("content-security-policy"), None);
    }
    // A body arrives whole, by HTTP on the control plane's own name too.
    let path = world.dir.path().join("by-path");
    let query = format!("/files?path={}&signature=v1_any", path.display());
    std::fs::write(&path, "content").unwrap();
    let reply = wire
        .ask(
            &format!("GET {}", to(ENVD, &query)),
            "Host: api.e2b.test\r\n",
        )
        .await;
    assert_eq!((reply.status, reply.text()), (200, "content"));
    // A sandbox that the host or the headers name gets such a path itself.
    let program = Program::mirror().await;
    let reply = wire.ask("GET /sandbox/x/1", &world.to(program.port)).await;
    assert!(
        reply.text().starts_with("GET /sandbox/x/1 HTTP/1.1"),
        "{}",
        reply.text()
    );
    for (path, message) in [
        ("/sandbox/x/80/", "Invalid sandbox ID".to_owned()),
        (&to(0, "/"), "Invalid sandbox port".to_owned()),
    ] {
        let reply = wire.ask(&format!("GET {path}"), host).await;
        let expected = serde_json::json!({"message": message, "code": 400});
        assert_eq!((reply.status, reply.json()), (400, expected), "{path}");
    }
    for path in ["/sandbox/", "//sandbox/x/80/", "/%73andbox/x/80"] {
        let reply = wire.ask(&format!("GET {path}"), host).await;
        assert_eq!(
            (reply.status, reply.text()),
            (404, "no such route"),
            "{path}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_by_path_acts_on_no_other_path_of_the_server() {
    let world = World::new().await;
    let program = Program::start(async |mut wire| {
        wire.request_head().await;
        wire.send(
            "HTTP/1.1 200 OK\r\nSet-Cookie: a=b; Path=/x; Domain=localhost\r\nClear-Site-Data: \"*\"\r\n\
             Strict-Transport-Security: max-age=9\r\nAlt-Svc: h2=\":1\"\r\nContent-Length: 2\r\n\r\nhi",
        )
        .await;
        wire.is_closed().await;
    })
    .await;
    let prefix = format!("/sandbox/{}/{}", world.id, program.port);
    let mut wire = Wire::connect(world.address).await;
    let reply = wire
        .ask(&format!("GET {prefix}/"), "Host: localhost\r\n")
        .await;
    let cookie = format!("a=b; Path={prefix}/x");
    assert_eq!(reply.field("set-cookie"), Some(cookie.as_str()));
    for name in ["clear-site-data", "strict-transport-security", "alt-svc"] {
        assert_eq!(reply.field(name), None, "{name}");
    }
    // Below its own host name, a sandbox decides.
    let reply = wire.ask("GET /", &world.to(program.port)).await;
    assert_eq!(reply.field("clear-site-data"), Some("\"*\""));
}

/// An absolute request target replaces `Host` (RFC 9112, 3.2.2), for each decision that depends on the host.
#[tokio::test(flavor = "multi_thread")]
async fn an_absolute_target_is_routed_and_checked_by_its_authority() {
    let strict = Setup {
        strict: true,
        ..Setup::default()
    };
    let world = World::with(strict).await;
    let mut wire = Wire::connect(world.address).await;
    for (target, host, status) in [
        ("http://localhost/control", "evil.example", 200),
        ("http://evil.example/control", "localhost", 400),
        ("http://user@localhost/control", "localhost", 400),
    ] {
        let reply = wire
            .ask(&format!("GET {target}"), &format!("Host: {host}\r\n"))
            .await;
        assert_eq!(reply.status, status, "{target} {host}");
    }
    let program = Program::mirror().await;
    let name = format!("{}-{}.e2b.test", program.port, world.id);
    let reply = wire
        .ask(&format!("GET http://{name}/x"), "Host: localhost\r\n")
        .await;
    assert!(reply.text().starts_with("GET /x HTTP/1.1\r\n"));
    assert!(reply.text().contains(&format!("Host: {name}\r\n")));
}

/// The checks of load balancers send no more by default.
#[tokio::test(flavor = "multi_thread")]
async fn a_health_check_of_http_1_0_needs_no_host() {
    for strict in [false, true] {
        let setup = Setup {
            strict,
            ..Setup::default()
        };
        let world = World::with_guest(setup, async |_| {}).await;
        for (line, host, status) in [
            ("GET /health HTTP/1.0", "", 200),
            ("GET /control HTTP/1.0", "", 400),
            ("GET /health HTTP/1.1", "", 400),
            ("GET /health HTTP/1.0", "Host: a\r\nHost: b\r\n", 400),
        ] {
            let mut wire = Wire::connect(world.address).await;
            wire.send(format!("{line}\r\n{host}\r\n")).await;
            assert_eq!(wire.head().await.status, status, "{line} {host}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn internal_routes_and_tokens_are_checked_behind_the_path_too() {
    let (world, asked) = World::counting().await;
    world.table.set(Route {
        traffic_token: Some("traffic".into()),
        envd_token: Some("access".into()),
        ..world.route()
    });
    let mut wire = Wire::connect(world.address).await;
    let host = "Host: localhost\r\n";
    for (path, status) in [
        ("49983/init", 404),
        ("49983//init", 404),
        ("49983/%69nit", 404),
        ("49983/%2569nit", 404),
        ("49983/x/%2e%2e/freeze", 404),
        ("49983/UPGRADE/", 404),
        ("49983/init?x", 404),
        ("80/", 403),
        ("49999/execute", 403),
    ] {
        let path = format!("/sandbox/{}/{path}", world.id);
        let reply = wire.post(&path, host, b"{}").await;
        assert_eq!(reply.status, status, "{path}");
    }
    let traffic = format!("{host}E2b-Traffic-Access-Token: traffic\r\n");
    let path = format!("/sandbox/{}/49999/%65xecute", world.id);
    assert_eq!(wire.post(&path, &traffic, b"{}").await.status, 401);
    assert_eq!(asked.load(Ordering::Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_keys_pages_behind_a_path_get_an_origin_of_their_own() {
    let world = World::with(Setup {
        strict: true,
        ..Setup::default()
    })
    .await;
    let program = Program::start(async |mut wire| {
        wire.request_head().await;
        wire.send("HTTP/1.1 200 OK\r\nService-Worker-Allowed: /\r\nContent-Length: 2\r\n\r\nhi")
            .await;
        wire.is_closed().await;
    })
    .await;
    let mut wire = Wire::connect(world.address).await;
    let target = format!("GET /sandbox/{}/{}/", world.id, program.port);
    let reply = wire.ask(&target, "Host: 127.0.0.1\r\n").await;
    assert_eq!((reply.status, reply.text()), (200, "hi"));
    let policy = reply.field("content-security-policy").unwrap();
    assert!(
        policy.starts_with("sandbox ") && !policy.contains("same-origin"),
        "{policy}"
    );
    assert_eq!(reply.field("service-worker-allowed"), None);
    let reply = wire.ask(&target, "Host: rebound.example\r\n").await;
    assert_eq!(reply.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_sandbox_and_a_closed_port_have_different_answers() {
    let mut world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    let closed = Program::mirror().await.port;
    let reply = wire.ask("GET /", &world.to(closed)).await;
    assert_eq!(reply.status, 502);
    let expected = serde_json::json!({
        "sandboxId": world.id, "message": "The sandbox is running but port is not open",
        "port": closed, "code": 502,
    });
    assert_eq!(reply.json(), expected);
    assert_eq!(reply.field("content-type"), Some("application/json"));
    let gone = serde_json::json!({
        "sandboxId": world.id, "message": "The sandbox was not found", "code": 502,
    });
    // The answer is the same before and after the registry notices that the VM has ended.
    world.vsock = None;
    for port in [ENVD, closed] {
        assert_eq!(wire.ask("GET /health", &world.to(port)).await.json(), gone);
    }
    world.kill();
    let reply = wire.ask("GET /health", &world.to(ENVD)).await;
    assert_eq!((reply.status, reply.json()), (502, gone));
    let browser = "Accept: text/html\r\nSec-Fetch-Mode: navigate\r\n";
    let reply = wire
        .ask("GET /", &format!("{}{browser}", world.to(80)))
        .await;
    assert_eq!(reply.status, 502);
    assert_eq!(
        reply.field("content-type"),
        Some("text/html; charset=utf-8")
    );
    assert!(reply.text().contains("The sandbox was not found"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_agent_is_a_closed_port() {
    let mut world = World::new().await;
    world.agent = None;
    let mut wire = Wire::connect(world.address).await;
    let reply = wire.ask("GET /health", &world.to(ENVD)).await;
    assert_eq!(reply.status, 502);
    assert_eq!(reply.json()["port"], ENVD);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_name_a_sandbox_incorrectly_are_refused() {
    let world = World::with_guest(Setup::default(), async |_| {}).await;
    let mut wire = Wire::connect(world.address).await;
    for (fields, message) in [
        ("Host: web.e2b.test\r\n", "Invalid host"),
        ("Host: 80-web.e2b.test\r\n", "Invalid sandbox ID"),
        ("Host: x-web.e2b.test\r\n", "Invalid sandbox port"),
        (
            "Host: localhost\r\nE2b-Sandbox-Port: 80\r\n",
            "missing header",
        ),
        ("Host: a\r\nHost: b\r\n", "Invalid host"),
    ] {
        let reply = wire.ask("GET /", fields).await;
        let expected = serde_json::json!({"message": message, "code": 400});
        assert_eq!((reply.status, reply.json()), (400, expected), "{fields}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_resume_is_answered_with_a_retry_time() {
    let world = World::with_guest(Setup::default(), async |_| {}).await;
    let no_room = RouteError::Unavailable("no room".into());
    world.table.set_error(&world.id, no_room);
    let mut wire = Wire::connect(world.address).await;
    let reply = wire.ask("GET /", &world.to(ENVD)).await;
    assert_eq!(reply.status, 503);
    assert_eq!(reply.field("retry-after"), Some("1"));
    assert_eq!(reply.json()["code"], 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn internal_routes_of_the_agent_are_not_forwarded() {
    let (world, asked) = World::counting().await;
    let mut wire = Wire::connect(world.address).await;
    for path in [
        "/init",
        "//init",
        "/%69nit",
        "/x/../freeze",
        "/UPGRADE/",
        "/init?x",
    ] {
        let reply = wire.post(path, &world.to(ENVD), b"{}").await;
        assert_eq!(reply.status, 404, "{path}");
        assert_eq!(reply.json()["code"], 404);
    }
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    // The same paths are allowed on other ports.
    wire.ask("GET /init", &world.to(80)).await;
    assert_eq!(asked.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn private_ports_require_the_traffic_token() {
    let world = World::new().await;
    let mirror = Program::mirror().await;
    world.table.set(Route {
        traffic_token: Some("secret".into()),
        ..world.route()
    });
    let mut wire = Wire::connect(world.address).await;
    let to = world.to(mirror.port);
    for (token, end) in [
        ("", "is missing"),
        ("E2b-Traffic-Access-Token: x\r\n", "is invalid"),
    ] {
        let reply = wire.ask("GET /", &format!("{to}{token}")).await;
        assert_eq!((reply.status, &reply.json()["code"]), (403, &403.into()));
        let message = reply.json()["message"].as_str().unwrap().to_owned();
        assert!(message.ends_with(end), "{message}");
    }
    let reached = || world.table.reached.lock().unwrap().len();
    assert_eq!(reached(), 0, "a refused request is no activity");
    let right = format!("{to}E2b-Traffic-Access-Token: secret\r\n");
    let reply = wire.ask("GET /", &right).await;
    assert_eq!((reply.status, reached()), (200, 1));
    assert!(!reply.text().contains("secret"), "{}", reply.text());
    // The agent's port does not need the traffic token: the agent checks its own.
    assert_eq!(wire.ask("GET /health", &world.to(ENVD)).await.status, 204);
}

/// A guest that answers every request on any connection, and counts the requests.
async fn interpreter(asked: Arc<AtomicUsize>) -> World {
    World::with_guest(Setup::default(), move |mut client| {
        let asked = Arc::clone(&asked);
        async move {
            client.write_all(b"OK 1\n").await.unwrap();
            read_head(&mut client).await;
            asked.fetch_add(1, Ordering::Relaxed);
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
            client.write_all(answer).await.unwrap();
        }
    })
    .await
}

/// Sends a request to the interpreter's port. Returns whether it reaches the guest.
async fn is_forwarded(world: &World, line: &str, fields: &str) -> bool {
    let mut wire = Wire::connect(world.address).await;
    let reply = wire
        .ask(line, &format!("{}{fields}", world.to(INTERPRETER)))
        .await;
    if reply.status != 200 {
        let message = reply.json()["message"].as_str().unwrap().to_owned();
        assert_eq!((reply.status, &reply.json()["code"]), (401, &401.into()));
        assert!(message.contains("X-Access-Token"), "{message}");
    }
    reply.status == 200
}

#[tokio::test(flavor = "multi_thread")]
async fn running_code_requires_the_access_token() {
    let asked = Arc::new(AtomicUsize::new(0));
    let world = interpreter(Arc::clone(&asked)).await;
    let secure = Route {
        envd_token: Some("secret".into()),
        ..world.route()
    };
    world.table.set(secure.clone());
    for line in [
        "POST /execute",
        "POST /execute/",
        "POST //execute?x",
        "POST /%65xecute",
        "POST /x/../execute",
        "POST /EXECUTE",
        "GET /execute",
    ] {
        for token in [
            "",
            "X-Access-Token: \r\n",
            "X-Access-Token: other\r\n",
            "X-Access-Token: secret\r\nX-Access-Token: secret\r\n",
            "E2b-Traffic-Access-Token: secret\r\n",
        ] {
            assert!(!is_forwarded(&world, line, token).await, "{line} {token}");
        }
        assert_eq!(asked.load(Ordering::Relaxed), 0, "{line}");
    }
    assert!(is_forwarded(&world, "POST /execute", "X-Access-Token: secret\r\n").await);
    // Programs on other ports are not restricted.
    let mut wire = Wire::connect(world.address).await;
    wire.send(format!("POST /execute HTTP/1.1\r\n{}\r\n", world.to(8080)))
        .await;
    assert_ne!(wire.head().await.status, 401);
    // Sandboxes that were created without a token are not restricted either.
    world.table.set(world.route());
    assert!(is_forwarded(&world, "POST /execute", "").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn contexts_need_no_access_token() {
    let world = interpreter(Arc::default()).await;
    let secure = Route {
        envd_token: Some("secret".into()),
        ..world.route()
    };
    let private = Route {
        traffic_token: Some("traffic".into()),
        ..secure.clone()
    };
    for line in [
        "GET /health",
        "GET /contexts",
        "POST /contexts",
        "DELETE /contexts/1",
        "POST /contexts/1/restart",
        "GET /contexts/execute",
    ] {
        world.table.set(secure.clone());
        assert!(is_forwarded(&world, line, "").await, "{line}");
        world.table.set(private.clone());
        let mut wire = Wire::connect(world.address).await;
        let reply = wire.ask(line, &world.to(INTERPRETER)).await;
        assert_eq!(reply.status, 403, "{line}");
        let traffic = "E2b-Traffic-Access-Token: traffic\r\n";
        assert!(is_forwarded(&world, line, traffic).await, "{line}");
        // The traffic token alone does not permit running code.
        assert!(!is_forwarded(&world, "POST /execute", traffic).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_in_https_ports_are_reached_over_tls() {
    let world = World::new().await;
    let (secured, plain) = (Program::mirror_with_tls().await, Program::mirror().await);
    let host = |port| format!("Host: {port}-{}.e2b.test\r\n", world.id);
    let mut wire = Wire::connect(world.address).await;
    // Without the option, TLS is for the client and its server alone.
    assert_eq!(wire.ask("GET /", &host(secured.port)).await.status, 502);
    world.table.set(Route {
        https_ports: vec![secured.port],
        ..world.route()
    });
    for _ in 0..2 {
        let reply = wire.ask("GET /over-tls", &host(secured.port)).await;
        assert_eq!(reply.status, 200);
        assert!(reply.text().starts_with("GET /over-tls HTTP/1.1\r\n"));
    }
    assert_eq!(wire.ask("GET /", &host(plain.port)).await.status, 200);
    // A server that does not speak TLS does not get the request without it.
    world.table.set(Route {
        https_ports: vec![plain.port],
        ..world.route()
    });
    assert_eq!(wire.ask("GET /", &host(plain.port)).await.status, 502);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_gets_the_original_or_masked_host() {
    let world = World::new().await;
    let mirror = Program::mirror().await;
    let port = mirror.port;
    let mut wire = Wire::connect(world.address).await;
    let host = format!("{port}-{}.e2b.test", world.id);
    let fields = format!("Host: {host}\r\nConnection: x-mine\r\nX-Mine: 1\r\nX-Other: 2\r\n");
    let reply = wire.ask("GET /a%2Fb?c=d", &fields).await;
    let seen = reply.text().to_ascii_lowercase();
    assert!(seen.starts_with("get /a%2fb?c=d http/1.1\r\n"), "{seen}");
    assert!(seen.contains(&format!("host: {host}\r\n")), "{seen}");
    assert!(
        seen.contains("x-other: 2\r\n") && !seen.contains("mine"),
        "{seen}"
    );
    world.table.set(Route {
        mask_request_host: Some("localhost:${PORT}".into()),
        ..world.route()
    });
    let seen = wire.ask("GET /", &fields).await.text().to_ascii_lowercase();
    assert!(
        seen.contains(&format!("\r\nhost: localhost:{port}\r\n")),
        "{seen}"
    );
    assert!(
        seen.contains(&format!("x-forwarded-host: {host}\r\n")),
        "{seen}"
    );
}

/// Some servers compare `Host:` case-sensitively; Go's proxies write all names in title case.
#[tokio::test(flavor = "multi_thread")]
async fn header_names_are_forwarded_in_title_case() {
    let world = World::new().await;
    let mirror = Program::mirror().await;
    let mut wire = Wire::connect(world.address).await;
    let fields = format!("{}x-oTHER-name: aB\r\n", world.to(mirror.port));
    let seen = wire.ask("GET /", &fields).await.text().to_owned();
    for wanted in ["\r\nHost: ", "\r\nX-Other-Name: aB\r\n"] {
        assert!(seen.contains(wanted), "{seen}");
    }
    let names = seen.lines().filter_map(|line| line.split_once(": "));
    for (name, _) in names {
        assert!(
            name.starts_with(|first: char| first.is_ascii_uppercase()),
            "{seen}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_any_origin_may_use_the_agent() {
    let world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    let origin = "Origin: https://app.example\r\n";
    let asks =
        "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n";
    let to = world.to(ENVD);
    let reply = wire
        .ask(
            "OPTIONS /process.Process/List",
            &format!("{to}{origin}{asks}"),
        )
        .await;
    assert_eq!(reply.status, 204);
    assert_eq!(reply.field("access-control-allow-origin"), Some("*"));
    assert_eq!(
        reply.field("access-control-allow-headers"),
        Some("authorization")
    );
    let reply = wire.ask("GET /health", &format!("{to}{origin}")).await;
    assert_eq!(reply.field("access-control-allow-origin"), Some("*"));
    let reply = wire.ask("GET /health", &to).await;
    assert_eq!(reply.field("access-control-allow-origin"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_to_a_vm_are_not_reused_for_its_successor() {
    let mut world = World::new().await;
    let mut wire = Wire::connect(world.address).await;
    for _ in 0..3 {
        assert_eq!(wire.ask("GET /envs", &world.to(ENVD)).await.status, 200);
    }
    // After a resume, the sandbox is another VM at another socket. Here the old VM still answers, so that only the
    // content of an answer reveals whether an old connection was reused.
    let dir = world.dir.path().join("second");
    std::fs::create_dir(&dir).unwrap();
    let second = tokio::task::spawn_blocking({
        let dir = dir.clone();
        move || Agent::start(&dir)
    });
    let second = second.await.unwrap();
    let vsock = Vsock::to_agent(dir.join("vsock.sock"), second.socket.clone());
    world.table.set(Route {
        vsock: vsock.path.clone(),
        generation: 2,
        ..world.route()
    });
    world.vsock = None;
    world.agent = None;
    for _ in 0..3 {
        assert_eq!(wire.ask("GET /envs", &world.to(ENVD)).await.status, 200);
    }
}

/// Otherwise a client that was told that a sandbox has ended could still change its timeout.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_refuses_connections_is_not_found_once_its_end_is_known() {
    let mut world = World::new().await;
    world.vsock = None;
    let asking = tokio::spawn({
        let (address, fields) = (world.address, world.to(ENVD));
        async move {
            Wire::connect(address)
                .await
                .ask("GET /health", &fields)
                .await
        }
    });
    let table = world.table.clone();
    until("a wait for the end", || table.asked() > 3).await;
    assert!(!asking.is_finished());
    table.remove(&world.id);
    let reply = asking.await.unwrap();
    assert!(reply.text().contains("The sandbox was not found"));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_to_an_unknown_sandbox_is_not_found() {
    let world = World::with_guest(Setup::default(), async |_| {}).await;
    let mut wire = Wire::connect(world.address).await;
    let other = SandboxId::from_random([9; 19]);
    let fields = format!("Host: x\r\nE2b-Sandbox-Id: {other}\r\nE2b-Sandbox-Port: {ENVD}\r\n");
    for path in ["/health", "/files?path=x", "/process.Process/Start"] {
        let reply = wire.post(path, &fields, b"{}").await;
        assert_eq!(reply.status, 502);
        let message = reply.json()["message"].as_str().unwrap().to_owned();
        assert!(message.contains("was not found"), "{message}");
    }
}
