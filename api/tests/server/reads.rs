//! Read-only keys: no response to them enables more than reading.

use std::{fs, path::Path, process::Command};

use serde_json::{Value, json};

use crate::{
    http::{self, Answer},
    names::upstream,
    outside::with_outside,
    process::{Sandbox, Server, until, variable},
};

/// The scopes of routes that read.
const READING: [&str; 5] = [
    "sandboxes:read",
    "templates:read",
    "secrets:read",
    "metrics:read",
    "nodes:admin",
];
/// A literal value of a header in a rule.
const LITERAL: &str = "canary-of-a-rule";

/// A server with one of everything that a key may be denied, and two keys.
struct Fixture {
    server: Server,
    writer: String,
    reader: String,
    sandbox: Sandbox,
    /// Path of a build.
    build: String,
    template: String,
    hook: String,
    node: String,
    /// Values that no response to the reader may contain, each with a name.
    denied: Vec<(&'static str, String)>,
}

fn new_key(server: &Server, scopes: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cube-api"));
    command.args(["key", "new", "of-a-test", "--state"]);
    command.arg(server.state.path());
    command.args(scopes.iter().flat_map(|scope| ["--scope", scope]));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let key = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    until("the key is accepted", || {
        send(server, &key, "GET", "/teams", &Value::Null).status != 401
    });
    key
}

fn send(server: &Server, key: &str, method: &str, path: &str, body: &Value) -> Answer {
    let headers = [("X-API-Key", key), ("Content-Type", "application/json")];
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    http::send(server.address, method, path, &headers, body.as_bytes())
}

fn text(answer: &Value, key: &str) -> String {
    answer[key]
        .as_str()
        .unwrap_or_else(|| panic!("{key}: {answer}"))
        .to_owned()
}

impl Fixture {
    fn new(reports: &Path) -> Self {
        fs::create_dir(reports.join("run")).unwrap();
        fs::write(reports.join("run/report.json"), "{}").unwrap();
        let proxy = variable("CUBE_BIN").unwrap().join("cube-egress");
        let upstream = upstream();
        let server = Server::with(&[
            "--warm",
            "0:0",
            "--rate",
            "1000",
            "--uplink",
            "up0",
            "--dns-server",
            &upstream,
            "--egress-proxy",
            proxy.to_str().unwrap(),
            "--reports",
            reports.to_str().unwrap(),
        ]);
        let write = ["sandboxes:write", "templates:write", "secrets:write"];
        let writer = new_key(&server, &[&READING[..], &write].concat());
        let reader = new_key(&server, &READING);
        let post = |path: &str, body: Value, status| {
            send(&server, &writer, "POST", path, &body)
                .expect(status)
                .json()
        };
        let secret = json!({"name": "key", "value": "canary-of-a-secret"});
        post("/secrets", secret, 201);
        let headers = json!({"a": LITERAL, "b": format!("{LITERAL}${{e2b.secrets.key}}")});
        let proxy = json!({"address": "192.0.2.1:1080", "username": "me", "password": "canary-of-the-proxy"});
        let rules = json!({"api.test": [{"transform": {"headers": headers}}]});
        let body = json!({
            "templateID": "base", "timeout": 300, "mcp": {"token": "canary-of-mcp"},
            "envVars": {"KEY": "canary-of-a-variable"},
            "network": {"allowPublicTraffic": false, "denyOut": ["0.0.0.0/0"], "rules": rules, "egressProxy": proxy},
        });
        let sandbox = Sandbox::of(&post("/v2/sandboxes", body, 201));
        post(&sandbox.path("/snapshots"), json!({"name": "kept"}), 201);
        let hook = json!({"name": "n", "url": "https://hooks.test/x", "events": ["sandbox.lifecycle.paused"],
            "signatureSecret": "canary-of-a-signature"});
        let hook = text(&post("/events/webhooks", hook, 201), "id");
        let made = post("/v3/templates", json!({"name": "mine"}), 202);
        let (template, build) = (text(&made, "templateID"), text(&made, "buildID"));
        let login =
            json!({"type": "registry", "username": "u", "password": "canary-of-a-registry"});
        let start = json!({"fromImage": "127.0.0.1:1/x", "fromImageRegistry": login, "steps": []});
        let build = format!("/templates/{template}/builds/{build}");
        send(&server, &writer, "POST", &format!("/v2{build}"), &start).expect(202);
        let status = || {
            send(
                &server,
                &writer,
                "GET",
                &format!("{build}/status"),
                &Value::Null,
            )
        };
        until("the build fails", || status().json()["status"] == "error");
        let nodes = send(&server, &writer, "GET", "/nodes", &Value::Null).json();
        let node = text(&nodes[0], "id");
        let mut denied = vec![
            ("token of the agent", sandbox.token.clone()),
            ("token of ports", sandbox.traffic_token.clone().unwrap()),
            ("literal header value", LITERAL.to_owned()),
            ("value of a secret", "canary-of-a-secret".to_owned()),
            ("password of a proxy", "canary-of-the-proxy".to_owned()),
            ("secret of signatures", "canary-of-a-signature".to_owned()),
            ("password of a registry", "canary-of-a-registry".to_owned()),
            ("variable", "canary-of-a-variable".to_owned()),
            ("setting of MCP", "canary-of-mcp".to_owned()),
            ("key of a client", writer.clone()),
        ];
        let keys = fs::read(server.state.path().join("keys.json")).unwrap();
        let keys: Value = serde_json::from_slice(&keys).unwrap();
        let hashes = keys["keys"].as_array().unwrap().iter();
        denied.extend(hashes.map(|key| ("hash of a key", text(key, "sha256"))));
        Self {
            server,
            writer,
            reader,
            sandbox,
            build,
            template,
            hook,
            node,
            denied,
        }
    }

