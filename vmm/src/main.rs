//! `cube-vmm`: one process, one microVM.

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use model::{chain, clock};
use vmm::{
    confine::{close_inherited, confine},
    control::Control,
    machine::Machine,
};

/// Runs one microVM, told what to do over a control socket.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the control socket that is standard input (the default): a connected one until its client
    /// leaves, a listening one for clients one after another until the guest ends
    Serve {
        /// Become this user and this group first; takes root
        #[arg(long, value_name = "ID")]
        user: Option<u32>,
    },
    /// Say which platform this host's KVM offers, and why, as JSON
    Probe,
    /// Read every byte of a template and compare it with its manifest
    Verify {
        /// The template's directory
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

fn run(command: Option<Command>, started: u64) -> Result<(), Box<dyn std::error::Error>> {
    match command.unwrap_or(Command::Serve { user: None }) {
        Command::Serve { user } => {
            close_inherited()?;
            let control = Control::of_stdin()?;
            if control.is_listening() {
                // It is to outlive the terminal and the session of whoever started it. Fails for a leader of
                // a process group, which was given one of its own on purpose.
                let _ = nix::unistd::setsid();
            }
            // Before anything is read: what a snapshot holds was written by another VMM.
            confine(user)?;
            Machine::new(control, started)?.serve()?;
        }
        Command::Probe => println!("{}", serde_json::to_string(&vmm::platform::probe::host()?)?),
        Command::Verify { template } => {
            vmm::snapshot::verify(&template)?;
            println!("{}: every byte is as its manifest says", template.display());
        }
    }
    Ok(())
}
