//! The submission checker: reads a recorded run or a pack as a stranger would, and reports one finding a line.
//!
//! ```text
//! pack ─► hashes, signature ─► chain of events ─► figures recomputed ─► division ─► failures, left out, grade
//! ```
//! A *fault* contradicts the record, which neither confirms nor contradicts an *unproven* finding. The checker trusts no
//! report: it compares the figures of `report.json` with those that it computes from the events.

mod division;
mod figures;

use std::{collections::BTreeSet, path::Path};

use model::chain;
use serde::Serialize;
use testbed::exit::End;

use crate::{
    pack::{self, LIST_FILE, PACKED, PackError, PackList, REPORT_FILE, SIGNATURE_FILE, at},
    record::{self, EVENTS_FILE, MANIFEST_FILE, read_optional},
    report::{View, document::Document},
    session::RecordedRun,
};

pub use division::Division;

/// Weight of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Weight {
    /// The record contradicts itself, its hashes or its signature.
    Fault,
    /// Something that a reader would rely on cannot be verified.
    Unproven,
    /// Verified, or a property that a reader must judge.
    Fact,
}

/// One line of the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckFinding {
    pub weight: Weight,
    pub text: String,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CheckResult {
    pub findings: Vec<CheckFinding>,
}

impl CheckResult {
    fn add(&mut self, weight: Weight, text: impl Into<String>) {
        let text = text.into();
        self.findings.push(CheckFinding { weight, text });
    }

    fn fault(&mut self, text: impl Into<String>) {
        self.add(Weight::Fault, text);
    }

    fn unproven(&mut self, text: impl Into<String>) {
        self.add(Weight::Unproven, text);
    }

    fn fact(&mut self, text: impl Into<String>) {
        self.add(Weight::Fact, text);
    }

    /// Exit status: [`End::GateFailed`] after a fault, [`End::Inconclusive`] if something is unproven, else
    /// [`End::Pass`].
    #[must_use]
    pub fn end(&self) -> End {
        let has = |weight| self.findings.iter().any(|found| found.weight == weight);
        match (has(Weight::Fault), has(Weight::Unproven)) {
            (true, _) => End::GateFailed,
            (false, true) => End::Inconclusive,
            (false, false) => End::Pass,
        }
    }

    /// One line for each finding.
    #[must_use]
    pub fn render(&self) -> String {
        let line = |found: &CheckFinding| {
            let weight = match found.weight {
                Weight::Fault => "FAULT",
                Weight::Unproven => "unproven",
                Weight::Fact => "ok",
            };
            format!("{weight:<8}  {}\n", found.text)
        };
        self.findings.iter().map(line).collect()
    }
}

/// Checks a directory with a run, or a pack. `signers` is a file of allowed signers, which makes a valid signature by one
/// of them a requirement.
///
/// # Errors
/// Returns [`PackError`] if the path is neither, or cannot be read. A changed record is a finding instead.
pub fn check(path: &Path, signers: Option<&Path>) -> Result<CheckResult, PackError> {
    let mut result = CheckResult::default();
    let unpacked = if path.is_dir() {
        None
    } else {
        let dir = tempfile::tempdir().map_err(at(path))?;
        pack::unpack(path, dir.path())?;
        Some(dir)
    };
    let dir = unpacked.as_ref().map_or(path, tempfile::TempDir::path);
    if record::events_file(dir).is_none() {
        let path = path.to_owned();
        let why = format!("it contains no {EVENTS_FILE}");
        return Err(PackError::Malformed { path, why });
    }
    match pack::read_list(dir)? {
        Some(list) => hashes(dir, &list, &mut result)?,
        None if unpacked.is_some() => result.fault(format!("the pack has no {LIST_FILE}")),
        None => {}
    }
    signature(dir, signers, &mut result)?;
    match RecordedRun::read(dir) {
        Err(error) => result.fault(chain(&error)),
        Ok(run) => record_of(dir, &run, &mut result)?,
    }
    Ok(result)
}

