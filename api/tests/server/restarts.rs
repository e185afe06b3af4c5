//! State that outlives a server process.

use std::{fs, time::Duration};

use envd::Timestamp;
use serde_json::{Value, json};

use crate::{
    clock::Clock,
    process::{Sandbox, Server, until},
};

pub(crate) fn kvm_what_runs_outlives_a_killed_server() {
    let mut server = Server::open();
    let running = server.create(&json!({"metadata": {"k": "v"}, "autoPause": true}));
    let paused = server.create(&json!({}));
    let short = server.create(&json!({}));
    server.write_file(&running, "/dev/shm/note", "running");
    server.write_file(&paused, "/dev/shm/note", "paused");
    server.post(&paused.path("/pause"), &json!({})).expect(204);
    server
        .post(&running.path("/timeout"), &json!({"timeout": 1000}))
        .expect(204);
    server
        .post(&short.path("/timeout"), &json!({"timeout": 1}))
        .expect(204);
    let before = server.get(&running.path("")).expect(200).json();
    server.crash_and_restart();
    assert_eq!(server.get(&running.path("")).expect(200).json(), before);
    assert_eq!(server.read_file(&running, "/dev/shm/note"), "running");
    assert_eq!(server.state_of(&paused), "paused");
    let connect = format!("/v2{}", paused.path("/connect"));
    server.post(&connect, &json!({"timeout": 60})).expect(201);
    assert_eq!(server.read_file(&paused, "/dev/shm/note"), "paused");
    // The deadline of `short` passed while no server was running, or passes shortly afterwards.
    until("the sandbox with the short timeout ends", || {
        !server.is_up(&short)
    });
}

/// Rewrites a sandbox's record as a server with record version 1 would have written it: the note is a separate file,
/// and contains the lifetime.
fn downgrade_record(server: &Server, sandbox: &Sandbox) {
    let dir = server.state.path().join("sandboxes").join(&sandbox.id);
    let read = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
    let mut record = read(&fs::read(dir.join("record.json")).unwrap());
    let fields = record.as_object_mut().unwrap();
    fields.insert("version".into(), 1.into());
    let lifetime = fields.remove("lifetime").unwrap();
    let note = fields.remove("note").unwrap();
    let mut note = read(note.as_str().unwrap().as_bytes());
    note["format"] = 1.into();
    note["note"]["end_at"] = lifetime["end_at"].clone();
    note["note"]["timeout_s"] = lifetime["timeout_s"].clone();
    note["note"]["at_deadline"] = lifetime["on_timeout"]["pause"].clone();
    note["note"]["auto_resume"] = lifetime["auto_resume"].clone();
    fs::write(dir.join("record.json"), record.to_string()).unwrap();
    fs::write(dir.join("note"), note.to_string()).unwrap();
}

pub(crate) fn kvm_an_upgraded_server_keeps_sandboxes_and_their_deadlines() {
    let mut server = Server::open();
    let options = json!({"metadata": {"k": "v"}, "autoPause": true, "timeout": 1000});
    let running = server.create(&options);
    let paused = server.create(&json!({"timeout": 1000}));
    server.write_file(&running, "/dev/shm/note", "running");
    server.post(&paused.path("/pause"), &json!({})).expect(204);
    let before = [&running, &paused].map(|s| server.get(&s.path("")).expect(200).json());
    server.kill();
    for sandbox in [&running, &paused] {
        downgrade_record(&server, sandbox);
    }
    server.restart();
    let after = [&running, &paused].map(|s| server.get(&s.path("")).expect(200).json());
    assert_eq!(after, before);
    assert_eq!(server.read_file(&running, "/dev/shm/note"), "running");
    // The new server writes records of its own version, which the next server reads.
    let extended = server.post(&running.path("/timeout"), &json!({"timeout": 2000}));
    extended.expect(204);
    let connect = format!("/v2{}", paused.path("/connect"));
    server.post(&connect, &json!({"timeout": 60})).expect(201);
    let before = server.get(&running.path("")).expect(200).json();
    server.crash_and_restart();
    assert_eq!(server.get(&running.path("")).expect(200).json(), before);
    assert!(server.is_up(&paused));
}

