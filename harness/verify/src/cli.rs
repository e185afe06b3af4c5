//! The command line of `cube-verify`: suites, options, and the output of each suite.

use std::{
    fs,
    io::{Read, Write},
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Args, Parser, Subcommand, ValueEnum};
use model::chain;
use testbed::{
    artifacts,
    exit::{self, End},
    options::{self, Places, RunRoot},
};
use verify::{
    Setup, VerifyError,
    confinement::{self, ConfinementSpec, Starts},
    conformance::{self, ConformanceSpec, features::Area},
    hazards::{self, HazardSpec, Templates},
    isolation::{self, IsolationSpec, Scope, TargetSpec},
    key_from_environment,
    lifecycle::{self, LifecycleSpec, Selection},
    report::{Figures, Report, Suite},
    restarts::{self, Builds, Limits, RestartSpec},
};

#[derive(Parser)]
#[command(
    version,
    // Users start this program by this command; reports and guides name it.
    bin_name = "cube-bench verify",
    about = "Verify conformance with E2B, network isolation, confinement of the VMM, differences between clones, and restarts"
)]
struct Arguments {
    #[command(subcommand)]
    job: Job,
}

#[derive(Subcommand)]
enum Job {
    /// Try every feature with every official E2B SDK; exit code 0 only if all required features work
    E2b(Conformance),
    /// Check that clones of one memory image share nothing they must not; exit code 4 if they do, 5 if a case was
    /// not tried
    CloneHazards(Hazards),
    /// Try to reach forbidden destinations from a sandbox; exit code 4 for a breach, 5 if a case is not proven
    Isolation(Prover),
    /// Run only those cases of `isolation` that concern allowed destinations
    Egress(Prover),
    /// Try to reach the host from a compromised VMM; exit code 4 for a breach, 5 if a case is not proven
    Confinement(Confinement),
    /// Restart a cube-api under load, and check what its clients observe; exit code 3 if a promise does not hold
    Restarts(Restarts),
    /// Run random operations and kills, and compare every response with a model; exit code 3 if one contradicts it
    Lifecycle(Lifecycle),
    /// Wait until standard input ends, as a root process that attempts try to reach
    #[command(hide = true)]
    RootProcess,
}

#[derive(Args)]
struct Conformance {
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    run_root: RunRoot,
    /// URL of an endpoint; its key is E2B_API_KEY [default: start a cube-api]
    #[arg(long, value_name = "URL")]
    api_url: Option<String>,
    /// Template id or name
    #[arg(long, default_value = "base")]
    template: String,
    /// Which features to try; `interpreter` needs the template code-interpreter-v1
    #[arg(long, value_enum, default_value_t = Area::Sandbox)]
    area: Area,
    /// Try only this SDK, such as python-2.63.0; can be repeated
    #[arg(long = "sdk", value_name = "NAME")]
    sdks: Vec<String>,
    /// Try only this feature; can be repeated
    #[arg(long = "feature", value_name = "NAME")]
    features: Vec<String>,
    /// Number of SDKs that run at the same time
    #[arg(long, value_name = "N", default_value_t = 2)]
    jobs: usize,
    #[command(flatten)]
    output: Output,
}

#[derive(Args)]
struct Hazards {
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    run_root: RunRoot,
    /// URL of an endpoint; its key is E2B_API_KEY [default: start a cube-api]
    #[arg(long, value_name = "URL")]
    target: Option<String>,
    /// Data plane of the target, such as https://{port}-{id}.example.com [default: the target]
    #[arg(long, value_name = "PATTERN", requires = "target")]
    sandbox_url: Option<String>,
    /// Template id or name
    #[arg(long, default_value = "code-interpreter-v1")]
    template: String,
    /// Command that prints a random value of the template's start command; clones that share it cause a warning
    #[arg(long, value_name = "COMMAND")]
    ask: Option<String>,
    /// Verify every template of the endpoint
    #[arg(long, conflicts_with_all = ["template", "ask"])]
    all_templates: bool,
    /// Build one template of each kind (from a template, from an image, with a start command), and verify them
    #[arg(long, conflicts_with_all = ["template", "ask", "all_templates"])]
    build: bool,
    #[command(flatten)]
    output: Output,
}

