//! Tests on real VMs. The prefix of a test's name is its tier: `kvm_…` needs /dev/kvm and the prepared artifacts,
//! `net_…` also root and network namespaces, `soak_…` also several minutes.
//!
//! CUBE_ARTIFACTS is the absolute path of the directory that `cargo xtask prepare` fills, CUBE_BIN the directory of
//! `cube-vmm`. A test without its requirements is counted as ignored, and the reason is printed.

mod support;

mod boot;
mod damage;
mod deferred;
mod diff;
mod guest;
mod hostile;
mod identity;
mod lifecycle;
mod net;
mod soak;

use support::{host, run_dir};
use test_cases::cases;

fn main() {
    if let Ok(template) = std::env::var(lifecycle::CLIENT) {
        return lifecycle::be_client(&template);
    }
    let cases = cases! {
        boot::{
            kvm_boot_with_patched_hypercalls,
            kvm_boot_with_trapped_hypercalls,
            kvm_a_newer_guest_kernel_boots_and_its_clone_runs,
            kvm_boot_in_the_least_memory,
            kvm_boot_in_the_most_memory,
            kvm_specs_out_of_range_are_refused,
        },
        guest::{
            kvm_signals_carry_fault_addresses,
            kvm_ptrace_steps_and_breakpoints,
            kvm_ptrace_hardware_breakpoints,
            kvm_copy_on_write_keeps_processes_apart,
            kvm_no_mapping_is_stale,
            kvm_threads_have_their_own_storage,
            kvm_vector_registers_survive_switches,
            kvm_timers_and_clocks,
            kvm_segment_bases_survive_switches,
            kvm_files_keep_what_is_written,
            kvm_pipes_sockets_and_events,
            kvm_many_processes_at_once,
            kvm_modules_load,
            kvm_out_of_memory_is_survived,
            kvm_a_fork_bomb_meets_its_limit,
            kvm_proc_is_sane,
            kvm_an_idle_guest_stops_its_tick,
            kvm_a_hundred_commands,
        },
        identity::{
            kvm_clones_are_different_machines,
            kvm_first_random_bytes_differ,
            kvm_the_wall_clock_is_right,
            kvm_a_clone_of_an_old_snapshot_has_the_present_time,
            kvm_pending_timers_keep_their_remaining_time,
            kvm_clones_do_not_see_each_other,
            kvm_a_bad_identity_is_refused,
        },
        lifecycle::{
            kvm_a_listening_vmm_outlives_its_client, kvm_a_vmm_joins_its_groups_or_ends, kvm_a_request_that_is_older_than_its_connection_is_answered, kvm_a_guest_does_not_notice_a_pause,
            kvm_a_paused_guest_does_not_run,
            kvm_space_of_deleted_files_returns_to_the_host,
            kvm_requests_in_the_wrong_phase_are_refused,
            kvm_clones_of_clones_keep_what_they_inherit,
            kvm_streams_open_at_a_snapshot,
            kvm_the_end_of_a_guest_is_reported,
            kvm_the_vmm_ends_with_its_client,
            kvm_shutdown_leaves_no_socket,
            kvm_busy_programs_survive_a_snapshot,
            kvm_faults_under_way_survive_a_snapshot,
            kvm_clones_of_a_loaded_template,
        },
        damage::{
            kvm_truncated_templates_are_refused,
            kvm_verify_finds_a_flipped_bit_in_every_file,
            kvm_other_formats_and_platforms_are_refused,
            kvm_forged_states_do_not_crash_the_vmm,
            kvm_hostile_working_sets_are_harmless,
            kvm_bad_boot_files_are_refused,
            kvm_garbage_on_the_control_socket,
            kvm_a_full_disk_stops_a_snapshot,
            kvm_snapshots_never_replace_files,
            kvm_a_killed_vmm_leaves_only_a_draft,
        },
        deferred::{
            kvm_every_kind_of_instruction_can_touch_deferred_memory,
            kvm_forks_keep_the_content_of_deferred_memory,
            kvm_a_forged_list_of_chunks_harms_the_guest_only,
        },
        diff::{
            kvm_a_clone_of_a_diff_continues_where_it_stopped,
            kvm_generations_of_diffs_have_one_base,
            kvm_a_diff_of_a_loaded_template_names_the_original_directory,
            kvm_a_diff_without_its_base_is_refused,
            kvm_a_damaged_diff_is_refused,
            kvm_without_a_base_a_diff_is_a_full_snapshot,
            kvm_a_saved_layer_boots,
        },
        net::{
            net_a_guest_talks_over_its_tap,
            net_other_descriptors_than_taps_are_refused,
        },
        hostile::{
            kvm_the_gate_to_ring_0_cannot_harm_the_vmm,
            kvm_scribbling_over_all_memory_harms_the_guest_only,
            kvm_random_device_registers,
            kvm_a_flooded_console_is_bounded,
            kvm_a_flooded_vsock_keeps_serving,
            kvm_a_running_vmm_is_confined,
        },
        soak::{
            soak_mixed_stress,
            soak_two_hundred_generations,
            soak_the_cost_of_diffs,
            soak_python_test_suite_as_on_the_host,
            soak_node_test_suite_as_on_the_host,
            soak_files_across_generations,
            soak_every_class_of_stress_ng,
        },
    };
    run_dir::sweep();
    let conclusion = test_cases::run(cases, host::lack);
    run_dir::remove();
    conclusion.exit();
}
