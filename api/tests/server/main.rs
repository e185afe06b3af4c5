//! Tests the real server with real VMs over HTTP, as a client would use it. Needs root, /dev/kvm and the artefacts of
//! `cargo xtask prepare`: CUBE_ARTIFACTS names their directory, CUBE_BIN the directory of `cube-vmm`. Without one of
//! these, a test is counted as ignored and prints the reason.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builds;
mod churn;
mod clock;
mod days;
mod events;
mod http;
mod keys;
mod lives;
mod memory;
mod names;
mod network;
mod outside;
mod pressure;
mod process;
mod reads;
mod redo;
mod reload;
mod restarts;
mod rules;
mod secrets;
mod socks;
mod starts;
mod streams;
mod templates;
mod tls;

use test_cases::cases;

fn main() {
    let cases = cases! {
        lives::{
            kvm_a_sandbox_is_created_looked_at_and_ended,
            kvm_a_server_without_a_domain_names_one_that_does_not_exist,
            kvm_lists_are_filtered_and_paged,
            kvm_timeouts_are_set_shortened_and_never_shortened_by_connect,
            kvm_requests_prolong_a_life_up_to_its_maximum,
            kvm_a_pause_keeps_memory_and_a_resume_goes_on,
            kvm_a_pause_without_memory_is_a_cold_boot,
            kvm_an_automatic_pause_ends_with_traffic,
            kvm_a_sandbox_that_was_paused_by_a_timeout_of_zero_stays_when_it_is_resumed,
            kvm_snapshots_and_forks_have_what_the_source_had,
            kvm_figures_and_logs_are_there,
        },
        rules::{
            kvm_wrong_requests_are_told_in_json,
            kvm_a_repeated_create_with_its_idempotency_key_makes_one_sandbox,
            kvm_ports_ask_for_their_tokens,
            kvm_a_page_of_another_origin_changes_nothing,
            kvm_a_create_that_nobody_waits_for_leaves_nothing,
        },
        secrets::{
            kvm_secrets_are_kept_without_their_values_in_any_answer,
            kvm_a_wrong_key_of_the_secrets_is_an_error_at_the_start,
            kvm_a_secret_reaches_the_origin_and_nothing_else,
            kvm_clients_of_the_base_image_trust_the_authority_of_rules,
            kvm_rules_that_are_added_later_need_no_restart_of_the_guest,
            interpreter_java_and_clients_of_python_trust_the_authority_of_rules,
        },
        socks::{
            kvm_all_connections_of_a_sandbox_leave_by_its_proxy_or_not_at_all,
        },
        events::{
            kvm_events_are_listed_and_delivered_over_a_crash_of_the_server,
        },
        builds::{
            kvm_a_build_is_requested_started_followed_and_deleted,
            kvm_files_are_uploaded_to_urls_with_their_own_authority,
            kvm_builds_outlive_a_restart_or_end_with_a_reason,
        },
        templates::{
            kvm_a_template_is_built_of_its_steps_and_its_sandboxes_begin_there,
            kvm_only_the_start_command_runs_on_in_sandboxes,
            kvm_a_failed_build_names_its_step_and_leaves_nothing,
            kvm_steps_run_once_until_they_change_or_are_forced,
            kvm_a_build_ends_when_it_is_superseded_deleted_or_its_server_is_killed,
            kvm_a_guest_without_disk_or_memory_or_vmm_ends_its_build_only,
            kvm_two_builds_of_one_name_with_different_tags_both_become_ready,
            kvm_a_recipe_that_is_known_by_another_name_needs_no_machine,
            kvm_a_template_has_the_free_disk_that_its_build_asks_for,
            kvm_a_template_is_not_promised_more_disk_than_its_sandboxes_may_write,
        },
        starts::{
            kvm_a_start_command_that_fails_without_a_ready_command_ends_the_build,
        },
        redo::{
            kvm_a_template_is_built_again_from_the_order_that_the_server_keeps,
            kvm_a_redo_says_what_it_lacks,
        },
        keys::{
            kvm_keys_open_what_their_scopes_say,
            kvm_a_printed_key_survives_a_power_loss,
            kvm_created_certificates_survive_a_power_loss,
        },
        reads::{
            kvm_no_answer_to_a_key_that_reads_has_a_token_or_a_secret,
        },
        restarts::{
            kvm_what_runs_outlives_a_killed_server,
            kvm_an_upgraded_server_keeps_sandboxes_and_their_deadlines,
            kvm_a_stopped_server_keeps_or_ends_what_runs,
            kvm_the_end_of_a_stopped_server_spares_paused_sandboxes,
            kvm_a_wall_clock_that_is_set_neither_ends_nor_prolongs_a_sandbox,
        },
        reload::{
            kvm_a_reload_refuses_and_cuts_nothing,
            kvm_a_terminal_lives_through_many_reloads,
            kvm_a_program_that_does_not_start_leaves_the_old_server,
            kvm_a_reload_with_another_vmm_keeps_what_runs_and_what_is_paused,
            kvm_a_server_that_dies_while_it_takes_over_is_replaced_by_the_old_one,
            kvm_a_server_killed_during_a_reload_loses_no_sandbox,
            kvm_a_deadline_that_passes_during_a_reload_is_acted_upon,
            kvm_systemd_passes_sockets_and_learns_of_reloads,
            kvm_upgraded_connections_live_through_reloads,
            kvm_reloads_at_the_same_time_leave_one_server,
            kvm_a_reload_does_not_wait_for_a_silent_vmm,
            kvm_a_new_process_killed_at_any_moment_leaves_a_server_or_a_clean_start,
        },
        tls::{
            kvm_connections_with_tls_live_through_a_reload_with_another_certificate,
        },
        memory::{
            kvm_the_server_is_in_a_control_group_of_its_own,
            kvm_the_group_of_a_replaced_server_is_removed_when_it_ends,
        },
        pressure::{
            kvm_sandboxes_that_all_grow_at_once_lose_nothing,
        },
        network::{
            kvm_a_sandbox_reaches_what_its_policy_allows,
            kvm_a_sandbox_has_its_share_of_the_network_each_way,
            kvm_a_sandbox_that_does_nothing_sends_nothing,
            kvm_a_policy_is_replaced_while_the_sandbox_runs,
            kvm_pause_fork_and_kill_take_the_policy_along,
            kvm_a_killed_server_leaves_the_policy_in_force,
            kvm_a_sandbox_whose_network_changed_while_no_server_ran_is_never_served,
            kvm_a_server_that_is_killed_while_it_starts_is_followed_by_one_that_starts,
            kvm_without_a_network_programs_are_told_at_once,
        },
        names::{
            kvm_dns_queries_during_reloads_are_answered_without_a_repeat,
        },
        churn::{
            kvm_two_hundred_sandboxes_leave_nothing,
            kvm_a_server_killed_under_load_loses_no_sandbox,
            kvm_a_server_that_stops_while_it_adopts_leaves_nothing,
            kvm_what_another_boot_or_a_killed_server_left_is_removed,
            soak_two_thousand_sandboxes_leave_nothing,
        },
        days::{
            soak_a_day_of_pauses_and_resumes,
        },
    };
    test_cases::run(cases, process::lack).exit();
}
