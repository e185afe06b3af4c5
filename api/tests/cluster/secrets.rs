//! A secret belongs to the cluster.

use std::time::Instant;

use api::secrets::{KeySource, Secrets};
use serde_json::{Value, json};

use crate::world::{Client, Node, World, until};

/// A text that no file and no log of a node may contain.
const CANARY: &str = "hunter2-canary";

pub(crate) fn belong_to_the_cluster(world: &mut World) {
    let began = Instant::now();
    let [a, b, c] = [0, 1, 2].map(|at| world.nodes[at].client());
    // Every node has a change when the response arrives.
    put(&a, "/secrets", "one", "of a").expect(201);
    put(&b, "/secrets", "one", "x").expect(409);
    put(&c, "/secrets/one", "one", "of c").expect(200);
    for node in [&a, &b, &c] {
        assert_eq!(version(node, "one"), Some(2), "{}", node.name);
    }
    put(&a, "/secrets", "gone", "x").expect(201);
    put(&a, "/secrets", "two", "x").expect(201);
    remove(&b, "two");
    for node in [&a, &b, &c] {
        assert_eq!(version(node, "two"), None, "{}", node.name);
    }
    // c is down during changes, and the others still respond.
    world.nodes[2].kill();
    put(&b, "/secrets/one", "one", CANARY).expect(200);
    put(&a, "/secrets", "three", CANARY).expect(201);
    remove(&a, "gone");
    world.nodes[2].start();
    until("c catches up", || {
        let seen = ["one", "three", "gone"].map(|name| version(&c, name));
        seen == [Some(3), Some(1), None]
    });
    for node in [&a, &b] {
        assert_eq!(version(node, "gone"), None, "{}", node.name);
    }
    for node in &world.nodes {
        for name in ["one", "three"] {
            assert_eq!(value(node, name), CANARY, "{}", node.name);
        }
        assert!(!node.log().contains("canary"), "{}", node.name);
    }
    // A node without secrets, like one that has just joined.
    world.nodes[2].kill();
    std::fs::remove_dir_all(world.nodes[2].state.path().join("secrets")).unwrap();
    world.nodes[2].start();
    until("c has the secrets", || {
        ["one", "three"].map(|name| version(&c, name)) == [Some(3), Some(1)]
    });
    assert_eq!(value(&world.nodes[2], "one"), CANARY);
    remove(&c, "one");
    remove(&c, "three");
    assert_eq!(a.get("/secrets").expect(200).json(), json!([]));
    println!("secrets: {:?}", began.elapsed());
}

fn put(node: &Client, path: &str, name: &str, value: &str) -> crate::http::Answer {
    node.send("POST", path, &json!({"name": name, "value": value}))
}

fn remove(node: &Client, name: &str) {
    let path = format!("/secrets/{name}");
    node.send("DELETE", &path, &Value::Null).expect(204);
}

fn version(node: &Client, name: &str) -> Option<u64> {
    let found = node.get(&format!("/secrets/{name}"));
    match found.status {
        404 => None,
        _ => found.expect(200).json()["currentVersion"].as_u64(),
    }
}

/// The value that a request of a sandbox on this node would get, according to its server's files.
fn value(node: &Node, name: &str) -> String {
    let secrets = Secrets::open(node.state.path(), &KeySource::Generated).unwrap();
    secrets.value(name, "a.test").unwrap().expose().to_owned()
}