fn hashes(dir: &Path, list: &PackList, result: &mut CheckResult) -> Result<(), PackError> {
    let listed = list.files.keys().map(String::as_str);
    let names: BTreeSet<&str> = PACKED.into_iter().chain(listed).collect();
    let mut wrong = 0;
    for name in names {
        let path = dir.join(name);
        // The list comes from others, so only files with known names are opened.
        let bytes = if PACKED.contains(&name) {
            read_optional(&path).map_err(at(&path))?
        } else {
            None
        };
        let (found, listed) = (bytes.map(|b| record::sha256(&b)), list.files.get(name));
        if found.as_ref() != listed {
            wrong += 1;
            let [found, listed] =
                [found.as_ref(), listed].map(|sum| sum.map_or("none", String::as_str));
            result.fault(format!(
                "{name} has SHA-256 {found}, {LIST_FILE} lists {listed}"
            ));
        }
    }
    if wrong == 0 {
        let n = list.files.len();
        result.fact(format!("{n} files have the hashes in {LIST_FILE}"));
    }
    Ok(())
}

fn signature(
    dir: &Path,
    signers: Option<&Path>,
    result: &mut CheckResult,
) -> Result<(), PackError> {
    match (signers, dir.join(SIGNATURE_FILE).exists()) {
        (None, false) => {}
        (None, true) => result.fact("signed; --signers FILE verifies the signature"),
        (Some(_), false) => result.fault("not signed"),
        (Some(signers), true) => match pack::signer(dir, signers)? {
            Ok(name) => result.fact(format!("signed by {name}")),
            Err(why) => result.fault(format!("no allowed signer has signed this: {why}")),
        },
    }
    Ok(())
}

fn record_of(dir: &Path, run: &RecordedRun, result: &mut CheckResult) -> Result<(), PackError> {
    protection(dir, run, result);
    let Some(view) = run.view() else {
        // Reading a record requires its first event.
        result.fault("the record has no start");
        return Ok(());
    };
    let d = Document::new(&view);
    let report = dir.join(REPORT_FILE);
    match read_optional(&report).map_err(at(&report))? {
        Some(text) => figures::compare(&text, &d, result),
        None => result.fact(format!("no {REPORT_FILE} to compare")),
    }
    match &*d.ended {
        "complete" => result.fact("the run is complete"),
        ended => result.unproven(format!("the run ended early: {ended}")),
    }
    result.fact(Division::of(view.scenario, view.facts.sandboxes).describe());
    quality(&view, &d, result);
    Ok(())
}

/// Whether a later change of the events would be found.
fn protection(dir: &Path, run: &RecordedRun, result: &mut CheckResult) {
    let sum = &run.sha256;
    match (&run.chain, dir.join(MANIFEST_FILE).exists()) {
        (None, _) => result.unproven(format!(
            "the events carry no hashes (format 1), SHA-256 {sum}"
        )),
        (Some(end), false) => result.unproven(format!(
            "{} chained events, but no {MANIFEST_FILE} with the hash of the last one: the run was killed, or the end is missing",
            end.lines
        )),
        (Some(end), true) => result.fact(format!(
            "{} chained events up to {}, SHA-256 {sum}",
            end.lines, end.last
        )),
    }
}

/// Facts that a reader must judge.
fn quality(view: &View<'_>, d: &Document, result: &mut CheckResult) {
    let interference = &view.summary.interference;
    let (all, left) = (
        interference.repetitions(),
        interference.repetitions_left_out,
    );
    let share = left as f64 / all.max(1) as f64 * 100.0;
    result.fact(format!(
        "left out: {left} of {all} repetitions ({share:.0} %)"
    ));
    let failed: u64 = d.failures.values().sum();
    result.fact(format!("failures: {failed} of {} starts", d.n));
    let host = match d.target {
        Some(_) => "client",
        None => "host",
    };
    let reasons = d.host.grade_reasons.iter();
    let reasons: String = reasons.map(|why| format!("; {why}")).collect();
    result.fact(format!("{host} graded {}{reasons}", d.host.grade));
    if d.n == 0 {
        result.unproven("no start was measured");
    }
}