#[derive(Args)]
struct Prover {
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    run_root: RunRoot,
    /// Program that runs the attempts in sandboxes [default: cube-netprobe in $CUBE_BIN, else beside this program]
    #[arg(long, value_name = "PATH")]
    probe: Option<PathBuf>,
    /// Egress proxy of the classes `l7` and `secrets` [default: cube-egress in $CUBE_BIN, else beside this program]
    #[arg(long, value_name = "PATH")]
    egress: Option<PathBuf>,
    /// Path of `mitmdump` (package mitmproxy): print which attempts of the class `l7` end differently there
    #[arg(long, value_name = "PATH")]
    oracle: Option<PathBuf>,
    /// Template id or name
    #[arg(long, default_value = "base")]
    template: String,
    /// Run only this case, or the cases of this class; can be repeated
    #[arg(long = "case", value_name = "NAME")]
    only: Vec<String>,
    /// URL of a running server; its key is E2B_API_KEY. A case that only the guest observes does not pass [default:
    /// start a cube-api in new network namespaces]
    #[arg(long, value_name = "URL")]
    target: Option<String>,
    /// Address of this host that the target's sandboxes can reach; the suite listens there
    #[arg(long, value_name = "ADDRESS", requires = "target")]
    outside: Option<IpAddr>,
    #[command(flatten)]
    output: Output,
}

#[derive(Args)]
struct Confinement {
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    run_root: RunRoot,
    /// Template id or name
    #[arg(long, default_value = "base")]
    template: String,
    /// Run only this case, or the cases of this class; can be repeated
    #[arg(long = "case", value_name = "NAME")]
    only: Vec<String>,
    /// Test only VMMs that this program starts itself, without a server
    #[arg(long)]
    direct: bool,
    #[command(flatten)]
    output: Output,
}

#[derive(Args)]
struct Restarts {
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    run_root: RunRoot,
    /// Template id or name
    #[arg(long, default_value = "base")]
    template: String,
    /// Sandboxes that live for the whole run
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..))]
    sandboxes: u32,
    /// Number of times to kill the server under load and restart it at once
    #[arg(long, value_name = "N", default_value_t = 0)]
    unplanned: u32,
    /// Number of times to reload the server under load
    #[arg(long, value_name = "N", default_value_t = 0)]
    planned: u32,
    /// Number of times to kill and restart the server without load, at random moments of its start
    #[arg(long, value_name = "N", default_value_t = 0)]
    bare: u32,
    /// Two builds of cube-api to alternate between [default: the same build]
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    builds: Vec<PathBuf>,
    /// Seed of all random moments and choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Maximum time until the first response, such as 300ms
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    max_answer: Option<Duration>,
    /// Maximum time until each sandbox responds, such as 1s
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    max_reach: Option<Duration>,
    /// Maximum time without a response to new connections, such as 500ms
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    max_gap: Option<Duration>,
    #[command(flatten)]
    output: Output,
}

#[derive(Args)]
struct Lifecycle {
    #[command(flatten)]
    places: Places,
    /// Directory for sockets, logs and server state. Must be on a disk, because in-memory files that a VMM writes
    /// count against the memory limit of its sandbox
    #[arg(long, value_name = "DIR", default_value = "/var/tmp/cube")]
    run_root: PathBuf,
    /// Template id or name
    #[arg(long, default_value = "base")]
    template: String,
    /// URL of a running server; its key is E2B_API_KEY. Nothing is killed, and leaks are detected only through the
    /// API [default: start a cube-api in new network namespaces]
    #[arg(long, value_name = "URL")]
    target: Option<String>,
    /// Data plane of the target, such as https://{port}-{id}.example.com [default: the target]
    #[arg(long, value_name = "PATTERN", requires = "target")]
    sandbox_url: Option<String>,
    /// Time after which no new episode begins
    #[arg(long, value_name = "M", default_value_t = 1)]
    minutes: u32,
    /// Seed of all plans
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Repeat only this episode until it has a finding
    #[arg(long, value_name = "N")]
    episode: Option<u64>,
    /// Run only these steps of the episode, such as 0,3-5
    #[arg(long, value_name = "STEPS", requires = "episode")]
    steps: Option<Selection>,
    #[command(flatten)]
    output: Output,
}

