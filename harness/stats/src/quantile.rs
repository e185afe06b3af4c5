//! Quantiles of latencies, their confidence intervals, and the smallest sample sizes for reported quantiles.

use serde::{Deserialize, Serialize};

use crate::{
    bootstrap::Clusters,
    rank::{nearest_rank, rank},
};

/// Latency of a failed start: larger than every measured latency.
pub const INFINITE: u64 = u64::MAX;

/// The value of a quantile, or the reason why it has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Estimate {
    /// Nanoseconds.
    Value(u64),
    /// The quantile lies among the failed starts.
    Infinite,
    /// The number of samples is smaller than `needs`.
    TooFew { needs: usize },
}

/// A quantile that reports print and gates can limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantile {
    P50,
    P95,
    P99,
    /// The largest sample.
    Max,
}

impl Quantile {
    /// All quantiles in ascending order.
    pub const ALL: [Self; 4] = [Self::P50, Self::P95, Self::P99, Self::Max];

    /// Name in metrics, JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::P50 => "p50",
            Self::P95 => "p95",
            Self::P99 => "p99",
            Self::Max => "max",
        }
    }

    /// The quantile in thousandths.
    #[must_use]
    pub fn permille(self) -> u32 {
        match self {
            Self::P50 => 500,
            Self::P95 => 950,
            Self::P99 => 990,
            Self::Max => 1000,
        }
    }

    /// Smallest number of samples for which the quantile is reported.
    #[must_use]
    pub fn needs(self) -> usize {
        match self {
            Self::P50 => 10,
            Self::P95 => 100,
            Self::P99 => 500,
            Self::Max => 1,
        }
    }
}

/// Latencies in nanoseconds, failures included as [`INFINITE`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Samples {
    /// In ascending order.
    all: Vec<u64>,
    /// `None` for independent samples.
    clusters: Option<Clusters>,
}

impl Samples {
    /// Takes independent latencies in any order.
    #[must_use]
    pub fn new(mut latencies_ns: Vec<u64>) -> Self {
        latencies_ns.sort_unstable();
        Self {
            all: latencies_ns,
            clusters: None,
        }
    }

    /// Takes the latencies of each cluster. Samples of one cluster depend on each other.
    #[must_use]
    pub fn clustered(clusters: &[Vec<u64>]) -> Self {
        Self {
            clusters: Some(Clusters::new(clusters)),
            ..Self::new(clusters.concat())
        }
    }

    /// All samples in ascending order, failures last.
    #[must_use]
    pub fn all(&self) -> &[u64] {
        &self.all
    }

    /// Number of samples, failures included.
    #[must_use]
    pub fn n(&self) -> usize {
        self.all.len()
    }

    /// Number of failures.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.n() - self.finite().len()
    }

    /// Samples without failures, in ascending order.
    #[must_use]
    pub fn finite(&self) -> &[u64] {
        let end = self.all.partition_point(|ns| *ns != INFINITE);
        &self.all[..end]
    }

    #[must_use]
    pub fn quantile(&self, quantile: Quantile) -> Estimate {
        let needs = quantile.needs();
        match nearest_rank(&self.all, quantile.permille()) {
            Some(_) | None if self.n() < needs => Estimate::TooFew { needs },
            None => Estimate::TooFew { needs },
            Some(INFINITE) => Estimate::Infinite,
            Some(ns) => Estimate::Value(ns),
        }
    }

    /// 95 % confidence interval of a quantile in nanoseconds, distribution-free: by bootstrap over clusters, or from
    /// order statistics if the samples are independent. The upper bound is infinite if it lies among the failures.
    /// `None` for the maximum, and with too few samples or clusters.
    #[must_use]
    pub fn interval95(&self, quantile: Quantile) -> Option<(f64, f64)> {
        if quantile == Quantile::Max || self.n() < quantile.needs() {
            return None;
        }
        if let Some(clusters) = &self.clusters {
            return clusters.interval95(quantile.permille());
        }
        let (low, high) = order_interval(self.n(), f64::from(quantile.permille()) / 1000.0)?;
        let at = |rank: usize| match self.all[rank - 1] {
            INFINITE => f64::INFINITY,
            ns => ns as f64,
        };
        Some((at(low), at(high)))
    }

    /// Number of clusters; every sample of independent samples is one.
    #[must_use]
    pub fn clusters(&self) -> usize {
        let clusters = self.clusters.as_ref().map(Clusters::count);
        clusters.unwrap_or(self.n())
    }
}

