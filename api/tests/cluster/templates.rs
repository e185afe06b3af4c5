//! A template that is built on one node arrives at the others.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, MetadataExt},
    path::PathBuf,
};

use serde_json::{Value, json};

use crate::{
    service::{id, only, open_all},
    world::{Node, World, until},
};

/// Number of random bytes on the template's disk.
const DATA: u64 = 16 << 20;
/// Where an ext4 file system has its magic number.
const SUPERBLOCK: u64 = 1024 + 56;
const STEP: &str = "head -c 16M /dev/urandom >/data; sha256sum /data >/data.sum; sync";

pub(crate) fn travel(world: &mut World) {
    let (template, build) = build_on_a(world);
    a_broken_transfer_goes_on(world, &build);
    for node in &world.nodes {
        until(&format!("{} sees a copy on each node", node.name), || {
            nodes_of(node, "travels") == ["a", "b", "c"]
        });
    }
    // Cordoned nodes also have it; a is the only one that could forward.
    only(world, 1);
    let [a, c] = [0, 2].map(|at| &world.nodes[at]);
    let body = json!({"templateID": "travels", "timeout": 300});
    let made = a.send("POST", "/v2/sandboxes", &body).expect(201);
    assert_eq!(made.header("x-cube-node"), Some("b"));
    let sandbox = made.json();
    let sum = c
        .exec(&sandbox, "sha256sum -c /data.sum && id -un")
        .unwrap();
    assert!(sum.starts_with("/data: OK"), "{sum}");
    c.send(
        "DELETE",
        &format!("/sandboxes/{}", id(&sandbox)),
        &Value::Null,
    )
    .expect(204);
    open_all(world);
    builds_and_tags_count_at_once(world);
    a_build_ends_without_etcd(world);
    a_closed_node_makes_no_template(world);
    a_deletion_reaches_all(world, &template);
}

/// Returns the ids of the template and of its build.
pub(crate) fn build_on_a(world: &World) -> (String, String) {
    build(world, STEP)
}

fn build(world: &World, step: &str) -> (String, String) {
    let a = &world.nodes[0];
    let body = json!({"name": "travels", "cpuCount": 1, "memoryMB": 256});
    let asked = a.send("POST", "/v3/templates", &body).expect(202).json();
    let text = |key: &str| asked[key].as_str().unwrap().to_owned();
    let (template, build) = (text("templateID"), text("buildID"));
    let path = format!("/templates/{template}/builds/{build}");
    let body = json!({
        "fromTemplate": "base",
        "steps": [{"type": "RUN", "args": [step, "root"]}],
    });
    // Through another node, which forwards it.
    let b = &world.nodes[1];
    b.send("POST", &format!("/v2{path}"), &body).expect(202);
    until("the build ends", || {
        let status = b
            .get(&format!("{path}/status?logsOffset=0"))
            .expect(200)
            .json();
        assert_ne!(status["status"], "error", "{status}");
        status["status"] == "ready"
    });
    (template, build)
}

fn part_of(node: &Node, build: &str) -> PathBuf {
    let copies = node.state.path().join("builds/copies");
    copies.join(build).join("layer.part")
}

fn a_broken_transfer_goes_on(world: &mut World, build: &str) {
    let part = part_of(&world.nodes[1], build);
    until("a part of the template is at b", || {
        fs::metadata(&part).is_ok_and(|part| part.blocks() * 512 >= DATA / 2)
    });
    world.nodes[0].kill();
    assert!(!part.with_file_name("layer").exists());
    until("b has noticed", || {
        world.nodes[1]
            .log()
            .contains("cannot copy a template from another node")
    });
    // Damage that happened in the meantime is detected.
    let file = File::options().read(true).write(true).open(&part).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, SUPERBLOCK).unwrap();
    assert_ne!(byte, [0], "the first chunk is not there");
    file.write_all_at(&[!byte[0]], SUPERBLOCK).unwrap();
    world.nodes[0].start();
    until("b has the template", || !part.parent().unwrap().exists());
    let log = world.nodes[1].log();
    let went_on = log
        .lines()
        .find(|line| line.contains("resuming the fetch of a file"));
    let went_on = went_on.expect("b began anew");
    let number = |key: &str| {
        let text = went_on.split(key).nth(1).unwrap();
        let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u64>().unwrap()
    };
    let (missing, chunks) = (number("missing="), number("chunks="));
    assert!(missing >= 1 && missing < chunks, "{went_on}");
    assert!(log.contains("copied a template from another node"));
}

