//! Tests on real VMs, named by tier: `kvm_…` needs /dev/kvm and the prepared artifacts, `net_…` also root
//! and network namespaces, `soak_…` also much time.
//!
//! CUBE_ARTIFACTS is the absolute directory that `cargo xtask prepare` fills, CUBE_BIN the one of `cube-vmm`.
//! A test that lacks one of them, or /dev/kvm or root, is counted as ignored and its reason is printed.

mod support;

mod boot;
mod guest;

use libtest_mimic::{Arguments, Failed, Trial};
use support::{host, run_dir};

/// One test: its name begins with its tier.
struct Case {
    name: &'static str,
    run: fn(),
}

/// Lists test functions by their own names.
macro_rules! cases {
    ($($module:ident :: {$($name:ident),* $(,)?}),* $(,)?) => {
        [$($(Case { name: stringify!($name), run: $module::$name }),*),*]
    };
}

fn main() {
    let mut arguments = Arguments::from_args();
    // VMs share few cores and measured time: one test after another unless asked otherwise.
    arguments.test_threads.get_or_insert(1);
    let cases = cases! {
        boot::{
            kvm_boot_with_patched_hypercalls,
            kvm_boot_with_trapped_hypercalls,
            kvm_boot_in_the_least_memory,
            kvm_boot_in_the_most_memory,
            kvm_specs_out_of_range_are_refused,
        },
        guest::{
            kvm_signals_tell_their_addresses,
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
            kvm_a_hundred_commands,
        },
    };
    let trials = cases.into_iter().map(trial).collect();
    run_dir::sweep();
    let conclusion = libtest_mimic::run(&arguments, trials);
    run_dir::remove();
    conclusion.exit();
}

fn trial(case: Case) -> Trial {
    let lack = host::lack(case.name);
    if let Some(lack) = &lack {
        eprintln!("{} is skipped: {lack}", case.name);
    }
    let soak = case.name.starts_with("soak_");
    let run = case.run;
    Trial::test(case.name, move || {
        // Asked for with --ignored on a host that lacks something.
        match host::lack(case.name) {
            Some(lack) => Err(Failed::from(format!("cannot run here: {lack}"))),
            None => {
                run();
                Ok(())
            }
        }
    })
    .with_ignored_flag(soak || lack.is_some())
}
