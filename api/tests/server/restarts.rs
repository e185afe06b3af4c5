//! State that outlives a server process.

use std::fs;

use serde_json::{Value, json};

use crate::process::{Sandbox, Server};

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
    crate::process::until("the sandbox with the short timeout ends", || {
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
