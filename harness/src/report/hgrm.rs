//! Percentile files in the text format of HdrHistogram, which its plotter and wrk2 read. The value of a row is in
//! milliseconds.
//!
//! A histogram keeps three digits, so these files are for comparing and plotting. Published quantiles come from the exact
//! samples.

use hdrhistogram::Histogram;
use stats::quantile::{INFINITE, Samples};

use super::View;
use crate::summary::fold;

/// Significant digits of a histogram.
const DIGITS: u8 = 3;
/// Rows for each halving of the distance to 100 %, as HdrHistogram's own tools print them.
const TICKS: u32 = 5;
/// Largest latency that a histogram holds, in nanoseconds: more than a day. Longer ones are recorded as this long.
const LONGEST: u64 = 1 << 47;

/// Name and contents of a file for each phase of the target. If sandboxes have different origins, each origin also has
/// separate files, because the others mix them.
pub(super) fn files(view: &View<'_>) -> Vec<(String, String)> {
    let mut files: Vec<(String, String)> = Vec::new();
    let mut add = |prefix: &str, phases: Vec<(model::StartPhase, Samples)>| {
        let file = |(phase, samples): (model::StartPhase, Samples)| {
            let name = format!("{prefix}{}.hgrm", phase.name());
            Some((name, render(&samples)?))
        };
        files.extend(phases.into_iter().filter_map(file));
    };
    add("", view.summary.phases());
    let origins = view.summary.by_start();
    if origins.len() > 1 {
        for (kind, clones) in &origins {
            let prefix = format!("{}.", fold::start_name(*kind));
            add(&prefix, fold::ladder(clones));
        }
    }
    files
}

/// The percentiles of the samples. Failed starts count as slower than all others: the rows end where they begin.
/// `None` without a successful start.
fn render(samples: &Samples) -> Option<String> {
    let finite = samples.finite();
    let max = finite.last()?;
    // The crate accepts these constants as bounds.
    let mut found = Histogram::<u64>::new_with_bounds(1, LONGEST, DIGITS).ok()?;
    finite.iter().for_each(|ns| found.saturating_record(*ns));
    let (mean, deviation) = (found.mean(), found.stdev());
    for _ in 0..samples.failed() {
        found.saturating_record(INFINITE);
    }
    let mut text = format!(
        "{:>12} {:>14} {:>10} {:>14}\n\n",
        "Value", "Percentile", "TotalCount", "1/(1-Percentile)"
    );
    let (mut count, last) = (0, finite.len() as u64);
    for row in found.iter_quantiles(TICKS) {
        count += row.count_since_last_iteration();
        if count > last {
            break;
        }
        let (value, share) = (
            milliseconds(row.value_iterated_to()),
            row.quantile_iterated_to(),
        );
        let inverse = if share < 1.0 {
            format!("{:14.2}", 1.0 / (1.0 - share))
        } else {
            String::new()
        };
        let line = format!("{value:12.6} {share:14.12} {count:10} {inverse}");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text.push_str(&format!(
        "#[Mean    = {:12.6}, StdDeviation   = {:12.6}]\n#[Max     = {:12.6}, Total count    = {:12}]\n#[Failed  = {:12}]\n",
        mean / 1e6,
        deviation / 1e6,
        milliseconds(*max),
        samples.n(),
        samples.failed(),
    ));
    Some(text)
}

fn milliseconds(ns: u64) -> f64 {
    ns as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use stats::{
        quantile::{Estimate, Quantile},
        random::SplitMix64,
    };

    /// Value in milliseconds, share and count of each row.
    fn rows(text: &str) -> Vec<(f64, f64, usize)> {
        let rows = text.lines().skip(2).filter(|line| !line.starts_with('#'));
        rows.map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            assert!(matches!(words.len(), 3 | 4), "{line}");
            let number = |n: usize| words[n].parse::<f64>().unwrap();
            (number(0), number(1), words[2].parse().unwrap())
        })
        .collect()
    }

    /// Latencies with a heavy tail: 50 µs to about a second.
    fn samples(n: usize, failed: usize) -> Samples {
        let mut random = SplitMix64::new(7);
        let mut draw =
            || 50_000 + (1_000_000_000 >> (random.next_u64() % 14)) + random.next_u64() % 50_000;
        let latencies = (0..n).map(|_| draw());
        Samples::new(latencies.chain(vec![INFINITE; failed]).collect())
    }

    #[test]
    fn quantiles_read_from_a_file_are_the_exact_ones_within_its_precision() {
        let samples = samples(5000, 0);
        let text = render(&samples).unwrap();
        let rows = rows(&text);
        for quantile in [Quantile::P50, Quantile::P95, Quantile::P99, Quantile::Max] {
            let Estimate::Value(exact) = samples.quantile(quantile) else {
                panic!("{quantile:?} has a value");
            };
            let share = f64::from(quantile.permille()) / 1000.0;
            let before = rows.iter().rev().find(|row| row.1 <= share).unwrap().0;
            let after = rows.iter().find(|row| row.1 >= share).unwrap().0;
            let exact = exact as f64 / 1e6;
            assert!(
                before / 1.001 <= exact && exact <= after * 1.001,
                "{quantile:?}: {before} {exact} {after}"
            );
        }
        for (value, share, count) in rows {
            let exact = samples.all()[count - 1] as f64 / 1e6;
            assert!(
                exact <= value + 1e-6 && value <= exact * 1.001,
                "{share}: {value}, {exact}"
            );
        }
        assert!(text.contains("Total count    =         5000]"), "{text}");
    }

    #[test]
    fn rows_end_where_failed_starts_begin() {
        let text = render(&samples(90, 10)).unwrap();
        let rows = rows(&text);
        let (_, share, count) = rows.last().unwrap();
        assert!(*share <= 0.9 && *count <= 90, "{text}");
        assert!(text.contains("#[Failed  =           10]"), "{text}");
        assert!(rows.iter().all(|row| row.0 < 2000.0), "{text}");
        assert_eq!(render(&Samples::new(vec![INFINITE; 3])), None);
        assert_eq!(render(&Samples::default()), None);
    }
}
