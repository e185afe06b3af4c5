//! `cube mcp`: JSON-RPC over standard streams and over HTTP.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout},
};

use client::endpoint::Endpoint;
use envd::EnvdClient;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::world::{PATIENCE, World, signal};

/// A client of `cube mcp` on standard streams.
struct Session {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    requests: u64,
}

impl Session {
    fn start(world: &World, words: &[&str]) -> Self {
        let mut child = world.spawn(&[&["mcp"], words].concat());
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut session = Self {
            child,
            input,
            output,
            requests: 0,
        };
        let client = json!({"name": "test", "version": "1"});
        let hello =
            json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client});
        let welcome = session.request("initialize", &hello);
        assert_eq!(welcome["result"]["serverInfo"]["name"], "cube", "{welcome}");
        session.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        session
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.input, "{message}").unwrap();
    }

    fn request(&mut self, method: &str, params: &Value) -> Value {
        self.requests += 1;
        self.send(
            &json!({"jsonrpc": "2.0", "id": self.requests, "method": method, "params": params}),
        );
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let response: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(response["id"], self.requests, "{line}");
        response
    }

    /// Whether a tool failed, and the texts of its result.
    fn call(&mut self, tool: &str, arguments: Value) -> (bool, String) {
        let response = self.request("tools/call", &json!({"name": tool, "arguments": arguments}));
        let result = &response["result"];
        let texts = result["content"]
            .as_array()
            .unwrap_or_else(|| panic!("{response}"))
            .iter();
        let texts: Vec<_> = texts.map(|block| block["text"].as_str().unwrap()).collect();
        (result["isError"] == true, texts.join("\n"))
    }

    #[track_caller]
    fn succeeds(&mut self, tool: &str, arguments: Value) -> String {
        let (is_error, text) = self.call(tool, arguments);
        assert!(!is_error, "{tool}: {text}");
        text
    }

    #[track_caller]
    fn fails(&mut self, tool: &str, arguments: Value, cause: &str) {
        let (is_error, text) = self.call(tool, arguments);
        assert!(is_error && text.contains(cause), "{tool}: {text}");
    }

    fn create(&mut self, arguments: Value) -> String {
        let made = self.succeeds("create", arguments);
        named("sandbox", &made)
    }
}

/// The value of a line `name: value`.
fn named(name: &str, text: &str) -> String {
    let mut lines = text.lines();
    let value = lines.find_map(|line| line.strip_prefix(&format!("{name}: ")));
    value.unwrap().to_owned()
}

