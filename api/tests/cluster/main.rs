//! Three nodes in network namespaces, each with a `cube-api`, a pool and real VMs, and one etcd. Has the requirements
//! of the tests of `server`, and needs the etcd that `cargo xtask prepare` unpacks.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod etcd;
mod faults;
#[path = "../server/http.rs"]
#[allow(dead_code, reason = "the tests of the server use all of it")]
mod http;
mod moves;
mod removed;
mod secrets;
mod service;
mod templates;
mod world;

use test_cases::cases;

/// Also runs the tests of the complete form, which take minutes.
const ALL: &str = "CUBE_TEST_CLUSTER_ALL";

fn main() {
    let cases = cases! {
        service::{
            cluster_three_nodes_are_one_service,
            cluster_long_a_node_that_owns_nothing_keeps_the_life_cycle,
        },
        moves::{
            cluster_a_drained_node_gives_its_sandboxes_away,
        },
        removed::{
            cluster_a_removed_node_has_nothing_left,
        },
        faults::{
            cluster_long_moves_survive_the_loss_of_either_node,
            cluster_long_nodes_return_from_partitions_and_stops,
            cluster_long_an_upgrade_of_all_nodes_fails_no_create,
        },
    };
    let lack = |name: &str| {
        if name.starts_with("cluster_long_") && std::env::var_os(ALL).is_none() {
            return Some(format!("it is part of the whole form ({ALL}=1)"));
        }
        test_cases::lack_for_vms(&[
            ("CUBE_ARTIFACTS", "templates/base"),
            ("CUBE_ARTIFACTS", "stages/etcd/etcd"),
            ("CUBE_BIN", "cube-vmm"),
        ])
    };
    test_cases::run(cases, lack).exit();
}
