//! One recorded run: prepare the host and the target, run the plan, and write a directory of results.
//!
//! ```text
//! this thread   Runner::run ── events ─┐
//! noise thread  every 100 ms ── events ┴─► recorder thread: events.jsonl, live view
//! ```

mod subjects;
mod systems;

use std::{
    fs,
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, channel},
    },
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use model::chain;
use testbed::{
    artifacts::{self, ArtifactError},
    cluster::{Cluster, ClusterError, Hub},
    endpoint::{BadUrl, Endpoint},
    exit,
    leftovers::{self, RunDir},
    server::ServerError,
    world::WorldError,
};

use crate::{
    account::Account,
    clock,
    event::{EVENTS_FORMAT, EndReason, RunEvent, RunStarted},
    exchange::Network,
    host::{
        facts::{self, ENVIRONMENT_FILE, HostFacts},
        listener,
        usage::OwnGroup,
    },
    live::{LiveView, Medium},
    noise, plan,
    record::{self, RecordError, Recorder},
    report::View,
    run::Runner,
    scenario::Scenario,
    summary::fold::{self, Summary},
    target::host_process::HostProcess,
};
use subjects::{Surroundings, cluster};
use systems::Systems;

/// Paths and programs of one run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Directory that contains `templates/` and `results/`.
    pub artifacts: PathBuf,
    /// `cube-vmm`; `None` searches as [`artifacts::find_vmm`] does.
    pub vmm: Option<PathBuf>,
    /// `cube-api`; `None` searches as [`artifacts::find_api`] does.
    pub api: Option<PathBuf>,
    /// `cube-netprobe`, which exchanges run inside sandboxes; `None` searches as [`artifacts::find_probe`] does.
    pub probe: Option<PathBuf>,
    /// etcd, for scenarios with a cluster; `None` searches as [`artifacts::find_etcd`] does.
    pub etcd: Option<PathBuf>,
    /// Directory for the results of this run; `None` is `ARTIFACTS/results/NAME-TIME`.
    pub results: Option<PathBuf>,
    /// Process of the server at `target.api_url`; `None` searches for the one that listens there.
    pub server_pid: Option<u32>,
    /// Directory for sockets, logs and server state of the run.
    pub run_root: PathBuf,
    /// Command line that repeats the run; recorded for the report.
    pub reproduce: String,
}

