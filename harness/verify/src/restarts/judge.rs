//! Derives findings from the observations: promises that do not hold.

use std::collections::BTreeMap;

use super::{
    Limits, RestartSpec,
    event::{Cause, Event, Record, Seen, Work},
    figures::{Bare, Ended, Kind, RestartFigures, RestartReport},
    ledger::{self, Existing},
    reach::Reached,
};
use crate::report::{Case, FORMAT, Report, Suite, Verdict};

/// Class of the cases.
const CLASS: &str = "restarts";
/// The only case of a run without findings.
const PROMISE: &str = "all promises hold";

/// Number of examples of each kind of finding; further ones are only counted.
const EXAMPLES: usize = 5;

/// A restart as observed by the driver. Times are nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Debug)]
pub struct Restart {
    pub kind: Kind,
    /// Number of the build that was started, 0 or 1.
    pub build: usize,
    /// When the server was killed or the reload was requested.
    pub begun_ns: u64,
    /// When the program that then responded was started; for a planned restart, `begun_ns`.
    pub exec_ns: u64,
    /// First accepted connection. `None` for planned restarts, which never refuse one.
    pub connected_ns: Option<u64>,
    /// First response; for a planned restart, the end of `cube-api reload`. `None`: never.
    pub answered_ns: Option<u64>,
    /// When all sandboxes had been contacted and clients had time to reconnect.
    pub settled_ns: u64,
    /// Programs that were started; all but the last were killed during their start.
    pub starts: u32,
    /// Result for each sandbox.
    pub reached: Vec<Reached>,
    /// Number of server processes afterwards: 1, plus those that are finishing their connections.
    pub servers: usize,
    /// Warm slots before and after. `None`: could not be read.
    pub warm: [Option<u64>; 2],
    /// Failures of the start or of the reload.
    pub faults: Vec<String>,
}

/// All observations except the records of clients.
#[derive(Clone, Debug)]
pub struct Observed {
    pub ended: Ended,
    pub seconds: f64,
    pub restarts: Vec<Restart>,
    pub bare: Option<Bare>,
    /// Sandboxes that exist at the end. `None`: could not be read.
    pub existing: Option<Existing>,
    /// Leftovers of the server, and other findings of the driver.
    pub faults: Vec<String>,
}

/// Findings by kind, so that a thousand equal ones become one line.
#[derive(Debug, Default)]
struct Findings(BTreeMap<String, Vec<String>>);

impl Findings {
    fn add(&mut self, kind: impl Into<String>, example: impl Into<String>) {
        self.0.entry(kind.into()).or_default().push(example.into());
    }

    fn cases(self) -> Vec<Case> {
        let case = |(kind, examples): (String, Vec<String>)| {
            let mut shown: Vec<&str> = Vec::new();
            for example in &examples {
                let is_new = !example.is_empty() && !shown.contains(&example.as_str());
                if is_new && shown.len() < EXAMPLES {
                    shown.push(example);
                }
            }
            let n = examples.len();
            let problem = if shown.is_empty() {
                format!("n = {n}")
            } else {
                format!("n = {n}: {}", shown.join(" | "))
            };
            Case::new(CLASS, &kind, "").judged(Verdict::Fail, [problem])
        };
        self.0.into_iter().map(case).collect()
    }
}