fn nodes_of(node: &Node, name: &str) -> Vec<String> {
    let listed = node.get("/templates").expect(200).json();
    let mut listed = listed.as_array().unwrap().iter();
    let found = listed.find(|template| template["aliases"][0] == name);
    let nodes = found.and_then(|template| template["nodes"].as_array());
    let nodes = nodes.into_iter().flatten();
    nodes
        .map(|node| node.as_str().unwrap().to_owned())
        .collect()
}

/// Each node's response to a create, and the content of the sandbox's file `/version`.
fn versions(nodes: &[&Node], template: &str) -> Vec<(u16, String)> {
    let body = json!({"templateID": template, "timeout": 300});
    let version = |node: &&Node| {
        let made = node.send("POST", "/v2/sandboxes", &body);
        if made.status != 201 {
            return (made.status, String::new());
        }
        let sandbox = made.json();
        let version = node.exec(&sandbox, "cat /version 2>/dev/null || echo first");
        let path = format!("/sandboxes/{}", id(&sandbox));
        node.send("DELETE", &path, &Value::Null).expect(204);
        (201, version.unwrap().trim().to_owned())
    };
    nodes.iter().map(version).collect()
}

/// All nodes have the first build, but only the home has the later ones. Every node respects what a client has been
/// told.
fn builds_and_tags_count_at_once(world: &World) {
    let [a, b, c] = [0, 1, 2].map(|at| &world.nodes[at]);
    let all = [b, c, a];
    let is = |version: &str| vec![(201, version.to_owned()); 3];
    let body = json!({"target": "travels", "tags": ["stable"]});
    b.send("POST", "/templates/tags", &body).expect(201);
    assert_eq!(versions(&all, "travels:stable"), is("first"));
    for node in all {
        until("each node has the tag", || {
            nodes_of(node, "travels") == ["a", "b", "c"]
        });
    }
    build(world, "echo second >/version");
    assert_eq!(versions(&all, "travels"), is("second"));
    assert_eq!(versions(&all, "travels:stable"), is("first"));
    c.send("POST", "/templates/tags", &body).expect(201);
    assert_eq!(versions(&all, "travels:stable"), is("second"));
    let body = json!({"name": "travels", "tags": ["stable"]});
    b.send("DELETE", "/templates/tags", &body).expect(204);
    assert_eq!(
        versions(&all, "travels:stable"),
        vec![(404, String::new()); 3]
    );
    let warned = "another node has not confirmed a change of tags";
    assert!(!a.log().contains(warned), "{}", a.log());
}

fn a_build_ends_without_etcd(world: &World) {
    world.stop_etcd();
    build(world, "echo third >/version");
    world.continue_etcd();
    let log = world.nodes[0].log();
    assert!(log.contains("the other nodes may use previous builds"));
    // Including nodes that could not see it.
    only(world, 1);
    until("b has the build", || {
        versions(&[&world.nodes[2]], "travels") == [(201, "third".to_owned())]
    });
    open_all(world);
}

/// Without a build: where it is recorded.
fn a_closed_node_makes_no_template(world: &World) {
    only(world, 1);
    let body = json!({"name": "elsewhere"});
    let asked = world.nodes[0].send("POST", "/v3/templates", &body);
    let asked = asked.expect(202).json();
    let template = asked["templateID"].as_str().unwrap();
    let is_at = |at: usize| {
        let records = world.nodes[at].state.path().join("builds/templates");
        records.join(template).exists()
    };
    assert!(is_at(1) && !is_at(0) && !is_at(2));
    world.nodes[2]
        .send("DELETE", &format!("/templates/{template}"), &Value::Null)
        .expect(204);
    open_all(world);
}

fn a_deletion_reaches_all(world: &mut World, template: &str) {
    // c learns of it when it is back.
    world.nodes[2].kill();
    let path = format!("/templates/{template}");
    let b = &world.nodes[1];
    b.send("DELETE", &path, &Value::Null).expect(204);
    assert_eq!(versions(&[b], "travels"), [(404, String::new())]);
    world.nodes[2].start();
    for node in &world.nodes {
        node.until_all(world.nodes.len(), "ready");
        until("the deletion is everywhere", || {
            node.get(&path).status == 404 && nodes_of(node, "travels").is_empty()
        });
    }
}
