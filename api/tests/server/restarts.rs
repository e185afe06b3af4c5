//! State that outlives a server.

use serde_json::json;

use crate::process::Server;

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
    // Its deadline passed while no server was running, or shortly afterwards.
    crate::process::until("the sandbox with the short timeout ends", || {
        !server.is_up(&short)
    });
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
