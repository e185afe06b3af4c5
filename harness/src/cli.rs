//! Command line: what each command does, and how each error ends the program.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use api_types::chain;
use clap::{Parser, Subcommand, ValueEnum};
use harness::{
    artifacts,
    compare::{self, CompareError, Side},
    exit::End,
    host::{
        facts,
        grade::{self, Grade, NoiseLevel},
    },
    leftovers::RUN_ROOT,
    noise, plan,
    record::{self, RecordError},
    report::{
        self, View,
        doctor::{self, Diagnosis},
        document::Document,
        junit, terminal,
    },
    scenario::{self, ScenarioError},
    session::{self, SessionError, Settings},
    stats::fold,
    verify::{
        self, Matrix, Programs, VerifyError, VerifySpec,
        features::Area,
        hazards::{self, HazardSpec, report as hazard_report},
        report as matrix_report,
    },
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
        #[command(flatten)]
        run_root: RunRoot,
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
        format: PlainFormat,
    },
    /// Is the second recorded run slower than the first?
    Compare {
        /// Results of the run to compare with
        a: PathBuf,
        /// Results of the run in question
        b: PathBuf,
        /// Slower by more than so many percent fails
        #[arg(long, default_value_t = 10.0)]
        margin: f64,
        #[arg(long, value_enum, default_value_t)]
        format: PlainFormat,
    },
    /// Say what this host is and what its numbers are worth
    Doctor {
        #[command(flatten)]
        places: Places,
        #[arg(long, value_enum, default_value_t)]
        format: PlainFormat,
    },
    /// Verify an endpoint: what the official SDKs can do with it, and what its clones share
    Verify {
        #[command(subcommand)]
        what: Verify,
    },
    /// Remove what killed runs left: VMM processes and directories below /run/cube
    Sweep {
        #[command(flatten)]
        run_root: RunRoot,
    },
}

