//! The command line of `cube-bench`: commands, and the exit code of each error.

mod ab;
mod badge;
mod claims;
mod compare;
mod density;
mod doctor;
mod history;
mod init;
mod pack;
mod peers;
mod plan;
mod quick;
mod report;
mod run;
mod saturate;
mod verify;

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
};

use clap::{Parser, Subcommand, ValueEnum};
use harness::{
    ab::{builds::BuildError, record::ReadError, run::AbError},
    claims::ClaimsError,
    compare::CompareError,
    event::EVENTS_FORMAT,
    host::facts,
    pack::PackError,
    record::RecordError,
    report::document,
    saturate::SaturateError,
    scenario::{self, Change, Scenario, ScenarioError},
    session::{self, SessionError},
};
use model::chain;
use testbed::{
    artifacts::ArtifactError,
    exit::End,
    options::{self, RunRoot},
};

#[derive(Parser)]
#[command(
    version,
    about = "Measures how fast microVMs start and how much memory they use, and verifies their isolation"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write a commented scenario to start from, and print the next steps
    Init(init::Init),
    /// Run a scenario, record it, evaluate its gates and print the report
    Run(run::Run),
    /// Measure a server with E2B's API in two minutes: create, echo and a Python cell, by origin of the sandbox
    Quick(quick::Quick),
    /// Compare in one run how systems create sandboxes, run a first command in them, and remove them
    Peers(peers::Peers),
    /// Recompute the report of a recorded run
    Report(report::Report),
    /// Print a scenario file of an earlier version in the current form, without its comments
    Rewrite(plan::Rewrite),
    /// Print the planned starts of a scenario without running it
    Plan(plan::Plan),
    /// Compare two recorded runs of one scenario: fail if the second one is slower, or needs more memory or CPU time
    Compare(compare::Compare),
    /// Draw the trends of recorded runs as one HTML page
    History(history::History),
    /// Draw runs of many hosts and platforms as one HTML page
    Board(history::Board),
    /// Draw one figure of a recorded run as an SVG
    Badge(badge::Badge),
    /// Write a recorded run with its hashes into one archive, which may be signed
    Pack(pack::Pack),
    /// Check a recorded run or a pack: hashes, signature, figures, division. Exit code 3 after a fault, 5 if something
    /// cannot be verified
    Check(pack::Check),
    /// Measure two builds in one run, in the order A B B A, and report what changed
    Ab(ab::Ab),
    /// Find the highest start rate at which the P95 of first exec stays within a bound
    Saturate(saturate::Saturate),
    /// Find the largest number of sandboxes within bounds on memory, idle CPU time and the P95 of first exec
    Density(density::Density),
    /// Describe this host and grade how far its measurements can be trusted
    Doctor(doctor::Doctor),
    /// Verify conformance with E2B, network isolation, confinement of the VMM, differences between clones, and restarts
    #[command(disable_help_flag = true)]
    Verify(verify::Verify),
    /// Compare the figures in documents with the recorded runs that they quote (claims.toml)
    VerifyClaims(claims::VerifyClaims),
    /// Remove VMM processes and directories that killed runs left below the run root
    Sweep {
        #[command(flatten)]
        run_root: RunRoot,
    },
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum PlainFormat {
    /// Text for a terminal
    #[default]
    Human,
    /// One JSON document
    Json,
}

