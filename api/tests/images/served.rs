//! Builds from images by clients of a server.

use std::time::Instant;

use serde_json::{Value, json};

use crate::{
    archive::{file, image, pack},
    process::Server,
    registry::Registry,
    world::{PATIENCE, variable},
};

/// Builds a template and returns the messages of its log. Fails if the build does.
fn build(server: &Server, name: &str, from: &str, command: &str) -> Vec<String> {
    let request = json!({"name": name, "memoryMB": 256});
    let requested = server.post("/v3/templates", &request).expect(202).json();
    let text = |key: &str| requested[key].as_str().unwrap().to_owned();
    let path = format!(
        "/templates/{}/builds/{}",
        text("templateID"),
        text("buildID")
    );
    let steps = json!([{"type": "RUN", "args": [command]}]);
    let start = json!({"fromImage": from, "steps": steps});
    server.post(&format!("/v2{path}"), &start).expect(202);
    let begun = Instant::now();
    loop {
        let status = server.get(&format!("{path}/status?logsOffset=0&limit=100"));
        let status = status.expect(200).json();
        if status["status"] == "ready" {
            return messages(&status);
        }
        // Queued, until a former build has ended.
        let goes_on = status["status"] == "waiting" || status["status"] == "building";
        assert!(goes_on, "{status}");
        assert!(begun.elapsed() < PATIENCE * 2, "{status}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

fn messages(status: &Value) -> Vec<String> {
    let entries = status["logEntries"].as_array().unwrap().iter();
    let messages = entries.map(|entry| entry["message"].as_str().unwrap().to_owned());
    messages.collect()
}

pub(crate) fn kvm_a_template_is_built_from_an_image_by_a_client() {
    let storage = tempfile::tempdir().unwrap();
    let registry = Registry::start(storage.path(), "");
    registry.push(&image(&[pack(&[file("a", "1")])]));
    let (address, converter) = (registry.address, variable("CUBE_BIN").join("cube-image"));
    let mirror = format!("{address}=http://{address}");
    let mut options = vec![
        "--insecure-loopback",
        "--warm",
        "0:0",
        "--image-mirror",
        &mirror,
    ];
    let converter = converter.to_str().unwrap();
    options.extend(["--image-converter", converter]);
    let server = Server::with(&options);
    let from = format!("{address}/r");
    let log = build(&server, "mine", &from, "echo $A > /home/user/made");
    assert!(
        log[0].starts_with(&format!("[base] FROM {from} [")),
        "{log:?}"
    );
    let sandbox = server.create(&json!({"templateID": "mine"}));
    let script = "cat /home/user/made /a; echo \"[$A]\"; id -un";
    assert_eq!(server.sh(&sandbox, script).trim_end(), "b\n1[]\nuser");
    // The next server finds the image's template.
    server.reload().unwrap();
    let log = build(&server, "other", &from, "echo $A > /home/user/other");
    assert!(log[0].starts_with("CACHED [base] FROM"), "{log:?}");
    build(
        &server,
        "default",
        "e2bdev/base",
        "python3 -c 'print(1)' > /home/user/made",
    );
    let sandbox = server.create(&json!({"templateID": "default"}));
    assert_eq!(server.sh(&sandbox, "cat /home/user/made").trim_end(), "1");
}
