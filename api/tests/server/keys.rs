//! API keys of a running server.

use std::process::Command;

use crate::{
    http::{self, Answer},
    process::{Server, until},
};

fn command(server: &Server, words: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_cube-api"))
        .args(words)
        .arg("--state")
        .arg(server.state.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn get(server: &Server, path: &str, key: &str) -> Answer {
    http::send(server.address, "GET", path, &[("X-API-KEY", key)], b"")
}

pub(crate) fn kvm_keys_open_what_their_scopes_say() {
    let server = Server::with(&["--warm", "0:0", "--rate", "20"]);
    server.get("/health").expect(200);
    server.get("/openapi.json").expect(200);
    for path in ["/v2/sandboxes", "/metrics", "/templates"] {
        server.get(path).expect(401);
    }
    // Unknown routes answer the same with and without a key.
    server.get("/no/such/route").expect(404);
    let key = command(
        &server,
        &["key", "new", "reader", "--scope", "sandboxes:read"],
    );
    until("the key is accepted", || {
        get(&server, "/v2/sandboxes", &key).status == 200
    });
    get(&server, "/metrics", &key).expect(403);
    let headers = [("X-API-KEY", key.as_str())];
    let body = br#"{"templateID":"base"}"#;
    http::send(server.address, "POST", "/v2/sandboxes", &headers, body).expect(403);
    let bearer = format!("Bearer {key}");
    let teams = http::send(
        server.address,
        "GET",
        "/teams",
        &[("Authorization", &bearer)],
        b"",
    );
    assert_eq!(teams.expect(200).json()[0]["apiKey"], key.as_str());
    let list = command(&server, &["key", "list"]);
    assert!(
        list.contains("sandboxes:read  reader") && !list.contains(&key),
        "{list}"
    );
    let too_many = (0..200).map(|_| get(&server, "/v2/sandboxes", &key));
    let refused = too_many.into_iter().find(|answer| answer.status == 429);
    let refused = refused.expect("the rate limit has no effect").expect(429);
    assert_eq!(refused.header("retry-after"), Some("1"));
    command(&server, &["key", "revoke", "reader"]);
    until("the key is rejected", || {
        get(&server, "/v2/sandboxes", &key).status == 401
    });
}
