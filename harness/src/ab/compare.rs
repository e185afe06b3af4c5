//! The comparison itself: computes findings from recorded blocks.

use std::collections::BTreeMap;

use model::StartPhase;
use serde::{Deserialize, Serialize};

use super::{Side, metrics::Metric, record::Block};
use crate::{
    event::{Attempt, StartKind},
    scenario::Scenario,
};
use stats::{fisher, paired, permutation::benjamini_hochberg};

/// Largest p value with which a change is reported as `better` or `worse`.
pub const LEVEL: f64 = 0.05;

/// The primary metrics of a comparison that declares none.
pub const PRIMARY: [&str; 3] = ["first_exec.p50", "cpu_per_start.p50", "memory.slope.p50"];
/// Largest slowdown, as a share, that a comparison without `--margin` may miss.
pub const MARGIN: f64 = 0.1;

/// How changes become verdicts, fixed before the first block.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Names of the primary metrics, as declared; empty for those of [`PRIMARY`] that were measured.
    pub primary: Vec<String>,
    /// Error rate of this evaluation; see [`super::sequential`].
    pub alpha: f64,
    /// Smallest change that counts, as a share.
    pub tolerance: f64,
}

/// Result of comparing B with A.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    Better,
    Worse,
    /// The data do not show a change beyond the tolerance, or the verdict was withheld. This does not prove equality:
    /// changes smaller than `detectable_share` are likely to be missed.
    NotShown,
    /// With so few blocks (for a count, so few starts), even the largest possible change of this metric alone would
    /// not be significant.
    TooFewBlocks,
    /// The metric is not a primary one: its values describe, and have no verdict.
    Described,
}

impl Finding {
    /// Wording in reports.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::NotShown => "not shown",
            Self::TooFewBlocks => "too few blocks",
            Self::Described => "",
        }
    }
}

/// Number of starts of each build for which a condition was true.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CountComparison {
    /// `failures`, or `not_warm` for sandboxes that did not come from the pool.
    pub name: String,
    pub a: u64,
    /// Measured starts of A.
    pub a_n: u64,
    pub b: u64,
    /// Measured starts of B.
    pub b_n: u64,
    /// Two-sided p value of Fisher's exact test, corrected for the number of looks.
    pub p: f64,
    pub verdict: Finding,
}

/// One quantile of one metric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricComparison {
    /// For example `first_exec.p95` or `turn.1.faults.p50`.
    pub metric: String,
    /// Whether the metric was declared before the run, so that it has a verdict.
    #[serde(default)]
    pub primary: bool,
    /// `ms`, `faults`, `MB` or `per s`.
    pub unit: String,
    /// Whether a larger value is better.
    #[serde(default)]
    pub more_is_better: bool,
    /// Quantile over all starts of A.
    pub a: f64,
    /// Quantile over all starts of B.
    pub b: f64,
    /// Samples of A.
    pub a_n: usize,
    /// Samples of B.
    pub b_n: usize,
    /// Pairs of blocks in which the quantile is defined for both builds.
    pub pairs: usize,
    /// B/A, estimated from the ratios within pairs, which removes drift between pairs. It therefore differs from `b` /
    /// `a`.
    pub ratio: f64,
    /// 95 % bootstrap interval of the ratio; `null` with fewer than 6 pairs.
    pub ratio_ci95: Option<[f64; 2]>,
    /// p value of the signed-rank test over pairs.
    pub p: f64,
    /// Of a primary metric: `p`, corrected for all of them after Benjamini and Hochberg and for the number of looks. Of
    /// others: `p`.
    pub p_adjusted: f64,
    /// Smallest change, as a share of A, that a test without the correction would find 8 times in 10; `null` for one
    /// pair.
    pub detectable_share: Option<f64>,
    pub verdict: Finding,
    /// Why a significant change is not reported as `better` or `worse`; otherwise `null`.
    pub reason: Option<String>,
    /// Whether the change is not reported because the build with the lower value failed more often.
    pub withheld: bool,
}

/// All comparisons of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    pub counts: Vec<CountComparison>,
    pub metrics: Vec<MetricComparison>,
    /// Declared primary metrics without samples.
    pub not_measured: Vec<String>,
    /// Blocks of each build with which a change of one metric alone can be significant.
    pub blocks_needed: usize,
    /// Whether at least one create of each build succeeded.
    pub both_replied: bool,
}