/// Reason why a run could not start, or why its events could not be recorded.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    #[error(transparent)]
    Url(#[from] BadUrl),
    /// `target.api_url` is set, but the variable with its key is not.
    #[error("the API at target.api_url needs a key: set {0}")]
    NoKey(String),
    /// The server at `target.api_url` has no such template.
    #[error(
        "the server has no template {template:?}: set target.template to one that it has ({answer})"
    )]
    NoTemplate {
        template: String,
        /// The response to the create.
        answer: String,
    },
    /// The measured server is not a process of this host, or the scenario has none.
    #[error("cannot count the CPU time of process {pid} as the server's: {cure}")]
    ServerPid {
        pid: u32,
        cure: &'static str,
        #[source]
        source: Option<io::Error>,
    },
    /// The program behind the target is missing, or did not start.
    #[error("cannot use target.kind {kind:?}: {why}")]
    Target { kind: &'static str, why: String },
    /// The run's cluster did not start.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The run's `cube-api` did not start.
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error("cannot use /dev/kvm ({0}): run as root on a host with KVM")]
    Kvm(String),
    #[error("cannot install handlers for SIGINT and SIGTERM")]
    Signals(#[source] io::Error),
    /// The network namespaces of the scenario could not be created.
    #[error(transparent)]
    World(#[from] WorldError),
    #[error("cannot use {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Writing events failed during the run, and the run was stopped.
    #[error("cannot write events to {path}: the run was stopped early")]
    Recording {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Runs a scenario and returns the directory of its results.
///
/// # Errors
/// Returns an error if the host, the network or the target cannot be prepared, or if the results cannot be written.
/// Failures of single clones and errors that end the run early are recorded as events instead.
pub fn run(scenario: &Scenario, settings: &Settings) -> Result<PathBuf, SessionError> {
    let interrupted = watch_signals()?;
    run_until(scenario, settings, &interrupted)
}

/// Like [`run`], but installs no signal handlers: the caller sets `interrupted` to stop before the next clone. This
/// function also sets it if recording fails.
///
/// # Errors
/// Returns the errors of [`run`], except [`SessionError::Signals`].
pub fn run_until(
    scenario: &Scenario,
    settings: &Settings,
    interrupted: &AtomicBool,
) -> Result<PathBuf, SessionError> {
    // Entering namespaces must come first: it affects only the calling thread, and later threads inherit from it.
    let network = subjects::enter_network(scenario, settings)?;
    let hub = scenario.cluster().map(|_| Hub::enter()).transpose()?;
    sweep(&settings.run_root)?;
    let mut host = facts::read(&settings.vmm.clone().unwrap_or_else(artifacts::default_vmm));
    // The server is a child of this process, so the process must first enter the run's cgroup.
    let mut group = OwnGroup::enter()
        .inspect_err(|error| {
            eprintln!("cube-bench: CPU time of other programs is not measured: {error}");
        })
        .ok();
    if let Some(group) = &mut group {
        own_server(
            group,
            scenario.target.api_url.as_deref(),
            settings.server_pid,
        )?;
    }
    // Servers and clones keep files in this directory, so it must outlive all subjects.
    let run_dir = Arc::new(RunDir::create(&settings.run_root).map_err(at(&settings.run_root))?);
    let cluster = hub.zip(scenario.cluster());
    let cluster = cluster
        .map(|(hub, spec)| cluster::start((&hub, spec), scenario, settings, &run_dir, &host));
    let cluster = cluster.transpose()?;
    let results = results_dir(scenario, settings)?;
    let surroundings = Surroundings {
        run_dir: &run_dir,
        network: network.as_ref(),
        cluster: cluster.as_ref(),
        results: &results,
        name: "target",
        by: scenario.cluster().map_or(&[], |cluster| &cluster.by),
    };
    let systems = systems::start(scenario, settings, surroundings, &mut host);
    let systems = systems.inspect_err(|_| {
        // Fails if the directory is not empty; it is then kept.
        let _ = fs::remove_dir(&results);
    })?;
    write_environment(&results, &host)?;
    let recording = Recording {
        scenario,
        settings,
        results: &results,
        interrupted,
        cluster: cluster.as_ref(),
    };
    recording.run(&systems, network.as_ref(), group.as_ref())?;
    Ok(results)
}

/// Counts the CPU time of the server at `url` as the run's, if its process is on this host.
fn own_server(
    group: &mut OwnGroup,
    url: Option<&str>,
    given: Option<u32>,
) -> Result<(), SessionError> {
    let refused = |pid, cure| move |source| SessionError::ServerPid { pid, cure, source };
    let pid = match (url, given) {
        (None, None) => return Ok(()),
        (None, Some(pid)) => {
            let cure = "the run starts the sandboxes itself: remove --server-pid, or add --target";
            return Err(refused(pid, cure)(None));
        }
        (Some(_), Some(pid)) => pid,
        (Some(url), None) => match listener::process_at(&Endpoint::parse(url)?) {
            Some(pid) => pid,
            None => {
                group.set_client_only();
                return Ok(());
            }
        },
    };
    let cure = "give the process id of the running server as --server-pid";
    let account = Account::observe(pid).map_err(|error| refused(pid, cure)(Some(error)))?;
    eprintln!(
        "cube-bench: process {pid} is the measured server, so its CPU time counts as the run's"
    );
    group.add_server(account);
    Ok(())
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> SessionError {
    let path = path.to_owned();
    move |source| SessionError::Io { path, source }
}

/// Removes processes and directories of killed runs, and prints what it removed to standard error.
///
/// # Errors
/// Returns [`SessionError::Io`] if the run root cannot be listed or is writable by other users.
pub fn sweep(run_root: &Path) -> Result<(), SessionError> {
    let swept = leftovers::sweep(run_root).map_err(at(run_root))?;
    if let Some(text) = swept.describe() {
        eprintln!("cube-bench: {text}");
    }
    Ok(())
}

fn results_dir(scenario: &Scenario, settings: &Settings) -> Result<PathBuf, SessionError> {
    let dir = settings.results.clone().unwrap_or_else(|| {
        let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let name = format!("{}-{}", scenario.name, now.replace([':', '-'], ""));
        settings.artifacts.join("results").join(name)
    });
    fs::create_dir_all(&dir).map_err(at(&dir))?;
    Ok(dir)
}

fn write_environment(dir: &Path, host: &HostFacts) -> Result<(), SessionError> {
    let path = dir.join(ENVIRONMENT_FILE);
    let text = serde_json::to_string_pretty(host)
        .map_err(io::Error::from)
        .map_err(at(&path))?;
    fs::write(&path, text).map_err(at(&path))
}

/// Reads the facts about the host that [`run`] recorded.
///
/// # Errors
/// Returns [`SessionError::Io`] if `environment.json` cannot be read or parsed.
pub fn read_environment(dir: &Path) -> Result<HostFacts, SessionError> {
    let path = dir.join(ENVIRONMENT_FILE);
    let text = fs::read(&path).map_err(at(&path))?;
    serde_json::from_slice(&text)
        .map_err(io::Error::from)
        .map_err(at(&path))
}

/// The recorded data of a run. Its report is a pure function of this.
#[derive(Clone, Debug)]
pub struct RecordedRun {
    pub summary: Summary,
    pub facts: HostFacts,
    /// SHA-256 of the uncompressed events.
    pub sha256: String,
    /// `None` for records whose events carry no hashes.
    pub chain: Option<record::ChainEnd>,
}

impl RecordedRun {
    /// Reads the results of a run.
    ///
    /// # Errors
    /// Returns [`SessionError`] if the events or the facts about the host cannot be read.
    pub fn read(dir: &Path) -> Result<Self, SessionError> {
        let record = record::read_record(dir)?;
        Ok(Self {
            summary: fold::fold(&record.events),
            facts: read_environment(dir)?,
            sha256: record.sha256,
            chain: record.chain,
        })
    }

    /// The input of reports; `None` if the run recorded no start event.
    #[must_use]
    pub fn view(&self) -> Option<View<'_>> {
        let view = View::new(&self.summary, &self.facts)?;
        Some(View {
            record: Some(&self.sha256),
            ..view
        })
    }
}

/// Everything needed to record one run, except the subjects.
struct Recording<'a> {
    scenario: &'a Scenario,
    settings: &'a Settings,
    results: &'a Path,
    interrupted: &'a AtomicBool,
    cluster: Option<&'a Cluster>,
}

impl Recording<'_> {
    fn run(
        &self,
        systems: &Systems,
        network: Option<&Network>,
        group: Option<&OwnGroup>,
    ) -> Result<(), SessionError> {
        let recorder = Recorder::create(self.results)?;
        let mut plan = plan::build(self.scenario);
        plan.rounds
            .retain(|round| !systems.is_missing(round.subject));
        let subjects = &systems.target;
        let medium = if io::stderr().is_terminal() {
            Medium::Terminal
        } else {
            Medium::Log
        };
        let rule = self.scenario.interference;
        let progress = LiveView::new(&plan, rule, medium, io::stderr());
        let (events, received) = channel();
        let stop_noise = AtomicBool::new(false);
        let recorded = thread::scope(|scope| {
            let recorder = scope.spawn(|| {
                let outcome = record(recorder, received, progress);
                // A run without recorded events is worthless, so stop it.
                self.interrupted
                    .fetch_or(outcome.is_err(), Ordering::Relaxed);
                outcome
            });
            let _ = events.send(started(self.scenario, self.settings));
            if !systems.found.is_empty() {
                let systems = systems.found.clone();
                let _ = events.send(RunEvent::Systems { systems });
            }
            let noise_events = events.clone();
            scope.spawn(|| noise::watch(&stop_noise, &{ noise_events }));
            let stage = self
                .cluster
                .and_then(|cluster| cluster::stage(self.scenario, cluster, self.interrupted));
            let runner = Runner {
                scenario: self.scenario,
                plan: &plan,
                target: subjects.target.as_ref(),
                beside: subjects.beside.as_deref(),
                peers: &systems.peers,
                baseline: &HostProcess,
                network,
                stage: stage.as_ref(),
                group,
                guest_memory: subjects.memory,
                events: events.clone(),
                interrupted: self.interrupted,
            };
            let why = runner.run().unwrap_or_else(|error| EndReason::Broken {
                message: chain(&error),
            });
            stop_noise.store(true, Ordering::Relaxed);
            let at_ns = clock::monotonic_ns();
            let _ = events.send(RunEvent::RunEnded { why, at_ns });
            drop((runner, events));
            recorder.join()
        });
        match recorded {
            Ok(Ok(())) => Ok(()),
            Ok(Err(source)) => Err(SessionError::Recording {
                path: self.results.to_owned(),
                source,
            }),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

fn started(scenario: &Scenario, settings: &Settings) -> RunEvent {
    let unix = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    RunEvent::RunStarted(Box::new(RunStarted {
        format: EVENTS_FORMAT,
        scenario: scenario.clone(),
        reproduce: settings.reproduce.clone(),
        started_unix_ms: u64::try_from(unix.as_millis()).unwrap_or(u64::MAX),
        at_ns: clock::monotonic_ns(),
    }))
}

/// Like [`exit::watch_signals`].
///
/// # Errors
/// Returns [`SessionError::Signals`] if a handler cannot be installed.
pub fn watch_signals() -> Result<Arc<AtomicBool>, SessionError> {
    exit::watch_signals().map_err(SessionError::Signals)
}

/// Appends events until [`RunEvent::RunEnded`] or until all senders are dropped. Later noise samples are discarded, so
/// that [`RunEvent::RunEnded`] is the last line. Seals the record.
fn record(
    mut recorder: Recorder,
    events: Receiver<RunEvent>,
    mut progress: LiveView<io::Stderr>,
) -> io::Result<()> {
    for event in events {
        recorder.append(&event)?;
        progress.apply(&event, clock::monotonic_ns());
        if matches!(event, RunEvent::RunEnded { .. }) {
            break;
        }
    }
    recorder.seal()
}
