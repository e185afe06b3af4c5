//! The cluster on a real etcd.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{env, path::PathBuf, process::ExitCode};

mod faults;
mod membership;
mod support;

fn main() -> ExitCode {
    let cases = test_cases::cases! {
        membership::{
            cluster_nodes_find_each_other_and_a_death_is_noticed,
            cluster_creates_write_nothing_and_loads_are_coalesced,
            cluster_owner_records_change_by_compare_and_swap,
            cluster_an_old_etcd_is_refused,
            cluster_etcd_with_certificates,
            cluster_an_etcd_without_client_certificates_is_refused,
        },
        faults::{
            cluster_a_watch_goes_on_after_a_compaction,
            cluster_nodes_return_after_etcd_was_killed_or_stopped,
            cluster_a_restored_backup_is_noticed_and_repaired,
        },
    };
    test_cases::run(cases, lack).exit_code()
}

fn lack(_case: &'static str) -> Option<String> {
    let Some(dir) = env::var_os("CUBE_ARTIFACTS") else {
        return Some("CUBE_ARTIFACTS is not set (run `cargo xtask test`)".to_owned());
    };
    let program = PathBuf::from(dir).join("stages/etcd/etcd");
    let lack = || format!("{} is missing (run `cargo xtask etcd`)", program.display());
    (!program.exists()).then(lack)
}
