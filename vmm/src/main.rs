//! `cube-vmm`: one process, one microVM.

use std::{
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    process::ExitCode,
};

use clap::{Parser, Subcommand};
use vmm::{clock, error::chain, machine::Machine};

/// Runs one microVM, told what to do over a control socket.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the control socket that is standard input (the default)
    Serve {
        /// Listen at this path for one client instead
        #[arg(long)]
        listen: Option<PathBuf>,
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
    match command.unwrap_or(Command::Serve { listen: None }) {
        Command::Serve { listen } => {
            let control = match listen {
                None => UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?),
                Some(path) => UnixListener::bind(path)?.accept()?.0,
            };
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
