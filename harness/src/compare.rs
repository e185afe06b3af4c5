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
    plan::Subject,
    report::{
        section::{Column, Section},
        terminal,
        units::milliseconds,
    },
    scenario::{Quantile, Scenario},
    summary::{
        cost::{self, whole},
        fold::Summary,
    },
};
use stats::{
    bootstrap::NEEDS_CLUSTERS,
    fisher,
    permutation::{self, Difference},
    quantile::INFINITE,
};

/// Format of the JSON document.
pub const FORMAT: u32 = 3;
/// Corrected p values below this are significant.
const LEVEL: f64 = 0.05;

/// Result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Pass,
    Fail,
    /// Within the margin, but not equal beyond doubt: the second run is significantly slower, or the test has too little
    /// power and the 95 % interval still excludes a loss beyond the margin. It is printed and does not fail.
    Warning,
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
            Self::Warning => "warning",
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
    /// Values for which both runs have enough samples and the first run has a finite value.
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

/// A quantile of times, or the median over rounds of memory or CPU time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricComparison {
    /// For example `first_exec.p95`, `memory.slope` or `cpu_per_start`.
    pub metric: String,
    /// `ms` or `MB`, of `a`, `b` and `detectable`.
    pub unit: String,
    /// Value of the first run.
    pub a: f64,
    /// Value of the second run; `null` if it lies among failures, which fails the comparison.
    pub b: Option<f64>,
    /// Number of samples of the first run; of rounds for memory and CPU time.
    pub a_n: usize,
    /// Number of samples of the second run.
    pub b_n: usize,
    /// p value of the permutation test, corrected for all metrics after Benjamini and Hochberg.
    pub p_adjusted: f64,
    /// Smallest difference that a test without the correction finds 8 times in 10.
    pub detectable: f64,
    /// Fail: a significant loss beyond the margin. Pass: a significant gain, or no significant difference although a loss
    /// of the margin is detectable. Otherwise a warning or inconclusive.
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

