//! Tests `cube-vmm` on the platform `hvm`, step by step, and prints the result and the run time of each step.
//!
//! ```text
//! hvm-steps --vmm F --verify F --guest D  on a host with VMX or SVM; needs root for the TAP
//! /init (PID 1)                           on an emulated host: mounts, modules, the same steps, power-off
//! ```
//! The exit status is 0 if every step passed, otherwise 1. As PID 1, the last line of output reports the result
//! instead.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::Parser;

mod config;
mod confinement;
mod steps;
mod vm;

mod emulated_host;
mod tap;

mod sys;

use config::Config;

#[derive(Debug, Parser)]
#[command(about = "Run the steps of the test tier hvm", version)]
struct Args {
    /// The `cube-vmm` under test.
    #[arg(long)]
    vmm: PathBuf,
    /// The `cube-verify` that contains the confinement prover.
    #[arg(long)]
    verify: PathBuf,
    /// Directory with vmlinux, initramfs.cpio, base.erofs and layer.ext4.
    #[arg(long)]
    guest: PathBuf,
    /// Stop after the first step whose name contains this text.
    #[arg(long)]
    only: Option<String>,
    /// Run the confinement prover instead of the steps: the cases and classes given, or all of them.
    #[arg(long, value_name = "CASE", num_args = 0..)]
    confinement: Option<Vec<String>>,
}

fn main() -> ExitCode {
    if std::process::id() == 1 {
        emulated_host::serve(steps::run);
    }
    let args = Args::parse();
    let done = work_dir().and_then(|work| {
        let config = Config {
            vmm: args.vmm,
            verify: args.verify,
            guest: args.guest,
            work: work.path().to_owned(),
            only: args.only,
            cases: args.confinement,
            brief: false,
            skip: Vec::new(),
            kept: None,
            keep: None,
            templates: Vec::new(),
        };
        steps::run(&config)
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hvm-steps: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A directory with a short path, which Unix sockets need.
fn work_dir() -> Result<tempfile::TempDir> {
    Ok(tempfile::Builder::new().prefix("hvm-").tempdir()?)
}
