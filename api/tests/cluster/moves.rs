//! Sandboxes that move.

use std::time::Instant;

use serde_json::{Value, json};

use crate::{
    removed,
    service::{id, only, open_all},
    templates,
    world::{Node, World, until},
};

/// Data on the disk, a value in memory and a process, whose id it prints.
const FILL: &str = "echo disk > ~/kept; head -c 3000000 /dev/urandom > ~/big; sync; echo memory > /dev/shm/kept; \
                    sleep 100000 </dev/null >/dev/null 2>&1 & echo $!";

/// A sandbox with state that a move must preserve.
pub(crate) struct Loaded {
    pub(crate) sandbox: Value,
    pid: String,
    sum: String,
}

impl Loaded {
    pub(crate) fn new(node: &Node) -> Self {
        Self::fill(node, node.ask().expect(201).json())
    }

    fn fill(node: &Node, sandbox: Value) -> Self {
        let pid = node.exec(&sandbox, FILL).unwrap().trim().to_owned();
        let sum = node.exec(&sandbox, "md5sum ~/big").unwrap();
        Self { sandbox, pid, sum }
    }

    pub(crate) fn id(&self) -> String {
        id(&self.sandbox)
    }

    pub(crate) fn path(&self) -> String {
        format!("/sandboxes/{}", self.id())
    }

    /// Nothing is lost, as seen from this node.
    pub(crate) fn check(&self, node: &Node) {
        let script = format!(
            "cat ~/kept /dev/shm/kept; md5sum ~/big; kill -0 {}; hostname",
            self.pid
        );
        let found = node.exec(&self.sandbox, &script).unwrap();
        let expected = format!("disk\nmemory\n{}{}\n", self.sum, self.id());
        assert_eq!(found, expected, "at {}", node.name);
    }

    pub(crate) fn state(&self, node: &Node) -> String {
        let detail = node.get(&self.path()).expect(200).json();
        detail["state"].as_str().unwrap().to_owned()
    }

    /// The nodes that have it on disk.
    pub(crate) fn at(&self, world: &World) -> Vec<usize> {
        let all = world.nodes.iter().enumerate();
        let has = all.filter(|(_, node)| node.has(&self.id()));
        has.map(|(at, _)| at).collect()
    }
}

pub(crate) fn drain(world: &World, by: usize, at: usize) {
    let path = format!("/nodes/{}", world.nodes[at].name);
    let body = json!({"status": "draining", "move": true});
    world.nodes[by].send("POST", &path, &body).expect(204);
}

pub(crate) fn is_empty(world: &World, at: usize) -> bool {
    let node = &world.nodes[at];
    let seen = node
        .get(&format!("/nodes/{}", node.name))
        .expect(200)
        .json();
    seen["sandboxCount"] == 0 && seen["pausedCount"] == 0
}

pub(crate) fn cluster_a_drained_node_gives_its_sandboxes_away() {
    World::run_with_two_bases(|world| {
        let (running, paused) = filled(world);
        a_drain_moves_both(world, &running, &paused);
        a_moved_sandbox_lives_on(world, &running);
        until("b has removed the base that nothing needs", || {
            world.nodes[1].images() == 1
        });
        what_was_built_and_what_booted_moves(world);
        one_that_no_node_can_take_stays(world);
    });
}

fn filled(world: &World) -> (Loaded, Loaded) {
    only(world, 0);
    let (running, paused) = (Loaded::new(&world.nodes[0]), Loaded::new(&world.nodes[1]));
    let pause = format!("{}/pause", paused.path());
    world.nodes[2].send("POST", &pause, &json!({})).expect(204);
    open_all(world);
    (running, paused)
}

/// While a offers a sandbox to b, c must not get its files, although it is a member too.
fn its_files_are_for_its_taker(world: &World, id: &str) {
    let path = format!("/cluster/files/move-{id}");
    let status = |at: usize| {
        let pem = world.nodes[at].state.path().join("cluster/node.pem");
        let answer = removed::ask(&world.nodes[0], &pem, &path, &[]);
        answer.rsplit(' ').next().unwrap().to_owned()
    };
    until("the files are offered", || status(1) == "200");
    let other = status(2);
    assert_eq!((other.as_str(), status(1).as_str()), ("404", "200"));
}