/// Evaluates a run. A pure function of the observations.
#[must_use]
pub fn judge(
    spec: &RestartSpec,
    observed: &Observed,
    records: &[Record],
) -> Report<RestartFigures> {
    let mut findings = Findings::default();
    let mut restarts: Vec<RestartReport> = observed.restarts.iter().map(numbers).collect();
    let mut done = BTreeMap::new();
    let mut looked_up = Vec::new();
    for record in records {
        let Record::Event(event) = record else {
            continue;
        };
        if event.seen == Seen::Done {
            *done.entry(event.work).or_default() += 1;
            if event.work == Work::LookUp {
                looked_up.push(event.ended_ns);
            }
        }
        match place(&observed.restarts, event) {
            Some(at) => count(
                &mut restarts[at],
                event,
                &format!("restart {at}"),
                &mut findings,
            ),
            None => outside(event, &mut findings),
        }
    }
    looked_up.sort_unstable();
    for (n, (report, restart)) in restarts.iter_mut().zip(&observed.restarts).enumerate() {
        report.gap_ms = gap_ns(&looked_up, restart).map(milliseconds);
        check(n, restart, report, spec.limits, &mut findings);
    }
    if let Some(bare) = &observed.bare {
        for why in &bare.failed {
            findings.add("a start without load failed", why);
        }
    }
    for fault in &observed.faults {
        findings.add(fault, "");
    }
    if observed.ended == Ended::Complete {
        match &observed.existing {
            None => findings.add("the sandboxes could not be listed at the end", ""),
            Some(existing) => {
                for lost in ledger::audit(records.iter(), existing) {
                    findings.add("answers and state disagree", lost);
                }
            }
        }
        check_load(&done, &restarts, &mut findings);
    }
    let mut cases = findings.cases();
    if cases.is_empty() {
        let bare = observed.bare.as_ref().map_or(0, |bare| bare.starts);
        let doubt = (restarts.is_empty() && bare == 0).then_some("the server was not restarted");
        cases.push(Case::promise(CLASS, PROMISE, doubt));
    }
    Report {
        format: FORMAT,
        suite: Suite::Restarts,
        target: None,
        cases,
        seconds: observed.seconds,
        figures: RestartFigures {
            ended: observed.ended,
            sandboxes: spec.sandboxes,
            seed: spec.seed,
            restarts,
            done,
            bare: observed.bare.clone(),
        },
    }
}

