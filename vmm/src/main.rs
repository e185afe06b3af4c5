//! `cube-vmm`: one process runs one microVM.

use std::{
    fs::OpenOptions,
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Parser, Subcommand};
use model::{chain, clock};
use vmm::{
    confine::{close_inherited, confine},
    control::Control,
    machine::Machine,
};

/// Runs one microVM under the control of a client, over a unix socket
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the control socket on standard input (the default). A connected socket is served until its client
    /// disconnects; a listening socket serves one client after another until the guest ends
    Serve {
        /// Switch to this user and group id first; needs root
        #[arg(long, value_name = "ID")]
        user: Option<u32>,
        /// Join a cgroup of version 1 before anything else; FILE is the group's `tasks`. May be repeated
        #[arg(long, value_name = "FILE")]
        join: Vec<PathBuf>,
    },
    /// Print as JSON which platform KVM on this host offers, and why
    Probe,
    /// Read every byte of a template and compare it with its manifest
    Verify {
        /// Directory of the template
        template: PathBuf,
    },
}

fn main() -> ExitCode {
    let started = clock::monotonic_ns();
    match run(Args::parse().command, started) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("cube-vmm: {}", chain(&*e));
            ExitCode::FAILURE
        }
    }
}

/// Moves this process, which has one thread, into a cgroup of version 1. A process that moves another one, or writes to
/// `cgroup.procs`, takes `cgroup_threadgroup_rwsem` and waits for an RCU grace period. A thread that moves itself does
/// not (`cgroup_procs_write_start` in kernel/cgroup/cgroup.c).
fn join_group(tasks: &Path) -> Result<(), String> {
    let written = OpenOptions::new()
        .write(true)
        .open(tasks)
        .and_then(|mut file| file.write_all(b"0"));
    written.map_err(|e| format!("cannot join the cgroup: {}: {e}", tasks.display()))
}

fn run(command: Option<Command>, started: u64) -> Result<(), Box<dyn std::error::Error>> {
    let default = Command::Serve {
        user: None,
        join: Vec::new(),
    };
    match command.unwrap_or(default) {
        Command::Serve { user, join } => {
            close_inherited()?;
            join.iter().try_for_each(|tasks| join_group(tasks))?;
            let control = Control::of_stdin()?;
            if control.is_listening() {
                // The VM outlives the terminal and the session of the process that started it. setsid fails for the
                // leader of a process group, which already has its own group.
                let _ = nix::unistd::setsid();
            }
            // Must come before any input is read: a snapshot may have been written by a compromised VMM.
            confine(user)?;
            Machine::new(control, started)?.serve()?;
        }
        Command::Probe => println!("{}", serde_json::to_string(&vmm::platform::probe::host()?)?),
        Command::Verify { template } => {
            vmm::snapshot::verify(&template)?;
            println!("{}: all files match the manifest", template.display());
        }
    }
    Ok(())
}