/// An error that ends a command; `end` maps it to an exit code.
#[derive(Debug, thiserror::Error)]
enum CommandError {
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Compare(#[from] CompareError),
    #[error(transparent)]
    Ab(#[from] AbError),
    #[error(transparent)]
    AbRead(#[from] ReadError),
    #[error("cannot execute {path}: run `cargo xtask prepare`, or reinstall the package cube")]
    Verify {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Claims(#[from] ClaimsError),
    #[error(transparent)]
    Saturate(#[from] SaturateError),
    #[error("the scenario has no peer {name:?}: it has {known}")]
    NoPeer { name: String, known: String },
    #[error("{0} does not contain a recorded run")]
    NoRun(PathBuf),
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error(
        "{0:?} is not a figure: name it as the metric of a gate, such as first_exec.p95 or memory.slope"
    )]
    NoFigure(String),
    #[error("no bound: give at least one of --p95, --memory and --idle-cpu")]
    NoBound,
    #[error(
        "the sandboxes of {0} do not live to the end of its run: use a scenario with hold.until = \"end\", such as scenarios/density.toml"
    )]
    NotHeld(PathBuf),
    #[error(
        "{0} is a recorded run, which --set cannot change: leave --set out, or give a scenario file to run"
    )]
    Recorded(PathBuf),
    #[error("the starts of scenario {0} have no times: a closed loop cannot be a trace")]
    Untimed(String),
    #[error("cannot write {path}: {why}")]
    Init { path: PathBuf, why: String },
}

impl CommandError {
    fn end(&self) -> End {
        match self {
            Self::Scenario(_)
            | Self::Record(_)
            | Self::Compare(_)
            | Self::NoPeer { .. }
            | Self::NoFigure(_)
            | Self::Pack(_)
            | Self::NoBound
            | Self::Untimed(_)
            | Self::NotHeld(_)
            | Self::Recorded(_)
            | Self::Init { .. }
            | Self::NoRun(_) => End::Usage,
            Self::Claims(error) => match error {
                ClaimsError::Session(error) => session_end(error),
                ClaimsError::Read { .. }
                | ClaimsError::Toml { .. }
                | ClaimsError::Record(_)
                | ClaimsError::NoRun(_) => End::Usage,
            },
            Self::Verify { .. } => End::TargetUnreachable,
            Self::Session(error) => session_end(error),
            Self::Saturate(error) => match error {
                SaturateError::Session(error) => session_end(error),
                SaturateError::Record(_) => End::Usage,
                SaturateError::Ended { .. } => End::Interrupted,
            },
            Self::Ab(error) => match error {
                AbError::Scenario { .. }
                | AbError::Metric { .. }
                | AbError::Results { .. }
                | AbError::Read(_)
                | AbError::Record(_) => End::Usage,
                AbError::Build(BuildError::Template(error)) => artifact_end(error),
                AbError::Build(BuildError::Program { .. }) => End::TargetUnreachable,
                AbError::Session(error) => session_end(error),
                AbError::Changed { .. } => End::UnsuitableHost,
                AbError::Block { .. } => End::Bug,
            },
            Self::AbRead(error) => match error {
                ReadError::Plan { .. }
                | ReadError::Format { .. }
                | ReadError::Events(_)
                | ReadError::Environment(_)
                | ReadError::Changed { .. } => End::Usage,
            },
        }
    }
}

/// A scenario may name any template, so one that cannot be used is a mistake in the scenario.
fn artifact_end(error: &ArtifactError) -> End {
    match error {
        ArtifactError::Template { .. }
        | ArtifactError::Manifest { .. }
        | ArtifactError::Memory { .. } => End::Usage,
        ArtifactError::Vmm { .. }
        | ArtifactError::Api { .. }
        | ArtifactError::Probe { .. }
        | ArtifactError::Egress { .. }
        | ArtifactError::Etcd { .. } => End::TargetUnreachable,
    }
}

fn session_end(error: &SessionError) -> End {
    match error {
        SessionError::Artifact(error) => artifact_end(error),
        SessionError::Server(_) | SessionError::Cluster(_) | SessionError::Target { .. } => {
            End::TargetUnreachable
        }
        SessionError::Url(_)
        | SessionError::NoKey(_)
        | SessionError::NoTemplate { .. }
        | SessionError::ServerPid { .. }
        | SessionError::Record(_) => End::Usage,
        SessionError::Kvm(_)
        | SessionError::World(_)
        | SessionError::Io { .. }
        | SessionError::Recording { .. }
        | SessionError::Signals(_) => End::UnsuitableHost,
    }
}

pub(crate) fn main() -> End {
    let mut words: Vec<OsString> = std::env::args_os().collect();
    if let [_, help, verify, ..] = &*words
        && help == "help"
        && verify == "verify"
    {
        // The suites and their options are known to cube-verify alone.
        words.swap(1, 2);
    }
    if let [_, option] = &*words
        && (option == "--version" || option == "-V")
    {
        println!("{}", version());
        return End::Pass;
    }
    let arguments: Arguments = match options::parse(words) {
        Ok(arguments) => arguments,
        Err(end) => return end,
    };
    match arguments.command.carry_out() {
        Ok(end) => end,
        Err(error) => {
            eprintln!("cube-bench: {}", chain(&error));
            error.end()
        }
    }
}

/// Version, commit and formats of this program. The commit is unknown for a program that was not installed with its
/// record.
fn version() -> String {
    let commit = match facts::own_build() {
        Some(build) if build.dirty_tree == Some(false) => build.commit,
        Some(build) => build.commit.map(|commit| format!("{commit} (modified)")),
        None => None,
    };
    format!(
        "cube-bench {} commit {}, format of events {EVENTS_FORMAT}, of reports {}",
        env!("CARGO_PKG_VERSION"),
        commit.as_deref().unwrap_or("unknown"),
        document::FORMAT
    )
}

impl Command {
    fn carry_out(self) -> Result<End, CommandError> {
        match self {
            Self::Init(init) => init.carry_out(),
            Self::Run(run) => run.carry_out(),
            Self::Quick(quick) => quick.carry_out(),
            Self::Peers(peers) => peers.carry_out(),
            Self::Report(report) => report.carry_out(),
            Self::Rewrite(rewrite) => rewrite.carry_out(),
            Self::Plan(plan) => plan.carry_out(),
            Self::Compare(compare) => compare.carry_out(),
            Self::History(history) => history.carry_out(),
            Self::Board(board) => board.carry_out(),
            Self::Badge(badge) => badge.carry_out(),
            Self::Pack(pack) => pack.carry_out(),
            Self::Check(check) => check.carry_out(),
            Self::Ab(ab) => ab.carry_out(),
            Self::Saturate(saturate) => saturate.carry_out(),
            Self::Density(density) => density.carry_out(),
            Self::Doctor(doctor) => Ok(doctor.carry_out()),
            Self::Verify(verify) => Err(verify.execute()),
            Self::VerifyClaims(claims) => claims.carry_out(),
            Self::Sweep { run_root } => {
                session::sweep(&run_root.run_root)?;
                Ok(End::Pass)
            }
        }
    }
}

/// Loads a scenario file. If it has the form of an earlier version, prints the command that shows the current one.
fn load(path: &Path, work: Option<&Path>, changes: &[Change]) -> Result<Scenario, ScenarioError> {
    let scenario = scenario::load_changed(path, work, changes)?;
    for why in scenario::undecidable(&scenario) {
        eprintln!("cube-bench: with these changes, {why}");
    }
    if scenario::rewritten(path)?.is_some() {
        let path = path.display();
        eprintln!(
            "cube-bench: {path} has tables of an earlier version instead of [mode]: `cube-bench rewrite {path}` prints its current form"
        );
    }
    Ok(scenario)
}

fn print_json(document: &impl serde::Serialize) {
    // Serializing plain values does not fail.
    println!(
        "{}",
        serde_json::to_string_pretty(document).unwrap_or_default()
    );
}