/// Compares quantiles of `replied` and `first_exec`, memory of one more clone and CPU time per start of two runs.
/// `margin` is a share: 0.1 accepts a loss of 10 %.
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
    let seed = a_started.scenario.seed;
    let quantiles = [StartPhase::Replied, StartPhase::FirstExec]
        .into_iter()
        .flat_map(|phase| [Quantile::P50, Quantile::P95, Quantile::P99].map(|q| (phase, q)))
        .filter_map(|(phase, q)| test(a.summary, b.summary, phase, q, seed));
    let medians = [
        ("memory.slope", memory as PerRound),
        ("cpu_per_start", cpu as PerRound),
    ]
    .into_iter()
    .filter_map(|(name, of)| test_rounds(name, of(a.summary), of(b.summary), seed));
    let tested: Vec<Tested> = quantiles.chain(medians).collect();
    let p: Vec<f64> = tested.iter().map(|tested| tested.difference.p).collect();
    let metrics = tested
        .into_iter()
        .zip(permutation::benjamini_hochberg(&p))
        .map(|(tested, p_adjusted)| {
            let d = tested.difference;
            MetricComparison {
                unit: if tested.metric == "memory.slope" {
                    "MB"
                } else {
                    "ms"
                }
                .to_owned(),
                metric: tested.metric,
                a: d.a as f64 / 1e6,
                b: (d.b != INFINITE).then_some(d.b as f64 / 1e6),
                a_n: tested.n[0],
                b_n: tested.n[1],
                p_adjusted,
                detectable: d.detectable_ns / 1e6,
                verdict: verdict(&d, p_adjusted, margin),
            }
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

/// A tested difference, with the numbers of samples of both runs.
struct Tested {
    metric: String,
    n: [usize; 2],
    difference: Difference,
}

/// A value of each round, in bytes or nanoseconds.
type PerRound = fn(&Summary) -> Vec<u64>;

fn memory(summary: &Summary) -> Vec<u64> {
    let steps = summary.memory_steps().into_iter();
    steps.filter_map(whole).collect()
}

fn cpu(summary: &Summary) -> Vec<u64> {
    let rate = cost::cpu_ns_per_start(summary, Subject::Clone);
    rate.by_round().filter_map(whole).collect()
}

/// Compares the medians over rounds; `None` with too few rounds.
fn test_rounds(name: &str, a: Vec<u64>, b: Vec<u64>, seed: u64) -> Option<Tested> {
    let n = [a.len(), b.len()];
    if n.iter().any(|n| *n < NEEDS_CLUSTERS) {
        return None;
    }
    let [a, b] = [a, b].map(|values| {
        values
            .into_iter()
            .map(|value| vec![value])
            .collect::<Vec<_>>()
    });
    let difference = permutation::compare(&a, &b, Quantile::P50.permille(), seed)?;
    let metric = name.to_owned();
    Some(Tested {
        metric,
        n,
        difference,
    })
}

fn test(
    a: &Summary,
    b: &Summary,
    phase: StartPhase,
    quantile: Quantile,
    seed: u64,
) -> Option<Tested> {
    let needs = quantile.needs();
    if a.clones.len() < needs || b.clones.len() < needs {
        return None;
    }
    let (a_blocks, b_blocks) = (blocks(&a.clones, phase), blocks(&b.clones, phase));
    let difference = permutation::compare(&a_blocks, &b_blocks, quantile.permille(), seed)?;
    Some(Tested {
        metric: format!("{}.{}", phase.name(), quantile.name()),
        n: [a.clones.len(), b.clones.len()],
        difference,
    })
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

/// If the difference is not significant, the verdict is a pass only if a loss as large as the margin is detectable.
fn verdict(d: &Difference, p_adjusted: f64, margin: f64) -> Outcome {
    if d.b == INFINITE {
        return Outcome::Fail;
    }
    let allowed = d.a as f64 * margin;
    let slower = d.b as f64 - d.a as f64;
    if p_adjusted < LEVEL {
        return match slower {
            slower if slower > allowed => Outcome::Fail,
            slower if slower > 0.0 => Outcome::Warning,
            _ => Outcome::Pass,
        };
    }
    // The detectable difference is 2.8 standard errors, the interval 1.96.
    if d.detectable_ns <= allowed {
        Outcome::Pass
    } else if slower + d.detectable_ns / 2.8 * 1.96 <= allowed {
        Outcome::Warning
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
        columns.extend(["A", "B", "change", "p", "detectable", "n"].map(number));
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
            "{}: B against A, an increase of more than {:.0} % fails\n\n{}",
            self.scenario,
            self.margin * 100.0,
            terminal::section(&self.section())
        )
    }
}

impl MetricComparison {
    fn row(&self) -> Vec<String> {
        let (b, change) = match self.b {
            Some(b) => (
                milliseconds(b),
                format!("{:+.1} %", (b / self.a - 1.0) * 100.0),
            ),
            None => ("failed".to_owned(), String::new()),
        };
        vec![
            format!("{}, {}", self.metric, self.unit),
            self.verdict.name().to_owned(),
            milliseconds(self.a),
            b,
            change,
            format!("{:.4}", self.p_adjusted),
            milliseconds(self.detectable),
            format!("{} / {}", self.a_n, self.b_n),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(b: u64, p: f64, detectable_ns: f64) -> Outcome {
        let d = Difference {
            a: 1000,
            b,
            p,
            detectable_ns,
        };
        verdict(&d, p, 0.1)
    }

    #[test]
    fn a_loss_within_the_margin_warns_and_one_beyond_it_fails() {
        assert_eq!(of(1101, 0.003, 90.0), Outcome::Fail);
        assert_eq!(
            of(1100, 0.003, 90.0),
            Outcome::Warning,
            "exactly the margin"
        );
        assert_eq!(of(900, 0.003, 90.0), Outcome::Pass);
        assert_eq!(of(INFINITE, 1.0, 0.0), Outcome::Fail);
    }

    #[test]
    fn without_power_the_interval_decides_between_warning_and_inconclusive() {
        assert_eq!(of(1050, 0.3, 100.0), Outcome::Pass, "10 % are detectable");
        // 140 detectable: the interval reaches 98 above the estimate.
        assert_eq!(of(1000, 0.9, 140.0), Outcome::Warning);
        assert_eq!(of(1010, 0.9, 140.0), Outcome::Inconclusive);
    }
}