pub(crate) fn kvm_an_mcp_client_uses_sandboxes_which_end_with_its_input() {
    let world = World::open();
    let other = world.sandbox();
    let words = [
        "--template",
        "base",
        "--max-sandboxes",
        "2",
        "--max-output",
        "1024",
    ];
    let mut session = Session::start(&world, &words);
    let listed = session.request("tools/list", &json!({}));
    assert_eq!(
        listed["result"]["tools"].as_array().unwrap().len(),
        11,
        "{listed}"
    );
    let unknown = session.request("tools/call", &json!({"name": "rm"}));
    assert_eq!(unknown["error"]["code"], -32602, "{unknown}");

    let id = session.create(json!({}));
    let at = |command: &str| json!({"sandbox": id, "command": command});
    let ran = session.succeeds("exec", at("echo out; echo bad >&2; exit 3"));
    assert_eq!(ran, "out\n\nstderr:\nbad\n\nexit code 3");
    let flood = session.succeeds("exec", at("head -c 1000000 /dev/zero | tr '\\0' x"));
    assert!(
        flood.contains("[998976 bytes left out]") && flood.len() < 1100,
        "{flood}"
    );
    session.fails(
        "exec",
        json!({"sandbox": id, "command": "sleep 60", "timeout_s": 1}),
        "longer than 1s",
    );
    session.fails(
        "exec",
        json!({"sandbox": id, "cmd": "true"}),
        "no argument \"cmd\"",
    );
    session.fails(
        "exec",
        json!({"sandbox": other, "command": "true"}),
        "this server has no sandbox",
    );
    session.fails(
        "kill",
        json!({"sandbox": other}),
        "this server has no sandbox",
    );

    let file = |content: &str| json!({"sandbox": id, "path": "/tmp/d/f", "content": content});
    session.succeeds("write_file", file("kept\n"));
    let path = |path: &str| json!({"sandbox": id, "path": path});
    assert_eq!(session.succeeds("read_file", path("/tmp/d/f")), "kept\n");
    let files = session.succeeds("list_files", path("/tmp/d"));
    assert!(files.ends_with(" 5 f\n1 entries"), "{files}");
    session.fails("read_file", path("/bin/sh"), "more than 1024 bytes");
    session.succeeds("exec", at("printf '\\377' > /tmp/b"));
    session.fails("read_file", path("/tmp/b"), "is not text");
    session.fails("read_file", path("/nowhere"), "/nowhere");
    session.fails(
        "run_code",
        json!({"sandbox": id, "code": "1"}),
        "code-interpreter-v1",
    );
    assert_eq!(
        session.succeeds("network_log", json!({"sandbox": id})),
        "nothing was refused"
    );

    let snapshot = session.succeeds("snapshot", json!({"sandbox": id}));
    let snapshot = named("snapshot", &snapshot);
    let copy = session.create(json!({"snapshot": snapshot}));
    session.fails("fork", json!({"sandbox": id}), "may have 2 sandboxes");
    session.succeeds("kill", json!({"sandbox": id}));
    session.fails("exec", at("true"), "this server has no sandbox");
    let fork = session.succeeds("fork", json!({"sandbox": copy}));
    let fork = named("sandbox", &fork);
    assert_eq!(
        session.succeeds("exec", json!({"sandbox": fork, "command": "cat /tmp/d/f"})),
        "kept\n\nexit code 0"
    );
    let listed = session.succeeds("list", json!({}));
    assert!(
        listed.contains(&fork) && listed.contains(&copy) && listed.lines().count() == 2,
        "{listed}"
    );

    drop(session.input);
    assert!(session.child.wait().unwrap().success());
    assert_eq!(world.ids(), [other]);
    assert!(
        world
            .run(&["snapshot", "list", "--json"])
            .items("snapshot")
            .is_empty()
    );
}

pub(crate) fn kvm_mcp_over_http_serves_only_clients_with_the_token() {
    let world = World::open();
    let token = world.dir.path().join("token");
    fs::write(&token, "0123456789abcdef\n").unwrap();
    let words = [
        "mcp",
        "--listen",
        "127.0.0.1:0",
        "--token-file",
        token.to_str().unwrap(),
        "--template",
        "base",
    ];
    let mut child = world.spawn(&words);
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let url = line.trim().strip_prefix("cube: serving MCP at ").unwrap();
    let endpoint = Endpoint::parse(url.strip_suffix("/mcp").unwrap()).unwrap();
    let post = |host: &str, more: &[(&str, &str)], tool: &str| {
        let mut client = EnvdClient::over(endpoint.dial(PATIENCE).unwrap(), PATIENCE);
        client.set_route(host, more);
        let headers = [
            ("accept", "application/json, text/event-stream"),
            ("content-type", "application/json"),
        ];
        let params = json!({"name": tool, "arguments": {}});
        let call = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params});
        let response = client
            .request("POST", "/mcp", &headers, call.to_string().as_bytes())
            .unwrap();
        (response.status, String::from_utf8(response.body).unwrap())
    };
    let here = endpoint.authority();
    let key = ("authorization", "Bearer 0123456789abcdef");
    let (evil, own) = (("origin", "http://evil.test"), format!("http://{here}"));
    for (host, headers, status) in [
        (here.as_str(), &[][..], 401),
        (&here, &[("authorization", "Bearer 0123456789abcdeF")], 401),
        (&here, &[evil], 403),
        (&here, &[key, evil], 403),
        (&here, &[key, ("origin", "null")], 403),
        ("evil.test", &[key], 403),
        (&here, &[key, ("origin", own.as_str())], 200),
    ] {
        assert_eq!(post(host, headers, "list").0, status, "{host} {headers:?}");
    }
    assert!(world.ids().is_empty());
    let (_, made) = post(&here, &[key], "create");
    let ids = world.ids();
    assert!(ids.len() == 1 && made.contains(&ids[0]), "{made}");
    signal(&child, Signal::SIGTERM);
    assert!(child.wait().unwrap().success());
    assert!(world.ids().is_empty());
}
