//! Three nodes in network namespaces, each with a `cube-api`, a pool and real VMs, and one etcd. Needs what the tests of
//! `server` need, and the etcd that `cargo xtask prepare` unpacks.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../server/http.rs"]
#[allow(dead_code, reason = "the tests of the server use all of it")]
mod http;
mod service;
mod world;

use test_cases::cases;

fn main() {
    let cases = cases! {
        service::{
            cluster_three_nodes_are_one_service,
        },
    };
    let lack = |_| {
        test_cases::lack_for_vms(&[
            ("CUBE_ARTIFACTS", "templates/base"),
            ("CUBE_ARTIFACTS", "stages/etcd/etcd"),
            ("CUBE_BIN", "cube-vmm"),
        ])
    };
    test_cases::run(cases, lack).exit();
}
