//! Confidence intervals by cluster bootstrap: whole clusters are resampled with replacement, because the starts of
//! one burst compete for the same cores and are not independent samples.
//!
//! The interval is the hull of two: the *expanded* percentile interval (Hesterberg 2015, "What Teachers Should Know
//! about the Bootstrap", 5.3), and the estimate with Student's factor times the bootstrap's standard error of its
//! logarithm. With 20 clusters, either interval alone covers a high quantile too rarely; a test counts how often
//! the hull covers it.

use crate::{quantile::INFINITE, random::SplitMix64, rank::rank, slope::student_975};

/// Minimum number of clusters for an interval.
pub const NEEDS_CLUSTERS: usize = 6;
/// Minimum number of burst rounds whose quantiles may be published.
pub const PUBLISHED_ROUNDS: u32 = 20;
const RESAMPLES: usize = 1000;
/// Intervals are reproducible: the same samples give the same interval.
const SEED: u64 = 0x0b00_7571_2ab5_eed5;

/// Samples with their clusters, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clusters {
    /// Each sample with the number of its cluster.
    sorted: Vec<(u64, usize)>,
    sizes: Vec<usize>,
}

impl Clusters {
    /// Takes the samples of each cluster, in any order.
    #[must_use]
    pub fn new(clusters: &[Vec<u64>]) -> Self {
        let numbered = clusters.iter().enumerate();
        let mut sorted: Vec<(u64, usize)> = numbered
            .flat_map(|(number, cluster)| cluster.iter().map(move |ns| (*ns, number)))
            .collect();
        sorted.sort_unstable();
        Self {
            sorted,
            sizes: clusters.iter().map(Vec::len).collect(),
        }
    }

    /// Number of clusters.
    #[must_use]
    pub fn count(&self) -> usize {
        self.sizes.len()
    }

    /// Nearest-rank percentile over all samples if cluster `i` is counted `times[i]` times; infinite if it lies
    /// among failures, `None` without samples.
    #[must_use]
    pub fn quantile(&self, times: &[usize], permille: u32) -> Option<f64> {
        let n = self.sizes.iter().zip(times).map(|(size, k)| size * k).sum();
        let rank = rank(n, permille);
        let mut seen = 0;
        for (ns, cluster) in &self.sorted {
            seen += times[*cluster];
            if seen >= rank && rank > 0 {
                return Some(match *ns {
                    INFINITE => f64::INFINITY,
                    ns => ns as f64,
                });
            }
        }
        None
    }

    /// 95 % interval of a percentile. The upper bound is infinite if it lies among failures. `None` with fewer than
    /// [`NEEDS_CLUSTERS`] clusters.
    #[must_use]
    pub fn interval95(&self, permille: u32) -> Option<(f64, f64)> {
        interval95(self.count(), |times| self.quantile(times, permille))
    }
}

/// 95 % interval of a statistic over `n` clusters. The statistic receives how often each cluster was resampled.
/// `None` with fewer than [`NEEDS_CLUSTERS`] clusters, or if the statistic is `None` for a resample.
pub fn interval95(n: usize, statistic: impl Fn(&[usize]) -> Option<f64>) -> Option<(f64, f64)> {
    if n < NEEDS_CLUSTERS {
        return None;
    }
    let mut random = SplitMix64::new(SEED);
    let mut values = Vec::with_capacity(RESAMPLES);
    let mut times = vec![0; n];
    for _ in 0..RESAMPLES {
        times.fill(0);
        for _ in 0..n {
            times[random.below(n)] += 1;
        }
        values.push(statistic(&times)?);
    }
    values.sort_by(f64::total_cmp);
    let factor = student_factor(n);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share below one half of RESAMPLES"
    )]
    let outside = (normal_tail(factor) * RESAMPLES as f64) as usize;
    let (low, high) = (values[outside], values[RESAMPLES - 1 - outside]);
    let estimate = statistic(&vec![1; n])?;
    Some(match standard_error_of_log(&values) {
        None => (low, high),
        Some(error) => {
            let wide = (factor * error).exp();
            (low.min(estimate / wide), high.max(estimate * wide))
        }
    })
}

/// `None` unless there are values and all are positive and finite.
fn standard_error_of_log(values: &[f64]) -> Option<f64> {
    // Relative to the first value, so that equal values have an error of exactly zero.
    let first = values.first()?;
    let logs: Vec<f64> = values.iter().map(|value| (value / first).ln()).collect();
    let n = logs.len() as f64;
    let mean = logs.iter().sum::<f64>() / n;
    let variance = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / n;
    variance.is_finite().then(|| variance.sqrt())
}

