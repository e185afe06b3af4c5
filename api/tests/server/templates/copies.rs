//! Templates whose builds have already been done under other names.

use serde_json::{Value, json};

use super::{leaves, run, start};
use crate::process::{Sandbox, Server};

/// Prints the random numbers, and how often the start command is running.
const DRAWN: &str = "cat /home/user/step /dev/shm/started; pgrep -fc 'sleep 888[8]'";

/// A step and a start command that each generate a random number.
fn recipe() -> Value {
    let draws = |to: &str| format!("cat /proc/sys/kernel/random/uuid > {to}");
    json!({
        "steps": [run(&draws("/home/user/step"))],
        "startCmd": format!("{}; exec sleep 8888", draws("/dev/shm/started")),
        "readyCmd": "[ -s /dev/shm/started ]",
    })
}

/// A sandbox of a template, and the numbers in it.
fn sandbox(server: &Server, name: &str, template: &str) -> (Sandbox, String) {
    let sandbox = server.create(&json!({"templateID": name}));
    let detail = server.get(&sandbox.path("")).expect(200).json();
    assert_eq!(detail["templateID"], template, "{detail}");
    let drawn = server.sh(&sandbox, DRAWN);
    (sandbox, drawn)
}

pub(crate) fn kvm_a_recipe_that_is_known_by_another_name_needs_no_machine() {
    let mut server = Server::with(&[
        "--insecure-loopback",
        "--warm",
        "0:0",
        "--max-sandboxes",
        "1",
    ]);
    let first = start(&server, "first", &recipe());
    assert_eq!(first.is_ready().count("CACHED"), 0);
    let first = first.template;
    let (of_first, drawn) = sandbox(&server, "first", &first);
    // The only slot for a build VM is taken.
    let second = start(&server, "second", &recipe());
    let outcome = second.is_ready();
    assert_eq!(outcome.count("CACHED"), 2, "{:#?}", outcome.log);
    assert!(outcome.has("finalize CACHED"), "{:#?}", outcome.log);
    assert!(!outcome.has("waiting for room"), "{:#?}", outcome.log);
    let second = second.template;
    assert_ne!(second, first);
    server.delete(&of_first.path("")).expect(204);
    let (of_second, same) = sandbox(&server, "second", &second);
    assert_eq!(same, drawn);
    // The paused sandbox has files of its own template only.
    server
        .post(&of_second.path("/pause"), &json!({}))
        .expect(204);

    // Either template is complete without the other, also for the next server.
    server.delete(&format!("/templates/{first}")).expect(204);
    server
        .post("/v2/sandboxes", &json!({"templateID": "first"}))
        .expect(404);
    server.crash_and_restart();
    let connected = server.post(&of_second.path("/connect"), &json!({"timeout": 600}));
    connected.expect(201);
    assert_eq!(server.sh(&of_second, DRAWN), drawn);
    server.delete(&of_second.path("")).expect(204);
    let (again, same) = sandbox(&server, "second", &second);
    assert_eq!(same, drawn);
    server.delete(&again.path("")).expect(204);
    // A third name starts from what is left.
    let third = start(&server, "third", &recipe());
    assert_eq!(third.is_ready().count("CACHED"), 2);
    server.delete(&format!("/templates/{second}")).expect(204);
    let (last, same) = sandbox(&server, "third", &third.template);
    assert_eq!(same, drawn);
    server.delete(&last.path("")).expect(204);
    // The disk of the step, and the template.
    leaves(&server, 2);
}
