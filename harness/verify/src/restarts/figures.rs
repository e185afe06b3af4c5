//! The measurements of a run, and their tables and plot.

use std::{
    collections::BTreeMap,
    fmt::{Result, Write},
};

use maud::html;
use serde::{Deserialize, Serialize};
use stats::{
    chart::{Frame, standalone},
    rank::nearest_rank,
};
use testbed::exit::End;

use super::event::{Cause, Work};
use crate::report::Figures;

/// Colours of the curves.
const COLOURS: [&str; 4] = ["#4e79a7", "#f28e2b", "#59a14f", "#d1495b"];

/// Kinds of restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// SIGKILL. Requests may fail and streams are cut, with errors, but nothing is lost.
    Unplanned,
    /// `cube-api reload`. No request fails, and no stream is cut.
    Planned,
}

impl Kind {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unplanned => "unplanned",
            Self::Planned => "planned",
        }
    }
}

/// Result of restarts without load.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bare {
    /// Programs that were started.
    pub starts: u32,
    /// Number of programs that were killed before they responded.
    pub killed_early: u32,
    /// Failed starts, each with the end of the log, and sandboxes that the last start did not find.
    pub failed: Vec<String>,
}

/// Why the run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    Complete,
    Interrupted,
    /// The server stopped responding.
    Hung,
}

/// Numbers of a restart. Times are milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RestartReport {
    pub kind: Kind,
    pub build: usize,
    pub starts: u32,
    /// From the start of the program to the first accepted connection.
    pub connected_ms: Option<f64>,
    /// From the start of the program to the first response; for a planned restart, until `cube-api reload` ended.
    pub answered_ms: Option<f64>,
    /// Longest time without a response to the clients that look up sandboxes on new connections.
    pub gap_ms: Option<f64>,
    /// Longest duration of a successful request, not counting slow transfers.
    pub slowest_ms: Option<f64>,
    /// For each sandbox, from the start of the program (for a planned restart, the end of the reload) to its
    /// response.
    pub reached_ms: Vec<f64>,
    /// Number of successful requests and stream parts.
    pub done: BTreeMap<Work, u64>,
    pub failed: BTreeMap<Work, BTreeMap<Cause, u64>>,
    /// Streams that ended with an error.
    pub cut: BTreeMap<Work, u64>,
    /// Number of sandboxes that did not respond or lost their number.
    pub lost: u64,
    pub servers: usize,
    pub warm_before: Option<u64>,
    pub warm_after: Option<u64>,
}

/// The measurements of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RestartFigures {
    pub ended: Ended,
    pub sandboxes: usize,
    pub seed: u64,
    pub restarts: Vec<RestartReport>,
    /// Number of successful requests and stream parts, including those between restarts.
    pub done: BTreeMap<Work, u64>,
    pub bare: Option<Bare>,
}

impl Figures for RestartFigures {
    fn terminal(&self) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = write_terminal(&mut out, self);
        out
    }

    /// Shows the plot from the file `restarts.svg` next to it.
    fn markdown(&self) -> String {
        let mut out = String::new();
        let _ = write_markdown(&mut out, self);
        out
    }

    fn end(&self, of_cases: End) -> End {
        match self.ended {
            Ended::Interrupted => End::Interrupted,
            Ended::Complete | Ended::Hung => of_cases,
        }
    }
}

impl RestartFigures {
    /// Distributions of the time without a response and of the time to reach each sandbox, as an SVG file.
    #[must_use]
    pub fn plot(&self) -> String {
        let mut curves = Vec::new();
        for kind in [Kind::Unplanned, Kind::Planned] {
            let restarts = of(self, kind);
            let gaps = restarts.iter().filter_map(|r| r.gap_ms);
            let reached = restarts.iter().flat_map(|r| r.reached_ms.iter().copied());
            curves.push((kind, Row::new("no answer to new connections", gaps)));
            curves.push((kind, Row::new("each sandbox", reached)));
        }
        let mut curves: Vec<_> = curves.into_iter().zip(COLOURS).collect();
        curves.retain(|((_, row), _)| !row.sorted.is_empty());
        let longest = curves.iter().filter_map(|((_, row), _)| row.sorted.last());
        let frame = Frame::new(320.0, longest.copied().fold(0.0, f64::max) * 1.02, 100.0);
        let content = html! {
            @for (line, ((kind, row), colour)) in curves.iter().enumerate() {
                path class="curve" style={ "stroke:" (colour) } d=(frame.distribution(&row.sorted, row.sorted.len())) {}
                text x=(frame.x(0.0) + 420.0) y=(230.0 - 18.0 * line as f64) style={ "fill:" (colour) } {
                    (kind.name()) ": " (row.name) " (n = " (row.sorted.len()) ")"
                }
            }
        };
        standalone(&frame.svg("times of restarts", "ms", "% of samples", &content))
    }
}

/// A distribution of times in milliseconds.
struct Row {
    name: &'static str,
    sorted: Vec<f64>,
}

impl Row {
    fn new(name: &'static str, times: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = times.collect();
        sorted.sort_by(f64::total_cmp);
        Self { name, sorted }
    }

    /// A percentile; `n/a` if there are too few samples for it.
    fn quantile(&self, permille: u32, needs: usize) -> String {
        match nearest_rank(&self.sorted, permille) {
            Some(ms) if self.sorted.len() >= needs => format!("{ms:.0}"),
            _ => "n/a".to_owned(),
        }
    }

    fn cells(&self) -> [String; 5] {
        [
            self.sorted.len().to_string(),
            self.quantile(500, 10),
            // As for every P95 in this repository, fewer than 100 samples give none. The maximum is always printed.
            self.quantile(950, 100),
            self.quantile(1000, 1),
            self.name.to_owned(),
        ]
    }
}

