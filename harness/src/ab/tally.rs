//! Counts how often repeated comparisons of the same two sides report a change. If both sides are the same files,
//! these are false alarms.

use std::fmt::Write;

use serde::{Deserialize, Serialize};
use testbed::exit::End;

use super::{
    compare::{Finding, LEVEL},
    report::AbReport,
};

/// Tally of the reports of repeated comparisons.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    comparisons: u64,
    /// Comparisons in which the sides were the same files.
    same_files: u64,
    worse: u64,
    better: u64,
    either: u64,
    /// Comparisons without a metric.
    empty: u64,
}

/// The JSON document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TallyDocument {
    pub comparisons: u64,
    /// Whether both sides were the same files in all comparisons, so that every change is a false alarm.
    pub same_files: bool,
    /// Comparisons that reported `worse` in a metric or a count.
    pub worse: u64,
    /// Comparisons that reported `better` in a metric or a count.
    pub better: u64,
    /// Comparisons that reported either.
    pub changed: u64,
    /// 95 % interval of the share of comparisons that report a change (Wilson 1927).
    pub changed_share_ci95: [f64; 2],
    /// Comparisons that had no metric to compare, because nothing or too little was measured.
    pub empty: u64,
}

impl Tally {
    pub fn add(&mut self, report: &AbReport) {
        let counts = report.counts.iter().map(|count| count.verdict);
        let metrics = report.metrics.iter().map(|metric| metric.verdict);
        let verdicts: Vec<Finding> = counts.chain(metrics).collect();
        self.add_verdicts(&verdicts, report.same_files, report.metrics.is_empty());
    }

    fn add_verdicts(&mut self, verdicts: &[Finding], same_files: bool, empty: bool) {
        let (worse, better) = (
            verdicts.contains(&Finding::Worse),
            verdicts.contains(&Finding::Better),
        );
        self.comparisons += 1;
        self.same_files += u64::from(same_files);
        self.worse += u64::from(worse);
        self.better += u64::from(better);
        self.either += u64::from(worse || better);
        self.empty += u64::from(empty);
    }

    #[must_use]
    pub fn document(&self) -> TallyDocument {
        let (low, high) = wilson95(self.either, self.comparisons);
        TallyDocument {
            comparisons: self.comparisons,
            same_files: self.same_files == self.comparisons,
            worse: self.worse,
            better: self.better,
            changed: self.either,
            changed_share_ci95: [low, high],
            empty: self.empty,
        }
    }

    #[must_use]
    pub fn render(&self) -> String {
        let d = self.document();
        let [low, high] = d.changed_share_ci95.map(|share| share * 100.0);
        let what = if d.same_files {
            "false alarms"
        } else {
            "changes found"
        };
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "{what}: {} of {} comparisons (95 % {low:.0} to {high:.0} %), {} worse, {} better",
            d.changed, d.comparisons, d.worse, d.better
        );
        if d.empty > 0 {
            let _ = writeln!(out, "{} comparisons had no metric to compare", d.empty);
        }
        out
    }

    /// Fails if identical files were reported as changed significantly more often than [`LEVEL`] allows.
    /// Comparisons without a metric do not count.
    #[must_use]
    pub fn end(&self) -> End {
        let is_same = self.same_files == self.comparisons;
        let decided = self.comparisons - self.empty;
        if is_same && at_least(self.either, self.comparisons, LEVEL) <= LEVEL {
            End::GateFailed
        } else if decided == 0 {
            End::Inconclusive
        } else {
            End::Pass
        }
    }
}

/// Probability of at least `hits` in `n` independent trials that each hit with probability `p`.
fn at_least(hits: u64, n: u64, p: f64) -> f64 {
    let mut term = (1.0 - p).powf(n as f64);
    let mut below = 0.0;
    for k in 0..hits {
        below += term;
        term *= (n - k) as f64 / (k + 1) as f64 * p / (1.0 - p);
    }
    1.0 - below
}

/// Wilson's 95 % interval of a share; 0 to 1 without trials.
fn wilson95(hits: u64, n: u64) -> (f64, f64) {
    if n == 0 {
        return (0.0, 1.0);
    }
    let (n, share, z) = (n as f64, hits as f64 / n as f64, 1.96_f64);
    let middle = share + z * z / (2.0 * n);
    let half = z * (share * (1.0 - share) / n + z * z / (4.0 * n * n)).sqrt();
    let whole = 1.0 + z * z / n;
    (((middle - half) / whole).max(0.0), (middle + half) / whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(alarms: u32, comparisons: u32) -> Tally {
        let mut tally = Tally::default();
        for index in 0..comparisons {
            let verdict = if index < alarms {
                Finding::Worse
            } else {
                Finding::NotShown
            };
            tally.add_verdicts(&[Finding::NotShown, verdict], true, false);
        }
        tally
    }

    #[test]
    fn more_false_alarms_than_chance_explains_fail() {
        // P(at least 3 of 20) is 7.5 %, P(at least 4 of 20) 1.6 %.
        assert_eq!(tally(3, 20).end(), End::Pass);
        assert_eq!(tally(4, 20).end(), End::GateFailed);
        assert!(tally(1, 20).render().contains("false alarms: 1 of 20"));
        assert_eq!(Tally::default().end(), End::Inconclusive);
    }

    #[test]
    fn shares_have_the_published_intervals() {
        // Newcombe 1998, table I: 0 of 20 has 0 to 0.1611, 15 of 148 has 0.0624 to 0.1605.
        let (low, high) = wilson95(0, 20);
        assert!(low == 0.0 && (high - 0.1611).abs() < 1e-4, "{high}");
        let (low, high) = wilson95(15, 148);
        assert!((low - 0.0624).abs() < 1e-4 && (high - 0.1605).abs() < 1e-4);
    }
}
