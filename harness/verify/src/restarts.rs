//! `cube-bench verify restarts`: observes clients while the server is killed or reloaded under load.
//!
//! ```text
//! load: clients of the API and of sandboxes ──► events ─────────┐
//! drive: kill or reload, start again ─► reach: each sandbox ─► observed ─┼─► judge ─► report
//! ledger: what was answered, against what exists at the end ────┘
//! ```
//! The load never stops while the server restarts. Everything right of the events is a pure function: [`judge`]
//! assigns each event to the restart during which it happened, and compares the result with the promises for that
//! kind of restart ([`figures::Kind`]).
//!
//! An unplanned restart (SIGKILL) cuts streams and refuses connections until the next server listens. It must not
//! lose anything that was acknowledged, and a cut stream must end with an error. A planned restart must not be
//! noticeable at all.

mod drive;
pub mod event;
pub mod figures;
mod guests;
pub mod judge;
pub mod ledger;
mod line;
mod load;
mod program;
pub mod reach;

use std::{
    path::PathBuf,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use testbed::{api::Api, server::LocalServer, world};

use self::{
    drive::Drive,
    event::Record,
    figures::{Ended, RestartFigures},
    guests::Guests,
    judge::Observed,
    ledger::Existing,
    load::Site,
    program::Program,
};
use crate::{
    remains::Remains,
    report::Report,
    setup::{Setup, VerifyError, api_of, at},
};

/// Sandboxes that the server keeps ready.
const WARM: u32 = 4;
/// Timeout of a request. A request that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Addresses that sandboxes may reach, so that each sandbox has a policy that a restarted server must verify.
const OUTSIDE: &str = "198.51.100.0/24";

/// Options of a run.
#[derive(Clone, Debug)]
pub struct RestartSpec {
    pub setup: Setup,
    /// Sandboxes that live for the whole run; at least 1.
    pub sandboxes: usize,
    /// Restarts of each kind. They take place in the order of these fields.
    pub unplanned: u32,
    pub planned: u32,
    pub bare: u32,
    /// Two builds of the server that alternate. `None`: every restart starts the same build.
    pub builds: Option<Builds>,
    /// Seed of all random moments and choices.
    pub seed: u64,
    pub limits: Limits,
    /// File for the server's log. `None`: the log is removed.
    pub log: Option<PathBuf>,
}

/// Paths of two builds of `cube-api`. The run begins with the first.
#[derive(Clone, Debug)]
pub struct Builds(pub [PathBuf; 2]);

/// Limits in addition to the promises. `None`: no limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Maximum time from the start of the program to its first response.
    pub answer: Option<Duration>,
    /// Maximum time from the start of the program until each sandbox is reached.
    pub reach: Option<Duration>,
    /// Maximum time without a response to new connections.
    pub gap: Option<Duration>,
}

/// Runs the restarts. The process moves into new network namespaces and stays there, so the caller must not have
/// started any thread. Setting `interrupted` ends the run early; the observations so far are judged.
///
/// # Errors
/// Returns a [`VerifyError`] if the suite cannot start. Any later failure is a finding, never an error.
pub fn run(
    spec: &RestartSpec,
    interrupted: &AtomicBool,
) -> Result<Report<RestartFigures>, VerifyError> {
    let begun = Instant::now();
    let _outside = world::enter([OUTSIDE])?;
    let run_dir = spec.setup.run_dir()?;
    let mut options = spec.setup.server(WARM)?;
    // The run root may be mounted noexec, and `cargo xtask` empties `tmp`.
    let dir = &spec.setup.artifacts;
    let program = Program::install(dir, &options.program, spec.builds.as_ref()).map_err(at(dir))?;
    options.program = program.path().to_owned();
    options.options = ["--uplink", world::UPLINK, "--dns-server", "198.51.100.53"]
        .map(str::to_owned)
        .to_vec();
    // Dropped after the server, whose cgroups it removes if the server did not.
    let mut remains = Remains::default();
    let server = LocalServer::start(run_dir.path(), options)?;
    remains.watch(&server.state());
    let api = api_of(&server, TIMEOUT);
    let guests = Guests::create(&api, &spec.setup.template, spec.sandboxes)?;
    let drive = Drive::new(spec, server, program, interrupted);
    let (mut observed, records) = observe(spec, drive, &api, &guests);
    observed.faults.extend(remains.find(run_dir.path()));
    observed.seconds = begun.elapsed().as_secs_f64();
    Ok(judge::judge(spec, &observed, &records))
}

/// Restarts the server under load and without, and ends it.
fn observe(
    spec: &RestartSpec,
    mut drive: Drive<'_>,
    api: &Api,
    guests: &Guests,
) -> (Observed, Vec<Record>) {
    let (log, records) = mpsc::channel();
    let stop = AtomicBool::new(false);
    let site = Site {
        api,
        template: &spec.setup.template,
        guests,
        stop: &stop,
        log,
    };
    for guest in guests.all() {
        site.fate(guest.id(), event::Fate::Running);
    }
    thread::scope(|scope| {
        load::start(scope, &site, spec.seed);
        drive.run_loaded(&site);
        stop.store(true, Ordering::Relaxed);
    });
    drive.run_bare(&site);
    drop(site);
    let records: Vec<Record> = records.into_iter().collect();
    let (server, program, restarts, bare, ended) = drive.finish();
    let existing = match ended {
        Ended::Complete => Existing::read(api, &records),
        Ended::Interrupted | Ended::Hung => None,
    };
    let log = server.log();
    drop((server, program));
    if let Some(copy) = &spec.log
        && let Err(error) = std::fs::copy(&log, copy)
    {
        eprintln!("cube-bench: cannot keep {}: {error}", log.display());
    }
    let observed = Observed {
        ended,
        seconds: 0.0,
        restarts,
        bare,
        existing,
        faults: Vec::new(),
    };
    (observed, records)
}
