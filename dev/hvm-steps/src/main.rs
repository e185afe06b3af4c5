//! Runs `cube-vmm` through what the `hvm` platform promises, one step after another, and says of each how
//! it went and how long it took.
//!
//! ```text
//! hvm-steps --vmm F --guest D      on a host whose /dev/kvm is hvm; needs root for the TAP
//! /init (PID 1)                    on an emulated host: mounts, modules, then the same, then power-off
//! ```
//! Exit status 0 when every step passed, 1 otherwise. As PID 1 the last line says it instead.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::Parser;

mod confinement;
mod steps;
mod vm;

mod emulated_host;
mod tap;

mod sys;

use steps::Places;

#[derive(Debug, Parser)]
#[command(about = "Steps of the test tier hvm", version)]
struct Args {
    /// The program under test.
    #[arg(long)]
    vmm: PathBuf,
    /// The program that has the confinement prover.
    #[arg(long)]
    bench: PathBuf,
    /// Directory with vmlinux, initramfs.cpio, base.erofs and layer.ext4.
    #[arg(long)]
    guest: PathBuf,
    /// Only steps whose name contains this, and those that they need.
    #[arg(long)]
    only: Option<String>,
    /// Instead of the steps, run the confinement prover: all its cases, or those of these names and classes.
    #[arg(long, value_name = "CASE", num_args = 0..)]
    confinement: Option<Vec<String>>,
}

fn main() -> ExitCode {
    if std::process::id() == 1 {
        emulated_host::serve(steps::run);
    }
    let args = Args::parse();
    let done = work_dir().and_then(|work| {
        let places = Places {
            vmm: args.vmm,
            bench: args.bench,
            guest: args.guest,
            work: work.path().to_owned(),
            only: args.only,
            cases: args.confinement,
            kept: None,
            lacking: None,
        };
        steps::run(&places)
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hvm-steps: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Sockets need a short path.
fn work_dir() -> Result<tempfile::TempDir> {
    Ok(tempfile::Builder::new().prefix("hvm-").tempdir()?)
}