/// The 0.975 quantile of Student's distribution with one degree of freedom less than clusters, with the factor that
/// corrects the bootstrap's variance.
fn student_factor(clusters: usize) -> f64 {
    let n = clusters as f64;
    student_975(clusters - 1) * (n / (n - 1.0)).sqrt()
}

/// Upper tail of the normal distribution, after Abramowitz and Stegun 26.2.17, with an error below 1e-7.
fn normal_tail(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z);
    let polynomial = t
        * (0.319_381_530
            + t * (-0.356_563_782
                + t * (1.781_477_937 + t * (-1.821_255_978 + t * 1.330_274_429))));
    (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * polynomial
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(random: &mut SplitMix64) -> f64 {
        // Box and Muller; 1 - unit() is never zero.
        let radius = (-2.0 * (1.0 - random.unit()).ln()).sqrt();
        radius * (2.0 * std::f64::consts::PI * random.unit()).cos()
    }

    /// Starts of a burst queue behind each other, and each round has its own speed.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positive times of milliseconds"
    )]
    fn rounds(random: &mut SplitMix64, n: usize, spread: f64) -> Vec<Vec<u64>> {
        let round = |random: &mut SplitMix64| {
            let speed = (spread * normal(random)).exp();
            (0..20)
                .map(|place| {
                    let queued = 10.0 + 3.0 * f64::from(place);
                    (1e6 * speed * queued * (0.1 * normal(random)).exp()) as u64
                })
                .collect()
        };
        (0..n).map(|_| round(random)).collect()
    }

    fn truth(rounds: &[Vec<u64>], permille: u32) -> f64 {
        let clusters = Clusters::new(rounds);
        clusters
            .quantile(&vec![1; clusters.count()], permille)
            .unwrap()
    }

    fn coverage(n: usize, spread: f64, permille: u32) -> f64 {
        let mut random = SplitMix64::new(2026);
        // The true quantile, from far more rounds than a run has.
        let many = rounds(&mut random, 4000, spread);
        let truth = truth(&many, permille);
        let trials = 200;
        let covered = (0..trials)
            .filter(|_| {
                let sample = rounds(&mut random, n, spread);
                let (low, high) = Clusters::new(&sample).interval95(permille).unwrap();
                low <= truth && truth <= high
            })
            .count();
        covered as f64 / f64::from(trials)
    }

    #[test]
    fn intervals_cover_the_true_quantile_of_simulated_bursts() {
        // If rounds differ by a factor of 1.5, the P95 depends on the few slowest of them. 20 rounds are then too
        // few for 95 %, as docs/measure/measuring.md states.
        for (n, spread, permille, least) in [
            (20, 0.05, 500, 0.92),
            (20, 0.2, 950, 0.92),
            (20, 0.4, 950, 0.87),
            (40, 0.2, 950, 0.92),
        ] {
            let share = coverage(n, spread, permille);
            assert!(
                (least..=0.995).contains(&share),
                "{n} rounds, spread {spread}, {permille} permille: {share}"
            );
        }
    }

    /// For comparison, the interval that assumes independent samples: if each round has its own speed, it misses
    /// the true value far too often.
    #[test]
    fn order_statistics_do_not_cover_it() {
        let mut random = SplitMix64::new(7);
        let many = rounds(&mut random, 4000, 0.2);
        let truth = truth(&many, 950);
        let covered = (0..200)
            .filter(|_| {
                let all: Vec<u64> = rounds(&mut random, 20, 0.2).concat();
                let samples = super::super::quantile::Samples::new(all);
                let (low, high) = samples.interval95(crate::quantile::Quantile::P95).unwrap();
                low <= truth && truth <= high
            })
            .count();
        assert!(covered < 150, "{covered} of 200");
    }

    #[test]
    fn few_clusters_give_no_interval_and_failures_an_infinite_bound() {
        let clusters = vec![vec![1, 2, 3]; NEEDS_CLUSTERS];
        assert_eq!(Clusters::new(&clusters[1..]).interval95(500), None);
        assert_eq!(Clusters::new(&clusters).interval95(500), Some((2.0, 2.0)));
        let mut failing = vec![vec![5, 6, INFINITE]; 3];
        failing.extend(vec![vec![INFINITE, INFINITE, INFINITE]; 4]);
        let (_, high) = Clusters::new(&failing).interval95(500).unwrap();
        assert!(high.is_infinite());
    }

    #[test]
    fn levels_move_outward_with_few_clusters() {
        // Normal tail at 1.96 and, for 20 clusters, at 2.093 times 1.026.
        assert!((normal_tail(1.96) - 0.025).abs() < 1e-4);
        let tail = |clusters| normal_tail(student_factor(clusters));
        assert!((tail(20) - 0.0159).abs() < 5e-4);
        assert!(tail(6) < tail(20) && tail(1000) < 0.0251);
    }
}
