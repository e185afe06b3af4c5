//! One service on three nodes.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    http, secrets, templates,
    world::{World, until},
};

/// Number of creates in the comparison of local and forwarded ones.
const CREATES: usize = 6;

pub(crate) fn cluster_three_nodes_are_one_service() {
    World::run(|world| {
        only_members_use_the_listener_of_the_cluster(world);
        signed_urls_of_other_nodes_are_not_limited(world);
        requests_without_a_key_ask_other_nodes_so_often_only(world);
        a_node_serves_what_another_has(world);
        creates_write_nothing_to_etcd(world);
        without_etcd_creates_and_streams_go_on(world);
        a_closed_node_gets_no_sandbox(world);
        templates::travel(world);
        secrets::belong_to_the_cluster(world);
        a_dead_node_is_reported(world);
    });
}

pub(crate) fn id(sandbox: &Value) -> String {
    sandbox["sandboxID"].as_str().unwrap().to_owned()
}

/// Cordons all nodes but one, so that creates go there.
pub(crate) fn only(world: &World, at: usize) {
    for (other, node) in world.nodes.iter().enumerate() {
        let status = if other == at { "ready" } else { "standby" };
        let body = json!({"status": status});
        world.nodes[0]
            .send("POST", &format!("/nodes/{}", node.name), &body)
            .expect(204);
    }
    for node in &world.nodes {
        node.until_all(1, "ready");
    }
}

pub(crate) fn open_all(world: &World) {
    for node in &world.nodes {
        let path = format!("/nodes/{}", node.name);
        world.nodes[0]
            .send("POST", &path, &json!({"status": "ready"}))
            .expect(204);
    }
    for node in &world.nodes {
        node.until_all(world.nodes.len(), "ready");
    }
}

/// Random operations through a cordoned node, compared with a model.
pub(crate) fn cluster_long_a_node_that_owns_nothing_keeps_the_life_cycle() {
    World::run(|world| {
        only(world, 1);
        world.nodes[0].verify_lifecycle();
    });
}

/// A signed file URL that names no sandbox and that no node has signed.
fn requests_without_a_key_ask_other_nodes_so_often_only(world: &World) {
    let c = &world.nodes[2];
    let path = "/files?path=x&signature=v1_x&signature_expiration=9999999999";
    let status = |_| http::send(c.address, "GET", path, &[], b"").status;
    let refused = (0..5000).map(status).position(|status| status == 429);
    assert!(refused.is_some_and(|asked| asked >= 200), "{refused:?}");
    // With a key, nothing has changed.
    c.get("/v2/templates").expect(200);
}

/// A signed URL of a file on another node costs nothing: more than the limit can be read at once.
fn signed_urls_of_other_nodes_are_not_limited(world: &World) {
    let [b, c] = [1, 2].map(|at| &world.nodes[at]);
    only(world, 1);
    let body = json!({"templateID": "base", "timeout": 300, "secure": true});
    let sandbox = b.send("POST", "/v2/sandboxes", &body).expect(201).json();
    let token = sandbox["envdAccessToken"].as_str().unwrap();
    let signed = Sha256::digest(format!("/etc/hostname:read:root:{token}"));
    let signature = format!("v1_{}", STANDARD_NO_PAD.encode(signed));
    let query = [
        ("path", "/etc/hostname"),
        ("username", "root"),
        ("signature", &signature),
    ];
    let mut path = form_urlencoded::Serializer::for_suffix("/files?".to_owned(), "/files?".len());
    let path = path.extend_pairs(query).finish();
    for _ in 0..1500 {
        http::send(c.address, "GET", &path, &[], b"").expect(200);
    }
    let path = format!("/sandboxes/{}", id(&sandbox));
    b.send("DELETE", &path, &Value::Null).expect(204);
}

/// The public listener has no node-to-node routes, and the cluster listener responds with 403 to hosts without a
/// certificate.
fn only_members_use_the_listener_of_the_cluster(world: &World) {
    let a = &world.nodes[0];
    a.get("/cluster/state").expect(404);
    assert_eq!(a.status_without_certificate("/cluster/state", ""), "403");
    assert_eq!(a.status_without_certificate("/v2/sandboxes", ""), "403");
    let join = json!({"secret": "0".repeat(32), "node": "x", "identity": "i", "public_key": ""});
    assert_eq!(
        a.status_without_certificate("/cluster/join", &join.to_string()),
        "403"
    );
}

