//! Hostile agents and VMMs attack the requests that the server itself sends to them.

use serde_json::json;

use crate::server::{MIB, Server};

/// Maximum growth of the server's memory during all attacks together. An attack that is not stopped sends a gigabyte.
const GROWTH_MAX: u64 = 64 * MIB;
/// Maximum factor by which an attack may slow down a neighbour.
const SLOWER_MAX: u32 = 25;
/// Number of attacks of each kind.
const ROUNDS: usize = 3;

/// Behaviours that send endless or invalid data when a sandbox starts.
const FLOODS: [&str; 14] = [
    "endless-body",
    "endless-chunks",
    "ten-gigabytes",
    "endless-head",
    "endless-interim",
    "endless-greeting",
    "two-lengths",
    "broken",
    "nonsense",
    "early",
    "wordy",
    "huge-vmm",
    "wordy-vmm",
    "last-words",
];

#[test]
fn floods_in_first_answers_are_bounded_and_do_not_slow_neighbours() {
    let server = Server::start(&FLOODS, &["--warm", "0:0"]);
    let quiet = server.neighbour();
    let before = server.forget_peak();
    let busy = std::thread::scope(|scope| {
        for conduct in FLOODS {
            let server = &server;
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    is_refused(server, conduct);
                }
            });
        }
        server.neighbour()
    });
    let grown = server.peak_bytes().saturating_sub(before);
    assert!(grown < GROWTH_MAX, "the server grew by {} MiB", grown / MIB);
    assert!(
        busy < quiet * SLOWER_MAX,
        "{busy:?}, without attack {quiet:?}"
    );
    // The pool and the request log one line each for a failed start. Each life of a neighbour logs two lines, and there
    // are nine lives in each of two measurements.
    server.check_log(24 + 2 * ROUNDS * FLOODS.len() + 2 * 2 * 9);
}

fn is_refused(server: &Server, conduct: &str) {
    let answer = server.try_create(conduct, &json!({}));
    assert!(answer.status >= 500, "{conduct}: {}", answer.status);
    let text = answer.text();
    let start: String = text.chars().take(200).collect();
    assert!(
        text.len() < 2000,
        "{conduct}: {} bytes: {start}",
        text.len()
    );
    let message = answer.json()["message"].as_str().unwrap().to_owned();
    assert!(!message.contains(char::is_control), "{conduct}: {start}");
}

#[test]
fn a_server_dumps_no_core() {
    let server = Server::start(&[], &["--warm", "0:0"]);
    let limits = std::fs::read_to_string(server.proc("limits")).unwrap();
    let core = limits
        .lines()
        .find(|line| line.starts_with("Max core file size"));
    let fields: Vec<_> = core.unwrap().split_whitespace().skip(4).take(2).collect();
    assert_eq!(fields, ["0", "0"], "{limits}");
}

#[test]
fn clients_cannot_delete_an_installed_template() {
    let server = Server::start(&[], &["--warm", "0:0"]);
    let listed = server.get("/templates").expect(200).json();
    let id = listed[0]["templateID"].as_str().unwrap();
    for reference in ["good", "good:default", "GOOD", id, &format!("{id}:default")] {
        let refused = server.delete(&format!("/templates/{reference}"));
        assert!(
            matches!(refused.status, 403 | 404),
            "{reference}: {}",
            refused.text()
        );
        assert!(server.get("/templates/good").status == 200, "{reference}");
    }
    for reference in ["good", id] {
        let refused = server
            .delete(&format!("/templates/{reference}"))
            .expect(403);
        let text = refused.text();
        assert!(text.contains("cannot be deleted by clients"), "{text}");
    }
    assert_eq!(listed[0]["installed"], true, "{listed}");
    let sandbox = server.create("good", &json!({}));
    server.kill(&sandbox);
}

#[test]
fn data_after_the_end_of_a_stream_is_not_read() {
    let server = Server::start(&["after-the-end"], &["--warm", "0:0"]);
    let ids: Vec<_> = (0..4)
        .map(|_| server.create("after-the-end", &json!({})))
        .collect();
    let quiet = server.neighbour();
    let before = server.forget_peak();
    let busy = std::thread::scope(|scope| {
        for id in &ids {
            // To pause without memory, the server runs a command in the guest that syncs the disk. The answer is a
            // stream.
            let server = &server;
            scope.spawn(move || server.pause(id, &json!({"memory": false})).expect(500));
        }
        server.neighbour()
    });
    let grown = server.peak_bytes().saturating_sub(before);
    assert!(grown < GROWTH_MAX, "the server grew by {} MiB", grown / MIB);
    assert!(
        busy < quiet * SLOWER_MAX,
        "{busy:?}, without attack {quiet:?}"
    );
    // The sandboxes keep running, as after any failed pause.
    for id in &ids {
        let listed = server.get(&format!("/sandboxes/{id}")).expect(200).json();
        assert_eq!(listed["state"], "running");
    }
    server.check_log(24 + 4 * ids.len() + 2 * 2 * 9);
}
