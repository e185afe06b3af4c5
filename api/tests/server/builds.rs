//! Requests of the official clients for builds of templates.

use serde_json::{Value, json};

use crate::{
    http::{self, Answer},
    process::{JSON, Server, until},
};

/// The path of a build, and the template's id.
fn request(server: &Server, name: &str) -> (String, String) {
    let body = json!({"name": name, "cpuCount": 2, "memoryMB": 1024});
    let answer = server.post("/v3/templates", &body).expect(202).json();
    let text = |key: &str| answer[key].as_str().unwrap().to_owned();
    let (template, build) = (text("templateID"), text("buildID"));
    (format!("/templates/{template}/builds/{build}"), template)
}

fn start(server: &Server, build: &str) -> Answer {
    let body = json!({"fromImage": "127.0.0.1:1/no/such/image", "steps": []});
    server.post(&format!("/v2{build}"), &body)
}

fn status(server: &Server, build: &str) -> Value {
    server
        .get(&format!("{build}/status?logsOffset=0"))
        .expect(200)
        .json()
}

fn ends_with_error(server: &Server, build: &str) -> Value {
    until("the build fails", || {
        status(server, build)["status"] == "error"
    });
    status(server, build)["reason"].clone()
}

pub(crate) fn kvm_a_build_is_requested_started_followed_and_deleted() {
    let server = Server::open();
    for (name, code) in [("base", 403), ("base:v2", 403), ("no name", 400), ("", 400)] {
        server
            .post("/v3/templates", &json!({"name": name}))
            .expect(code);
    }
    let sandbox = server.create(&json!({}));
    let snapshots = sandbox.path("/snapshots");
    server
        .post(&snapshots, &json!({"name": "snap"}))
        .expect(201);
    server
        .post("/v3/templates", &json!({"name": "snap"}))
        .expect(409);

    let (build, template) = request(&server, "mine:v1");
    server
        .post(&snapshots, &json!({"name": "mine"}))
        .expect(409);
    assert_eq!(status(&server, &build)["status"], "waiting");
    start(&server, &build).expect(202);
    let reason = ends_with_error(&server, &build);
    assert_eq!(reason["step"], "base", "{reason}");
    start(&server, &build).expect(400);
    let logs = server
        .get(&format!("{build}/logs?direction=backward"))
        .expect(200)
        .json();
    assert!(logs["logs"].is_array());

    let detail = server
        .get(&format!("/templates/{template}"))
        .expect(200)
        .json();
    assert_eq!(detail["builds"][0]["status"], "error", "{detail}");
    let listed = server.get("/templates").expect(200).json();
    let listed = listed.as_array().unwrap();
    assert!(listed.iter().any(|t| t["templateID"] == template.as_str()));
    server.get("/templates/aliases/mine").expect(404);
    server
        .get(&format!("/templates/{template}/tags"))
        .expect(200);
    let create = json!({"templateID": "mine:v1"});
    server.post("/v2/sandboxes", &create).expect(404);
    let assign = json!({"target": "mine:v1", "tags": ["v2"]});
    server.post("/templates/tags", &assign).expect(404);
    let public = format!("/v2/templates/{template}");
    let patch =
        |path: &str| http::send(server.address, "PATCH", path, &JSON, br#"{"public":true}"#);
    patch(&public).expect(200);
    patch("/v2/templates/base").expect(403);
    let detail = server
        .get(&format!("/templates/{template}"))
        .expect(200)
        .json();
    assert_eq!(detail["public"], true);
    server.delete(&format!("/templates/{template}")).expect(204);
    server.get(&format!("{build}/status")).expect(404);
    start(&server, &build).expect(404);
}

pub(crate) fn kvm_files_are_uploaded_to_urls_with_their_own_authority() {
    let mut server = Server::open();
    let (_, template) = request(&server, "mine");
    let hash = "0a".repeat(32);
    let path = format!("/templates/{template}/files/{hash}");
    server
        .get(&format!("/templates/{template}/files/.."))
        .expect(400);
    server
        .get(&format!("/templates/none/files/{hash}"))
        .expect(404);
    let grant = server.get(&path).expect(201).json();
    assert_eq!(grant["present"], false);
    let url = grant["url"].as_str().unwrap().to_owned();
    let origin = format!("http://{}", server.address);
    let granted = url.strip_prefix(&origin).expect(&url).to_owned();
    let put = |server: &Server, path: &str| http::send(server.address, "PUT", path, &[], b"tar");
    put(&server, &path).expect(403);
    let other = granted.replacen(&hash, &"0b".repeat(32), 1);
    put(&server, &other).expect(403);
    put(&server, &granted).expect(200);
    assert_eq!(server.get(&path).expect(201).json()["present"], true);
    // The key, the build and the file are those of the state directory.
    server.crash_and_restart();
    assert_eq!(server.get(&path).expect(201).json()["present"], true);
    put(&server, &granted).expect(200);
    server.delete(&format!("/templates/{template}")).expect(204);
    put(&server, &granted).expect(404);
    assert!(
        !server
            .state
            .path()
            .join("builds/files")
            .join(&template)
            .exists()
    );
}

pub(crate) fn kvm_builds_outlive_a_restart_or_end_with_a_reason() {
    let mut server = Server::open();
    let (waiting, template) = request(&server, "mine");
    server.crash_and_restart();
    assert_eq!(status(&server, &waiting)["status"], "waiting");
    let (newer, same) = request(&server, "mine");
    assert_eq!(same, template);
    let reason = ends_with_error(&server, &waiting);
    assert_eq!(
        reason["message"],
        "The build was canceled because it was superseded by a newer one."
    );
    server.reload().unwrap();
    start(&server, &newer).expect(202);
    let reason = ends_with_error(&server, &newer);
    server.restart();
    assert_eq!(
        status(&server, &newer)["reason"]["message"],
        reason["message"]
    );
}