fn a_node_serves_what_another_has(world: &World) {
    only(world, 1);
    let [a, b, c] = [0, 1, 2].map(|at| &world.nodes[at]);
    let made = a.ask().expect(201);
    assert_eq!(made.header("x-cube-node"), Some("b"));
    let sandbox = made.json();
    // Everything through a node that owns nothing: the agent, files, the control plane, paths.
    assert_eq!(c.exec(&sandbox, "echo $((6*7))").unwrap(), "42\n");
    let path = format!("/sandboxes/{}", id(&sandbox));
    let detail = c.get(&path).expect(200).json();
    assert_eq!(detail["metadata"]["by"], "a");
    assert_eq!(detail, b.get(&path).expect(200).json());
    let by_path = c.get(&format!("/sandbox/{}/49983/health", id(&sandbox)));
    assert!(by_path.status == 204, "{}", by_path.text());
    // A stream: pieces arrive as they are produced.
    let began = Instant::now();
    let output = c.exec(&sandbox, "echo a; sleep 0.3; echo b").unwrap();
    assert!(output == "a\nb\n" && began.elapsed() >= Duration::from_millis(300));
    // A megabyte in each direction.
    let sum = c
        .exec(&sandbox, "head -c 1000000 /dev/zero | tr '\\0' x")
        .unwrap();
    assert_eq!(sum.len(), 1_000_000);
    // Keys of one node are accepted by all others.
    until("the key of b is known at c", || {
        c.send_as(b, "GET", &path).status == 200
    });
    c.send("POST", &format!("{path}/pause"), &json!({}))
        .expect(204);
    a.send("POST", &format!("{path}/connect"), &json!({"timeout": 60}))
        .expect(201);
    assert_eq!(c.exec(&sandbox, "echo on").unwrap(), "on\n");
    // A snapshot can be used at once, through a node that has not learned of it yet.
    let kept = c.send("POST", &format!("{path}/snapshots"), &json!({}));
    let kept = kept.expect(201).json();
    let body = json!({"templateID": kept["snapshotID"], "timeout": 60});
    let clone = a.send("POST", "/v2/sandboxes", &body).expect(201);
    assert_eq!(clone.header("x-cube-node"), Some("b"));
    let clone = format!("/sandboxes/{}", id(&clone.json()));
    a.send("DELETE", &clone, &Value::Null).expect(204);
    let kept = format!("/templates/{}", kept["snapshotID"].as_str().unwrap());
    a.send("DELETE", &kept, &Value::Null).expect(204);
    lists_are_merged(world);
    c.send("DELETE", &path, &Value::Null).expect(204);
    a.get(&path).expect(404);
    assert!(a.exec(&sandbox, "true").is_err());
}

fn lists_are_merged(world: &World) {
    open_all(world);
    let mut made = BTreeSet::new();
    for at in [0, 2] {
        only(world, at);
        made.insert(id(&world.nodes[1].ask().expect(201).json()));
    }
    open_all(world);
    // One sandbox of each node, on pages with one item.
    let (mut seen, mut next) = (Vec::new(), String::new());
    loop {
        let page = world.nodes[1]
            .get(&format!("/v2/sandboxes?limit=1{next}"))
            .expect(200);
        assert_eq!(page.header("x-total-running"), Some("3"));
        assert_eq!(page.header("x-cube-missing"), None);
        let listed = page.json();
        assert!(listed.as_array().unwrap().len() <= 1);
        seen.extend(listed.as_array().unwrap().iter().map(id));
        match page.header("x-next-token") {
            Some(token) if seen.len() < 10 => next = format!("&nextToken={token}"),
            _ => break,
        }
    }
    let all: BTreeSet<_> = seen.iter().cloned().collect();
    assert!(
        seen.len() == 3 && all.len() == 3 && made.is_subset(&all),
        "{seen:?}"
    );
    let old = world.nodes[0].get("/sandboxes").expect(200).json();
    assert_eq!(
        old.as_array().unwrap().iter().map(id).collect::<Vec<_>>(),
        seen
    );
    let templates = world.nodes[0].get("/templates").expect(200).json();
    let base = templates
        .as_array()
        .unwrap()
        .iter()
        .filter(|t| t["aliases"][0] == "base");
    assert_eq!(base.count(), 1, "{templates}");
    world.nodes[1]
        .send("DELETE", "/templates/base", &Value::Null)
        .expect(403);
    for made in made {
        world.nodes[1]
            .send("DELETE", &format!("/sandboxes/{made}"), &Value::Null)
            .expect(204);
    }
}