/// Compares all blocks.
#[must_use]
pub fn compare(scenario: &Scenario, blocks: &[Block], rule: &Rule, seed: u64) -> Comparison {
    let looks = LEVEL / rule.alpha;
    let counts = counts(blocks, looks);
    let (a_failed, b_failed) = (counts[0].a, counts[0].b);
    let found: Vec<MetricComparison> = Metric::all(scenario)
        .iter()
        .filter_map(|metric| measure(metric, blocks, seed))
        .collect();
    let (mut primary, mut described): (Vec<_>, Vec<_>) = found
        .into_iter()
        .partition(|metric| rule.is_primary(&metric.metric));
    let p: Vec<f64> = primary.iter().map(|metric| metric.p).collect();
    let family = primary.len();
    for (metric, p_adjusted) in primary.iter_mut().zip(benjamini_hochberg(&p)) {
        metric.primary = true;
        metric.p_adjusted = (p_adjusted * looks).min(1.0);
        decide(metric, family as f64 * looks, rule.tolerance);
        withhold(metric, a_failed, b_failed);
    }
    for metric in &mut described {
        metric.verdict = Finding::Described;
    }
    let is_measured = |name: &&String| primary.iter().any(|metric| names(name, &metric.metric));
    let declared = rule.primary.iter();
    let not_measured = declared
        .filter(|name| !is_measured(name))
        .cloned()
        .collect();
    primary.append(&mut described);
    let metrics = primary;
    Comparison {
        both_replied: [Side::A, Side::B].into_iter().all(|side| {
            starts(blocks, side).any(|start| start.timeline.at(StartPhase::Replied).is_some())
        }),
        counts,
        metrics,
        not_measured,
        blocks_needed: blocks_needed(family as f64 * looks),
    }
}

/// Whether `declared` names a metric. The quantile may be left out if the metric has one value for each block.
#[must_use]
pub fn names(declared: &str, metric: &str) -> bool {
    metric
        .strip_prefix(declared)
        .is_some_and(|rest| rest.is_empty() || rest == ".p50")
}

impl Rule {
    fn is_primary(&self, metric: &str) -> bool {
        if self.primary.is_empty() {
            return PRIMARY.contains(&metric);
        }
        self.primary.iter().any(|name| names(name, metric))
    }
}

fn starts(blocks: &[Block], side: Side) -> impl Iterator<Item = &Attempt> {
    blocks
        .iter()
        .filter(move |block| block.side == side)
        .flat_map(|block| &block.summary.clones)
}

/// Failures first. If the servers of both builds report origins, also starts that did not come from the warm pool.
fn counts(blocks: &[Block], looks: f64) -> Vec<CountComparison> {
    let failed = |start: &Attempt| start.failure.is_some();
    let mut counts = vec![count("failures", blocks, looks, failed)];
    let knows_kind = |side| starts(blocks, side).any(|start| start.start.is_some());
    if knows_kind(Side::A) && knows_kind(Side::B) {
        let not_warm = |start: &Attempt| start.start != Some(StartKind::Warm);
        counts.push(count("not_warm", blocks, looks, not_warm));
    }
    counts
}

fn count(
    name: &str,
    blocks: &[Block],
    looks: f64,
    hit: impl Fn(&Attempt) -> bool,
) -> CountComparison {
    let of = |side| {
        let n = starts(blocks, side).count() as u64;
        let hits = starts(blocks, side).filter(|start| hit(start)).count() as u64;
        (hits, n)
    };
    let ((a, a_n), (b, b_n)) = (of(Side::A), of(Side::B));
    let p = (fisher::two_sided(a, a_n, b, b_n) * looks).min(1.0);
    // Compares the shares multiplied by both numbers of starts, to avoid a division by zero.
    let (a_share, b_share) = (
        u128::from(a) * u128::from(b_n),
        u128::from(b) * u128::from(a_n),
    );
    let verdict = if p <= LEVEL && b_share > a_share {
        Finding::Worse
    } else if p <= LEVEL && b_share < a_share {
        Finding::Better
    } else if fisher::two_sided(0, a_n, b_n, b_n) * looks > LEVEL {
        Finding::TooFewBlocks
    } else {
        Finding::NotShown
    };
    CountComparison {
        name: name.to_owned(),
        a,
        a_n,
        b,
        b_n,
        p,
        verdict,
    }
}

