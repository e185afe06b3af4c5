//! The server's estimate of the memory that a new sandbox needs, while one sandbox uses far more than others.

use serde_json::json;

use crate::server::{MIB, Server, until};

/// A sandbox that uses more bytes than this counts as inflated. The stand-in allocates 300 MiB.
const INFLATED: u64 = 250 * MIB;
/// Upper limit of the estimate: a few times the memory that a small guest needs.
const EXPECTED_MAX: u64 = 80 * MIB;

/// Number of samples in which a sandbox is inflated. The server takes a sample every five seconds; the pool measures
/// memory every second.
fn samples(server: &Server, id: &str) -> usize {
    let path = format!("/sandboxes/{id}/metrics");
    let samples = server.get(&path).expect(200).json();
    let samples = samples.as_array().unwrap().iter();
    samples
        .filter(|s| s["memUsed"].as_u64().unwrap() > INFLATED)
        .count()
}

#[test]
fn an_inflated_sandbox_does_not_raise_the_estimate_for_others() {
    let server = Server::start(&["inflated"], &["--warm", "0:0"]);
    let first = server.create("inflated", &json!({}));
    let small: Vec<_> = (0..3).map(|_| server.create("good", &json!({}))).collect();
    until("it was measured often", || samples(&server, &first) >= 3);
    let expected = server.figure("cube_pool_expected_bytes");
    assert!(expected < EXPECTED_MAX, "{} MiB", expected / MIB);
    // Not even a second sandbox of the same template is refused.
    server.create("inflated", &json!({}));
    for id in &small {
        server.kill(id);
    }
}
