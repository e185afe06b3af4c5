//! `cube-bench quick`: what an endpoint's users wait for, in two minutes.
//!
//! ```text
//! create answered  ┐
//! + echo           ┘ run quick-probe, then by origin of the sandbox
//! + unseen cell      run quick-cell
//! ```
//! Both are ordinary recorded runs, whose reports can be checked. Each ends after its share of the time with the starts
//! that it has. The page cache of a server cannot be dropped through its API, so cold starts need a scenario on its host.

use std::{
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use model::{StartPhase, chain};
use stats::quantile::{Quantile, Samples};
use testbed::{api::Api, endpoint::Endpoint, exit::End};

use crate::{
    clock,
    event::{EndReason, StartKind},
    report::{phase::PhaseDocument, section::Section, terminal, units::milliseconds},
    scenario::Scenario,
    session::{self, RecordedRun, SessionError, Settings},
    summary::fold::{self, Summary},
};

/// Names and contents of the files: the scenario with the probe, the scenario with a cell, and its cells.
pub const FILES: [(&str, &str); 3] = [
    ("quick-probe.toml", include_str!("quick/probe.toml")),
    ("quick-cell.toml", include_str!("quick/cell.toml")),
    (
        "python.toml",
        include_str!("../../scenarios/work/held-out/python.toml"),
    ),
];
/// Requests that measure the round trip.
const TRIPS: usize = 20;
/// How often the end of a run's share is noticed.
const TICK: Duration = Duration::from_millis(50);

/// The results.
#[derive(Debug)]
pub struct QuickReport {
    url: String,
    trip: RoundTrip,
    probe: Part,
    /// The message of the error if nothing was recorded.
    cell: Result<Part, String>,
    is_interrupted: bool,
}

/// Times to the endpoint without any sandbox.
#[derive(Debug)]
struct RoundTrip {
    /// Opening a connection, which each create does.
    connect: Samples,
    /// A request for `/health` on an open connection.
    request: Samples,
}

/// One of the two runs.
#[derive(Debug)]
struct Part {
    dir: PathBuf,
    summary: Summary,
}

/// Measures the server at `url`, which both scenarios have as their target. The results of each become a directory in
/// `dir`. Each scenario is run for at most half of `time`.
///
/// # Errors
/// Returns an error if the server does not respond, or if the probe could not be run. Failures of single starts, and an
/// error of the cell's run, are lines of the report instead.
pub fn run(
    url: &str,
    [probe, cell]: &[Scenario; 2],
    settings: &Settings,
    dir: &Path,
    time: Duration,
) -> Result<QuickReport, SessionError> {
    let interrupted = session::watch_signals()?;
    let trip = round_trip(url, probe)?;
    let part = |scenario: &Scenario| {
        let settings = Settings {
            results: Some(dir.join(&scenario.name)),
            ..settings.clone()
        };
        part(scenario, &settings, &interrupted, time / 2)
    };
    Ok(QuickReport {
        url: url.to_owned(),
        trip,
        probe: part(probe)?,
        cell: part(cell).map_err(|error| chain(&error)),
        is_interrupted: interrupted.load(Ordering::Relaxed),
    })
}

/// Runs a scenario until it is complete, `share` is over, or the user interrupts.
fn part(
    scenario: &Scenario,
    settings: &Settings,
    interrupted: &AtomicBool,
    share: Duration,
) -> Result<Part, SessionError> {
    let stop = &AtomicBool::new(interrupted.load(Ordering::Relaxed));
    let dir = thread::scope(|scope| {
        let (running, ended) = mpsc::channel::<()>();
        scope.spawn(move || {
            let deadline = Instant::now() + share;
            // The other end is dropped when the run has ended.
            while ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                let is_over = Instant::now() > deadline || interrupted.load(Ordering::Relaxed);
                stop.fetch_or(is_over, Ordering::Relaxed);
            }
        });
        let dir = session::run_until(scenario, settings, stop);
        drop(running);
        dir
    })?;
    let summary = RecordedRun::read(&dir)?.summary;
    Ok(Part { dir, summary })
}

