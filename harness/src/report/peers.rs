//! The comparison of systems in a report.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{View, phase::PhaseDocument, section::Section};
use crate::{
    event::{Attempt, System},
    plan::Subject,
    scenario::{Quantile, TargetKind},
    summary::{
        peers::{self, Step},
        ratio::Ratio,
    },
};

/// The systems of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeersDocument {
    /// Name of the system that ratios refer to: the first that was measured. `null` if none was.
    pub reference: Option<String>,
    /// Number of systems that are missing on the host.
    pub missing: usize,
    /// The target, the peers in the order of the scenario, and the host processes if the scenario has them.
    pub systems: Vec<SystemDocument>,
}

/// One system.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SystemDocument {
    pub name: String,
    /// Kind of target, for example `runc`.
    pub kind: String,
    pub version: Option<String>,
    /// Isolation of its sandboxes from the host, in a few words.
    pub platform: Option<String>,
    /// Why it was not measured; `null` if it was.
    pub missing: Option<String>,
    /// Measured starts, failures included.
    pub n: usize,
    /// Failed starts by cause; causes without failures are absent.
    pub failures: BTreeMap<String, u64>,
    /// First message of a failure.
    pub first_failure: Option<String>,
    /// Time from the intended start until the create returned, until the first command returned, and until the
    /// sandbox was removed; `null` without starts.
    pub created: Option<PhaseDocument>,
    pub first_exec: Option<PhaseDocument>,
    pub gone: Option<PhaseDocument>,
    /// Quantiles of `first_exec` divided by the same quantiles of the reference; `null` for the reference.
    pub p50_ratio: Option<QuotientDocument>,
    pub p95_ratio: Option<QuotientDocument>,
}

/// A ratio to the reference.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuotientDocument {
    /// `null` with too few starts, or if one of the quantiles lies among failures.
    pub ratio: Option<f64>,
    /// 95 % interval, by bootstrap over pairs of neighbouring clusters; `null` with too few pairs, or if a bound is
    /// infinite.
    pub ratio_ci95: Option<[f64; 2]>,
}

impl PeersDocument {
    /// `None` if the run compared no systems.
    pub(super) fn new(view: &View<'_>) -> Option<Self> {
        let summary = view.summary;
        if summary.systems.is_empty() {
            return None;
        }
        let reference = peers::reference(summary);
        let base = reference.map_or(&[][..], |system| peers::attempts(summary, system));
        let baseline = view.scenario.baseline.as_ref().map(|_| System {
            subject: Subject::HostProcess,
            name: "host process".to_owned(),
            kind: TargetKind::Process,
            version: None,
            platform: Some("none".to_owned()),
            missing: None,
        });
        let systems = summary.systems.iter().chain(&baseline).map(|system| {
            let is_reference = reference.is_some_and(|r| r.subject == system.subject);
            let base = (!is_reference).then_some(base);
            SystemDocument::new(system, peers::attempts(summary, system), base)
        });
        Some(Self {
            reference: reference.map(|system| system.name.clone()),
            missing: summary
                .systems
                .iter()
                .filter(|system| system.missing.is_some())
                .count(),
            systems: systems.collect(),
        })
    }

    /// A row for each system, in milliseconds; a missing system has only its name. Each has a remark: its platform, why
    /// it is missing, and its failures.
    pub(super) fn section(&self) -> Section {
        let over = self.reference.as_deref().unwrap_or("the reference");
        let systems = self.systems.iter();
        let mut section = Section::numbers(
            "system, ms from the intended start",
            [
                "n",
                "failed",
                "create P50",
                "first exec P50",
                "P95",
                "gone P50",
                &format!("P50 / {over}"),
                &format!("P95 / {over}"),
            ],
            systems.clone().map(SystemDocument::row).collect(),
        );
        section.notes = systems.map(SystemDocument::note).collect();
        if self.missing > 0 {
            let missing = format!("{} of the systems are missing on this host", self.missing);
            section.notes.push(missing);
        }
        section
    }
}

