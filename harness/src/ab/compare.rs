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

/// The metric whose change the comparison must be able to show.
pub const PRIMARY: &str = "first_exec.p50";
/// Largest slowdown, as a share, that a comparison without `--margin` may miss.
pub const MARGIN: f64 = 0.1;

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
    /// Two-sided p value of Fisher's exact test.
    pub p: f64,
    pub verdict: Finding,
}

/// One quantile of one metric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricComparison {
    /// For example `first_exec.p95` or `turn.1.faults.p50`.
    pub metric: String,
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
    /// `p`, corrected for all metrics after Benjamini and Hochberg.
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
    /// Blocks of each build with which a change of one metric alone can be significant.
    pub blocks_needed: usize,
    /// Whether at least one create of each build succeeded.
    pub both_replied: bool,
}

/// Compares all blocks. `tolerance` is a share: 0.02 ignores ratios from 1/1.02 to 1.02.
#[must_use]
pub fn compare(scenario: &Scenario, blocks: &[Block], tolerance: f64, seed: u64) -> Comparison {
    let counts = counts(blocks);
    let (a_failed, b_failed) = (counts[0].a, counts[0].b);
    let found: Vec<MetricComparison> = Metric::all(scenario)
        .iter()
        .filter_map(|metric| measure(metric, blocks, seed))
        .collect();
    let p: Vec<f64> = found.iter().map(|metric| metric.p).collect();
    let family = found.len();
    let metrics = found
        .into_iter()
        .zip(benjamini_hochberg(&p))
        .map(|(mut metric, p_adjusted)| {
            metric.p_adjusted = p_adjusted;
            decide(&mut metric, family, tolerance);
            withhold(&mut metric, a_failed, b_failed);
            metric
        })
        .collect();
    Comparison {
        both_replied: [Side::A, Side::B].into_iter().all(|side| {
            starts(blocks, side).any(|start| start.timeline.at(StartPhase::Replied).is_some())
        }),
        counts,
        metrics,
        blocks_needed: blocks_needed(family),
    }
}

fn starts(blocks: &[Block], side: Side) -> impl Iterator<Item = &Attempt> {
    blocks
        .iter()
        .filter(move |block| block.side == side)
        .flat_map(|block| &block.summary.clones)
}

/// Failures first. If the servers of both builds report origins, also starts that did not come from the warm pool.
fn counts(blocks: &[Block]) -> Vec<CountComparison> {
    let mut counts = vec![count("failures", blocks, |start| start.failure.is_some())];
    let knows_kind = |side| starts(blocks, side).any(|start| start.start.is_some());
    if knows_kind(Side::A) && knows_kind(Side::B) {
        let not_warm = |start: &Attempt| start.start != Some(StartKind::Warm);
        counts.push(count("not_warm", blocks, not_warm));
    }
    counts
}

fn count(name: &str, blocks: &[Block], hit: impl Fn(&Attempt) -> bool) -> CountComparison {
    let of = |side| {
        let n = starts(blocks, side).count() as u64;
        let hits = starts(blocks, side).filter(|start| hit(start)).count() as u64;
        (hits, n)
    };
    let ((a, a_n), (b, b_n)) = (of(Side::A), of(Side::B));
    let p = fisher::two_sided(a, a_n, b, b_n);
    // Compares the shares multiplied by both numbers of starts, to avoid a division by zero.
    let (a_share, b_share) = (
        u128::from(a) * u128::from(b_n),
        u128::from(b) * u128::from(a_n),
    );
    let verdict = if p <= LEVEL && b_share > a_share {
        Finding::Worse
    } else if p <= LEVEL && b_share < a_share {
        Finding::Better
    } else if fisher::two_sided(0, a_n, b_n, b_n) > LEVEL {
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

/// Names of the metrics for which the data do not show that B is worse by at most `margin`, a share: the interval
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
    let open = metrics.iter().filter(|metric| !within(metric));
    open.map(|metric| metric.metric.clone()).collect()
}

/// Names of the primary metrics for which the run has too little power: a change of `margin` is not detectable, and the
/// interval does not exclude it. A primary metric that was not measured is also one of them.
#[must_use]
pub fn without_power(metrics: &[MetricComparison], margin: f64) -> Vec<String> {
    let measured = metrics.iter().find(|metric| metric.metric == PRIMARY);
    let has_power = measured.is_some_and(|metric| {
        metric.verdict != Finding::NotShown
            || metric.detectable_share.is_some_and(|least| least <= margin)
            || not_within(std::slice::from_ref(metric), margin).is_empty()
    });
    let lacking = (!has_power).then(|| PRIMARY.to_owned());
    lacking.into_iter().collect()
}

fn decide(metric: &mut MetricComparison, family: usize, tolerance: f64) {
    if metric.p_adjusted > LEVEL {
        if paired::least_p(metric.pairs) * family as f64 > LEVEL {
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
/// only one of `family` metrics changed.
fn blocks_needed(family: usize) -> usize {
    (1..)
        .find(|pairs| paired::least_p(*pairs) * family.max(1) as f64 <= LEVEL)
        .unwrap_or(usize::MAX)
}