fn round_trip(url: &str, scenario: &Scenario) -> Result<RoundTrip, SessionError> {
    let api = Api {
        control: Endpoint::parse(url)?,
        sandbox_url: None,
        key: String::new(),
        timeout: scenario.target.start_timeout,
    };
    let silent = |error: &dyn std::error::Error| SessionError::Target {
        kind: scenario.target.kind.name(),
        why: format!("no response to GET {url}/health: {}", chain(error)),
    };
    let (mut connects, mut requests) = (Vec::new(), Vec::new());
    for _ in 0..TRIPS {
        let mut stamps = vec![clock::monotonic_ns()];
        let mut client = api.connect(&api.control).map_err(|e| silent(&e))?;
        // The first request also completes a TLS handshake, and the second is a round trip alone.
        for _ in 0..2 {
            let got = client.request("GET", "/health", &[], b"");
            got.map_err(|e| silent(&e))?;
            stamps.push(clock::monotonic_ns());
        }
        let trip_ns = stamps[2] - stamps[1];
        connects.push((stamps[1] - stamps[0]).saturating_sub(trip_ns));
        requests.push(trip_ns);
    }
    Ok(RoundTrip {
        connect: Samples::new(connects),
        request: Samples::new(requests),
    })
}

impl QuickReport {
    /// The table for a terminal.
    #[must_use]
    pub fn render(&self) -> String {
        terminal::section(&self.section())
    }

    /// Directories of the recorded runs.
    pub fn dirs(&self) -> impl Iterator<Item = &Path> {
        self.parts().map(|part| part.dir.as_path())
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        [Some(&self.probe), self.cell.as_ref().ok()]
            .into_iter()
            .flatten()
    }

    /// [`End::Pass`] if a sandbox was measured.
    #[must_use]
    pub fn end(&self) -> End {
        let mut clones = self.parts().flat_map(|part| &part.summary.clones);
        let is_measured = clones.any(|clone| clone.failure.is_none());
        match (self.is_interrupted, is_measured) {
            (true, _) => End::Interrupted,
            (false, true) => End::Pass,
            (false, false) => End::TargetUnreachable,
        }
    }

    fn section(&self) -> Section {
        let origins = [Some(StartKind::Warm), Some(StartKind::Restored), None];
        let row = |name: &str, part: Option<&Part>, phase| {
            let cell =
                |origin| part.map_or(String::new(), |part| cell(&part.summary, origin, phase));
            [vec![name.to_owned()], origins.map(cell).to_vec()].concat()
        };
        let (probe, cell) = (Some(&self.probe), self.cell.as_ref().ok());
        let rows = vec![
            row("create answered", probe, StartPhase::Replied),
            row("+ echo", probe, StartPhase::FirstExec),
            row("+ unseen Python cell", cell, StartPhase::FirstExec),
        ];
        let mut section = Section::numbers(
            "ms from the request, P50 / P95 (n)",
            ["warm slot", "restored", "origin unknown"],
            rows,
        );
        section.notes = self.notes();
        section
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = vec![format!(
            "round trip to {}: {} ms; a new connection, which each create opens: {} ms (P50 of {TRIPS})",
            self.url,
            median(&self.trip.request),
            median(&self.trip.connect)
        )];
        for (name, part) in [("echo", Ok(&self.probe)), ("cell", self.cell.as_ref())] {
            match part {
                Err(why) => notes.push(format!("{name} not measured: {why}")),
                Ok(part) => {
                    if let Some(EndReason::Limit { message } | EndReason::Broken { message }) =
                        &part.summary.ended
                    {
                        notes.push(format!("{name} ended early: {message}"));
                    }
                    let failed: u64 = part.summary.failures().values().sum();
                    let example = part.summary.failure_examples().into_values().next();
                    notes.extend(example.map(|example| {
                        format!("{name}: {failed} starts failed, first: {example}")
                    }));
                }
            }
        }
        notes.push(
            "a cold page cache is not measured through an API: use a scenario with cold_rounds on the server's host"
                .to_owned(),
        );
        notes
    }
}

/// Times of the starts with this origin; empty without any.
fn cell(summary: &Summary, origin: Option<StartKind>, phase: StartPhase) -> String {
    let of_origin = summary.clones.iter().filter(|clone| clone.start == origin);
    let samples = fold::latencies(of_origin, phase);
    if samples.n() == 0 {
        return String::new();
    }
    let times = PhaseDocument::new(&samples);
    let [p50, p95] = [Quantile::P50, Quantile::P95].map(|quantile| times.short(quantile));
    format!("{p50} / {p95} ({})", times.n)
}

fn median(samples: &Samples) -> String {
    let times = PhaseDocument::new(samples);
    times.p50_ms.map_or("n/a".to_owned(), milliseconds)
}
