//! The real `cube` against a real server with real VMs. Needs root, /dev/kvm and the artefacts of `cargo xtask
//! prepare`: CUBE_ARTIFACTS names their directory, CUBE_BIN the directory of `cube-api` and `cube-vmm`. If one of
//! these is missing, tests are counted as ignored and print the reason.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod attached;
mod cubemastercli;
mod errors;
mod images;
mod mcp;
mod registry;
mod sandboxes;
mod secrets;
mod world;

use test_cases::cases;

fn main() {
    let cases = cases! {
        attached::{
            kvm_a_command_has_its_streams_and_its_exit_code,
            kvm_exit_codes_are_those_of_shells,
            kvm_signals_reach_the_command_and_its_sandbox_ends,
            kvm_a_command_that_ignores_signals_ends_with_the_second,
            kvm_a_command_has_a_terminal_with_its_size,
            kvm_a_reader_that_leaves_ends_the_sandbox,
            kvm_a_run_takes_little_longer_than_the_interface,
        },
        sandboxes::{
            kvm_a_sandbox_is_created_used_and_killed,
            kvm_a_sandbox_is_paused_resumed_forked_and_kept,
            kvm_a_sandbox_lives_as_long_as_it_is_used_and_a_paused_one_stays_paused,
            kvm_files_and_directories_are_copied_both_ways,
            kvm_a_file_of_this_host_that_cannot_be_written_is_named,
            kvm_exec_ends_its_command_with_a_signal_and_leaves_the_sandbox,
        },
        images::{
            kvm_an_image_is_built_once_and_keeps_its_user_and_directory,
            kvm_a_dockerfile_becomes_a_template,
            kvm_a_dockerfile_has_its_build_arguments_and_ignored_files,
            kvm_the_config_of_an_image_is_that_of_its_sandboxes,
        },
        cubemastercli::{
            kvm_the_commands_of_the_guides_work,
            kvm_answers_have_the_shape_of_the_guides_and_chosen_ids_are_kept,
            kvm_a_request_is_rendered_without_a_server_and_a_template_with_one,
        },
        secrets::{
            kvm_a_secret_is_stored_listed_updated_and_deleted,
        },
        mcp::{
            kvm_an_mcp_client_uses_sandboxes_which_end_with_its_input,
            kvm_mcp_over_http_serves_only_clients_with_the_token,
        },
        errors::{
            kvm_failures_name_the_cause_and_the_cure,
            kvm_a_program_that_is_no_server_is_named_by_its_url,
            kvm_a_server_with_tls_needs_a_trusted_certificate,
        },
    };
    test_cases::run(cases, |_| world::lack()).exit();
}