#[derive(Args)]
struct Output {
    /// Also write the report to this directory: SUITE.json, .md and .xml (matrix.* for e2b), and the other files that the
    /// suite's page lists
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t)]
    format: ReportFormat,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum ReportFormat {
    /// Text for a terminal
    #[default]
    Human,
    /// One JSON document, described in docs/measure/report-format.md
    Json,
    /// JUnit XML for CI systems
    Junit,
    /// Markdown for issues and documentation
    Markdown,
}

impl Output {
    /// Path of a file in the results.
    fn file(&self, name: &str) -> Option<PathBuf> {
        self.results.as_ref().map(|dir| dir.join(name))
    }

    /// Creates the directory of the results before the run, so that a mistake in its name is found early.
    fn prepare(&self) -> Result<(), VerifyError> {
        match &self.results {
            None => Ok(()),
            Some(dir) => fs::create_dir_all(dir).map_err(unusable(dir)),
        }
    }

    /// Writes the report to the results and prints it. Returns the exit status of the run.
    fn publish<F: Figures>(&self, report: &Report<F>) -> Result<End, VerifyError> {
        let [json, markdown, junit] = [report.json(), report.markdown(), report.junit()];
        let name = match report.suite {
            Suite::E2b => "matrix",
            Suite::Egress => Suite::Isolation.name(),
            suite => suite.name(),
        };
        let files = [("json", &json), ("md", &markdown), ("xml", &junit)];
        self.prepare()?;
        for (extension, text) in files {
            if let Some(path) = self.file(&format!("{name}.{extension}")) {
                fs::write(&path, text).map_err(unusable(&path))?;
            }
        }
        print!(
            "{}",
            match self.format {
                ReportFormat::Human => report.terminal(),
                ReportFormat::Json => json,
                ReportFormat::Junit => junit,
                ReportFormat::Markdown => markdown,
            }
        );
        Ok(report.end())
    }
}

fn unusable(path: &Path) -> impl FnOnce(std::io::Error) -> VerifyError {
    let path = path.to_owned();
    move |source| VerifyError::Io { path, source }
}

pub(crate) fn main() -> End {
    let arguments: Arguments = match options::parse(std::env::args_os()) {
        Ok(arguments) => arguments,
        Err(end) => return end,
    };
    match arguments.job.carry_out() {
        Ok(end) => end,
        Err(error) => {
            eprintln!("cube-bench: {}", chain(&error));
            error.end()
        }
    }
}

impl Job {
    fn carry_out(self) -> Result<End, VerifyError> {
        match self {
            Self::E2b(conformance) => conformance.verify(),
            Self::CloneHazards(hazards) => hazards.verify(),
            Self::Isolation(prover) => prover.prove(Scope::Isolation),
            Self::Egress(prover) => prover.prove(Scope::Egress),
            Self::Confinement(prover) => prover.prove(),
            Self::Restarts(restarts) => restarts.prove(),
            Self::Lifecycle(lifecycle) => lifecycle.prove(),
            Self::RootProcess => Ok(wait_for_eof()),
        }
    }
}

/// Setup that all suites share.
fn setup(places: Places, run_root: RunRoot, template: String) -> Setup {
    Setup {
        artifacts: places.artifacts.unwrap_or_else(artifacts::default_dir),
        vmm: places.vmm,
        api: places.api,
        run_root: run_root.run_root,
        template,
    }
}

