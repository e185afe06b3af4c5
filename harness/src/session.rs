//! One `run`: prepares, starts the threads, and leaves a directory with everything recorded.
//!
//! ```text
//! this thread   Runner::run ── events ─┐
//! noise thread  every 100 ms ── events ┴─► recorder thread: events.jsonl, live view
//! ```

use std::{
    fs,
    io::{self, IsTerminal},
    os::unix::fs::symlink,
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
use vmm_control::template::{LoadError, LoadedTemplate};

use testbed::{
    artifacts::{self, ArtifactError, Template},
    endpoint::{BadUrl, Endpoint},
    leftovers::{self, RunDir},
    server::{Door, LocalServer, ServerError, ServerSpec, Tls},
    world::{PlainNetwork, UPLINK, WorldError},
};

use crate::{
    clock,
    event::{EVENTS_FORMAT, EndReason, RunEvent, RunStarted},
    exchange::{NAME_SERVER, Network, Placement},
    host::facts::{self, ENVIRONMENT_FILE, HostFacts, TemplateFacts},
    live::LiveView,
    memory::FileId,
    noise, plan,
    record::{RecordError, Recorder},
    run::Runner,
    scenario::{NetworkSpec, Scenario, TargetKind, TargetSpec},
    target::{
        Target, e2b::E2b, forks::Forks, group::Groups, host_process::HostProcess,
        vmm_direct::RANDOM, vmm_direct::VmmDirect,
    },
};

/// What a run is told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Directory with `templates/` and `results/`.
    pub artifacts: PathBuf,
    /// The VMM, if given.
    pub vmm: Option<PathBuf>,
    /// The server, if given.
    pub api: Option<PathBuf>,
    /// The program that is put into sandboxes for exchanges, if given.
    pub probe: Option<PathBuf>,
    /// Directory of this run's results, if given.
    pub results: Option<PathBuf>,
    /// Where runs keep sockets and logs of their clones.
    pub run_root: PathBuf,
    /// Command line that does the same again.
    pub reproduce: String,
}

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// Program or template.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The API's address.
    #[error(transparent)]
    Url(#[from] BadUrl),
    /// Somebody else's API without a key.
    #[error("the API wants a key: set E2B_API_KEY")]
    NoKey,
    /// The run's own server.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// No KVM.
    #[error("/dev/kvm cannot be used ({0}): run as root on a host with KVM")]
    Kvm(String),
    /// The namespaces of a scenario with a network.
    #[error(transparent)]
    World(#[from] WorldError),
    /// A directory or file of the run.
    #[error("cannot use {path}")]
    Io {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The results.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The recorder stopped before the run did.
    #[error("events could not be written, the run is cut short in {path}")]
    Recording {
        /// The run's results.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// What a run starts its sandboxes from.
struct Subjects {
    target: Box<dyn Target>,
    beside: Option<VmmDirect>,
    /// The template's memory as `vmm-direct` maps it.
    memory: Option<FileId>,
    /// Ended after the target, which talks to it.
    _server: Option<LocalServer>,
}

/// Runs a scenario and returns the directory of its results.
///
/// # Errors
/// See [`SessionError`]. Failures of clones are results, not errors.
pub fn run(scenario: &Scenario, settings: &Settings) -> Result<PathBuf, SessionError> {
    // First of all, while there is one thread.
    let network = network(scenario, settings)?;
    sweep(&settings.run_root)?;
    let mut host = facts::read(&settings.vmm.clone().unwrap_or_else(artifacts::default_vmm));
    // Lives until the last subject has ended: servers and clones have their files in it.
    let run_dir = Arc::new(RunDir::create(&settings.run_root).map_err(at(&settings.run_root))?);
    let ground = Ground {
        run_dir: &run_dir,
        network: network.as_ref(),
    };
    let subjects = subjects(scenario, settings, ground, &mut host)?;
    let results = results_dir(scenario, settings)?;
    write_environment(&results, &host)?;
    carry_out(scenario, settings, &subjects, network.as_ref(), &results)?;
    Ok(results)
}

/// What subjects stand on.
#[derive(Clone, Copy)]
struct Ground<'a> {
    run_dir: &'a Arc<RunDir>,
    network: Option<&'a Network>,
}

/// The network of the scenario, if it has one. The process is in namespaces of its own then.
fn network(scenario: &Scenario, settings: &Settings) -> Result<Option<Network>, SessionError> {
    let Some(spec) = scenario.network.clone() else {
        return Ok(None);
    };
    let probe = artifacts::find_probe(settings.probe.as_deref())?;
    let program = fs::read(&probe).map_err(at(&probe))?;
    let placement = match scenario.beside {
        Some(_) => Placement::OneCpu,
        None => Placement::Free,
    };
    Ok(Some(Network::enter(spec, program, placement)?))
}

/// Starts or finds everything that the scenario names, and adds what it is to the facts.
fn subjects(
    scenario: &Scenario,
    settings: &Settings,
    ground: Ground<'_>,
    host: &mut HostFacts,
) -> Result<Subjects, SessionError> {
    let spec = &scenario.target;
    match (spec.kind, &spec.api_url) {
        (TargetKind::VmmDirect, _) => {
            let (direct, memory) = vmm_direct(scenario, settings, ground.run_dir, host)?;
            let beside = match (scenario.beside, scenario.beside_prefault) {
                (Some(_), Some(prefault)) => Some(
                    direct
                        .with_prefault(prefault)
                        .map_err(at(Path::new(RANDOM)))?,
                ),
                _ => None,
            };
            Ok(Subjects {
                target: Box::new(direct),
                beside,
                memory: Some(memory),
                _server: None,
            })
        }
        (TargetKind::E2b, Some(url)) => {
            let api = Endpoint::parse(url)?;
            host.endpoint = Some(api.to_string());
            let key = std::env::var("E2B_API_KEY").map_err(|_| SessionError::NoKey)?;
            let beside = beside(scenario, settings, ground.run_dir, host)?;
            Ok(Subjects {
                target: through(scenario, e2b(spec, api, key)),
                beside,
                memory: None,
                _server: None,
            })
        }
        (TargetKind::E2b, None) => own_server(scenario, settings, ground, host),
    }
}

fn own_server(
    scenario: &Scenario,
    settings: &Settings,
    ground: Ground<'_>,
    host: &mut HostFacts,
) -> Result<Subjects, SessionError> {
    let spec = &scenario.target;
    let program = artifacts::find_api(settings.api.as_deref())?;
    let template = artifacts::find_template(&settings.artifacts, &spec.template, spec.memory)?;
    refuse_without_kvm(host)?;
    let templates = ground.run_dir.path().join("templates");
    install(&template.dir, &templates.join(&spec.template)).map_err(at(&templates))?;
    let server = LocalServer::start(
        ground.run_dir.path(),
        ServerSpec {
            vmm: artifacts::find_vmm(settings.vmm.as_deref())?,
            templates,
            warm: spec.warm,
            domain: None,
            door: Door::Open,
            tls: Tls::Off,
            program,
            options: options(&settings.artifacts, ground.network.is_some()),
        },
    )?;
    host.endpoint = Some(format!("cube-api of the run's own, {} warm", spec.warm));
    host.add_binary("cube-api", server.program());
    let mut target = e2b(spec, server.endpoint().clone(), server.key().to_owned());
    target.sandboxes = Some(server.sandboxes());
    target.warm = spec.warm;
    target.network = scenario.network.as_ref().map(NetworkSpec::options);
    let beside = beside(scenario, settings, ground.run_dir, host)?;
    let beside = match (beside, ground.network) {
        (Some(direct), Some(network)) => Some(with_plain_network(direct, network, &target)?),
        (direct, _) => direct,
    };
    Ok(Subjects {
        target: through(scenario, target),
        beside,
        memory: None,
        _server: Some(server),
    })
}

/// The clones beside those of an API.
fn beside(
    scenario: &Scenario,
    settings: &Settings,
    run_dir: &Arc<RunDir>,
    host: &mut HostFacts,
) -> Result<Option<VmmDirect>, SessionError> {
    if scenario.beside.is_none() {
        return Ok(None);
    }
    let (direct, _) = vmm_direct(scenario, settings, run_dir, host)?;
    let Some(prefault) = scenario.beside_prefault else {
        return Ok(Some(direct));
    };
    let other = direct.with_prefault(prefault);
    other.map(Some).map_err(at(Path::new(RANDOM)))
}

/// Gives clones beside a network without programs, and groups like those of the server's sandboxes.
fn with_plain_network(
    direct: VmmDirect,
    network: &Network,
    server: &E2b,
) -> Result<VmmDirect, SessionError> {
    let sandboxes = server.sandboxes.clone().unwrap_or_default();
    let warm = || {
        server.await_ready()?;
        let vmm = leftovers::processes_of(&sandboxes).first().copied();
        Groups::like(vmm.ok_or_else(|| io::Error::other("no sandbox is warm"))?)
    };
    let groups = warm().map_err(at(&sandboxes))?;
    Ok(direct.with_network(PlainNetwork::new(network.outside())?, groups))
}

/// Creates, or forks of a parent where the scenario has one.
fn through(scenario: &Scenario, e2b: E2b) -> Box<dyn Target> {
    match scenario.parent.as_slice() {
        [] => Box::new(e2b),
        parent => Box::new(Forks::new(e2b, parent.to_vec(), scenario.arrival.starts())),
    }
}

/// What the server has to be told besides: the template is a link to what lies among the artifacts. What is measured of
/// the network is the programs, not what the server's limit leaves of them.
fn options(artifacts: &Path, networked: bool) -> Vec<String> {
    let images = artifacts.display().to_string();
    let mut options = vec!["--images".to_owned(), images];
    if networked {
        let network = ["--uplink", UPLINK, "--dns-server", NAME_SERVER];
        let limit = ["--network-rate", "none"];
        options.extend(network.into_iter().chain(limit).map(str::to_owned));
    }
    options
}

/// Shows the server the scenario's template and no other: it keeps sandboxes of each that it sees.
fn install(template: &Path, place: &Path) -> io::Result<()> {
    fs::create_dir_all(place.parent().unwrap_or(place))?;
    symlink(template, place)
}

fn e2b(spec: &TargetSpec, api: Endpoint, key: String) -> E2b {
    E2b {
        api,
        sandbox_url: spec.sandbox_url.clone(),
        key,
        template: spec.template.clone(),
        timeout: spec.start_timeout,
        sandboxes: None,
        warm: 0,
        network: None,
    }
}

fn vmm_direct(
    scenario: &Scenario,
    settings: &Settings,
    run_dir: &Arc<RunDir>,
    host: &mut HostFacts,
) -> Result<(VmmDirect, FileId), SessionError> {
    let vmm = artifacts::find_vmm(settings.vmm.as_deref())?;
    let target = &scenario.target;
    let template = artifacts::find_template(&settings.artifacts, &target.template, target.memory)?;
    let loaded = LoadedTemplate::load(&template.dir);
    host.template = Some(template_facts(&template, scenario, loaded.as_ref().err()));
    refuse_without_kvm(host)?;
    let loaded = loaded.ok();
    let source = loaded
        .as_ref()
        .map_or_else(|| template.dir.clone(), LoadedTemplate::dir);
    let memory_path = source.join(model::template_file::MEMORY);
    let memory = FileId::of(&memory_path).map_err(at(&memory_path))?;
    let direct = VmmDirect::new(
        vmm,
        template.dir,
        loaded,
        &scenario.target,
        Arc::clone(run_dir),
    )
    .map_err(at(Path::new(RANDOM)))?;
    Ok((direct, memory))
}

fn refuse_without_kvm(host: &HostFacts) -> Result<(), SessionError> {
    host.kvm_missing
        .clone()
        .map_or(Ok(()), |why| Err(SessionError::Kvm(why)))
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> SessionError {
    let path = path.to_owned();
    move |source| SessionError::Io { path, source }
}

/// Removes what killed runs left and says so.
///
/// # Errors
/// The run root cannot be listed.
pub fn sweep(run_root: &Path) -> Result<(), SessionError> {
    let swept = leftovers::sweep(run_root).map_err(at(run_root))?;
    if let Some(text) = swept.describe() {
        eprintln!("cube-bench: {text}");
    }
    Ok(())
}

fn template_facts(
    template: &Template,
    scenario: &Scenario,
    not_loaded: Option<&LoadError>,
) -> TemplateFacts {
    let mut page_cache = match not_loaded {
        None => {
            "the memory was copied into a tmpfs of huge pages before the first warm-up".to_owned()
        }
        Some(why) => format!(
            "the whole memory file was read before the first warm-up (no huge pages: {})",
            chain(why)
        ),
    };
    if scenario.cold_rounds > 0 {
        page_cache.push_str(
            "; cold starts map the file on disk, with POSIX_FADV_DONTNEED on it before each",
        );
    }
    TemplateFacts {
        dir: template.dir.clone(),
        manifest: serde_json::to_value(&template.manifest).unwrap_or_default(),
        page_cache,
    }
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

/// Reads what [`run`] recorded about the host.
///
/// # Errors
/// The file is missing or broken.
pub fn read_environment(dir: &Path) -> Result<HostFacts, SessionError> {
    let path = dir.join(ENVIRONMENT_FILE);
    let text = fs::read(&path).map_err(at(&path))?;
    serde_json::from_slice(&text)
        .map_err(io::Error::from)
        .map_err(at(&path))
}

fn carry_out(
    scenario: &Scenario,
    settings: &Settings,
    subjects: &Subjects,
    network: Option<&Network>,
    results: &Path,
) -> Result<(), SessionError> {
    let recorder = Recorder::create(results)?;
    let interrupted = watch_signals().map_err(at(results))?;
    let plan = plan::build(scenario);
    let (events, received) = channel();
    let stop_noise = AtomicBool::new(false);
    let recorded = thread::scope(|scope| {
        let recorder = scope.spawn(|| {
            let outcome = record(recorder, received, scenario);
            // Without a record there is nothing to run for.
            interrupted.fetch_or(outcome.is_err(), Ordering::Relaxed);
            outcome
        });
        let _ = events.send(started(scenario, settings));
        let noise_events = events.clone();
        scope.spawn(|| noise::watch(&stop_noise, &{ noise_events }));
        let runner = Runner {
            scenario,
            plan: &plan,
            target: subjects.target.as_ref(),
            beside: subjects.beside.as_ref().map(|beside| beside as &dyn Target),
            baseline: &HostProcess,
            network,
            guest_memory: subjects.memory,
            events: events.clone(),
            interrupted: &interrupted,
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
            path: results.to_owned(),
            source,
        }),
        Err(panic) => std::panic::resume_unwind(panic),
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

/// The first SIGINT or SIGTERM sets the flag; the second one ends the process at once.
fn watch_signals() -> io::Result<Arc<AtomicBool>> {
    use signal_hook::{
        consts::{SIGINT, SIGTERM},
        flag,
    };
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_default(signal, Arc::clone(&flag))?;
        flag::register(signal, Arc::clone(&flag))?;
    }
    Ok(flag)
}

/// Appends events until the last sender is gone. The end of the run is written last: a noise sample that
/// comes after it is dropped.
fn record(
    mut recorder: Recorder,
    events: Receiver<RunEvent>,
    scenario: &Scenario,
) -> io::Result<()> {
    let mut live = io::stderr()
        .is_terminal()
        .then(|| LiveView::new(scenario.rounds, io::stderr()));
    for event in events {
        recorder.append(&event)?;
        if let Some(live) = &mut live {
            live.apply(&event);
        }
        if matches!(event, RunEvent::RunEnded { .. }) {
            break;
        }
    }
    Ok(())
}
