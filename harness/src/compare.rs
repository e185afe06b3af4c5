//! Compares two recorded runs of one scenario: is B slower than A?
//!
//! The runs were not interleaved, so the p values do not account for drift of the host between them; `cube-bench
//! ab` compares two builds without this weakness. Runs of different scenarios, or on hosts with different CPU
//! models or kernels, are rejected.

use model::StartPhase;
use serde::{Deserialize, Serialize};

use testbed::exit::End;

use crate::{
    event::Attempt,
    host::facts::HostFacts,
    report::{
        section::{Column, Section},
        terminal,
        units::milliseconds,
    },
    scenario::{Quantile, Scenario},
    summary::fold::Summary,
};
use stats::{
    fisher,
    permutation::{self, Difference},
    quantile::INFINITE,
};

/// Format of the JSON document.
pub const FORMAT: u32 = 2;
/// Corrected p values below this are significant.
const LEVEL: f64 = 0.05;

/// Result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Pass,
    Fail,
    /// The data do not decide. This does not count as a pass.
    Inconclusive,
}

impl Outcome {
    /// Name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Inconclusive => "inconclusive",
        }
    }
}

/// One of the two runs.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    pub summary: &'a Summary,
    pub facts: &'a HostFacts,
}

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// [`FORMAT`].
    pub format: u32,
    /// Name of the scenario.
    pub scenario: String,
    /// Largest accepted slowdown, as a share.
    pub margin: f64,
    pub failures: FailureComparison,
    /// Quantiles for which both runs have enough samples and the first run has a finite value.
    pub metrics: Vec<MetricComparison>,
}

/// Failed starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FailureComparison {
    /// Failed starts of the first run, of `a_n`.
    pub a: u64,
    pub a_n: u64,
    /// Failed starts of the second run, of `b_n`.
    pub b: u64,
    pub b_n: u64,
    /// Two-sided p value of Fisher's exact test.
    pub p: f64,
    /// Fail: a significantly larger share failed in the second run. Inconclusive: a larger share failed, but not
    /// significantly. The margin does not apply, because a failed start is not a slow one.
    pub verdict: Outcome,
}

/// One quantile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricComparison {
    /// For example `first_exec.p95`.
    pub metric: String,
    /// Quantile of the first run.
    pub a_ms: f64,
    /// Quantile of the second run; `null` if it lies among failures, which fails the comparison.
    pub b_ms: Option<f64>,
    /// Number of samples of the first run.
    pub a_n: usize,
    /// Number of samples of the second run.
    pub b_n: usize,
    /// p value of the permutation test, corrected for all metrics after Benjamini and Hochberg.
    pub p_adjusted: f64,
    /// Smallest difference that a test without the correction finds 8 times in 10.
    pub detectable_ms: f64,
    /// Fail: a significant slowdown beyond the margin. Pass: a significant difference that is not a slowdown beyond
    /// the margin, or no significant difference although a slowdown of the margin is detectable. Otherwise
    /// inconclusive.
    pub verdict: Outcome,
}

/// Reason why two runs cannot be compared.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CompareError {
    #[error("cannot compare: one of the directories does not contain a recorded run")]
    NoRun,
    #[error("cannot compare: the runs have different scenarios or different versions of {0}")]
    Scenario(String),
    #[error("cannot compare: the runs are from different hosts, {what} is {a} and {b}")]
    Host {
        /// The fact that differs.
        what: &'static str,
        /// Value in the first run.
        a: String,
        /// Value in the second run.
        b: String,
    },
}

/// Compares quantiles of `replied` and `first_exec` of two runs. `margin` is a share: 0.1 accepts a slowdown of 10 %.
///
/// # Errors
/// Returns [`CompareError`] if a run has no start event, or if the runs differ in scenario, CPU model or kernel.
pub fn compare(a: Side<'_>, b: Side<'_>, margin: f64) -> Result<Comparison, CompareError> {
    let (a_started, b_started) = match (&a.summary.started, &b.summary.started) {
        (Some(a), Some(b)) => (a, b),
        _ => return Err(CompareError::NoRun),
    };
    let scenario = a_started.scenario.name.clone();
    if measured(&a_started.scenario) != measured(&b_started.scenario) {
        return Err(CompareError::Scenario(scenario));
    }
    same_host(a.facts, b.facts)?;
    let tested: Vec<(String, usize, usize, Difference)> =
        [StartPhase::Replied, StartPhase::FirstExec]
            .into_iter()
            .flat_map(|phase| [Quantile::P50, Quantile::P95, Quantile::P99].map(|q| (phase, q)))
            .filter_map(|(phase, q)| test(a.summary, b.summary, phase, q, a_started.scenario.seed))
            .collect();
    let p: Vec<f64> = tested.iter().map(|(.., difference)| difference.p).collect();
    let metrics = tested
        .into_iter()
        .zip(permutation::benjamini_hochberg(&p))
        .map(|((metric, a_n, b_n, d), p_adjusted)| MetricComparison {
            metric,
            a_ms: d.a as f64 / 1e6,
            b_ms: (d.b != INFINITE).then_some(d.b as f64 / 1e6),
            a_n,
            b_n,
            p_adjusted,
            detectable_ms: d.detectable_ns / 1e6,
            verdict: verdict(&d, p_adjusted, margin),
        })
        .collect();
    Ok(Comparison {
        format: FORMAT,
        scenario,
        margin,
        failures: failures(a.summary, b.summary),
        metrics,
    })
}

/// The scenario without the keys that do not affect measurements.
fn measured(scenario: &Scenario) -> Scenario {
    Scenario {
        description: String::new(),
        gates: Vec::new(),
        interference: None,
        ..scenario.clone()
    }
}