/// Ranks `low < high`, counted from 1, such that the number of samples below the quantile is in `low..high` with a
/// probability of at least 0.95. The range grows from the mode of Binomial(n, q) to the more likely side. `None` if `n`
/// samples are too few.
pub fn order_interval(n: usize, q: f64) -> Option<(usize, usize)> {
    let weights = binomial(n, q);
    let mode = (0..weights.len()).max_by(|a, b| weights[*a].total_cmp(&weights[*b]))?;
    let (mut first, mut last) = (mode, mode);
    let mut covered = weights[mode];
    while covered < 0.95 {
        let below = first.checked_sub(1).map_or(0.0, |i| weights[i]);
        let above = weights.get(last + 1).copied().unwrap_or(0.0);
        if below == 0.0 && above == 0.0 {
            return None;
        }
        if below >= above {
            first -= 1;
            covered += below;
        } else {
            last += 1;
            covered += above;
        }
    }
    // If `k` samples are below the quantile, the quantile lies between the samples of rank k and k + 1.
    (first >= 1 && last < n).then_some((first, last + 1))
}

/// Probabilities of 0 to n successes in Binomial(n, q), computed from the mode outward to avoid underflow.
fn binomial(n: usize, q: f64) -> Vec<f64> {
    let odds = q / (1.0 - q);
    let mode = rank(n, 1000).min((0..=n).take_while(|k| (*k as f64) <= n as f64 * q).count());
    let mut weights = vec![0.0; n + 1];
    weights[mode.min(n)] = 1.0;
    for k in mode + 1..=n {
        weights[k] = weights[k - 1] * odds * (n - k + 1) as f64 / k as f64;
    }
    for k in (0..mode).rev() {
        weights[k] = weights[k + 1] / odds * (k + 1) as f64 / (n - k) as f64;
    }
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|w| w / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn too_few_samples_give_no_quantile() {
        let samples = Samples::new((1..=99).collect());
        assert_eq!(samples.quantile(Quantile::P50), Estimate::Value(50));
        assert_eq!(
            samples.quantile(Quantile::P95),
            Estimate::TooFew { needs: 100 }
        );
        assert_eq!(samples.quantile(Quantile::Max), Estimate::Value(99));
        let none = Samples::default();
        assert_eq!(none.quantile(Quantile::Max), Estimate::TooFew { needs: 1 });
    }

    #[test]
    fn failures_count_as_the_largest_samples() {
        let samples = Samples::new((1..=94).chain([INFINITE; 6]).collect());
        assert_eq!(samples.failed(), 6);
        assert_eq!(samples.quantile(Quantile::P95), Estimate::Infinite);
        assert_eq!(samples.quantile(Quantile::P50), Estimate::Value(50));
        assert_eq!(samples.quantile(Quantile::Max), Estimate::Infinite);
        let (_, high) = samples.interval95(Quantile::P95).unwrap();
        assert!(high.is_infinite());
    }

    #[test]
    fn intervals_match_the_textbook() {
        // Conover, Practical Nonparametric Statistics: median of 100, ranks 40 and 60 or 61.
        let (low, high) = order_interval(100, 0.5).unwrap();
        assert!(
            (39..=41).contains(&low) && (60..=62).contains(&high),
            "{low} {high}"
        );
        assert_eq!(order_interval(10, 0.99), None);
    }

    proptest! {
        #[test]
        fn an_interval_contains_its_estimate(samples in prop::collection::vec(0_u64..1_000_000, 100..700)) {
            let samples = Samples::new(samples);
            for quantile in [Quantile::P50, Quantile::P95] {
                if let (Estimate::Value(v), Some((low, high))) =
                    (samples.quantile(quantile), samples.interval95(quantile)) {
                    prop_assert!(low <= v as f64 && v as f64 <= high);
                }
            }
        }
    }
}
