//! Interference by other programs in a report.

use serde::{Deserialize, Serialize};

use super::{View, section::Section};
use crate::plan::Subject;

/// Repetitions that other programs disturbed, and the rule for them, fixed before the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InterferenceDocument {
    /// The rule as a sentence.
    pub rule: String,
    /// Number of measured repetitions that began.
    pub repetitions: usize,
    /// Number of repetitions excluded from all results.
    pub left_out: usize,
    /// Number of disturbed repetitions that were kept because a start failed in them.
    pub kept_with_failures: usize,
    /// Distinct reasons.
    pub reasons: Vec<String>,
    /// Mean share of the host's CPU time that other programs used during measured rounds, excluded rounds included;
    /// `null` if it could not be measured. Includes kernel threads if their own share is `null`.
    pub foreign_cpu_share: Option<f64>,
    /// Mean share of kernel threads during the measured rounds of the target. They work for all programs, so no rule
    /// judges it. `null` if it could not be measured, and in older runs.
    #[serde(default)]
    pub kernel_cpu_share: Option<f64>,
    /// The same during the rounds of host processes.
    #[serde(default)]
    pub kernel_cpu_share_baseline: Option<f64>,
}

impl InterferenceDocument {
    /// `None` if the run has no interference rule.
    pub(super) fn new(view: &View<'_>) -> Option<Self> {
        let found = &view.summary.interference;
        let mut reasons: Vec<String> = found.left_out.values().cloned().collect();
        reasons.sort();
        reasons.dedup();
        Some(Self {
            rule: view.scenario.interference?.describe(),
            repetitions: found.repetitions(),
            left_out: found.repetitions_left_out,
            kept_with_failures: found.kept_with_failures,
            reasons,
            foreign_cpu_share: found.programs_share(),
            kernel_cpu_share: found.kernel_share(Subject::Clone),
            kernel_cpu_share_baseline: found.kernel_share(Subject::HostProcess),
        })
    }

    /// The section of a report.
    #[must_use]
    pub(super) fn section(&self) -> Section {
        let mut notes = vec![match self.foreign_cpu_share {
            None => "not measured".to_owned(),
            Some(share) => format!(
                "other programs used {:.1} % of the CPU time; {} of {} repetitions are left out",
                share * 100.0,
                self.left_out,
                self.repetitions
            ),
        }];
        notes.extend(self.kernel_threads());
        notes.push(format!(
            "rule, fixed before the run: a repetition is left out if {}",
            self.rule
        ));
        if self.kept_with_failures > 0 {
            let kept = self.kept_with_failures;
            notes.push(format!(
                "{kept} disturbed repetitions are kept because starts failed in them"
            ));
        }
        let reasons = self.reasons.iter();
        notes.extend(reasons.map(|reason| format!("left out: {reason}")));
        Section::remarks("interference", notes)
    }

    /// Sentence on kernel threads; `None` if other programs were not measured either.
    fn kernel_threads(&self) -> Option<String> {
        self.foreign_cpu_share?;
        let Some(share) = self.kernel_cpu_share else {
            return Some(
                "kernel threads are among the other programs: their CPU time is unknown".to_owned(),
            );
        };
        let percent = share * 100.0;
        let baseline = self
            .kernel_cpu_share_baseline
            .map(|share| format!(", and {:.1} % in those of host processes", share * 100.0));
        Some(format!(
            "kernel threads, which work for the run too and are not judged, used {percent:.1} % of the CPU time in rounds of the target{}",
            baseline.unwrap_or_default()
        ))
    }
}
