//! Faults of nodes, networks, disks and certificates, with real VMs. Run in the complete form only.

use std::{
    fs,
    process::Command,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::{Duration, SystemTime},
};

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType,
};
use serde_json::Value;

use crate::{
    moves::{Loaded, drain, is_empty},
    service::{id, only, open_all},
    world::{World, until},
};

/// Slow, so that a move can be interrupted.
const SLOW: &[&str] = &["--transfer-rate", "4MiB"];

pub(crate) fn cluster_long_moves_survive_the_loss_of_either_node() {
    World::run_with(SLOW, |world| {
        for loser in [Loser::Giver, Loser::Taker] {
            for fault in [Fault::Killed, Fault::Stopped] {
                a_move_is_interrupted(world, loser, fault);
            }
        }
        a_full_disk_sends_it_elsewhere(world);
        a_taker_that_is_removed_leaves_the_sandbox(world);
    });
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Loser {
    Giver,
    Taker,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Killed,
    /// With SIGSTOP, for longer than its lease.
    Stopped,
}

fn a_move_is_interrupted(world: &mut World, loser: Loser, fault: Fault) {
    only(world, 0);
    let loaded = Loaded::new(&world.nodes[0]);
    open_all(world);
    drain(world, 1, 0);
    let id = loaded.id();
    until("files arrive", || {
        world.nodes.iter().any(|node| node.is_incoming(&id))
    });
    let taker = world
        .nodes
        .iter()
        .position(|node| node.is_incoming(&id))
        .unwrap();
    let at = if loser == Loser::Giver { 0 } else { taker };
    match fault {
        Fault::Killed => {
            world.nodes[at].kill();
            // While it is unreachable, no other node has the sandbox as well.
            assert!(loaded.at(world).len() <= 1, "{loser:?}");
            world.nodes[at].start();
        }
        Fault::Stopped => {
            world.nodes[at].signal("-STOP");
            let path = format!("/nodes/{}", world.nodes[at].name);
            until("its lease has ended", || {
                world.nodes[3 - taker].get(&path).expect(200).json()["status"] == "unhealthy"
            });
            if loser == Loser::Taker {
                until("the giver waits for it no longer", || {
                    let giver = world.nodes[0].get("/nodes/a").expect(200).json();
                    giver["stuck"].as_array().is_some_and(|all| all.len() == 1)
                });
            }
            assert!(loaded.at(world).len() <= 1, "{loser:?}");
            world.nodes[at].signal("-CONT");
        }
    }
    let all = world.nodes.len();
    until("the node returns", || {
        let nodes = world.nodes[1].get("/nodes").expect(200).json();
        nodes
            .as_array()
            .unwrap()
            .iter()
            .filter(|n| n["status"] != "unhealthy")
            .count()
            == all
    });
    // The drain continues.
    until("a is empty", || is_empty(world, 0));
    until("one node has it", || loaded.at(world).len() == 1);
    until("it goes on", || loaded.state(&world.nodes[0]) == "running");
    for node in &world.nodes {
        loaded.check(node);
    }
    world.nodes[0]
        .send("DELETE", &loaded.path(), &Value::Null)
        .expect(204);
    open_all(world);
}

/// The disk of the first taker is full: the sandbox continues, and then moves to the other node.
fn a_full_disk_sends_it_elsewhere(world: &World) {
    only(world, 0);
    let loaded = Loaded::new(&world.nodes[0]);
    open_all(world);
    let incoming = world.nodes[1].state.path().join("incoming");
    fs::create_dir_all(&incoming).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(&incoming)
        .status();
    assert!(mounted.unwrap().success());
    drain(world, 1, 0);
    until("a is empty", || is_empty(world, 0));
    Command::new("umount").arg(&incoming).status().unwrap();
    assert_eq!(loaded.at(world), [2]);
    until("it goes on", || loaded.state(&world.nodes[0]) == "running");
    loaded.check(&world.nodes[1]);
    world.nodes[0]
        .send("DELETE", &loaded.path(), &Value::Null)
        .expect(204);
    open_all(world);
}

/// The taker crashes for good. Until it has been removed, only it could tell whether it has the sandbox.
fn a_taker_that_is_removed_leaves_the_sandbox(world: &mut World) {
    only(world, 0);
    let loaded = Loaded::new(&world.nodes[0]);
    open_all(world);
    drain(world, 1, 0);
    let id = loaded.id();
    let taker = || world.nodes.iter().position(|node| node.is_incoming(&id));
    until("files arrive", || taker().is_some());
    let taker = taker().unwrap();
    world.nodes[taker].die();
    let [a, other] = [0, 3 - taker].map(|at| &world.nodes[at]);
    let path = format!("/nodes/{}", world.nodes[taker].name);
    until("its lease has ended", || {
        other.get(&path).expect(200).json()["status"] == "unhealthy"
    });
    assert_eq!(loaded.state(a), "paused");
    other.send("DELETE", &path, &Value::Null).expect(204);
    until("a is empty", || is_empty(world, 0));
    assert_eq!(loaded.at(world), [3 - taker]);
    until("it goes on", || loaded.state(a) == "running");
    loaded.check(other);
}

pub(crate) fn cluster_long_nodes_return_from_partitions_and_stops() {
    World::run(|world| {
        two_nodes_are_away_and_return(world);
        an_expired_certificate_opens_nothing(world);
    });
}

/// b is stopped, and etcd's packets to c are dropped, for longer than their leases. Their VMs keep running.
fn two_nodes_are_away_and_return(world: &World) {
    only(world, 1);
    let at_b = Loaded::new(&world.nodes[0]);
    only(world, 2);
    let at_c = Loaded::new(&world.nodes[0]);
    open_all(world);
    let [a, b, c] = [0, 1, 2].map(|at| &world.nodes[at]);
    c.run("nft", "add table inet part");
    c.run(
        "nft",
        "add chain inet part in { type filter hook input priority 0 ; }",
    );
    c.run("nft", "add rule inet part in tcp sport 2379 drop");
    b.signal("-STOP");
    a.until_all(2, "unhealthy");
    for away in [&at_b, &at_c] {
        let refused = a.get(&away.path()).expect(502);
        assert!(
            refused.text().contains("is unreachable"),
            "{}",
            refused.text()
        );
    }
    // It serves its own sandboxes and accepts no new ones.
    at_c.check(c);
    let made = a.ask().expect(201);
    assert_eq!(made.header("x-cube-node"), Some("a"));
    drain(world, 0, 0);
    until("nothing can move", || {
        let node = a.get("/nodes/a").expect(200).json();
        node["stuck"]
            .as_array()
            .is_some_and(|stuck| stuck.len() == 1)
    });
    b.signal("-CONT");
    c.run("nft", "delete table inet part");
    until("both return, and the drain goes on", || is_empty(world, 0));
    a.until_all(2, "ready");
    for loaded in [&at_b, &at_c] {
        loaded.check(a);
        assert_eq!(loaded.at(world).len(), 1);
        a.send("DELETE", &loaded.path(), &Value::Null).expect(204);
    }
    let path = format!("/sandboxes/{}", id(&made.json()));
    a.send("DELETE", &path, &Value::Null).expect(204);
    open_all(world);
}

/// A certificate for a member's name, from the right authority, that expired an hour ago.
fn an_expired_certificate_opens_nothing(world: &World) {
    let dir = world.nodes[0].state.path().join("cluster");
    let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
    let subject = Command::new("openssl")
        .args(["x509", "-noout", "-subject", "-nameopt", "RFC2253", "-in"])
        .arg(dir.join("ca.crt"))
        .output()
        .unwrap();
    let subject = String::from_utf8(subject.stdout).unwrap();
    let name = subject.trim().strip_prefix("subject=CN=").unwrap();
    let named = |name: &str| {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params
    };
    let issuer = Issuer::new(named(name), KeyPair::from_pem(&read("ca.key")).unwrap());
    let member = "b.node.cube.internal";
    // With the member's key, because with another one it would not be the member's anyway.
    let own = world.nodes[1].state.path().join("cluster/node.pem");
    let own = fs::read_to_string(own).unwrap();
    let key = &own[own.find("-----BEGIN PRIVATE").unwrap()..];
    let key = KeyPair::from_pem(key).unwrap();
    let hour = Duration::from_secs(3600);
    let status = |expires: SystemTime| {
        let mut leaf = named(member);
        leaf.subject_alt_names = vec![SanType::DnsName(member.try_into().unwrap())];
        leaf.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        leaf.not_before = (SystemTime::now() - 24 * hour).into();
        leaf.not_after = expires.into();
        let pem = leaf.signed_by(&key, &issuer).unwrap().pem();
        let file = dir.join("test.pem");
        fs::write(&file, format!("{pem}{}", key.serialize_pem())).unwrap();
        let answer = Command::new("curl")
            .args([
                "-s",
                "-k",
                "-o",
                "/dev/null",
                "-w",
                "%{http_code}",
                "--cert",
            ])
            .arg(&file)
            .arg(format!(
                "https://{}:3001/cluster/state",
                world.nodes[0].address.ip()
            ))
            .output()
            .unwrap();
        String::from_utf8(answer.stdout).unwrap()
    };
    assert_eq!(status(SystemTime::now() + hour), "200");
    let refused = status(SystemTime::now() - hour);
    assert!(refused == "000" || refused == "403", "{refused}");
}

/// Runs `cube-api reload` on one node after the other, while clients create, use and kill sandboxes on all of them.
pub(crate) fn cluster_long_an_upgrade_of_all_nodes_fails_no_create() {
    World::run(|world| {
        let (ends, made) = (AtomicBool::new(false), AtomicU32::new(0));
        let addresses: Vec<_> = world.nodes.iter().map(|node| node.client()).collect();
        std::thread::scope(|scope| {
            for client in &addresses {
                let (ends, made) = (&ends, &made);
                scope.spawn(move || {
                    while !ends.load(Ordering::Relaxed) {
                        let sandbox = client.ask().expect(201).json();
                        assert_eq!(client.exec(&sandbox, "echo up").unwrap(), "up\n");
                        let path = format!("/sandboxes/{}", id(&sandbox));
                        client.send("DELETE", &path, &Value::Null).expect(204);
                        made.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for node in &mut world.nodes {
                    let before = made.load(Ordering::Relaxed);
                    node.reload();
                    until("creates go on", || {
                        made.load(Ordering::Relaxed) > before + 3
                    });
                }
            }));
            ends.store(true, Ordering::Relaxed);
            ended.unwrap();
        });
        println!(
            "creates during three reloads: {}",
            made.load(Ordering::Relaxed)
        );
        for node in &world.nodes {
            node.until_all(3, "ready");
        }
    });
}
