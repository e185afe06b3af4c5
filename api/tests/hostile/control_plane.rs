//! Agents and VMMs that the server itself asks.

use serde_json::json;

use crate::server::{MIB, Server};

/// What the server may grow by, however many sandboxes attack it. One that was not stopped could send it a gigabyte.
const GROWTH_MAX: u64 = 64 * MIB;
/// A neighbour's life beside an attack may take so many times what it takes without one.
const SLOWER_MAX: u32 = 25;
/// Attacks of each kind.
const ROUNDS: usize = 3;

/// Those that send much or wrong things in the first answer, or before it.
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
fn floods_of_first_answers_cost_the_server_and_its_neighbours_little() {
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
    assert!(grown < GROWTH_MAX, "grown by {} MiB", grown / MIB);
    assert!(
        busy < quiet * SLOWER_MAX,
        "{busy:?}, without attack {quiet:?}"
    );
    // A start that fails has two lines, by the pool and by the request; a neighbour has two, too.
    server.check_log(20 + 2 * ROUNDS * FLOODS.len() + 2 * 2 * 9);
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
fn nothing_is_read_after_the_end_of_a_stream() {
    let server = Server::start(&["after-the-end"], &["--warm", "0:0"]);
    let ids: Vec<_> = (0..4)
        .map(|_| server.create("after-the-end", &json!({})))
        .collect();
    let quiet = server.neighbour();
    let before = server.forget_peak();
    let busy = std::thread::scope(|scope| {
        for id in &ids {
            // The agent is told to write its disk, by a command whose answer is a stream.
            let server = &server;
            scope.spawn(move || server.pause(id, &json!({"memory": false})).expect(500));
        }
        server.neighbour()
    });
    let grown = server.peak_bytes().saturating_sub(before);
    assert!(grown < GROWTH_MAX, "grown by {} MiB", grown / MIB);
    assert!(
        busy < quiet * SLOWER_MAX,
        "{busy:?}, without attack {quiet:?}"
    );
    // The sandboxes run on, as after any pause that fails.
    for id in &ids {
        let listed = server.get(&format!("/sandboxes/{id}")).expect(200).json();
        assert_eq!(listed["state"], "running");
    }
    server.check_log(20 + 4 * ids.len() + 2 * 2 * 9);
}
