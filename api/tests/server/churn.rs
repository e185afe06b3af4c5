//! Many sandboxes start and end concurrently. They must leave nothing behind, and a server that is killed in the
//! process must not lose a sandbox.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use test_cases::found;

use crate::{
    http,
    outside::{ip, taps_of_vmms, with_outside},
    process::{JSON, STOCK, Sandbox, Server, until},
};

pub(crate) fn kvm_two_hundred_sandboxes_leave_nothing() {
    churn(200, 20);
}

pub(crate) fn soak_two_thousand_sandboxes_leave_nothing() {
    churn(2000, 50);
    found!("2000 sandboxes by 50 clients: no process, directory, cgroup or descriptor is left");
}

/// Runs `workers` clients that create `total` sandboxes with one command each, and checks that nothing is left behind.
fn churn(total: u32, workers: u32) {
    let server = Server::with(&["--insecure-loopback", "--warm", "0:0"]);
    // The first sandboxes make the server acquire permanent resources: loaded templates, thread pools, idle
    // connections.
    for _ in 0..3 {
        live(&server);
    }
    until("the first sandboxes are gone", || is_clean(&server));
    // One TAP more than the stock belongs to the DNS resolver.
    until("the stock of TAPs is full", || server.taps() > STOCK);
    let before = server.descriptors();
    let left = AtomicU32::new(total);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let take = |n: u32| n.checked_sub(1);
                while left
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
                    .is_ok()
                {
                    live(&server);
                }
            });
        }
    });
    until("nothing is left", || is_clean(&server));
    // TAPs are kept for reuse, at most as many as there were concurrent sandboxes.
    let most = before + usize::try_from(workers).unwrap() + 8;
    until("descriptors are closed", || server.descriptors() <= most);
}

pub(crate) fn kvm_a_server_killed_under_load_loses_no_sandbox() {
    let mut server = Server::with(&["--insecure-loopback", "--warm", "0:0"]);
    let kept: Vec<Sandbox> = (0..8).map(|_| server.create(&json!({}))).collect();
    for sandbox in &kept {
        server.write_file(sandbox, "/dev/shm/note", &sandbox.id);
    }
    let (address, over) = (server.address, AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let body = json!({"templateID": "base", "timeout": 300}).to_string();
                while !over.load(Ordering::Relaxed) {
                    // The server is killed during these requests, so any response, or none, is valid.
                    drop(http::try_send(
                        address,
                        "POST",
                        "/v2/sandboxes",
                        &JSON,
                        body.as_bytes(),
                    ));
                }
            });
        }
        until("enough sandboxes have run", || {
            server.list().len() > kept.len() + 6
        });
        server.kill();
        over.store(true, Ordering::Relaxed);
    });
    server.restart();
    for sandbox in &kept {
        assert_eq!(server.read_file(sandbox, "/dev/shm/note"), sandbox.id);
    }
    // Sandboxes whose create response was lost still exist: they are listed, usable, and can be killed.
    let listed = server.list();
    assert!(
        kept.iter().all(|sandbox| listed.contains(&sandbox.id)),
        "{listed:?}"
    );
    for id in listed {
        server.delete(&format!("/sandboxes/{id}")).expect(204);
    }
    until("nothing is left", || is_clean(&server));
}

/// Sandboxes of a killed server.
const ORPHANS: usize = 60;

/// A server with `--on-exit kill` is stopped while it adopts the sandboxes of a killed server.
pub(crate) fn kvm_a_server_that_stops_while_it_adopts_leaves_nothing() {
    with_outside(|| {
        let options = ["--warm", "2:4", "--uplink", "up0", "--on-exit", "kill"];
        let mut server = Server::with(&[&["--insecure-loopback"], &options[..]].concat());
        for waits_for_all in [false, true] {
            let orphans = create_all(&server, ORPHANS);
            // The new server starts while the killed one is still exiting.
            server.signal(Signal::SIGKILL);
            server.restart();
            if waits_for_all {
                orphans
                    .iter()
                    .for_each(|orphan| assert!(server.is_up(orphan)));
            }
            server.stop();
            assert_nothing_is_left(&server);
            server.restart();
        }
    });
}

