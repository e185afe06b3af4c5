//! The project's tasks: `cargo xtask bench`, `verify`, `test`, `prepare`, `images`, `sdks`, `hvm`, `soak`, `fuzz`,
//! `mutate-netisolation`, `mutate-confinement`.
//!
//! Exit codes: 0 done · 1 a bug or a failed test · 2 usage · 6 unsuitable host. `bench` ends with the code
//! of `cube-bench` once that has been started.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand};

mod conformance;
mod tasks;
mod tiers;

mod dependencies;
mod fuzz;
mod hvm;
mod isolation;
mod mutate;
mod mutate_confinement;

mod prepare;
mod workspace;

mod archive;
mod host;

mod binaries;
mod guest_dir;
mod guest_module;
mod initramfs;
mod interpreter;
mod kernel;
mod layer;
mod root_image;
mod sdks;
mod template;

mod bzimage;
mod cpio;
mod modules;
mod mounts;
mod progress;
mod stage;
mod tool;

use prepare::Freshness;
use progress::Progress;
use tiers::Tier;
use workspace::Workspace;

const EXIT_BUG: u8 = 1;
const EXIT_USAGE: u8 = 2;
const EXIT_UNSUITABLE_HOST: u8 = 6;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Tasks of this project", version)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Prepare everything, run a scenario on real VMs and say where its report is.
    Bench {
        /// Scenario file.
        #[arg(default_value = "scenarios/50-concurrent.toml")]
        scenario: PathBuf,
        /// Further arguments of `cube-bench run`.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Prepare everything and run the official SDKs against a server of its own.
    Verify {
        /// Further arguments of `cube-bench verify e2b`.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Install the official SDKs; then stop.
    Sdks,
    /// Prepare everything, check format and lints, and run the tests.
    Test {
        /// Only these tiers; unit needs neither root nor KVM. Otherwise all that this host can run.
        #[arg(long = "tier", value_enum)]
        tiers: Vec<Tier>,
    },
    /// Install packages, build images, binaries and the template; then stop.
    Prepare {
        /// Fetch kernel and root image anew although nothing in their recipes changed.
        #[arg(long)]
        refresh: bool,
    },
    /// The part of `prepare` that needs no KVM: kernel, root image, layer, initramfs.
    Images {
        /// As for `prepare`.
        #[arg(long)]
        refresh: bool,
    },
    /// Prepare everything and a further template.
    Template {
        /// Which one.
        name: FurtherTemplate,
    },
    /// Run the steps of tier hvm and nothing else.
    Hvm {
        /// Instead of the steps, run the confinement prover: all its cases, or those of these names and classes.
        #[arg(long, value_name = "CASE", num_args = 0..)]
        confinement: Option<Vec<String>>,
    },
    /// Run the long tests.
    Soak,
    /// Run fuzz targets for minutes each, on corpora that grow from run to run in target/cube/fuzz.
    Fuzz {
        /// For each target.
        #[arg(long, default_value_t = 10)]
        minutes: u64,
        /// Make seeds of the inputs that reach code which no seed reaches.
        #[arg(long)]
        keep: bool,
        /// One target instead of all.
        target: Option<String>,
    },
    /// Take checks of network isolation out, one at a time, and see whether the prover notices.
    MutateNetisolation {
        /// Only mutations whose names contain this.
        only: Option<String>,
    },
    /// Take the layers of a VMM's confinement away and see what each holds.
    MutateConfinement,
}

/// Templates that `prepare` leaves out, because they take minutes.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum FurtherTemplate {
    /// `code-interpreter-v1`: Python, JavaScript and TypeScript, warm; bash, R and Java on first use.
    CodeInterpreter,
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            exit_code(&error)
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    let progress = Progress::detect();
    match task {
        Task::Bench {
            scenario,
            arguments,
        } => return tasks::bench(&workspace, &scenario, &arguments, progress),
        Task::Test { tiers } => return tasks::test(&workspace, &tiers, progress),
        Task::Verify { arguments } => return tasks::verify(&workspace, &arguments, progress),
        Task::Sdks => prepare::sdks(&workspace, progress)?,
        Task::Hvm { confinement } => {
            let work = confinement.map_or(hvm::Work::Steps, hvm::Work::Prover);
            return tasks::hvm(&workspace, progress, &work);
        }
        Task::Soak => return tasks::soak(&workspace, progress),
        Task::Fuzz {
            minutes,
            keep,
            target,
        } => {
            let plan = fuzz::LongRun {
                target,
                minutes,
                keep,
            };
            fuzz::run_long(&workspace, &plan, progress)?;
            return Ok(ExitCode::SUCCESS);
        }
        Task::MutateNetisolation { only } => {
            let code = if mutate::run(&workspace, only.as_deref(), progress)? {
                0
            } else {
                EXIT_BUG
            };
            return Ok(ExitCode::from(code));
        }
        Task::MutateConfinement => {
            let code = if mutate_confinement::run(&workspace, progress)? {
                0
            } else {
                EXIT_BUG
            };
            return Ok(ExitCode::from(code));
        }
        Task::Prepare { refresh } => {
            prepare::all(&workspace, progress, freshness(refresh))?;
        }
        Task::Template {
            name: FurtherTemplate::CodeInterpreter,
        } => {
            prepare::code_interpreter(&workspace, progress)?;
        }
        Task::Images { refresh } => {
            prepare::images(&workspace, progress, freshness(refresh))?;
        }
    }
    progress.say(&format!("ready in {}", workspace.artifacts().display()));
    Ok(ExitCode::SUCCESS)
}

fn freshness(refresh: bool) -> Freshness {
    if refresh {
        Freshness::Refresh
    } else {
        Freshness::Keep
    }
}

/// A host that will not do is told from everything else that can go wrong.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref::<host::Unsuitable>() {
        Some(_) => ExitCode::from(EXIT_UNSUITABLE_HOST),
        None => ExitCode::from(EXIT_BUG),
    }
}
