//! A host that was removed from the cluster but has kept all of its files.

use std::{path::Path, process::Command};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::{
    etcd, http,
    world::{Client, World, until},
};

/// A request without content, for curl.
const JSON: [&str; 4] = ["-d", "{}", "-H", "Content-Type: application/json"];
const SECRET: &str = "of-the-cluster";

/// The files of a node from the time when it was a member.
struct Thief {
    files: TempDir,
    /// Its record in etcd.
    member: Vec<u8>,
}

pub(crate) fn cluster_a_removed_node_has_nothing_left() {
    World::run(|world| {
        let [a, b] = [0, 1].map(|at| world.nodes[at].client());
        let secret = json!({"name": "s", "value": SECRET});
        a.send("POST", "/secrets", &secret).expect(201);
        let thief = Thief::of(world, 2);
        assert_eq!(
            thief.breaches(&a),
            ["reads etcd", "reads secrets"],
            "it is a member"
        );
        world.nodes[2].kill();
        until("its lease has ended", || {
            b.get("/nodes/c").expect(200).json()["status"] == "unhealthy"
        });
        // A node without the authority can remove it.
        b.send("DELETE", "/nodes/c", &Value::Null).expect(204);
        until("it is removed", || {
            a.get("/nodes").expect(200).json().as_array().unwrap().len() == 2
        });

        let mut breaches = thief.breaches(&a);
        if etcd::put(thief.path(), "state/b", b"\"moving\"").is_ok() {
            breaches.push("drains another node");
            let ready = json!({"status": "ready"});
            a.send("POST", "/nodes/b", &ready).expect(204);
        }
        if etcd::put(thief.path(), "members/c", &thief.member).is_ok() {
            until("it is a member again", || {
                a.get("/nodes").expect(200).json().as_array().unwrap().len() == 3
            });
            breaches.push("adds itself");
            breaches.extend(thief.breaches(&a));
            a.send("DELETE", "/nodes/c", &Value::Null).expect(204);
        }
        // Another host joins under its name.
        world.replace_host(2);
        let again = Thief::of(world, 2);
        assert_eq!(again.breaches(&a), ["reads etcd", "reads secrets"]);
        let after = thief.breaches(&a).into_iter();
        breaches.extend(after.map(|what| match what {
            "reads secrets" => "reads secrets after another host has its name",
            other => other,
        }));
        assert_eq!(breaches, [] as [&str; 0]);
        a_member_names_the_key_of_a_client(&again, &a);
    });
}

/// A client's key stays on the node that received it. Other nodes accept its SHA-256 from members only.
fn a_member_names_the_key_of_a_client(member: &Thief, node: &Client) {
    let sum = Sha256::digest(node.key().as_bytes());
    let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
    let status = |header: &str| {
        let pem = member.path().join("node.pem");
        let answer = ask(node, &pem, "/v2/sandboxes", &["-H", header]);
        answer.rsplit(' ').next().unwrap().to_owned()
    };
    assert_eq!(status(&format!("X-API-KEY: {}", node.key())), "401");
    assert_eq!(status(&format!("x-cube-key: {sum}")), "200");
    assert_eq!(status(&format!("x-cube-key: {}", "0".repeat(64))), "401");
    let of_client = [("x-cube-key", sum.as_str())];
    let answer = http::send(node.address, "GET", "/v2/sandboxes", &of_client, b"");
    answer.expect(401);
}

impl Thief {
    fn of(world: &World, at: usize) -> Self {
        let files = tempfile::tempdir().unwrap();
        let node = &world.nodes[at];
        for name in ["ca.crt", "node.pem"] {
            let from = node.state.path().join("cluster").join(name);
            std::fs::copy(from, files.path().join(name)).unwrap();
        }
        let own = format!("/cube/v1/members/{}", node.name);
        let all = etcd::list(files.path()).unwrap();
        let record = all.into_iter().find(|kv| kv.key == own.as_bytes());
        Self {
            files,
            member: record.unwrap().value,
        }
    }

    fn path(&self) -> &Path {
        self.files.path()
    }

    /// The data that it can read.
    fn breaches(&self, node: &Client) -> Vec<&'static str> {
        let mut breaches = Vec::new();
        if etcd::list(self.path()).is_ok() {
            breaches.push("reads etcd");
        }
        if ask(
            node,
            &self.path().join("node.pem"),
            "/cluster/secrets",
            &JSON,
        )
        .contains(SECRET)
        {
            breaches.push("reads secrets");
        }
        breaches
    }
}

/// A node's response to the holder of a certificate.
pub(crate) fn ask(node: &Client, pem: &Path, path: &str, more: &[&str]) -> String {
    let mut curl = Command::new("curl");
    curl.args(["-s", "-k", "-w", " %{http_code}", "--cert"])
        .arg(pem)
        .args(more)
        .arg(format!("https://{}:3001{path}", node.address.ip()));
    String::from_utf8(curl.output().unwrap().stdout).unwrap()
}