fn creates_write_nothing_to_etcd(world: &World) {
    only(world, 0);
    let before = world.revision();
    let mut took = [Vec::new(), Vec::new()];
    for _ in 0..CREATES {
        // On the node itself and through another one, alternating, so that both see the same load of the host.
        for (times, node) in took.iter_mut().zip(&world.nodes) {
            let began = Instant::now();
            let made = node.ask().expect(201);
            times.push(began.elapsed());
            assert_eq!(made.header("x-cube-node"), Some("a"));
            let path = format!("/sandboxes/{}", id(&made.json()));
            node.send("DELETE", &path, &Value::Null).expect(204);
        }
    }
    assert_eq!(world.revision(), before, "a create has written to etcd");
    let [local, forwarded] = took.map(|mut times| {
        times.sort_unstable();
        times[CREATES / 2]
    });
    println!("create: local {local:?}, forwarded {forwarded:?} (median of {CREATES})");
    assert!(
        forwarded < local * 2 + Duration::from_millis(50),
        "{local:?} {forwarded:?}"
    );
    open_all(world);
}

fn without_etcd_creates_and_streams_go_on(world: &World) {
    only(world, 1);
    let [a, c] = [0, 2].map(|at| &world.nodes[at]);
    let sandbox = a.ask().expect(201).json();
    std::thread::scope(|scope| {
        let stream =
            scope.spawn(|| c.exec(&sandbox, "for i in $(seq 30); do echo $i; sleep 0.1; done"));
        world.stop_etcd();
        let made = c.ask().expect(201);
        assert_eq!(made.header("x-cube-node"), Some("b"));
        assert_eq!(a.exec(&made.json(), "echo up").unwrap(), "up\n");
        let path = format!("/sandboxes/{}", id(&made.json()));
        a.send("DELETE", &path, &Value::Null).expect(204);
        let output = stream.join().unwrap().unwrap();
        assert_eq!(output.lines().count(), 30);
    });
    world.continue_etcd();
    a.send(
        "DELETE",
        &format!("/sandboxes/{}", id(&sandbox)),
        &Value::Null,
    )
    .expect(204);
    open_all(world);
}

fn a_closed_node_gets_no_sandbox(world: &World) {
    let [a, b] = [0, 1].map(|at| &world.nodes[at]);
    a.send("POST", "/nodes/b", &json!({"status": "draining"}))
        .expect(204);
    until("b is draining", || {
        b.get("/nodes/b").expect(200).json()["status"] == "draining"
    });
    let made = b.ask().expect(201);
    assert_ne!(made.header("x-cube-node"), Some("b"));
    let path = format!("/sandboxes/{}", id(&made.json()));
    a.send("DELETE", &path, &Value::Null).expect(204);
    a.send("POST", "/nodes/b", &json!({"status": "unhealthy"}))
        .expect(409);
    a.send("DELETE", "/nodes/b", &Value::Null).expect(409);
    a.get("/nodes/x").expect(404);
    // No node is open: the response allows a retry.
    for name in ["a", "b", "c"] {
        a.send(
            "POST",
            &format!("/nodes/{name}"),
            &json!({"status": "standby"}),
        )
        .expect(204);
    }
    for node in &world.nodes {
        node.until_all(0, "ready");
    }
    let refused = a.ask().expect(503);
    assert!(refused.header("retry-after").is_some() && refused.text().contains("standby"));
    open_all(world);
}

fn a_dead_node_is_reported(world: &mut World) {
    only(world, 2);
    let sandbox = world.nodes[0].ask().expect(201).json();
    open_all(world);
    until("a and b have seen the sandbox of c", || {
        let mut others = world.nodes[..2].iter();
        others.all(|node| node.get("/nodes/c").expect(200).json()["sandboxCount"] == 1)
    });
    world.nodes[2].die();
    let [a, b] = [0, 1].map(|at| &world.nodes[at]);
    let path = format!("/sandboxes/{}", id(&sandbox));
    // At first, an error that names the node. After its lease has ended, the loss and the last state.
    let refused = a.get(&path).expect(502);
    assert!(refused.text().contains("node c"), "{}", refused.text());
    a.until_all(1, "unhealthy");
    until("b reports the loss", || {
        let refused = b.get(&path).expect(502);
        refused
            .text()
            .contains("node c, which is unreachable: it was running")
    });
    let lost = a.get("/nodes/c").expect(200).json();
    assert_eq!(lost["lost"][0]["sandboxID"], sandbox["sandboxID"]);
    assert_eq!(lost["lost"][0]["state"], "running");
    let list = a.get("/v2/sandboxes").expect(200);
    assert_eq!(list.header("x-cube-missing"), Some("c"));
    assert!(a.exec(&sandbox, "true").unwrap_err().contains("502"));
    // Creates continue, and the node can be removed.
    let made = b.ask().expect(201).json();
    a.send("DELETE", &format!("/sandboxes/{}", id(&made)), &Value::Null)
        .expect(204);
    a.send("DELETE", "/nodes/c", &Value::Null).expect(204);
    until("c is removed", || a.get("/nodes/c").status == 404);
}