impl Conformance {
    fn verify(self) -> Result<End, VerifyError> {
        let report = conformance::run(&ConformanceSpec {
            setup: setup(self.places, self.run_root, self.template),
            api_url: self.api_url,
            area: self.area,
            sdks: self.sdks,
            features: self.features,
            jobs: self.jobs,
        })?;
        self.output.publish(&report)
    }
}

impl Hazards {
    fn verify(self) -> Result<End, VerifyError> {
        let target = match self.target {
            Some(url) => Some(hazards::Target {
                url,
                key: key_from_environment()?,
                sandbox_url: self.sandbox_url,
            }),
            None => None,
        };
        let report = hazards::run(&HazardSpec {
            setup: setup(self.places, self.run_root, self.template),
            target,
            templates: match (self.all_templates, self.build) {
                (true, _) => Templates::All,
                (false, true) => Templates::Built,
                (false, false) => Templates::One { ask: self.ask },
            },
            mode: hazards::Mode::Look,
        })?;
        self.output.publish(&report)
    }
}

impl Prover {
    fn prove(self, scope: Scope) -> Result<End, VerifyError> {
        let target = match self.target {
            Some(url) => Some(TargetSpec {
                url,
                key: key_from_environment()?,
                outside: self.outside,
            }),
            None => None,
        };
        let report = isolation::run(&IsolationSpec {
            setup: setup(self.places, self.run_root, self.template),
            probe: self.probe,
            egress: self.egress,
            oracle: self.oracle,
            scope,
            only: self.only,
            target,
        })?;
        self.output.publish(&report)
    }
}

impl Confinement {
    fn prove(self) -> Result<End, VerifyError> {
        let report = confinement::run(&ConfinementSpec {
            setup: setup(self.places, self.run_root, self.template),
            starts: if self.direct {
                Starts::Direct
            } else {
                Starts::Both
            },
            only: self.only,
        })?;
        self.output.publish(&report)
    }
}

impl Restarts {
    fn prove(self) -> Result<End, VerifyError> {
        let interrupted = exit::watch_signals().map_err(VerifyError::Signals)?;
        self.output.prepare()?;
        let builds = <[PathBuf; 2]>::try_from(self.builds).ok().map(Builds);
        let spec = RestartSpec {
            setup: setup(self.places, self.run_root, self.template),
            sandboxes: usize::try_from(self.sandboxes).unwrap_or(usize::MAX),
            unplanned: self.unplanned,
            planned: self.planned,
            bare: self.bare,
            builds,
            seed: self.seed,
            limits: Limits {
                answer: self.max_answer,
                reach: self.max_reach,
                gap: self.max_gap,
            },
            log: self.output.file("cube-api.log"),
        };
        let report = restarts::run(&spec, &interrupted)?;
        if let Some(path) = self.output.file("restarts.svg") {
            fs::write(&path, report.figures.plot()).map_err(unusable(&path))?;
        }
        self.output.publish(&report)
    }
}

impl Lifecycle {
    fn prove(self) -> Result<End, VerifyError> {
        let interrupted = exit::watch_signals().map_err(VerifyError::Signals)?;
        self.output.prepare()?;
        let report = lifecycle::run(
            &LifecycleSpec {
                history: self.output.file("history.jsonl"),
                log: self.output.file("cube-api.log"),
                setup: setup(
                    self.places,
                    RunRoot {
                        run_root: self.run_root,
                    },
                    self.template,
                ),
                target: self.target,
                sandbox_url: self.sandbox_url,
                duration: Duration::from_secs(u64::from(self.minutes) * 60),
                seed: self.seed,
                replay: self.episode.map(|episode| (episode, self.steps)),
            },
            &interrupted,
        )?;
        self.output.publish(&report)
    }
}

/// Writes a newline to show that the process has started, and waits for the end of its input.
fn wait_for_eof() -> End {
    let mut out = std::io::stdout();
    let started = out.write_all(b"\n").and_then(|()| out.flush());
    let waited = started.and_then(|()| std::io::stdin().read_to_end(&mut Vec::new()));
    match waited {
        Ok(_) => End::Pass,
        Err(_) => End::Bug,
    }
}