fn of(figures: &RestartFigures, kind: Kind) -> Vec<&RestartReport> {
    let all = figures.restarts.iter();
    all.filter(|restart| restart.kind == kind).collect()
}

fn rows(restarts: &[&RestartReport], kind: Kind) -> Vec<Row> {
    let each = || restarts.iter().copied();
    let answer = match kind {
        Kind::Unplanned => "first answer, from the start of the program",
        Kind::Planned => "cube-api reload",
    };
    let reached = match kind {
        Kind::Unplanned => "each sandbox, from the start of the program",
        Kind::Planned => "each sandbox, from the end of the reload",
    };
    let rows = [
        Row::new(
            "first connection, from the start of the program",
            each().filter_map(|r| r.connected_ms),
        ),
        Row::new(answer, each().filter_map(|r| r.answered_ms)),
        Row::new(reached, each().flat_map(|r| r.reached_ms.iter().copied())),
        Row::new(
            "last sandbox",
            each().filter_map(|r| r.reached_ms.iter().copied().reduce(f64::max)),
        ),
        Row::new(
            "longest time without an answer to new connections",
            each().filter_map(|r| r.gap_ms),
        ),
        Row::new("slowest request", each().filter_map(|r| r.slowest_ms)),
    ];
    rows.into_iter()
        .filter(|row| !row.sorted.is_empty())
        .collect()
}

/// Failed requests and streams during restarts of a kind: cause and count.
fn failures(restarts: &[&RestartReport]) -> Vec<(String, u64)> {
    let mut sums: Vec<(String, u64)> = Vec::new();
    let mut add = |what: String, n: u64| match sums.iter_mut().find(|(name, _)| *name == what) {
        Some((_, sum)) => *sum += n,
        None => sums.push((what, n)),
    };
    for restart in restarts {
        for (work, causes) in &restart.failed {
            for (cause, n) in causes {
                add(format!("{} failed ({})", work.name(), cause.name()), *n);
            }
        }
        for (work, n) in &restart.cut {
            add(format!("{} cut", work.name()), *n);
        }
    }
    sums.sort();
    sums
}

fn warm(restarts: &[&RestartReport]) -> String {
    let sum = |pick: fn(&RestartReport) -> Option<u64>| {
        let known: Vec<u64> = restarts.iter().filter_map(|r| pick(r)).collect();
        match known.len() {
            0 => "n/a".to_owned(),
            n => format!("{:.1}", known.iter().sum::<u64>() as f64 / n as f64),
        }
    };
    format!(
        "{} before, {} after",
        sum(|r| r.warm_before),
        sum(|r| r.warm_after)
    )
}

fn write_terminal(out: &mut String, figures: &RestartFigures) -> Result {
    for kind in [Kind::Unplanned, Kind::Planned] {
        let restarts = of(figures, kind);
        if restarts.is_empty() {
            continue;
        }
        writeln!(
            out,
            "{} {} restarts, {} sandboxes",
            restarts.len(),
            kind.name(),
            figures.sandboxes
        )?;
        writeln!(out, "{:>7} {:>7} {:>7} {:>7}  ms", "n", "P50", "P95", "max")?;
        for row in rows(&restarts, kind) {
            let [n, p50, p95, max, name] = row.cells();
            writeln!(out, "{n:>7} {p50:>7} {p95:>7} {max:>7}  {name}")?;
        }
        for (what, n) in failures(&restarts) {
            writeln!(out, "{n:>7}  {what}")?;
        }
        writeln!(out, "mean warm slots: {}\n", warm(&restarts))?;
    }
    if let Some(bare) = &figures.bare {
        writeln!(
            out,
            "{} starts without load, {} of them killed before the first answer, {} failed\n",
            bare.starts,
            bare.killed_early,
            bare.failed.len()
        )?;
    }
    writeln!(out, "seed {}\n", figures.seed)
}

fn write_markdown(out: &mut String, figures: &RestartFigures) -> Result {
    writeln!(out, "# Restarts\n")?;
    let requests: u64 = figures.done.values().sum();
    writeln!(
        out,
        "{} sandboxes, {requests} requests and parts of streams that succeeded, seed {}.\n",
        figures.sandboxes, figures.seed
    )?;
    writeln!(out, "![times until the first answer](restarts.svg)")?;
    for kind in [Kind::Unplanned, Kind::Planned] {
        let restarts = of(figures, kind);
        if restarts.is_empty() {
            continue;
        }
        writeln!(out, "\n## {} {} restarts\n", restarts.len(), kind.name())?;
        writeln!(out, "| ms | n | P50 | P95 | max |\n|---|--:|--:|--:|--:|")?;
        for row in rows(&restarts, kind) {
            let [n, p50, p95, max, name] = row.cells();
            writeln!(out, "| {name} | {n} | {p50} | {p95} | {max} |")?;
        }
        let failed = failures(&restarts);
        if failed.is_empty() {
            writeln!(out, "\nNo request failed, and no stream was cut.")?;
        } else {
            writeln!(out, "\n| during the restarts | |\n|---|--:|")?;
        }
        for (what, n) in failed {
            writeln!(out, "| {what} | {n} |")?;
        }
        writeln!(out, "\nMean warm slots: {}.", warm(&restarts))?;
    }
    if let Some(bare) = &figures.bare {
        writeln!(
            out,
            "\n## {} starts without load\n\n{} killed before the first answer, {} failed.",
            bare.starts,
            bare.killed_early,
            bare.failed.len()
        )?;
    }
    writeln!(out, "\n## Findings\n")
}
