//! Rebuilds of templates from the orders that the server keeps.

use std::fs;

use serde_json::{Value, json};

use crate::{
    process::Server,
    templates::{Build, Outcome, request, run, start, step},
};

/// A redo of a template, as a build that can be followed.
fn redo<'a>(server: &'a Server, reference: &str, body: &Value) -> Build<'a> {
    let answer = server.post(&format!("/templates/{reference}/redo"), body);
    Build::of(server, &answer.expect(202).json())
}

/// The random words in sandboxes of a template, one from its step and one from its start command.
fn drawn(server: &Server, name: &str) -> Vec<String> {
    let sandbox = server.create(&json!({"templateID": name}));
    let text = server.sh(
        &sandbox,
        "cat /home/user/one /home/user/file /tmp/word; id -un; pwd",
    );
    server.delete(&sandbox.path("")).expect(204);
    text.lines().map(str::to_owned).collect()
}

fn cached(outcome: &Outcome) -> usize {
    outcome.count("CACHED")
}

pub(crate) fn kvm_a_template_is_built_again_from_the_order_that_the_server_keeps() {
    let mut server = Server::open();
    let uuid = "cat /proc/sys/kernel/random/uuid";
    let build = request(&server, "mine:v1", 384);
    let hash = build.upload("0a", &[("file", "copied\n")], &[]);
    let options = json!({
        "steps": [
            run(&format!("{uuid} > /home/user/one")),
            {"type": "COPY", "args": ["file", "/home/user/file"], "filesHash": hash},
            step("WORKDIR", &["/srv"]),
        ],
        "startCmd": format!("{uuid} > /tmp/word; exec sleep 8888"),
        "readyCmd": "[ -s /tmp/word ]",
    });
    let build = build.start(&options);
    build.is_ready();
    let (template, path) = (build.template.clone(), build.path.clone());
    for reference in ["mine:v1", "mine", &template] {
        let order = server.get(&format!("/templates/{reference}/order"));
        let order = order.expect(200).json();
        assert_eq!(order["templateID"], template.as_str());
        assert_eq!(
            (&order["memoryMB"], &order["hadCredentials"]),
            (&384.into(), &false.into())
        );
        let start = &order["start"];
        assert_eq!(start["startCmd"], options["startCmd"]);
        assert_eq!(start["readyCmd"], options["readyCmd"]);
        assert_eq!(start["steps"][1]["filesHash"], hash.as_str());
        assert_eq!(start["steps"][2]["args"], json!(["/srv"]));
    }
    server.get("/templates/mine:v2/order").expect(404);
    server.get("/templates/none/order").expect(404);
    server.get("/templates/base/order").expect(409);
    let first = drawn(&server, "mine:v1");
    assert_eq!(first[1], "copied");
    assert_eq!(first[3..], ["user", "/srv"]);
    let tags = json!({"target": "mine:v1", "tags": ["default"]});
    server.post("/templates/tags", &tags).expect(201);
    server.crash_and_restart();

    // All steps and the commands are cached: the template is the same.
    let same = redo(&server, "mine", &json!({}));
    assert_eq!(same.template, template);
    assert_ne!(same.path, path);
    assert_eq!(cached(&same.is_ready()), 4);
    assert_eq!(drawn(&server, "mine"), first);

    // Everything runs again. Sandboxes of the previous template continue, and new ones start from it until the new one
    // is ready.
    let former = server.create(&json!({"templateID": "mine"}));
    let again = redo(&server, "mine", &json!({"skipCache": true}));
    let busy = server.post("/templates/mine:v1/redo", &json!({}));
    busy.expect(409);
    let meanwhile = drawn(&server, "mine");
    let outcome = again.is_ready();
    assert_eq!(cached(&outcome), 0, "{:#?}", outcome.log);
    assert_eq!(meanwhile[0], first[0]);
    assert_eq!(
        server.read_file(&former, "/home/user/one").trim_end(),
        first[0]
    );
    let second = drawn(&server, "mine");
    assert_ne!((&second[0], &second[2]), (&first[0], &first[2]));
    assert!(second[0] != first[0] && second[2] != first[2]);
    assert_eq!((&second[1], &second[3..]), (&first[1], &first[3..]));
    assert_eq!(drawn(&server, "mine:v1"), second, "both tags have moved");
    let detail = server.get(&format!("/templates/{template}"));
    let detail = detail.expect(200).json();
    let sizes = detail["builds"].as_array().unwrap().iter();
    assert!(sizes.clone().all(|b| b["memoryMB"] == 384), "{detail}");
    assert_eq!(sizes.count(), 3);
    // The new order is also kept.
    assert_eq!(cached(&redo(&server, "mine", &json!({})).is_ready()), 4);
    assert_eq!(drawn(&server, "mine"), second);
}

pub(crate) fn kvm_a_redo_says_what_it_lacks() {
    let server = Server::open();
    let refused = |reference: &str, body: &Value, code: u16, text: &str| {
        let answer = server.post(&format!("/templates/{reference}/redo"), body);
        let answer = answer.expect(code).json();
        let message = answer["message"].as_str().unwrap();
        assert!(message.contains(text), "{message}");
    };
    let plain = json!({});
    refused("base", &plain, 403, "cargo xtask");
    refused("none", &plain, 404, "was not found");
    refused("no%20name", &plain, 400, "is not a name");
    let sandbox = server.create(&json!({}));
    let snapshot = json!({"name": "snap"});
    server
        .post(&sandbox.path("/snapshots"), &snapshot)
        .expect(201);
    refused("snap", &plain, 409, "snapshot");

    let build = request(&server, "mine", 256);
    refused("mine", &plain, 404, "no ready build");
    let hash = build.upload("0b", &[("file", "copied")], &[]);
    let copy = json!({"type": "COPY", "args": ["file", "/home/user/file"], "filesHash": hash});
    let build = build.start(&json!({"steps": [copy]}));
    build.is_ready();
    refused("mine:v2", &plain, 404, "mine:v2");
    refused("mine", &json!({"force": true}), 400, "force");
    let in_state = |path: String| server.state.path().join("builds").join(path);
    fs::remove_file(in_state(format!("files/{}/{hash}", build.template))).unwrap();
    let forced = json!({"skipCache": true});
    refused("mine", &forced, 409, "files of step 1");
    // The step is cached.
    redo(&server, "mine", &plain).is_ready();
    let dir = in_state(format!("templates/{}", build.template));
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "order") {
            fs::remove_file(path).unwrap();
        }
    }
    refused("mine", &plain, 409, "an older server");
    start(&server, "other", &json!({"steps": [run("true")]})).is_ready();
    redo(&server, "other", &forced).is_ready();
}
