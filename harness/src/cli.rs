//! Command line: what each command does, and how each error ends the program.

use std::path::{Path, PathBuf};

use clap::{Parser, Subcommand, ValueEnum};
use harness::{
    artifacts,
    event::chain,
    exit::End,
    leftovers::RUN_ROOT,
    plan,
    record::{self, RecordError},
    report::{View, document::Document, terminal},
    scenario::{self, ScenarioError},
    session::{self, SessionError, Settings},
    stats::fold,
};

#[derive(Parser)]
#[command(
    version,
    about = "Runs scenarios against microVMs and reports what they took"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a scenario, record it, judge its gates and print the report
    Run {
        /// A file such as scenarios/50-concurrent.toml
        scenario: PathBuf,
        #[command(flatten)]
        places: Places,
        /// Directory for this run's results [default: ARTIFACTS/results/NAME-TIME]
        #[arg(long, value_name = "DIR")]
        results: Option<PathBuf>,
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Report a recorded run again
    Report {
        /// Directory of its results
        run: PathBuf,
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Print when a scenario would start what, and start nothing
    Plan {
        /// A file such as scenarios/50-concurrent.toml
        scenario: PathBuf,
        /// Another seed than the scenario's
        #[arg(long)]
        seed: Option<u64>,
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Remove what killed runs left: VMM processes and directories below /run/cube
    Sweep,
}

#[derive(clap::Args)]
struct Places {
    /// Directory with templates/ and results/ [default: $CUBE_ARTIFACTS, else target/cube]
    #[arg(long, value_name = "DIR")]
    artifacts: Option<PathBuf>,
    /// The VMM [default: cube-vmm in $CUBE_BIN, else beside this program]
    #[arg(long, value_name = "PATH")]
    vmm: Option<PathBuf>,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Format {
    /// For a terminal
    #[default]
    Human,
    /// One document, described in docs/report-format.md
    Json,
}

/// Why a command ends early, by how it ends.
#[derive(Debug, thiserror::Error)]
enum CommandError {
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("{0} holds no run")]
    NoRun(PathBuf),
}

impl CommandError {
    fn end(&self) -> End {
        match self {
            Self::Scenario(_) | Self::Record(_) | Self::NoRun(_) => End::Usage,
            Self::Session(error) => match error {
                SessionError::Artifact(_) => End::TargetUnreachable,
                SessionError::Kvm(_) | SessionError::Io { .. } => End::UnsuitableHost,
                SessionError::Record(_) => End::Usage,
                SessionError::Recording { .. } => End::UnsuitableHost,
            },
        }
    }
}

pub(crate) fn main() -> End {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version are errors to clap, on standard output and without failure.
            let _ = error.print();
            return if error.use_stderr() {
                End::Usage
            } else {
                End::Pass
            };
        }
    };
    match arguments.command.carry_out() {
        Ok(end) => end,
        Err(error) => {
            eprintln!("cube-bench: {}", chain(&error));
            error.end()
        }
    }
}

impl Command {
    fn carry_out(self) -> Result<End, CommandError> {
        match self {
            Self::Run {
                scenario,
                places,
                results,
                format,
            } => run(&scenario, places, results, format),
            Self::Report { run, format } => report(&run, format),
            Self::Plan {
                scenario,
                seed,
                format,
            } => print_plan(&scenario, seed, format),
            Self::Sweep => {
                session::sweep(Path::new(RUN_ROOT))?;
                Ok(End::Pass)
            }
        }
    }
}

fn run(
    path: &Path,
    places: Places,
    results: Option<PathBuf>,
    format: Format,
) -> Result<End, CommandError> {
    let scenario = scenario::load(path)?;
    let settings = Settings {
        artifacts: places.artifacts.unwrap_or_else(artifacts::default_dir),
        vmm: places.vmm,
        results,
        run_root: RUN_ROOT.into(),
        reproduce: format!("cube-bench run {}", path.display()),
    };
    let dir = session::run(&scenario, &settings)?;
    let end = report(&dir, format)?;
    eprintln!("cube-bench: results are in {}", dir.display());
    Ok(end)
}

fn report(dir: &Path, format: Format) -> Result<End, CommandError> {
    let events = record::read(dir)?;
    let facts = session::read_environment(dir)?;
    let summary = fold::fold(&events);
    let view = View::new(&summary, &facts).ok_or_else(|| CommandError::NoRun(dir.to_owned()))?;
    match format {
        Format::Human => print!("{}", terminal::render(&view)),
        Format::Json => print!("{}", Document::new(&view).render()),
    }
    Ok(view.end())
}

fn print_plan(path: &Path, seed: Option<u64>, format: Format) -> Result<End, CommandError> {
    let mut scenario = scenario::load(path)?;
    scenario.seed = seed.unwrap_or(scenario.seed);
    let plan = plan::build(&scenario);
    match format {
        Format::Json => println!("{}", serde_json::to_string(&plan).unwrap_or_default()),
        Format::Human => print!("{}", plan.describe()),
    }
    Ok(End::Pass)
}