pub(crate) fn kvm_a_stopped_server_keeps_or_ends_what_runs() {
    let mut server = Server::open();
    let sandbox = server.create(&json!({}));
    server.write_file(&sandbox, "/dev/shm/note", "kept");
    server.stop();
    server.restart();
    assert_eq!(server.read_file(&sandbox, "/dev/shm/note"), "kept");
    let mut ending = Server::with(&["--insecure-loopback", "--warm", "0:0", "--on-exit", "kill"]);
    let sandbox = ending.create(&json!({}));
    ending.stop();
    ending.restart();
    ending.get(&sandbox.path("")).expect(404);
}

/// `cube-api end`, which the package runs before it is removed.
pub(crate) fn kvm_the_end_of_a_stopped_server_spares_paused_sandboxes() {
    let options = ["--insecure-loopback", "--warm", "0:0", "--on-exit", "keep"];
    let mut server = Server::with(&options);
    let [running, paused] = [(); 2].map(|()| server.create(&json!({})));
    server.write_file(&paused, "/dev/shm/note", "kept");
    server.post(&paused.path("/pause"), &json!({})).expect(204);
    server.stop();
    server.end();
    server.restart();
    server.get(&running.path("")).expect(404);
    let connect = format!("/v2{}", paused.path("/connect"));
    server.post(&connect, &json!({"timeout": 60})).expect(201);
    assert_eq!(server.read_file(&paused, "/dev/shm/note"), "kept");
    for id in server.list() {
        server.delete(&format!("/sandboxes/{id}")).expect(204);
    }
}

/// A sandbox lives for as long as was requested, whether the wall clock is set by a day while a server runs or while none
/// runs. Clients see the deadline by the new time.
pub(crate) fn kvm_a_wall_clock_that_is_set_neither_ends_nor_prolongs_a_sandbox() {
    const DAY_S: i64 = 86_400;
    let mut clock = Clock::new();
    let mut server = Server::of_program(clock.server(), &["--insecure-loopback", "--warm", "0:0"]);
    let rounds = [
        (true, DAY_S),
        (true, -DAY_S),
        (false, DAY_S),
        (false, -DAY_S),
    ];
    for (is_running, by_s) in rounds {
        let short = server.create(&json!({"timeout": 1000}));
        let long = server.create(&json!({"timeout": 3000}));
        let before = [&short, &long].map(|s| end_at_s(&server, s));
        if !is_running {
            server.kill();
        }
        clock.set(by_s);
        if !is_running {
            server.restart();
        }
        // A step is measured with two clocks, which are not read at the same moment.
        let follows = |(now, before): (&i64, &i64)| (now - before - by_s).abs() <= 2;
        until("the deadlines follow the clock", || {
            let now = [&short, &long].map(|s| end_at_s(&server, s));
            now.iter().zip(&before).all(follows)
        });
        assert!(server.is_up(&short) && server.is_up(&long));
        let followed = end_at_s(&server, &long);
        clock.advance(Duration::from_secs(1500));
        until("the first sandbox ends", || !server.is_up(&short));
        assert!(server.is_up(&long));
        assert_eq!(end_at_s(&server, &long), followed);
        clock.advance(Duration::from_secs(2000));
        until("the second sandbox ends", || !server.is_up(&long));
    }
}

/// The deadline that clients see, in seconds since 1970: the same one in the sandbox's details and in the list.
fn end_at_s(server: &Server, sandbox: &Sandbox) -> i64 {
    let time = |of: &Value| {
        let end = Timestamp::parse(of["endAt"].as_str().unwrap()).unwrap();
        i64::try_from(end.unix_ns() / 1_000_000_000).unwrap()
    };
    loop {
        let before = time(&server.get(&sandbox.path("")).expect(200).json());
        let list = server.get("/v2/sandboxes?limit=100").expect(200).json();
        let mut listed = list.as_array().unwrap().iter();
        let listed = listed.find(|s| s["sandboxID"] == sandbox.id.as_str());
        let listed = time(listed.unwrap());
        let after = time(&server.get(&sandbox.path("")).expect(200).json());
        if before == after {
            assert_eq!(listed, before);
            return before;
        }
    }
}
