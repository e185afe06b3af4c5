//! The command line of `cube-bench`: commands, options, and the exit code of each error.

mod ab;
mod density;
mod init;
mod saturate;

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process,
    time::{Duration, SystemTime},
};

use clap::{Parser, Subcommand, ValueEnum};
use harness::{
    ab::{builds::BuildError, record::ReadError, run::AbError},
    claims::{self, ClaimsError},
    compare::{self, CompareError, Side},
    host::{
        facts,
        grade::{self, Grade, NoiseLevel},
    },
    noise, plan,
    record::{self, RecordError},
    report::{
        self, Strictness, View,
        doctor::{self, Diagnosis},
        document::Document,
        history::{self, Entry},
        junit, terminal,
    },
    saturate::SaturateError,
    scenario::{self, Change, Scenario, ScenarioError},
    session::{self, RecordedRun, SessionError, Settings},
    summary::fold,
    trace,
};
use model::chain;
use testbed::{
    artifacts::{self, ArtifactError},
    exit::End,
    options::{self, Format, Places, RunRoot},
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
    Run {
        /// Scenario file, such as scenarios/50-concurrent.toml
        scenario: PathBuf,
        /// Work file that replaces the scenario's; scenarios/work/README.md describes the format
        #[arg(long, value_name = "FILE")]
        work: Option<PathBuf>,
        /// Measure this E2B-compatible server instead of the scenario's target: --set target.kind=e2b and
        /// target.api_url
        #[arg(long, value_name = "URL")]
        target: Option<String>,
        #[command(flatten)]
        options: RunOptions,
    },
    /// Compare systems in one run, interleaved: create, first command, removal
    Peers {
        /// Scenario file with mode.kind = "systems" [default: the built-in scenarios/peers.toml]
        scenario: Option<PathBuf>,
        /// Compare the target only with this peer; may be repeated
        #[arg(long, value_name = "NAME")]
        only: Vec<String>,
        #[command(flatten)]
        options: RunOptions,
    },
    /// Recompute the report of a recorded run
    Report {
        /// Directory with the results of the run
        run: PathBuf,
        #[command(flatten)]
        strict: Strict,
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Print a scenario file of an earlier version in the current form, without its comments
    Rewrite {
        /// Scenario file with tables such as [beside] or [[peers]] instead of [mode]
        scenario: PathBuf,
    },
    /// Print the planned starts of a scenario without running it
    Plan {
        /// Scenario file, such as scenarios/50-concurrent.toml
        scenario: PathBuf,
        /// Seed that replaces the scenario's
        #[arg(long)]
        seed: Option<u64>,
        /// Replace a key of the scenario; may be repeated
        #[arg(long = "set", value_name = "KEY=VALUE")]
        changes: Vec<Change>,
        /// Write the arrivals, templates and lifetimes of the first measured round to this file, which
        /// mode.kind = "trace" replays
        #[arg(long, value_name = "FILE")]
        trace: Option<PathBuf>,
        #[arg(long, value_enum, default_value_t)]
        format: PlainFormat,
    },
    /// Compare two recorded runs of one scenario: fail if the second one is slower, or needs more memory or CPU time
    Compare {
        /// Directory with the results of the reference run
        a: PathBuf,
        /// Directory with the results of the run to check
        b: PathBuf,
        /// Largest accepted increase, in percent
        #[arg(long, default_value_t = 10.0)]
        margin: f64,
        /// Also write the comparison as an HTML page to this file
        #[arg(long, value_name = "FILE")]
        html: Option<PathBuf>,
        #[arg(long, value_enum, default_value_t)]
        format: PlainFormat,
    },
    /// Draw the trends of recorded runs as one HTML page
    History {
        /// Directories that contain results, each run in its own directory
        #[arg(required = true, value_name = "DIR")]
        dirs: Vec<PathBuf>,
        /// File to write
        #[arg(long, value_name = "FILE", default_value = "history.html")]
        out: PathBuf,
    },
    /// Measure two builds in one run, in the order A B B A, and report what changed
    Ab(ab::Ab),
    /// Find the highest start rate at which the P95 of first exec stays within a bound
    Saturate(saturate::Saturate),
    /// Find the largest number of sandboxes within bounds on memory, idle CPU time and the P95 of first exec
    Density(density::Density),
    /// Describe this host and grade how far its measurements can be trusted
    Doctor {
        #[command(flatten)]
        places: Places,
        #[arg(long, value_enum, default_value_t)]
        format: PlainFormat,
    },
    /// Verify conformance with E2B, network isolation, confinement of the VMM, differences between clones, and restarts
    #[command(disable_help_flag = true)]
    Verify {
        /// Arguments of cube-verify, which this command executes
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Compare the figures in documents with the recorded runs that they quote (claims.toml)
    VerifyClaims {
        /// Root of the repository
        #[arg(long, value_name = "DIR", default_value = ".")]
        root: PathBuf,
        /// Write the figures of the quoted runs into the documents and into claims.toml first
        #[arg(long)]
        write: bool,
        /// Repeat the quoted runs, or only RUN, and compare the 95 % intervals: exit code 3 if a figure drifted, 5
        /// if one could not be compared
        #[arg(long, value_name = "RUN", num_args = 0..=1, default_missing_value = "")]
        rerun: Option<String>,
        #[command(flatten)]
        places: Places,
        #[command(flatten)]
        run_root: RunRoot,
    },
    /// Remove VMM processes and directories that killed runs left below the run root
    Sweep {
        #[command(flatten)]
        run_root: RunRoot,
    },
}

#[derive(clap::Args)]
struct RunOptions {
    /// Replace a key of the scenario, such as rounds=5 or arrival.starts=20; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    changes: Vec<Change>,
    #[command(flatten)]
    places: Places,
    /// Path of cube-netprobe, which scenarios with a network copy into sandboxes [default: in $CUBE_BIN, else in the
    /// directory of this program]
    #[arg(long, value_name = "PATH")]
    probe: Option<PathBuf>,
    /// Process of the server at target.api_url, whose CPU time is not interference [default: the process that listens
    /// there, if it is on this host]
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// Path of etcd 3.5.13 or later, for scenarios with a cluster [default: ARTIFACTS/stages/etcd/etcd, else in PATH]
    #[arg(long, value_name = "PATH")]
    etcd: Option<PathBuf>,
    /// Directory for the results of this run [default: ARTIFACTS/results/NAME-TIME]
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    #[command(flatten)]
    run_root: RunRoot,
    #[command(flatten)]
    strict: Strict,
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(clap::Args)]
struct Strict {
    /// Fail (exit code 3) if a time or rate is missed, even on a host graded below publishable; the default if the
    /// variable CI is set
    #[arg(long)]
    strict: bool,
}

impl Strict {
    fn strictness(&self) -> Strictness {
        let in_ci = std::env::var_os("CI").is_some_and(|value| !value.is_empty());
        if self.strict || in_ci {
            Strictness::Strict
        } else {
            Strictness::Excused
        }
    }
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

impl Command {
    fn carry_out(self) -> Result<End, CommandError> {
        match self {
            Self::Run {
                scenario,
                work,
                target,
                mut options,
            } => {
                options
                    .changes
                    .extend(target.iter().flat_map(target_changes));
                let loaded = load(&scenario, work.as_deref(), &options.changes)?;
                let mut command = format!("cube-bench run {}", shared_path(&scenario));
                if let Some(work) = &work {
                    command.push_str(&format!(" --work {}", shared_path(work)));
                }
                run(&loaded, command, options)
            }
            Self::Peers {
                scenario,
                only,
                options,
            } => peers(scenario.as_deref(), &only, options),
            Self::Report {
                run,
                strict,
                format,
            } => report(&run, (format, strict.strictness())),
            Self::Rewrite { scenario } => rewrite(&scenario),
            Self::Plan {
                scenario,
                seed,
                changes,
                trace,
                format,
            } => {
                let mut scenario = load(&scenario, None, &changes)?;
                scenario.seed = seed.unwrap_or(scenario.seed);
                match trace {
                    Some(file) => dump_trace(&scenario, &file),
                    None => Ok(print_plan(&scenario, format)),
                }
            }
            Self::Compare {
                a,
                b,
                margin,
                html,
                format,
            } => compare_runs([&a, &b], margin / 100.0, html, format),
            Self::History { dirs, out } => history(&dirs, &out),
            Self::Ab(ab) => ab.carry_out(),
            Self::Saturate(saturate) => saturate.carry_out(),
            Self::Density(density) => density.carry_out(),
            Self::Init(init) => init.carry_out(),
            Self::Doctor { places, format } => Ok(doctor(&places, format)),
            Self::Verify { arguments } => Err(execute_verify(&arguments)),
            Self::VerifyClaims {
                root,
                write,
                rerun,
                places,
                run_root,
            } => {
                if write {
                    println!("{} figures written", claims::write(&root)?);
                }
                match rerun {
                    None => verify_claims(&root),
                    Some(only) => rerun_claims(&root, &only, &places, &run_root.run_root),
                }
            }
            Self::Sweep { run_root } => {
                session::sweep(&run_root.run_root)?;
                Ok(End::Pass)
            }
        }
    }
}

/// Replaces this process by `cube-verify` in the directory of this program, so its output, its exit code and its
/// handling of signals are those of this command. Returns only if that fails.
fn execute_verify(arguments: &[OsString]) -> CommandError {
    let mut path = PathBuf::from("/proc/self/exe");
    let source = match std::env::current_exe() {
        Ok(exe) => {
            path = exe.with_file_name("cube-verify");
            process::Command::new(&path).args(arguments).exec()
        }
        Err(source) => source,
    };
    CommandError::Verify { path, source }
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

fn rewrite(path: &Path) -> Result<End, CommandError> {
    match scenario::rewritten(path)? {
        Some(text) => print!("{text}"),
        None => eprintln!("cube-bench: {} has the current form", path.display()),
    }
    Ok(End::Pass)
}

/// The keys that `--target URL` stands for.
fn target_changes(url: &String) -> Vec<Change> {
    let texts = [
        "target.kind=e2b".to_owned(),
        format!("target.api_url={url}"),
    ];
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

/// `only` are the names of the peers to keep; empty for all.
fn peers(path: Option<&Path>, only: &[String], options: RunOptions) -> Result<End, CommandError> {
    let mut command = "cube-bench peers".to_owned();
    let mut scenario = match path {
        Some(path) => {
            command.push_str(&format!(" {}", path.display()));
            load(path, None, &options.changes)?
        }
        None => scenario::parse_changed("peers", scenario::PEERS, &options.changes)?,
    };
    let known: Vec<&str> = scenario
        .peers()
        .iter()
        .map(|peer| peer.name.as_str())
        .collect();
    if let Some(unknown) = only.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(CommandError::NoPeer {
            name: unknown.clone(),
            known: known.join(", "),
        });
    }
    if let Some(peers) = scenario.mode.peers_mut().filter(|_| !only.is_empty()) {
        peers.retain(|peer| only.contains(&peer.name));
    }
    for name in only {
        command.push_str(&format!(" --only {name}"));
    }
    run(&scenario, command, options)
}

/// `command` is the command line without options that change the scenario.
fn run(scenario: &Scenario, command: String, options: RunOptions) -> Result<End, CommandError> {
    let output = (options.format, options.strict.strictness());
    let dir = record_run(scenario, command, options)?;
    let end = report(&dir, output)?;
    eprintln!("cube-bench: results are in {}", dir.display());
    Ok(end)
}

/// Runs a scenario and returns the directory of its results, which has no reports yet.
fn record_run(
    scenario: &Scenario,
    mut command: String,
    options: RunOptions,
) -> Result<PathBuf, CommandError> {
    for change in &options.changes {
        command.push_str(&format!(" --set '{}'", change.text()));
    }
    let settings = Settings {
        artifacts: options
            .places
            .artifacts
            .unwrap_or_else(artifacts::default_dir),
        vmm: options.places.vmm,
        api: options.places.api,
        probe: options.probe,
        etcd: options.etcd,
        results: options.results,
        server_pid: options.server_pid,
        run_root: options.run_root.run_root,
        reproduce: command,
    };
    Ok(session::run(scenario, &settings)?)
}

/// A path that is valid for others: relative to the current directory, or else starting at the directory
/// `scenarios`. Records of runs are published, and directories of this host mean nothing elsewhere.
fn shared_path(path: &Path) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    if let Ok(inside) = path.strip_prefix(&here) {
        return inside.display().to_string();
    }
    let above = path
        .ancestors()
        .find(|part| part.ends_with("scenarios"))
        .and_then(Path::parent);
    let short = above.and_then(|above| path.strip_prefix(above).ok());
    short.unwrap_or(path).display().to_string()
}

fn report(dir: &Path, output: (Format, Strictness)) -> Result<End, CommandError> {
    let (format, strictness) = output;
    let recorded = RecordedRun::read(dir)?;
    let mut view = viewed(&recorded, dir)?;
    view.strictness = strictness;
    write_reports(&view, dir)?;
    match format {
        Format::Human => print!("{}", terminal::render(&view)),
        Format::Json => print!("{}", Document::new(&view).render()),
        Format::Junit => print!("{}", junit::render(&view)),
    }
    Ok(view.end())
}

fn write_reports(view: &View<'_>, dir: &Path) -> Result<(), CommandError> {
    for (name, text) in report::files(view) {
        let path = dir.join(name);
        std::fs::write(&path, text).map_err(|source| SessionError::Io { path, source })?;
    }
    Ok(())
}

/// Writes the page. Directories without recorded events are not runs. A run that cannot be read is listed on the
/// page.
fn history(dirs: &[PathBuf], out: &Path) -> Result<End, CommandError> {
    let mut entries = Vec::new();
    for dir in dirs {
        let io_error = |source| SessionError::Io {
            path: dir.clone(),
            source,
        };
        let runs = std::fs::read_dir(dir).map_err(io_error)?;
        for run in runs {
            let path = run.map_err(io_error)?.path();
            if record::events_file(&path).is_some() {
                entries.push(Entry {
                    name: path.display().to_string(),
                    run: document(&path).map_err(|error| chain(&error)),
                });
            }
        }
    }
    if entries.is_empty() {
        return Err(CommandError::NoRun(dirs[0].clone()));
    }
    std::fs::write(out, history::render(&entries)).map_err(|source| SessionError::Io {
        path: out.to_owned(),
        source,
    })?;
    let shown = entries.iter().filter(|entry| entry.run.is_ok()).count();
    println!("{}: {shown} of {} runs", out.display(), entries.len());
    Ok(End::Pass)
}

fn document(dir: &Path) -> Result<Document, CommandError> {
    let recorded = RecordedRun::read(dir)?;
    Ok(Document::new(&viewed(&recorded, dir)?))
}

fn viewed<'a>(recorded: &'a RecordedRun, dir: &Path) -> Result<View<'a>, CommandError> {
    recorded
        .view()
        .ok_or_else(|| CommandError::NoRun(dir.to_owned()))
}

fn verify_claims(root: &Path) -> Result<End, CommandError> {
    let checked = claims::verify(root)?;
    for wrong in &checked.wrong {
        println!("{wrong}");
    }
    println!(
        "{} figures compared, {} faults",
        checked.figures,
        checked.wrong.len()
    );
    Ok(if checked.wrong.is_empty() {
        End::Pass
    } else {
        End::GateFailed
    })
}

/// Repeats the quoted runs with their recorded scenarios. An empty `only` selects all runs.
fn rerun_claims(
    root: &Path,
    only: &str,
    places: &Places,
    run_root: &Path,
) -> Result<End, CommandError> {
    let mut runs = claims::runs(root)?;
    if !only.is_empty() {
        runs.retain(|run| run == only);
    }
    let (mut agree, mut drifted, mut undecided) = (0, 0, 0);
    for run in &runs {
        let published = root.join("results").join(run);
        let events = record::read(&published)?;
        let summary = fold::fold(&events);
        let started = summary.started.ok_or(CommandError::NoRun(published))?;
        let settings = Settings {
            artifacts: places
                .artifacts
                .clone()
                .unwrap_or_else(artifacts::default_dir),
            vmm: places.vmm.clone(),
            api: places.api.clone(),
            probe: None,
            etcd: None,
            results: None,
            server_pid: None,
            run_root: run_root.to_owned(),
            reproduce: started.reproduce.clone(),
        };
        let again = session::run(&started.scenario, &settings)?;
        let drift = claims::drift(claims::Rerun {
            root,
            run,
            again: &again,
        })?;
        for line in drift.drifted.iter().chain(&drift.undecided) {
            println!("{run}: {line}");
        }
        agree += drift.agree;
        drifted += drift.drifted.len();
        undecided += drift.undecided.len();
    }
    println!("{agree} figures agree, {drifted} drifted, {undecided} not compared");
    Ok(match (runs.is_empty(), drifted, undecided) {
        (true, ..) => End::Usage,
        (false, 0, 0) => End::Pass,
        (false, 0, _) => End::Inconclusive,
        (false, ..) => End::GateFailed,
    })
}

fn print_plan(scenario: &Scenario, format: PlainFormat) -> End {
    let plan = plan::build(scenario);
    match format {
        PlainFormat::Json => print_json(&plan),
        PlainFormat::Human => print!("{}", plan.describe()),
    }
    End::Pass
}

fn dump_trace(scenario: &Scenario, file: &Path) -> Result<End, CommandError> {
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let trace = trace::of_plan(scenario, &plan::build(scenario), now)
        .ok_or_else(|| CommandError::Untimed(scenario.name.clone()))?;
    let text = serde_json::to_string_pretty(&trace).unwrap_or_default();
    std::fs::write(file, text).map_err(|source| SessionError::Io {
        path: file.to_owned(),
        source,
    })?;
    println!("{}: {} requests", file.display(), trace.requests.len());
    Ok(End::Pass)
}

fn compare_runs(
    dirs: [&Path; 2],
    margin: f64,
    html: Option<PathBuf>,
    format: PlainFormat,
) -> Result<End, CommandError> {
    let [a, b] = [RecordedRun::read(dirs[0])?, RecordedRun::read(dirs[1])?];
    let [a, b] = [&a, &b].map(|run| Side {
        summary: &run.summary,
        facts: &run.facts,
    });
    let comparison = compare::compare(a, b, margin)?;
    if let Some(path) = html {
        let names = dirs.map(|dir| dir.display().to_string());
        let names = [names[0].as_str(), names[1].as_str()];
        let page = report::comparison::render(&comparison, [a, b], names);
        std::fs::write(&path, page).map_err(|source| SessionError::Io { path, source })?;
    }
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
    // Serializing plain values does not fail.
    println!(
        "{}",
        serde_json::to_string_pretty(document).unwrap_or_default()
    );
}
