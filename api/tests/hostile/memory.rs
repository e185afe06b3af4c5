//! What a sandbox is taken to need, when one of them takes all it can get.

use serde_json::json;

use crate::server::{MIB, Server, until};

/// What the stand-in takes is more than this.
const INFLATED: u64 = 250 * MIB;
/// What any sandbox is taken to need here at most: a few times what those of a small guest need.
const EXPECTED_MAX: u64 = 80 * MIB;

/// Samples of a sandbox in which it is inflated. One is taken each five seconds, and the pool measures each second.
fn samples(server: &Server, id: &str) -> usize {
    let path = format!("/sandboxes/{id}/metrics");
    let samples = server.get(&path).expect(200).json();
    let samples = samples.as_array().unwrap().iter();
    samples
        .filter(|s| s["memUsed"].as_u64().unwrap() > INFLATED)
        .count()
}

#[test]
fn an_inflated_sandbox_is_no_measure_for_others() {
    let server = Server::start(&["inflated"], &["--warm", "0:0"]);
    let first = server.create("inflated", &json!({}));
    let small: Vec<_> = (0..3).map(|_| server.create("good", &json!({}))).collect();
    until("it was measured often", || samples(&server, &first) >= 3);
    let expected = server.figure("cube_pool_expected_bytes");
    assert!(expected < EXPECTED_MAX, "{} MiB", expected / MIB);
    // Of its own template, too.
    server.create("inflated", &json!({}));
    for id in &small {
        server.kill(id);
    }
}
