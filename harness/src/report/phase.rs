//! Quantiles of one kind of times in a report.

use serde::{Deserialize, Serialize};
use stats::quantile::{Estimate, Quantile, Samples};

use super::units::milliseconds;

/// Quantiles of the latencies of a phase, or of the times of a turn, a round or a repeated command. A quantile is
/// `null` with too few samples, or if it lies among the failures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseDocument {
    /// Samples, failures included.
    pub n: usize,
    /// Failures among the samples, for example starts that did not reach the phase.
    pub failed: usize,
    pub p50_ms: Option<f64>,
    pub p95_ms: Option<f64>,
    pub p99_ms: Option<f64>,
    pub max_ms: Option<f64>,
    /// 95 % confidence interval, by bootstrap over rounds; `null` with too few samples or rounds, or if its upper bound
    /// lies among the failures.
    pub p50_ci95_ms: Option<[f64; 2]>,
    pub p95_ci95_ms: Option<[f64; 2]>,
    pub p99_ci95_ms: Option<[f64; 2]>,
}

impl PhaseDocument {
    /// Computes quantiles and intervals of the samples.
    #[must_use]
    pub fn new(samples: &Samples) -> Self {
        let ms = |quantile| match samples.quantile(quantile) {
            Estimate::Value(ns) => Some(ns as f64 / 1e6),
            Estimate::Infinite | Estimate::TooFew { .. } => None,
        };
        let interval = |quantile| {
            let (low, high) = samples.interval95(quantile)?;
            high.is_finite().then_some([low / 1e6, high / 1e6])
        };
        Self {
            n: samples.n(),
            failed: samples.failed(),
            p50_ms: ms(Quantile::P50),
            p95_ms: ms(Quantile::P95),
            p99_ms: ms(Quantile::P99),
            max_ms: ms(Quantile::Max),
            p50_ci95_ms: interval(Quantile::P50),
            p95_ci95_ms: interval(Quantile::P95),
            p99_ci95_ms: interval(Quantile::P99),
        }
    }

    /// The same; `None` without samples.
    pub(super) fn present(samples: &Samples) -> Option<Self> {
        (samples.n() > 0).then(|| Self::new(samples))
    }

    /// Formats a quantile: milliseconds, `failed`, or `n/a` with too few samples.
    pub(super) fn cell(&self, quantile: Quantile) -> String {
        let ms = match quantile {
            Quantile::P50 => self.p50_ms,
            Quantile::P95 => self.p95_ms,
            Quantile::P99 => self.p99_ms,
            Quantile::Max => self.max_ms,
        };
        match ms {
            Some(ms) => milliseconds(ms),
            None if self.n >= quantile.needs() => "failed".to_owned(),
            None => format!("n/a (n = {})", self.n),
        }
    }

    /// The same without the number of samples.
    pub(crate) fn short(&self, quantile: Quantile) -> String {
        if self.n < quantile.needs() {
            return "n/a".to_owned();
        }
        self.cell(quantile)
    }

    /// The 95 % interval of P95; empty if there is none.
    pub(super) fn p95_interval(&self) -> String {
        let interval = self.p95_ci95_ms;
        interval.map_or(String::new(), |[low, high]| {
            format!("{}–{}", milliseconds(low), milliseconds(high))
        })
    }
}
