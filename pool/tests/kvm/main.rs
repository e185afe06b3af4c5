//! Tests of the pool with the real `cube-vmm` and the prepared template. Each test has its own state directory. The
//! next run removes the leftovers of a killed run.

mod support;

mod demand;
mod diffs;
mod disk;
mod faults;
mod lifecycle;
mod limits;
mod power;
mod rebuild;
mod sys;
mod templates;
mod upgrade;

use test_cases::cases;

fn main() {
    if let Some(state) = std::env::var_os(support::SERVER) {
        if let Some(fault) = std::env::var_os(support::FAULT) {
            return faults::be_on_a_failing_disk(state.as_ref(), &fault.to_string_lossy());
        }
        if let Some(marks) = std::env::var_os(support::MARKS) {
            return power::be_recorded(state.as_ref(), marks.as_ref());
        }
        if let Some(image) = std::env::var_os(support::FULL) {
            return disk::be_on_a_small_disk(state.as_ref(), image.as_ref());
        }
        return match std::env::var_os(support::BUSY) {
            Some(_) => limits::be_busy(state.as_ref()),
            None if std::env::var_os(support::UPGRADED).is_some() => {
                upgrade::be_opening(state.as_ref());
            }
            None => lifecycle::be_server(state.as_ref()),
        };
    }
    support::sweep();
    let cases = cases! {
        lifecycle::{
            kvm_a_lease_is_a_machine_of_its_own,
            kvm_a_warm_slot_serves_one_lease,
            kvm_a_warm_slot_has_answered_its_templates_requests,
            kvm_a_hundred_leases_leave_nothing,
            kvm_the_end_of_a_vm_is_reported,
            kvm_a_killed_server_is_followed_by_another,
            kvm_a_pause_keeps_memory,
            kvm_a_pause_without_memory_keeps_the_disk,
            kvm_a_disk_without_memory_is_consistent,
            kvm_forks_continue_from_their_source,
            kvm_files_that_are_removed_soon_are_no_base,
            kvm_a_snapshot_is_a_template,
        },
        templates::{
            kvm_a_sandbox_boots_from_a_disk_and_the_disk_that_it_leaves_is_a_template,
            kvm_a_published_process_runs_on_in_every_sandbox,
            kvm_names_move_between_templates_and_a_build_has_a_low_priority,
            kvm_a_disk_that_cannot_be_saved_costs_nothing,
            kvm_a_built_template_has_the_memory_that_its_disk_was_booted_with_and_a_working_set,
            kvm_a_template_that_is_not_used_any_more_loses_its_warm_slots,
        },
        demand::{
            kvm_warm_slots_follow_demand_and_end_without_it,
            kvm_many_templates_share_one_budget,
            kvm_refused_creates_are_no_demand,
            kvm_configured_marks_hold_within_the_budget,
            kvm_templates_have_a_quota_and_none_is_removed_for_another,
        },
        diffs::{
            kvm_a_template_stored_as_a_diff_serves_sandboxes_and_survives_a_restart,
            kvm_the_base_of_a_diff_stays_as_long_as_the_diff,
        },
        limits::{
            kvm_what_does_not_fit_is_refused,
            kvm_warm_slots_are_evicted,
            kvm_paused_sandboxes_and_snapshots_are_limited,
            kvm_silent_vmms_are_waited_for_together,
            kvm_each_vm_is_in_its_control_group,
            kvm_the_sandbox_of_a_caller_that_left_is_ended,
            kvm_random_lives_leave_nothing,
            kvm_a_server_is_killed_at_any_moment,
        },
        upgrade::{
            kvm_an_upgrade_keeps_what_users_have,
            kvm_an_interrupted_upgrade_is_harmless,
        },
        rebuild::{
            kvm_an_installed_template_is_rebuilt_after_an_upgrade,
            kvm_a_changed_guest_file_makes_a_new_template_and_a_missing_one_none,
            kvm_an_interrupted_rebuild_is_started_again,
        },
        disk::{
            kvm_a_full_disk_loses_nothing,
        },
        faults::{
            kvm_a_read_only_disk_refuses_changes_and_loses_nothing,
            kvm_a_broken_disk_refuses_changes_and_a_power_loss_keeps_what_was_answered,
            kvm_a_record_that_cannot_be_read_costs_no_sandbox,
            kvm_ten_thousand_leftover_directories_are_swept,
        },
        power::{
            kvm_a_power_loss_leaves_what_was_answered,
        },
    };
    test_cases::run(cases, |_| support::lack()).exit();
}