fn milliseconds(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn numbers(restart: &Restart) -> RestartReport {
    let since = |from: u64| move |at: u64| milliseconds(at.saturating_sub(from));
    let begun = match restart.kind {
        Kind::Unplanned => restart.exec_ns,
        Kind::Planned => restart.answered_ns.unwrap_or(restart.exec_ns),
    };
    let reached = restart.reached.iter().filter_map(|reached| match reached {
        Reached::At(at) => Some(*at),
        Reached::Lost(_) => None,
    });
    let reached_ms: Vec<f64> = reached.map(since(begun)).collect();
    let lost = restart.reached.len() - reached_ms.len();
    RestartReport {
        kind: restart.kind,
        build: restart.build,
        starts: restart.starts,
        connected_ms: restart.connected_ns.map(since(restart.exec_ns)),
        answered_ms: restart.answered_ns.map(since(restart.exec_ns)),
        gap_ms: None,
        slowest_ms: None,
        reached_ms,
        done: BTreeMap::new(),
        failed: BTreeMap::new(),
        cut: BTreeMap::new(),
        lost: u64::try_from(lost).unwrap_or(u64::MAX),
        servers: restart.servers,
        warm_before: restart.warm[0],
        warm_after: restart.warm[1],
    }
}

/// Index of the last restart that overlaps with the event.
fn place(restarts: &[Restart], event: &Event) -> Option<usize> {
    restarts.iter().rposition(|restart| {
        event.ended_ns >= restart.begun_ns && event.began_ns <= restart.settled_ns
    })
}

/// Counts an event during a restart, and adds a finding if this kind of restart does not allow it.
fn count(report: &mut RestartReport, event: &Event, name: &str, findings: &mut Findings) {
    let kind = report.kind.name();
    let work = event.work.name();
    let is_allowed = |cause: &Cause| match (report.kind, cause) {
        (Kind::Planned, _) | (Kind::Unplanned, Cause::NotFound) => false,
        (Kind::Unplanned, _) => true,
    };
    match &event.seen {
        Seen::Done => {
            *report.done.entry(event.work).or_default() += 1;
            if !event.work.is_slow() {
                let ms = milliseconds(event.ended_ns.saturating_sub(event.began_ns));
                report.slowest_ms = Some(report.slowest_ms.unwrap_or(0.0).max(ms));
            }
        }
        Seen::Failed(cause, text) => {
            if !is_allowed(cause) {
                let what = format!("{kind} restart: {work} failed ({})", cause.name());
                findings.add(what, format!("{name}: {text}"));
            }
            let failed = report.failed.entry(event.work).or_default();
            *failed.entry(*cause).or_default() += 1;
        }
        Seen::Cut(cause, text) => {
            if !is_allowed(cause) {
                let what = format!("{kind} restart: {work} was cut ({})", cause.name());
                findings.add(what, format!("{name}: {text}"));
            }
            *report.cut.entry(event.work).or_default() += 1;
        }
        Seen::Wrong(text) => {
            findings.add(
                format!("{kind} restart: {work} is wrong"),
                format!("{name}: {text}"),
            );
        }
    }
}

/// Between the restarts, nothing may fail.
fn outside(event: &Event, findings: &mut Findings) {
    let work = event.work.name();
    match &event.seen {
        Seen::Done => {}
        Seen::Failed(cause, text) => findings.add(
            format!("between restarts: {work} failed ({})", cause.name()),
            text,
        ),
        Seen::Cut(cause, text) => findings.add(
            format!("between restarts: {work} was cut ({})", cause.name()),
            text,
        ),
        Seen::Wrong(text) => findings.add(format!("between restarts: {work} is wrong"), text),
    }
}

/// The longest time between two responses that overlaps with the restart. `None` if no response follows.
fn gap_ns(answers: &[u64], restart: &Restart) -> Option<u64> {
    let before = answers.partition_point(|at| *at < restart.begun_ns);
    let after = answers.partition_point(|at| *at <= restart.settled_ns);
    let during =
        answers.get(before.saturating_sub(1)..=after.min(answers.len().checked_sub(1)?))?;
    during.windows(2).map(|pair| pair[1] - pair[0]).max()
}

/// Checks the driver's observations of a restart, and the limits.
fn check(
    n: usize,
    restart: &Restart,
    report: &RestartReport,
    limits: Limits,
    findings: &mut Findings,
) {
    let kind = restart.kind.name();
    for fault in &restart.faults {
        findings.add(
            format!("{kind} restart: the start failed"),
            format!("restart {n}: {fault}"),
        );
    }
    for reached in &restart.reached {
        if let Reached::Lost(why) = reached {
            findings.add(
                format!("{kind} restart: a sandbox or its memory is lost"),
                format!("restart {n}: {why}"),
            );
        }
    }
    let slowest = report.reached_ms.iter().copied().reduce(f64::max);
    for (what, limit, measured) in [
        ("the first answer", limits.answer, report.answered_ms),
        ("the last sandbox", limits.reach, slowest),
        ("an answer to new connections", limits.gap, report.gap_ms),
    ] {
        let Some(limit) = limit else { continue };
        let limit_ms = limit.as_secs_f64() * 1e3;
        match measured {
            Some(ms) if ms <= limit_ms => {}
            Some(ms) => findings.add(
                format!("{kind} restart: {what} took longer than {limit:?}"),
                format!("restart {n}: {ms:.0} ms"),
            ),
            None => findings.add(
                format!("{kind} restart: {what} never came"),
                format!("restart {n}"),
            ),
        }
    }
}

/// A client that never succeeded proves nothing.
fn check_load(done: &BTreeMap<Work, u64>, restarts: &[RestartReport], findings: &mut Findings) {
    if restarts.is_empty() {
        return;
    }
    for work in Work::ALL {
        if !done.contains_key(&work) {
            findings.add(format!("{} never succeeded", work.name()), "");
        }
    }
}

#[cfg(test)]
mod tests;
