//! One `run`: prepares, starts the threads, and leaves a directory with everything recorded.
//!
//! ```text
//! this thread   Runner::run ── events ─┐
//! noise thread  every 100 ms ── events ┴─► recorder thread: events.jsonl, live view
//! ```

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

use vmm_control::template::{LoadError, LoadedTemplate};

use crate::{
    artifacts::{self, ArtifactError, Template},
    clock,
    event::{EVENTS_FORMAT, EndReason, RunEvent, RunStarted, chain},
    host::facts::{self, ENVIRONMENT_FILE, HostFacts, TemplateFacts},
    leftovers::{self, RunDir},
    live::LiveView,
    memory::FileId,
    noise, plan,
    record::{RecordError, Recorder},
    run::Runner,
    scenario::Scenario,
    target::{host_process::HostProcess, vmm_direct::VmmDirect},
};

/// What a run is told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Directory with `templates/` and `results/`.
    pub artifacts: PathBuf,
    /// The VMM, if given.
    pub vmm: Option<PathBuf>,
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
    /// No KVM.
    #[error("/dev/kvm cannot be used ({0}): run as root on a host with KVM")]
    Kvm(String),
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

/// Runs a scenario and returns the directory of its results.
///
/// # Errors
/// See [`SessionError`]. Failures of clones are results, not errors.
pub fn run(scenario: &Scenario, settings: &Settings) -> Result<PathBuf, SessionError> {
    sweep(&settings.run_root)?;
    let vmm = artifacts::find_vmm(settings.vmm.as_deref())?;
    let template = artifacts::find_template(&settings.artifacts, &scenario.target)?;
    let loaded = LoadedTemplate::load(&template.dir);
    let host = host_facts(&vmm, &template, scenario, loaded.as_ref().err());
    if let Some(why) = host.kvm_missing {
        return Err(SessionError::Kvm(why));
    }
    let results = results_dir(scenario, settings)?;
    write_environment(&results, &host)?;
    let at_root = at(&settings.run_root);
    let run_dir = RunDir::create(&settings.run_root).map_err(at_root)?;
    let loaded = loaded.ok();
    let source = loaded
        .as_ref()
        .map_or_else(|| template.dir.clone(), LoadedTemplate::dir);
    let memory_path = source.join(model::template_file::MEMORY);
    let memory = FileId::of(&memory_path).map_err(at(&memory_path))?;
    let target = VmmDirect::new(vmm, template.dir, loaded, &scenario.target, run_dir)
        .map_err(at(Path::new("/dev/urandom")))?;
    carry_out(scenario, settings, &target, memory, &results)?;
    Ok(results)
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

fn host_facts(
    vmm: &Path,
    template: &Template,
    scenario: &Scenario,
    not_loaded: Option<&LoadError>,
) -> HostFacts {
    let mut host = facts::read(vmm);
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
    host.template = Some(TemplateFacts {
        dir: template.dir.clone(),
        manifest: serde_json::to_value(&template.manifest).unwrap_or_default(),
        page_cache,
    });
    host
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
    target: &VmmDirect,
    memory: FileId,
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
            target,
            baseline: &HostProcess,
            guest_memory: Some(memory),
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