#[derive(Subcommand)]
enum Verify {
    /// Conformance with E2B: every feature with every SDK; exit code 0 only if all that must work does
    E2b {
        #[command(flatten)]
        places: Places,
        #[command(flatten)]
        run_root: RunRoot,
        /// An endpoint; its key is E2B_API_KEY [default: a cube-api of the run's own]
        #[arg(long, value_name = "URL")]
        api_url: Option<String>,
        /// Template id or name
        #[arg(long, default_value = "base")]
        template: String,
        /// What is verified; `interpreter` needs the template code-interpreter-v1
        #[arg(long, value_enum, default_value_t = Area::Sandbox)]
        area: Area,
        /// Only this SDK, such as python-2.63.0; repeat for more
        #[arg(long = "sdk", value_name = "NAME")]
        sdks: Vec<String>,
        /// Only this feature; repeat for more
        #[arg(long = "feature", value_name = "NAME")]
        features: Vec<String>,
        /// SDKs at work at the same time
        #[arg(long, value_name = "N", default_value_t = 2)]
        jobs: usize,
        /// Also write matrix.json, matrix.md and matrix.xml into this directory
        #[arg(long, value_name = "DIR")]
        results: Option<PathBuf>,
        #[arg(long, value_enum, default_value_t)]
        format: MatrixFormat,
    },
    /// What two sandboxes of one memory must not share; exit code 4 if they share it, 5 if a case could not be tried
    CloneHazards {
        #[command(flatten)]
        places: Places,
        #[command(flatten)]
        run_root: RunRoot,
        /// An endpoint; its key is E2B_API_KEY [default: a cube-api of the run's own]
        #[arg(long, value_name = "URL")]
        target: Option<String>,
        /// Its data plane, such as https://{port}-{id}.example.com [default: as the target]
        #[arg(long, value_name = "PATTERN", requires = "target")]
        sandbox_url: Option<String>,
        /// Template id or name
        #[arg(long, default_value = "code-interpreter-v1")]
        template: String,
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
}

/// Sockets of clones need a short path, so this is not below the results.
#[derive(clap::Args)]
struct RunRoot {
    /// Where runs keep sockets and logs of their clones
    #[arg(long, value_name = "DIR", default_value = RUN_ROOT)]
    run_root: PathBuf,
}

#[derive(clap::Args)]
struct Places {
    /// Directory with templates/ and results/ [default: $CUBE_ARTIFACTS, else target/cube]
    #[arg(long, value_name = "DIR")]
    artifacts: Option<PathBuf>,
    /// The VMM [default: cube-vmm in $CUBE_BIN, else beside this program]
    #[arg(long, value_name = "PATH")]
    vmm: Option<PathBuf>,
    /// The server [default: cube-api in $CUBE_BIN, else beside this program]
    #[arg(long, value_name = "PATH")]
    api: Option<PathBuf>,
}

impl Places {
    fn programs(self) -> Programs {
        Programs {
            artifacts: self.artifacts.unwrap_or_else(artifacts::default_dir),
            vmm: self.vmm,
            api: self.api,
        }
    }
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Format {
    /// For a terminal
    #[default]
    Human,
    /// One document, described in docs/report-format.md
    Json,
    /// For CI systems
    Junit,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum MatrixFormat {
    /// For a terminal
    #[default]
    Human,
    /// One document, described in docs/conformance.md
    Json,
    /// For CI systems
    Junit,
    /// For issues and pages
    Markdown,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum PlainFormat {
    /// For a terminal
    #[default]
    Human,
    /// One document
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
    #[error(transparent)]
    Compare(#[from] CompareError),
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error("{0} holds no run")]
    NoRun(PathBuf),
}

impl CommandError {
    fn end(&self) -> End {
        match self {
            Self::Scenario(_) | Self::Record(_) | Self::Compare(_) | Self::NoRun(_) => End::Usage,
            Self::Verify(error) => match error {
                VerifyError::Artifact(_) | VerifyError::Server(_) | VerifyError::Target(_) => {
                    End::TargetUnreachable
                }
                VerifyError::Features(_) => End::Bug,
                VerifyError::Unknown { .. } | VerifyError::Url(_) | VerifyError::NoKey => {
                    End::Usage
                }
                VerifyError::Io { .. } => End::UnsuitableHost,
            },
            Self::Session(error) => match error {
                SessionError::Artifact(_) | SessionError::Server(_) => End::TargetUnreachable,
                SessionError::Url(_) | SessionError::NoKey => End::Usage,
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
                run_root,
                format,
            } => {
                let settings = Settings {
                    artifacts: places.artifacts.unwrap_or_else(artifacts::default_dir),
                    vmm: places.vmm,
                    api: places.api,
                    results,
                    run_root: run_root.run_root,
                    reproduce: format!("cube-bench run {}", scenario.display()),
                };
                run(&scenario, &settings, format)
            }
            Self::Report { run, format } => report(&run, format),
            Self::Plan {
                scenario,
                seed,
                format,
            } => print_plan(&scenario, seed, format),
            Self::Compare {
                a,
                b,
                margin,
                format,
            } => compare_runs(&a, &b, margin / 100.0, format),
            Self::Doctor { places, format } => Ok(doctor(&places, format)),
            Self::Verify { what } => what.carry_out(),
            Self::Sweep { run_root } => {
                session::sweep(&run_root.run_root)?;
                Ok(End::Pass)
            }
        }
    }
}

fn run(path: &Path, settings: &Settings, format: Format) -> Result<End, CommandError> {
    let scenario = scenario::load(path)?;
    let dir = session::run(&scenario, settings)?;
    let end = report(&dir, format)?;
    eprintln!("cube-bench: results are in {}", dir.display());
    Ok(end)
}

fn report(dir: &Path, format: Format) -> Result<End, CommandError> {
    let events = record::read(dir)?;
    let facts = session::read_environment(dir)?;
    let summary = fold::fold(&events);
    let view = View::new(&summary, &facts).ok_or_else(|| CommandError::NoRun(dir.to_owned()))?;
    for (name, text) in report::files(&view) {
        let path = dir.join(name);
        std::fs::write(&path, text).map_err(|source| SessionError::Io { path, source })?;
    }
    match format {
        Format::Human => print!("{}", terminal::render(&view)),
        Format::Json => print!("{}", Document::new(&view).render()),
        Format::Junit => print!("{}", junit::render(&view)),
    }
    Ok(view.end())
}

impl Verify {
    fn carry_out(self) -> Result<End, CommandError> {
        match self {
            Self::E2b {
                places,
                run_root,
                api_url,
                template,
                area,
                sdks,
                features,
                jobs,
                results,
                format,
            } => {
                let spec = VerifySpec {
                    programs: places.programs(),
                    api_url,
                    run_root: run_root.run_root,
                    template,
                    area,
                    sdks,
                    features,
                    jobs,
                };
                verify_e2b(&spec, results.as_deref(), format)
            }
            Self::CloneHazards {
                places,
                run_root,
                target,
                sandbox_url,
                template,
                format,
            } => {
                let spec = HazardSpec {
                    programs: places.programs(),
                    target,
                    sandbox_url,
                    run_root: run_root.run_root,
                    template,
                    mode: hazards::Mode::Look,
                };
                verify_clone_hazards(&spec, format)
            }
        }
    }
}

fn verify_e2b(
    spec: &VerifySpec,
    results: Option<&Path>,
    format: MatrixFormat,
) -> Result<End, CommandError> {
    let matrix = verify::run(spec)?;
    if let Some(dir) = results {
        let path = dir.to_owned();
        write_matrix(dir, &matrix).map_err(|source| VerifyError::Io { path, source })?;
    }
    print!(
        "{}",
        match format {
            MatrixFormat::Human => matrix_report::terminal(&matrix),
            MatrixFormat::Json => matrix_report::json(&matrix),
            MatrixFormat::Junit => matrix_report::junit(&matrix),
            MatrixFormat::Markdown => matrix_report::markdown(&matrix),
        }
    );
    Ok(matrix.end())
}

fn verify_clone_hazards(spec: &HazardSpec, format: Format) -> Result<End, CommandError> {
    let findings = hazards::run(spec)?;
    print!(
        "{}",
        match format {
            Format::Human => hazard_report::terminal(&findings),
            Format::Json => hazard_report::json(&findings),
            Format::Junit => hazard_report::junit(&findings),
        }
    );
    Ok(findings.end())
}

fn write_matrix(dir: &Path, matrix: &Matrix) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    std::fs::write(dir.join("matrix.json"), matrix_report::json(matrix))?;
    std::fs::write(dir.join("matrix.md"), matrix_report::markdown(matrix))?;
    std::fs::write(dir.join("matrix.xml"), matrix_report::junit(matrix))
}

fn print_plan(path: &Path, seed: Option<u64>, format: PlainFormat) -> Result<End, CommandError> {
    let mut scenario = scenario::load(path)?;
    scenario.seed = seed.unwrap_or(scenario.seed);
    let plan = plan::build(&scenario);
    match format {
        PlainFormat::Json => print_json(&plan),
        PlainFormat::Human => print!("{}", plan.describe()),
    }
    Ok(End::Pass)
}

fn compare_runs(a: &Path, b: &Path, margin: f64, format: PlainFormat) -> Result<End, CommandError> {
    let (a_events, b_events) = (record::read(a)?, record::read(b)?);
    let (a_facts, b_facts) = (session::read_environment(a)?, session::read_environment(b)?);
    let (a_summary, b_summary) = (fold::fold(&a_events), fold::fold(&b_events));
    let comparison = compare::compare(
        Side {
            summary: &a_summary,
            facts: &a_facts,
        },
        Side {
            summary: &b_summary,
            facts: &b_facts,
        },
        margin,
    )?;
    match format {
        PlainFormat::Human => print!("{}", comparison.render()),
        PlainFormat::Json => print_json(&comparison),
    }
    Ok(comparison.end())
}

fn doctor(places: &Places, format: PlainFormat) -> End {
    let vmm = places.vmm.clone().unwrap_or_else(artifacts::default_vmm);
    let noise = NoiseLevel::of(&[noise::look(Duration::from_secs(1))]);
    let facts = facts::read(&vmm);
    let diagnosis = Diagnosis {
        format: doctor::FORMAT,
        graded: grade::grade(&facts, noise),
        noise,
        facts,
    };
    match format {
        PlainFormat::Human => print!("{}", diagnosis.render()),
        PlainFormat::Json => print_json(&diagnosis),
    }
    match diagnosis.graded.grade {
        Grade::Publishable | Grade::Indicative => End::Pass,
        Grade::Unfit => End::UnsuitableHost,
    }
}

fn print_json(document: &impl serde::Serialize) {
    // Documents are plain values, so that this cannot fail.
    println!(
        "{}",
        serde_json::to_string_pretty(document).unwrap_or_default()
    );
}