    fn get(&self, key: &str, path: &str) -> Answer {
        send(&self.server, key, "GET", path, &Value::Null)
    }

    /// A request to the route, and the statuses that it may have.
    fn request_of(&self, pattern: &str) -> (String, &[u16]) {
        let sandbox = &self.sandbox.id;
        let with = |id: &str| pattern.replacen("{id}", id, 1);
        let path = match pattern {
            "/health" | "/openapi.json" | "/metrics" | "/teams" | "/api-keys" | "/benchmarks"
            | "/v2/sandboxes" | "/sandboxes" | "/events/sandboxes" | "/events/webhooks"
            | "/templates" | "/v2/templates" | "/snapshots" | "/secrets" | "/nodes" => {
                pattern.to_owned()
            }
            "/sandboxes/{id}"
            | "/sandboxes/{id}/metrics"
            | "/sandboxes/{id}/logs"
            | "/v2/sandboxes/{id}/logs"
            | "/sandboxes/{id}/network/events"
            | "/events/sandboxes/{id}" => with(sandbox),
            "/sandboxes/metrics" => format!("{pattern}?sandbox_ids={sandbox}"),
            "/events/webhooks/{id}"
            | "/events/webhooks/{id}/deliveries"
            | "/events/webhooks/{id}/stats" => with(&self.hook),
            "/templates/{id}" | "/templates/{id}/tags" => with(&self.template),
            "/templates/aliases/{alias}" => "/templates/aliases/base".to_owned(),
            "/templates/{id}/builds/{build}/status" => format!("{}/status", self.build),
            "/templates/{id}/builds/{build}/logs" => format!("{}/logs", self.build),
            "/secrets/{id}" => with("key"),
            "/nodes/{id}" => with(&self.node),
            "/benchmarks/{name}" => "/benchmarks/run".to_owned(),
            "/templates/{id}/order" => return (with(&self.template), &[200, 409]),
            // It grants an upload.
            "/templates/{id}/files/{hash}" => {
                let path = with(&self.template).replace("{hash}", &"0a".repeat(32));
                return (path, &[403]);
            }
            "/volumes" | "/volumes/{id}" => return (with("x"), &[501]),
            other => {
                panic!("GET {other} is a new route: add a request to it, with what it may show")
            }
        };
        (path, &[200])
    }

    /// The names of the denied values that an answer contains.
    fn found_in(&self, answer: &Answer) -> Vec<&'static str> {
        let whole = format!("{answer:?}{}", answer.text());
        let found = self
            .denied
            .iter()
            .filter(|(_, value)| whole.contains(value));
        found.map(|(what, _)| *what).collect()
    }
}

pub(crate) fn kvm_no_answer_to_a_key_that_reads_has_a_token_or_a_secret() {
    with_outside(|| {
        let reports = tempfile::tempdir().unwrap();
        let fixture = Fixture::new(reports.path());
        let reads = api::control::endpoints().into_iter();
        for endpoint in reads.filter(|endpoint| endpoint.method == "get") {
            let (path, expected) = fixture.request_of(endpoint.path);
            let answer = fixture.get(&fixture.reader, &path);
            assert!(
                expected.contains(&answer.status),
                "{path}: {}",
                answer.text()
            );
            assert_eq!(fixture.found_in(&answer), Vec::<&str>::new(), "{path}");
        }
        let detail = fixture.sandbox.path("");
        let shown = fixture.get(&fixture.reader, &detail).expect(200).json();
        let headers = &shown["network"]["rules"]["api.test"][0]["transform"]["headers"];
        assert_eq!(*headers, json!({"a": "***", "b": "***${e2b.secrets.key}"}));
        // A key that may write gets both, and one that may only use sandboxes gets the token.
        let answer = fixture.get(&fixture.writer, &detail);
        assert_eq!(
            fixture.found_in(&answer),
            ["token of the agent", "literal header value"]
        );
        let user = new_key(&fixture.server, &["sandboxes:read", "sandboxes:exec"]);
        let answer = fixture.get(&user, &detail);
        assert_eq!(fixture.found_in(&answer), ["token of the agent"]);
        // Secrets have scopes of their own.
        let maker = new_key(&fixture.server, &["sandboxes:read", "sandboxes:write"]);
        fixture.get(&maker, "/secrets").expect(403);
        let update = json!({"value": "v"});
        send(&fixture.server, &maker, "POST", "/secrets/key", &update).expect(403);
    });
}