/// One metric before the correction of p. `None` if the quantile over all starts is undefined for a build, or if no
/// pair has the quantile of both builds.
fn measure(metric: &Metric, blocks: &[Block], seed: u64) -> Option<MetricComparison> {
    let mut pooled: BTreeMap<Side, Vec<u64>> = BTreeMap::new();
    let mut by_pair: BTreeMap<usize, BTreeMap<Side, f64>> = BTreeMap::new();
    for block in blocks {
        let samples = metric.source.samples(&block.summary);
        let quantile = metric.of_block(samples.clone());
        pooled.entry(block.side).or_default().extend(samples);
        if let Some(value) = quantile {
            by_pair
                .entry(block.pair)
                .or_default()
                .insert(block.side, value);
        }
    }
    let log_ratios: Vec<f64> = by_pair
        .values()
        .filter_map(|pair| Some((pair.get(&Side::B)? / pair.get(&Side::A)?).ln()))
        .collect();
    let found = paired::estimate(&log_ratios, seed)?;
    let (a, b) = (pooled.remove(&Side::A)?, pooled.remove(&Side::B)?);
    let (unit, scale) = metric.source.unit();
    Some(MetricComparison {
        metric: metric.name.clone(),
        primary: false,
        unit: unit.to_owned(),
        more_is_better: metric.is_rate(),
        a_n: a.len(),
        b_n: b.len(),
        a: metric.pooled(a)? / scale,
        b: metric.pooled(b)? / scale,
        pairs: log_ratios.len(),
        ratio: found.ratio,
        ratio_ci95: found.interval95.map(|(low, high)| [low, high]),
        p: found.p,
        p_adjusted: found.p,
        detectable_share: found.detectable,
        verdict: Finding::NotShown,
        reason: None,
        withheld: false,
    })
}

/// Names of the primary metrics for which the data do not show that B is worse by at most `margin`, a share: the interval
/// is missing or ends beyond the margin. Each metric must be shown separately, so no correction for multiple
/// metrics applies.
#[must_use]
pub fn not_within(metrics: &[MetricComparison], margin: f64) -> Vec<String> {
    let within = |metric: &&MetricComparison| {
        metric.ratio_ci95.is_some_and(|[low, high]| {
            let worst = if metric.more_is_better {
                1.0 / low
            } else {
                high
            };
            worst <= 1.0 + margin
        })
    };
    let primary = metrics.iter().filter(|metric| metric.primary);
    let open = primary.filter(|metric| !within(metric));
    open.map(|metric| metric.metric.clone()).collect()
}

/// Names of the primary metrics for which the run has too little power: a change of `margin` is not detectable, and the
/// interval does not exclude it. A declared metric that was not measured is also one of them.
#[must_use]
pub fn without_power(comparison: &Comparison, margin: f64) -> Vec<String> {
    let lacks = |metric: &&MetricComparison| {
        metric.verdict == Finding::NotShown
            && metric.detectable_share.is_none_or(|least| least > margin)
            && !not_within(std::slice::from_ref(*metric), margin).is_empty()
    };
    let primary = comparison.metrics.iter().filter(|metric| metric.primary);
    let lacking = primary.filter(lacks).map(|metric| metric.metric.clone());
    lacking
        .chain(comparison.not_measured.iter().cloned())
        .collect()
}

/// `tests` is the number of tests that share the error rate.
fn decide(metric: &mut MetricComparison, tests: f64, tolerance: f64) {
    if metric.p_adjusted > LEVEL {
        if paired::least_p(metric.pairs) * tests > LEVEL {
            metric.verdict = Finding::TooFewBlocks;
        }
        return;
    }
    let cost = if metric.more_is_better {
        1.0 / metric.ratio
    } else {
        metric.ratio
    };
    if cost > 1.0 + tolerance {
        metric.verdict = Finding::Worse;
    } else if cost < 1.0 / (1.0 + tolerance) {
        metric.verdict = Finding::Better;
    } else {
        metric.reason = Some(format!(
            "the change is within the tolerance of {} %",
            tolerance * 100.0
        ));
    }
}

/// Withholds the verdict if the build with the better value failed more often.
fn withhold(metric: &mut MetricComparison, a_failed: u64, b_failed: u64) {
    let reason = match metric.verdict {
        Finding::Better if b_failed > a_failed => "B is better, but failed more often",
        Finding::Worse if a_failed > b_failed => "A is better, but failed more often",
        _ => return,
    };
    metric.verdict = Finding::NotShown;
    metric.reason = Some(reason.to_owned());
    metric.withheld = true;
}

/// The smallest number of pairs with which the smallest possible p value is still significant after the correction, if
/// only one of the metrics changed.
fn blocks_needed(tests: f64) -> usize {
    (1..)
        .find(|pairs| paired::least_p(*pairs) * tests.max(1.0) <= LEVEL)
        .unwrap_or(usize::MAX)
}