fn a_drain_moves_both(world: &World, running: &Loaded, paused: &Loaded) {
    let [a, b, c] = [0, 1, 2].map(|at| &world.nodes[at]);
    a.send(
        "POST",
        "/nodes/a",
        &json!({"status": "ready", "move": true}),
    )
    .expect(400);
    let before = a.get(&running.path()).expect(200).json();
    // The only taker has no template with the memory that the pauses refer to.
    b.send("POST", "/nodes/c", &json!({"status": "standby"}))
        .expect(204);
    a.until_all(2, "ready");
    assert_eq!(b.images(), 1, "b has its own base only");
    let began = Instant::now();
    drain(world, 1, 0);
    its_files_are_for_its_taker(world, &running.id());
    until("a is empty", || is_empty(world, 0));
    let metrics = b.get("/metrics").text();
    let moved = metrics
        .lines()
        .find(|line| line.starts_with("cube_cluster_moved_bytes_total"));
    println!("drain of two sandboxes: {:?}, {moved:?}", began.elapsed());
    for loaded in [running, paused] {
        let at = loaded.at(world);
        assert_eq!(at, [1]);
    }
    // Once for both.
    let log = b.log();
    let fetched = "fetching the base of a sandbox";
    assert_eq!(log.matches(fetched).count(), 1, "{log}");
    assert_eq!(b.images(), 2);
    until("the running one goes on", || running.state(b) == "running");
    let after = a.get(&running.path()).expect(200).json();
    for field in ["metadata", "endAt", "startedAt", "templateID"] {
        assert_eq!(after[field], before[field], "{field}");
    }
    for node in [a, b, c] {
        running.check(node);
        assert_eq!(paused.state(node), "paused");
    }
    let list = a
        .get("/v2/sandboxes?state=running,paused")
        .expect(200)
        .json();
    assert_eq!(list.as_array().unwrap().len(), 2, "{list}");
    let metrics = a.get("/metrics").text();
    assert!(
        metrics.contains("cube_cluster_moves_total{outcome=\"given\"} 2"),
        "{metrics}"
    );
    // Its own token, through a node that has never had it.
    let connect = format!("{}/connect", paused.path());
    a.send("POST", &connect, &json!({"timeout": 60}))
        .expect(201);
    for node in [a, b, c] {
        paused.check(node);
    }
    a.send("DELETE", &paused.path(), &Value::Null).expect(204);
    for node in [a, b, c] {
        node.get(&paused.path()).expect(404);
    }
    until("its record is gone", || world.owners() == 1);
    open_all(world);
}

/// Pauses, resumes, timeouts, a second move, and the end.
fn a_moved_sandbox_lives_on(world: &World, moved: &Loaded) {
    let [a, b, c] = [0, 1, 2].map(|at| &world.nodes[at]);
    let path = moved.path();
    for node in [a, b, c] {
        node.send("POST", &format!("{path}/pause"), &json!({}))
            .expect(204);
        assert_eq!(moved.state(c), "paused");
        let connect = format!("{path}/connect");
        node.send("POST", &connect, &json!({"timeout": 90}))
            .expect(201);
        moved.check(node);
    }
    let from = moved.at(world)[0];
    drain(world, (from + 1) % 3, from);
    until("it has moved again", || is_empty(world, from));
    until("it goes on", || moved.state(a) == "running");
    assert_ne!(moved.at(world), [from]);
    for node in [a, b, c] {
        moved.check(node);
    }
    b.send("DELETE", &path, &Value::Null).expect(204);
    a.get(&path).expect(404);
    until("its record is gone", || world.owners() == 0);
    open_all(world);
}

/// A clone of a built template, a sandbox that booted, and a disk without a running sandbox.
fn what_was_built_and_what_booted_moves(world: &World) {
    only(world, 0);
    let [a, b] = [0, 1].map(|at| &world.nodes[at]);
    templates::build_on_a(world);
    let body = json!({"templateID": "travels", "timeout": 300});
    let made = a.send("POST", "/v2/sandboxes", &body).expect(201);
    let built = Loaded::fill(a, made.json());
    let booted = a.ask().expect(201).json();
    boot(a, &booted);
    let booted = Loaded::fill(a, booted);
    let disk = Loaded::new(a);
    let no_memory = json!({"memory": false});
    a.send("POST", &format!("{}/pause", disk.path()), &no_memory)
        .expect(204);
    b.send("POST", "/nodes/b", &json!({"status": "ready"}))
        .expect(204);
    a.until_all(2, "ready");
    drain(world, 1, 0);
    until("a is empty", || is_empty(world, 0));
    for loaded in [&built, &booted] {
        until("it goes on", || loaded.state(b) == "running");
        assert_eq!(loaded.at(world), [1]);
        loaded.check(a);
    }
    let sum = a.exec(&built.sandbox, "sha256sum -c /data.sum").unwrap();
    assert_eq!(sum, "/data: OK\n");
    assert_eq!(disk.at(world), [1]);
    assert_eq!(disk.state(a), "paused");
    wake(a, &disk.path());
    let kept = a.exec(&disk.sandbox, "cat ~/kept; md5sum ~/big").unwrap();
    assert_eq!(kept, format!("disk\n{}", disk.sum));
    for loaded in [&built, &booted, &disk] {
        a.send("DELETE", &loaded.path(), &Value::Null).expect(204);
    }
    until("their records are gone", || world.owners() == 0);
    open_all(world);
}

/// Discards a sandbox's memory, so that its next start is a boot.
fn boot(node: &Node, sandbox: &Value) {
    let path = format!("/sandboxes/{}", id(sandbox));
    let boot_id = || {
        let read = node.exec(sandbox, "cat /proc/sys/kernel/random/boot_id");
        read.unwrap()
    };
    let before = boot_id();
    node.send("POST", &format!("{path}/pause"), &json!({"memory": false}))
        .expect(204);
    wake(node, &path);
    assert_ne!(boot_id(), before);
}

fn wake(node: &Node, path: &str) {
    let body = json!({"timeout": 300});
    node.send("POST", &format!("{path}/connect"), &body)
        .expect(201);
}

fn one_that_no_node_can_take_stays(world: &World) {
    only(world, 0);
    let loaded = Loaded::new(&world.nodes[0]);
    drain(world, 0, 0);
    let a = &world.nodes[0];
    until("the reason is shown", || {
        let node = world.nodes[1].get("/nodes/a").expect(200).json();
        let reason = node["stuck"][0]["reason"].as_str().unwrap_or_default();
        reason.contains("no other ready node has the same platform")
    });
    assert_eq!(loaded.state(a), "running");
    loaded.check(a);
    a.send("DELETE", &loaded.path(), &Value::Null).expect(204);
    open_all(world);
}