fn failures(a: &Summary, b: &Summary) -> FailureComparison {
    let count = |summary: &Summary| {
        let failed = summary.failures().values().sum();
        (failed, summary.clones.len() as u64)
    };
    let ((a, a_n), (b, b_n)) = (count(a), count(b));
    let p = fisher::two_sided(a, a_n, b, b_n);
    // Compares shares without division, because one of the runs may be empty.
    let more = u128::from(b) * u128::from(a_n) > u128::from(a) * u128::from(b_n);
    FailureComparison {
        a,
        a_n,
        b,
        b_n,
        p,
        verdict: if !more {
            Outcome::Pass
        } else if p < LEVEL {
            Outcome::Fail
        } else {
            Outcome::Inconclusive
        },
    }
}

fn same_host(a: &HostFacts, b: &HostFacts) -> Result<(), CompareError> {
    let pairs = [
        ("the CPU", &a.cpu_model, &b.cpu_model),
        ("the kernel", &a.kernel, &b.kernel),
    ];
    for (what, a, b) in pairs {
        if a != b {
            let text = |t: &Option<String>| t.clone().unwrap_or_else(|| "unknown".to_owned());
            return Err(CompareError::Host {
                what,
                a: text(a),
                b: text(b),
            });
        }
    }
    Ok(())
}

fn test(
    a: &Summary,
    b: &Summary,
    phase: StartPhase,
    quantile: Quantile,
    seed: u64,
) -> Option<(String, usize, usize, Difference)> {
    let needs = quantile.needs();
    if a.clones.len() < needs || b.clones.len() < needs {
        return None;
    }
    let (a_blocks, b_blocks) = (blocks(&a.clones, phase), blocks(&b.clones, phase));
    let difference = permutation::compare(&a_blocks, &b_blocks, quantile.permille(), seed)?;
    let name = format!("{}.{}", phase.name(), quantile.name());
    Some((name, a.clones.len(), b.clones.len(), difference))
}

/// Latencies in blocks: one block for each round, or for each start if the run has a single round.
fn blocks(attempts: &[Attempt], phase: StartPhase) -> Vec<Vec<u64>> {
    let mut rounds = std::collections::BTreeMap::<u32, Vec<u64>>::new();
    for attempt in attempts {
        let latency = attempt.latency_ns(phase).unwrap_or(INFINITE);
        rounds.entry(attempt.round).or_default().push(latency);
    }
    if rounds.len() == 1 {
        return rounds.into_values().flatten().map(|ns| vec![ns]).collect();
    }
    rounds.into_values().collect()
}

/// If the difference is not significant, the verdict is a pass only if a slowdown as large as the margin is detectable.
fn verdict(d: &Difference, p_adjusted: f64, margin: f64) -> Outcome {
    if d.b == INFINITE {
        return Outcome::Fail;
    }
    let allowed = d.a as f64 * margin;
    let slower = d.b as f64 - d.a as f64;
    if p_adjusted < LEVEL {
        return if slower > allowed {
            Outcome::Fail
        } else {
            Outcome::Pass
        };
    }
    if d.detectable_ns <= allowed {
        Outcome::Pass
    } else {
        Outcome::Inconclusive
    }
}

impl Comparison {
    /// Exit code of the command.
    #[must_use]
    pub fn end(&self) -> End {
        let any = |verdict| {
            self.failures.verdict == verdict || self.metrics.iter().any(|m| m.verdict == verdict)
        };
        if any(Outcome::Fail) {
            End::GateFailed
        } else if any(Outcome::Inconclusive) || self.metrics.is_empty() {
            End::Inconclusive
        } else {
            End::Pass
        }
    }

    /// Verdict and values of each metric.
    pub(crate) fn section(&self) -> Section {
        let number = |title: &str| Column::Number(title.to_owned());
        let mut columns = vec![Column::Verdict("verdict".to_owned())];
        columns.extend(["A, ms", "B, ms", "change", "p", "detectable", "n"].map(number));
        let f = &self.failures;
        let failures = vec![
            "failed starts".to_owned(),
            f.verdict.name().to_owned(),
            f.a.to_string(),
            f.b.to_string(),
            String::new(),
            format!("{:.4}", f.p),
            String::new(),
            format!("{} / {}", f.a_n, f.b_n),
        ];
        let metrics = self.metrics.iter().map(MetricComparison::row);
        let mut notes = Vec::new();
        if self.metrics.is_empty() {
            notes.push("no quantile has enough samples in both runs".to_owned());
        }
        notes.push(
            "The runs were not interleaved: p does not account for changes of the host between them. `cube-bench ab` \
             compares two builds in one run."
                .to_owned(),
        );
        Section {
            title: "verdicts".to_owned(),
            columns,
            rows: [failures].into_iter().chain(metrics).collect(),
            notes,
        }
    }

    /// The comparison as text for a terminal.
    #[must_use]
    pub fn render(&self) -> String {
        format!(
            "{}: B against A, a slowdown of more than {:.0} % fails\n\n{}",
            self.scenario,
            self.margin * 100.0,
            terminal::section(&self.section())
        )
    }
}

impl MetricComparison {
    fn row(&self) -> Vec<String> {
        let (b, change) = match self.b_ms {
            Some(ms) => (
                milliseconds(ms),
                format!("{:+.1} %", (ms / self.a_ms - 1.0) * 100.0),
            ),
            None => ("failed".to_owned(), String::new()),
        };
        vec![
            self.metric.clone(),
            self.verdict.name().to_owned(),
            milliseconds(self.a_ms),
            b,
            change,
            format!("{:.4}", self.p_adjusted),
            format!("{} ms", milliseconds(self.detectable_ms)),
            format!("{} / {}", self.a_n, self.b_n),
        ]
    }
}
