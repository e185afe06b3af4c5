//! Templates from images: from registries on this host to guests that run commands. Needs root, /dev/kvm, Debian's package
//! `docker-registry`, and the artefacts of `cargo xtask prepare`: CUBE_ARTIFACTS names their directory, CUBE_BIN that of
//! the programs. Without one of these, a test is counted as ignored and prints the reason.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "not all kinds of archives are needed here")]
#[path = "../../../template/oci-image/tests/images/archive.rs"]
mod archive;
mod faults;
mod guests;
#[path = "../server/http.rs"]
mod http;
mod limits;
mod load;
mod many;
mod power;
#[expect(dead_code, reason = "the tests of the server need more of it")]
#[path = "../server/process.rs"]
mod process;
mod quota;
#[path = "../../../template/oci-image/tests/images/registry.rs"]
mod registry;
mod restarts;
mod served;
#[path = "../../../template/oci-image/tests/images/server.rs"]
mod server;
mod world;

use test_cases::cases;

fn main() {
    if let Some(state) = std::env::var_os(restarts::KILLED) {
        return restarts::be_killed(state.as_ref());
    }
    if let Some(state) = std::env::var_os(power::RECORDED) {
        return power::be_recorded(state.as_ref());
    }
    let cases = cases! {
        guests::{
            kvm_a_guest_of_a_pulled_image_runs_commands,
            kvm_a_known_image_needs_its_manifest_only,
            kvm_an_image_is_summed_and_converted_in_the_control_group_of_the_background,
            kvm_the_default_image_needs_no_registry,
        },
        faults::{
            kvm_a_registry_that_refuses_or_lies_ends_a_build_with_a_reason,
            kvm_a_cancelled_build_ends_at_once_and_leaves_nothing,
            kvm_a_server_without_the_converter_names_it,
        },
        limits::{
            kvm_a_run_without_end_ends_its_build_at_the_limit,
        },
        quota::{
            kvm_images_stay_within_their_quota,
        },
        served::{
            kvm_a_template_is_built_from_an_image_by_a_client,
            kvm_credentials_of_the_operator_open_a_registry_to_builds_without_their_own,
        },
        many::{
            kvm_hundreds_of_templates_are_listed_completely,
            kvm_templates_of_distinct_roots_are_listed_started_and_limited,
            soak_three_hundred_templates_of_distinct_roots,
        },
        power::{
            kvm_a_power_loss_leaves_the_builds_that_were_answered,
        },
        load::{
            kvm_starts_while_builds_run_take_little_longer,
            kvm_starts_while_an_image_is_pulled_and_converted_take_little_longer,
        },
        restarts::{
            kvm_a_killed_server_leaves_nothing_of_an_image,
        },
    };
    test_cases::run(cases, |_| world::lack()).exit();
}
