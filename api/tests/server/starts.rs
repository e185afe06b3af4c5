//! Start commands of installed templates, in the templates that are built from them.

use std::{path::Path, process::Command};

use serde_json::{Value, json};

use crate::{
    process::{Server, templates},
    templates::{run, start},
};

/// Installs a copy of `base` whose recipe has this start command, and no ready command.
fn install(dir: &Path, name: &str, command: &str) {
    let to = dir.join(name);
    let mut copy = Command::new("cp");
    copy.args(["-a", "--sparse=always"]);
    let copied = copy.arg(templates().join("base")).arg(&to).status();
    assert!(copied.unwrap().success());
    let file = to.join("recipe.json");
    let text = std::fs::read(&file).unwrap();
    let mut recipe: Value = serde_json::from_slice(&text).unwrap();
    recipe["start"] = json!(["/bin/sh", "-c", command]);
    recipe["ready"] = Value::Null;
    std::fs::write(file, recipe.to_string()).unwrap();
}

pub(crate) fn kvm_a_start_command_that_fails_without_a_ready_command_ends_the_build() {
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    install(dir.path(), "runs", "exec sleep 8888");
    install(dir.path(), "ends", "(sleep 8888 &) >/dev/null 2>&1");
    install(dir.path(), "fails", "echo bad >&2; exit 3");
    let (from, images) = (dir.path().to_str().unwrap(), templates());
    let images = images.parent().unwrap().to_str().unwrap();
    let mut options = vec!["--insecure-loopback", "--warm", "0:0"];
    options.extend(["--templates", from, "--images", images]);
    let server = Server::with(&options);
    let build = |name: &str| {
        let options = json!({"fromTemplate": name, "steps": [run("true")]});
        start(&server, &format!("of-{name}"), &options)
    };
    for name in ["runs", "ends"] {
        build(name).is_ready();
        let sandbox = server.create(&json!({"templateID": format!("of-{name}")}));
        assert_eq!(server.sh(&sandbox, "pgrep -fc 'sleep 888[8]'"), "1\n");
    }
    let (at, message) = build("fails").fails();
    assert_eq!(at, "finalize");
    let expected = "start command failed: error running start command: exit status 3";
    assert_eq!(message, expected);
    // Neither a sandbox of the failed build nor its template is left.
    let create = json!({"templateID": "of-fails"});
    server.post("/v2/sandboxes", &create).expect(404);
}
