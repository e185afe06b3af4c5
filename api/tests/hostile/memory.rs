//! The memory estimate of sandboxes while one of them uses as much as it can.

use serde_json::json;

use crate::server::{MIB, Server, until};

/// The stand-in allocates more than this.
const INFLATED: u64 = 250 * MIB;
/// Upper limit of the estimate: a few times the need of a small guest.
const EXPECTED_MAX: u64 = 80 * MIB;

/// Number of samples in which a sandbox is inflated. The server takes one every five seconds, the pool measures every
/// second.
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
    // Including those of its own template.
    server.create("inflated", &json!({}));
    for id in &small {
        server.kill(id);
    }
}