/// After a reboot, the records refer to processes, TAPs and control groups of another boot. Paused sandboxes are kept.
/// Everything else is removed, even if something of the same name exists: a process whose record is from another boot
/// is not trusted.
pub(crate) fn kvm_what_another_boot_or_a_killed_server_left_is_removed() {
    with_outside(|| {
        let options = ["--warm", "2:2", "--uplink", "up0", "--on-exit", "kill"];
        let mut server = Server::with(&[&["--insecure-loopback"], &options[..]].concat());
        let [dead, alive, paused] = [(); 3].map(|()| server.create(&json!({})));
        server.write_file(&paused, "/dev/shm/note", "kept");
        server.post(&paused.path("/pause"), &json!({})).expect(204);
        server.kill();
        let state = server.state.path().to_owned();
        for sandbox in [&dead, &alive, &paused] {
            let path = state
                .join("sandboxes")
                .join(&sandbox.id)
                .join("record.json");
            let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            record["host_boot_id"] = "another boot".into();
            fs::write(&path, record.to_string()).unwrap();
            if sandbox.id == dead.id {
                let pid = record["vmm"]["pid"].as_i64().unwrap();
                kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL).unwrap();
            }
        }
        // A slot whose first record was not written, and the snapshot of forks that had not started.
        let unfinished = state.join("sandboxes").join("i".repeat(20));
        let forks = state.join("forks/0-1");
        for dir in [&unfinished, &forks] {
            fs::create_dir(dir).unwrap();
            fs::write(dir.join("memory"), "").unwrap();
        }
        server.restart();
        assert_eq!(server.list(), [paused.id.as_str()]);
        let tag = tag(&server);
        let (sandboxes, stock) = (state.join("sandboxes"), 2);
        until("only the paused sandbox and the stock are left", || {
            let directories = fs::read_dir(&sandboxes).unwrap().count();
            let vms = taps_of_vmms();
            directories == 1 + stock && vms == stock && members(&tag) == stock && !forks.exists()
        });
        assert!(!unfinished.exists());
        server
            .post(
                &format!("/v2{}", paused.path("/connect")),
                &json!({"timeout": 60}),
            )
            .expect(201);
        assert_eq!(server.read_file(&paused, "/dev/shm/note"), "kept");
        server.stop();
        assert_nothing_is_left(&server);
    });
}

/// Creates sandboxes over several connections.
fn create_all(server: &Server, count: usize) -> Vec<Sandbox> {
    const CLIENTS: usize = 6;
    thread::scope(|scope| {
        let create = || {
            (0..count / CLIENTS)
                .map(|_| server.create(&json!({})))
                .collect()
        };
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(create)).collect();
        let created = clients
            .into_iter()
            .map(|c| -> Vec<Sandbox> { c.join().unwrap() });
        created.flatten().collect()
    })
}

/// Panics if a server that has ended has left a process, a directory, a cgroup, a TAP or pinned programs.
fn assert_nothing_is_left(server: &Server) {
    let tag = tag(server);
    let sandboxes = fs::read_dir(server.state.path().join("sandboxes")).unwrap();
    assert_eq!((sandboxes.count(), members(&tag), groups(&tag)), (0, 0, 0));
    let pins = Path::new("/sys/fs/bpf/cube").join(instance(server));
    assert!(!pins.exists(), "{}", pins.display());
    let links = ip("-o link show");
    let taps: Vec<&str> = links.lines().filter(|l| l.contains(": cube")).collect();
    assert_eq!((taps_of_vmms(), taps.len()), (0, 0), "{taps:?}");
}

/// How often a create is retried that got no turn within the server's 30 s. On a busy host, 50 concurrent ones can take
/// longer.
const TURNS: usize = 10;

/// The life of one sandbox: create, one command, kill.
fn live(server: &Server) {
    let answer = (0..TURNS)
        .map(|_| server.ask(&json!({})))
        .find(|answer| answer.status != 429)
        .expect("a turn");
    let sandbox = Sandbox::of(&answer.expect(201).json());
    let output = server.sh(&sandbox, &format!("/bin/echo {}", sandbox.id));
    assert_eq!(output, format!("{}\n", sandbox.id));
    server.delete(&sandbox.path("")).expect(204);
    assert!(!server.is_up(&sandbox));
}

/// Whether no sandbox, sandbox directory, VMM process or cgroup is left.
pub(crate) fn is_clean(server: &Server) -> bool {
    let tag = tag(server);
    let directories = fs::read_dir(server.state.path().join("sandboxes"))
        .unwrap()
        .count();
    server.list().is_empty() && directories == 0 && members(&tag) == 0 && groups(&tag) == 0
}

/// The beginning of the names of a server's cgroups.
fn tag(server: &Server) -> String {
    let lock = fs::metadata(server.state.path().join("lock")).unwrap();
    format!("cube-{:x}-{:x}", lock.dev(), lock.ino())
}

/// The name of a server's pinned programs.
fn instance(server: &Server) -> String {
    let state = server.state.path().canonicalize().unwrap();
    let sum = Sha256::digest(state.as_os_str().as_encoded_bytes());
    sum.iter().take(4).map(|b| format!("{b:02x}")).collect()
}

/// Number of processes in cgroups below the pool's.
fn members(tag: &str) -> usize {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let group = |process: fs::DirEntry| fs::read_to_string(process.path().join("cgroup")).ok();
    processes
        .filter_map(group)
        .filter(|text| text.contains(&format!("{tag}/")))
        .count()
}

/// Number of cgroups of sandboxes, in all hierarchies.
fn groups(tag: &str) -> usize {
    let root = std::path::Path::new("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(root)
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    let parents = hierarchies
        .chain([root.to_owned()])
        .map(|path| path.join(tag));
    let children = |parent| fs::read_dir(parent).into_iter().flatten().flatten();
    parents
        .flat_map(children)
        .filter(|entry| entry.path().is_dir())
        .count()
}