impl SystemDocument {
    /// `base` contains the starts of the reference; `None` for the reference itself.
    fn new(system: &System, attempts: &[Attempt], base: Option<&[Attempt]>) -> Self {
        let phase = |step: Step| {
            (!attempts.is_empty()).then(|| PhaseDocument::new(&step.samples(attempts)))
        };
        let quotient = |quantile| {
            let found = peers::over(attempts, base?, Step::FirstExec, quantile);
            Some(QuotientDocument::new(&found))
        };
        let mut failures = BTreeMap::new();
        for failure in attempts.iter().filter_map(|a| a.failure.as_ref()) {
            *failures.entry(failure.cause.name().to_owned()).or_insert(0) += 1;
        }
        let mut messages = attempts.iter().filter_map(|a| a.failure.as_ref());
        let quotient = |quantile| (!attempts.is_empty()).then(|| quotient(quantile)).flatten();
        Self {
            name: system.name.clone(),
            kind: system.kind.name().to_owned(),
            version: system.version.clone(),
            platform: system.platform.clone(),
            missing: system.missing.clone(),
            n: attempts.len(),
            failures,
            first_failure: messages.next().map(|failure| failure.message.clone()),
            created: match system.subject {
                Subject::HostProcess | Subject::Null => None,
                Subject::Clone | Subject::Beside | Subject::Peer(_) => phase(Step::Created),
            },
            first_exec: phase(Step::FirstExec),
            gone: phase(Step::Gone),
            p50_ratio: quotient(Quantile::P50),
            p95_ratio: quotient(Quantile::P95),
        }
    }

    fn row(&self) -> Vec<String> {
        if self.missing.is_some() {
            let mut row = vec![String::new(); 9];
            row[0].clone_from(&self.name);
            row[1] = "missing".to_owned();
            return row;
        }
        let ms = |phase: &Option<PhaseDocument>, quantile: Quantile| {
            let phase = phase.as_ref();
            phase.map_or(String::new(), |phase| phase.cell(quantile))
        };
        let over =
            |ratio: Option<QuotientDocument>| ratio.map_or(String::new(), QuotientDocument::text);
        let failed: u64 = self.failures.values().sum();
        vec![
            self.name.clone(),
            self.n.to_string(),
            failed.to_string(),
            ms(&self.created, Quantile::P50),
            ms(&self.first_exec, Quantile::P50),
            ms(&self.first_exec, Quantile::P95),
            ms(&self.gone, Quantile::P50),
            over(self.p50_ratio),
            over(self.p95_ratio),
        ]
    }

    fn note(&self) -> String {
        let mut note = format!("{}: {}", self.name, self.kind);
        let facts = [&self.version, &self.platform];
        for fact in facts.into_iter().flatten() {
            note.push_str(&format!(", {fact}"));
        }
        if let Some(why) = &self.missing {
            note.push_str(&format!(". Missing: {why}"));
        }
        for (cause, n) in &self.failures {
            note.push_str(&format!(". {n} failed: {cause}"));
        }
        if let Some(message) = &self.first_failure {
            note.push_str(&format!(" ({message})"));
        }
        note
    }
}

impl QuotientDocument {
    pub(super) fn new(found: &Ratio) -> Self {
        Self {
            ratio: found.value.filter(|value| value.is_finite()),
            ratio_ci95: found
                .interval95
                .filter(|(_, high)| high.is_finite())
                .map(|(low, high)| [low, high]),
        }
    }

    pub(super) fn text(self) -> String {
        match (self.ratio, self.ratio_ci95) {
            (None, _) => "n/a".to_owned(),
            (Some(ratio), None) => format!("{ratio:.2}"),
            (Some(ratio), Some([low, high])) => format!("{ratio:.2} ({low:.2}–{high:.2})"),
        }
    }
}
