//! The project's build, test and bench tasks: `cargo xtask --help` lists them.
//!
//! Exit codes: 0 success · 1 bug or failed test · 2 usage · 6 unsuitable host. `bench` and `verify` pass on the exit
//! code of `cube-bench` once it has started.
//!
//! ```text
//! tasks          the commands, each from its preconditions to its exit code
//! tiers          the tests: which tiers there are, and how each runs
//! prepare, dist  what is built, in order; packages of it
//! stages         one module for each thing that is built, and the formats that this takes
//! repository     tests of the repository's documents, layout and workflows
//! ```

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand};

mod tasks;
mod tiers;

mod dist;
mod prepare;
mod specification;
mod stages;

mod host;
mod junit;
mod markdown;
mod progress;
mod tool;
mod workspace;

#[cfg(test)]
mod repository;

use prepare::Freshness;
use progress::Progress;
use stages::{binaries::HostBinaries, interpreter};
use tiers::{Selection, Tier, blocks, console, fuzz, hvm, mutate, mutate_confinement};
use workspace::Workspace;

const EXIT_BUG: u8 = 1;
const EXIT_USAGE: u8 = 2;
const EXIT_UNSUITABLE_HOST: u8 = 6;

#[derive(Debug, Parser)]
#[command(
    name = "xtask",
    bin_name = "cargo xtask",
    about = "Build, test and bench tasks of this repository",
    version
)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Build what a scenario needs, run it on real VMs and print where its report is.
    Bench {
        /// Scenario file.
        #[arg(default_value = "scenarios/50-concurrent.toml")]
        scenario: PathBuf,
        /// Arguments passed on to `cube-bench run`.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Build everything, start a server and run the conformance suite of the official SDKs against it.
    Verify {
        /// Arguments passed on to `cube-bench verify e2b`.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Build the web console, and write it to `console/dist`.
    Console,
    /// List the blocks of commands in the documents, and the tier that runs each.
    Blocks {
        /// Run the blocks of the tier `e2b`, with the programs and SDKs in target/cube.
        #[arg(long)]
        run: bool,
        /// Only of these documents, by the end of their names.
        #[arg(requires = "run")]
        documents: Vec<String>,
    },
    /// Render the documents as a web site in target/cube/docs, which a server from this checkout serves at /docs.
    Site,
    /// Write SPECIFICATION.md from the promises next to the tests.
    Specification {
        /// Print all promises with their tests instead.
        #[arg(long)]
        tests: bool,
    },
    /// Install the official SDKs below target/cube/sdk.
    Sdks,
    /// Install the sandboxes of other projects for `cube-bench peers`.
    Peers,
    /// Fetch the etcd of the tier `cluster` into target/cube/stages/etcd.
    Etcd,
    /// Build everything, check format and lints, and run the tests that every change must pass.
    Test {
        /// Run this whole tier instead; may be repeated. `unit` requires neither root nor KVM.
        #[arg(long = "tier", value_enum)]
        tiers: Vec<Tier>,
        /// Run all tiers completely.
        #[arg(long, conflicts_with = "tiers")]
        all: bool,
    },
    /// Install missing packages; build the images, the binaries and the template `base`.
    Prepare {
        /// Fetch the kernel and the root image again, even if their recipes have not changed.
        #[arg(long)]
        refresh: bool,
    },
    /// Build everything that needs no KVM: kernel, root image, writable layer, initramfs.
    Images {
        /// Fetch the kernel and the root image again, even if their recipes have not changed.
        #[arg(long)]
        refresh: bool,
    },
    /// Build everything, and package it as a Debian package and an archive in target/cube/dist.
    Dist {
        /// Version of the package [default: the workspace's]
        #[arg(long)]
        version: Option<String>,
        /// Compression level, 1 to 19; lower is faster, for test packages [default: 19]
        #[arg(long, value_parser = clap::value_parser!(u8).range(1..=19))]
        level: Option<u8>,
        /// Directory with prebuilt release binaries [default: build them]
        #[arg(long)]
        binaries: Option<PathBuf>,
        /// Also build the package of the template `code-interpreter-v1`, and the template if it is missing
        #[arg(long)]
        interpreter: bool,
    },
    /// Build everything and one of the optional templates.
    Template {
        /// The template to build.
        name: OptionalTemplate,
    },
    /// Run the tier `hvm` without format checks and lints.
    Hvm {
        /// Run the confinement prover instead of the steps: the cases and classes given, or all of them.
        #[arg(long, value_name = "CASE", num_args = 0..)]
        confinement: Option<Vec<String>>,
        /// Run the tier `hvm-vmx` instead.
        #[arg(long, conflicts_with = "confinement")]
        vmx: bool,
        /// Run some steps with the kernel of the backports as guest, as host, and as both. The tier `kvm` finds its files
        /// afterwards, and tests it on this host.
        #[arg(long, conflicts_with_all = ["confinement", "vmx"])]
        newer_kernel: bool,
    },
    /// Run the long tests: mixed stress, thousands of sandboxes, simulated days, test suites of other projects. A
    /// failure does not stop the others; the last output is a table.
    Soak {
        /// Run only the tests whose names contain this text.
        only: Option<String>,
    },
    /// Fuzz for minutes per target; the corpora in target/cube/fuzz are kept and grow from run to run.
    Fuzz {
        /// Minutes per target.
        #[arg(long, default_value_t = 10)]
        minutes: u64,
        /// Add the inputs that reach new code to the seeds in dev/fuzz/seeds.
        #[arg(long)]
        keep: bool,
        /// Fuzz only this target. Default: all targets.
        target: Option<String>,
    },
    /// Remove the checks of network isolation one at a time, and report which removals the prover detects.
    MutateNetisolation {
        /// Run only mutations whose name contains this text, or that this class of cases or this package's tests
        /// detect.
        only: Option<String>,
    },
    /// Remove the checks of the egress proxy one at a time, and report which removals the prover and the tests detect.
    MutateEgress {
        /// Run only mutations whose name contains this text, or that this class of cases or this package's tests
        /// detect.
        only: Option<String>,
    },
    /// Change the pool's decisions one at a time, and report which property of the explorer each change violates.
    MutatePool {
        /// Run only mutations whose name contains this text, or that this class of cases or this package's tests
        /// detect.
        only: Option<String>,
    },
    /// Run the simulation of a cluster with many seeds, in a release build.
    SimulateCluster {
        #[arg(long, default_value_t = 20_000)]
        seeds: u64,
    },
    /// Change the cluster's decisions one at a time, and report which property of the simulation each change violates.
    MutateCluster {
        /// Run only mutations whose name contains this text, or that this class of cases or this package's tests
        /// detect.
        only: Option<String>,
    },
    /// Run the confinement prover without any layer of a VMM's confinement, with each alone, and with all.
    MutateConfinement,
}

/// Templates that `prepare` does not build, because each takes minutes.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum OptionalTemplate {
    /// `code-interpreter-v1`: Python, JavaScript and TypeScript are warm; bash, R and Java start on first use.
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
        Task::Test { tiers, all } => {
            let selection = Selection::of(tiers, all);
            return tasks::test(&workspace, &selection, progress);
        }
        Task::Verify { arguments } => return tasks::verify(&workspace, &arguments, progress),
        Task::Blocks { run: false, .. } => {
            println!("{}", blocks::Blocks::load(&workspace)?.list());
            return Ok(ExitCode::SUCCESS);
        }
        Task::Blocks { documents, .. } => return tasks::blocks(&workspace, &documents),
        Task::Specification { tests: true } => {
            print!(
                "{}",
                specification::Promises::load(workspace.root())?.matrix()
            );
            return Ok(ExitCode::SUCCESS);
        }
        Task::Specification { tests: false } => {
            specification::write(workspace.root())?;
            return Ok(ExitCode::SUCCESS);
        }
        Task::Sdks => prepare::sdks(&workspace, progress)?,
        Task::Console => console::refresh(&workspace, progress)?,
        Task::Peers => prepare::peers(&workspace, progress)?,
        Task::Site => drop(prepare::site(&workspace, progress)?),
        Task::Etcd => prepare::cluster_tools(&workspace, progress)?,
        Task::Hvm {
            confinement,
            vmx,
            newer_kernel,
        } => {
            let steps = match (vmx, newer_kernel) {
                (true, _) => hvm::Work::Vmx,
                (_, true) => hvm::Work::NewerKernel,
                (false, false) => hvm::Work::Steps,
            };
            let work = confinement.map_or(steps, hvm::Work::Prover);
            return tasks::hvm(&workspace, progress, &work);
        }
        Task::Soak { only } => return tasks::soak(&workspace, only.as_deref(), progress),
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
            let list = mutate::NETISOLATION;
            let all_detected = mutate::run(&workspace, list, only.as_deref(), progress)?;
            return Ok(success_or_bug(all_detected));
        }
        Task::MutateEgress { only } => {
            let list = mutate::EGRESS;
            let all_detected = mutate::run(&workspace, list, only.as_deref(), progress)?;
            return Ok(success_or_bug(all_detected));
        }
        Task::MutatePool { only } => {
            let list = mutate::POOL;
            let all_detected = mutate::run(&workspace, list, only.as_deref(), progress)?;
            return Ok(success_or_bug(all_detected));
        }
        Task::MutateCluster { only } => {
            let list = mutate::CLUSTER;
            let all_detected = mutate::run(&workspace, list, only.as_deref(), progress)?;
            return Ok(success_or_bug(all_detected));
        }
        Task::SimulateCluster { seeds } => return tasks::simulate_cluster(&workspace, seeds),
        Task::MutateConfinement => {
            let all_proven = mutate_confinement::run(&workspace, progress)?;
            return Ok(success_or_bug(all_proven));
        }
        Task::Prepare { refresh } => {
            prepare::all(&workspace, progress, freshness(refresh))?;
        }
        Task::Dist {
            version,
            level,
            binaries,
            interpreter,
        } => {
            let template = interpreter.then(|| interpreter::place(&workspace));
            let binaries = match (binaries, interpreter) {
                (Some(dir), _) => HostBinaries { dir },
                (None, true) => prepare::code_interpreter(&workspace, progress, |_| Ok(()))?,
                (None, false) => prepare::without_templates(&workspace, progress)?,
            };
            let version = version.unwrap_or_else(|| dist::version().to_owned());
            let template = template.as_deref();
            dist::build(&workspace, &binaries, template, &version, level, progress)?;
        }
        Task::Template {
            name: OptionalTemplate::CodeInterpreter,
        } => {
            prepare::code_interpreter(&workspace, progress, |_| Ok(()))?;
        }
        Task::Images { refresh } => {
            prepare::images(&workspace, progress, freshness(refresh))?;
        }
    }
    progress.line(&format!(
        "build outputs are in {}",
        workspace.artifacts().display()
    ));
    Ok(ExitCode::SUCCESS)
}

fn success_or_bug(success: bool) -> ExitCode {
    if success {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(EXIT_BUG)
    }
}

fn freshness(refresh: bool) -> Freshness {
    if refresh {
        Freshness::Refresh
    } else {
        Freshness::Keep
    }
}

/// An unsuitable host has its own exit code; every other error is [`EXIT_BUG`].
fn exit_code(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref::<host::Unsuitable>() {
        Some(_) => ExitCode::from(EXIT_UNSUITABLE_HOST),
        None => ExitCode::from(EXIT_BUG),
    }
}
