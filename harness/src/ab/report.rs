//! The report of a comparison: a document for programs, text for people, and the exit code.

use serde::{Deserialize, Serialize};
use testbed::{
    exit::End,
    junit::{self, Case, Outcome},
};

use super::{
    builds::Build,
    compare::{self, Comparison, CountComparison, Finding, LEVEL, MetricComparison, Rule},
    record::{Block, Recorded},
    sequential,
};
use crate::{
    host::grade::{self, Grade, Graded, NoiseLevel},
    report::{
        markdown,
        section::{Column, Section},
        terminal,
    },
};

/// Format of the JSON document.
pub const FORMAT: u32 = 2;
/// Name of the document in the directory of the comparison.
pub const REPORT_FILE: &str = "report.json";

/// The JSON document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AbReport {
    /// [`FORMAT`].
    pub format: u32,
    /// Name of the scenario.
    pub scenario: String,
    /// Wall clock in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Command line that repeats the comparison.
    pub reproduce: String,
    pub exit_code: u8,
    pub grade: Grade,
    /// Rules that lowered the grade.
    pub grade_reasons: Vec<String>,
    pub a: Build,
    pub b: Build,
    /// Whether programs and template of both builds have the same hashes.
    pub same_files: bool,
    /// Planned blocks of each build.
    pub blocks: u32,
    /// Planned pairs after which the comparison was evaluated before its end and was decided; `null` otherwise.
    #[serde(default)]
    pub decided_after: Option<u32>,
    /// Pairs of blocks that were completed and are compared.
    pub pairs: usize,
    /// Pairs excluded because one of their blocks did not measure (too much of the host's memory was in use) or was
    /// disturbed by other programs.
    #[serde(default)]
    pub pairs_left_out: usize,
    /// Excluded pairs with a disturbed block.
    #[serde(default)]
    pub pairs_disturbed: usize,
    /// Blocks of each build with which a change of one metric alone can be significant.
    pub blocks_needed: usize,
    /// Smallest change that counts, as a share.
    pub tolerance: f64,
    /// Largest accepted slowdown as a share; `null` if none was given.
    #[serde(default)]
    pub margin: Option<f64>,
    /// Metrics for which it is not shown that B stays within `margin`; empty without a margin.
    #[serde(default)]
    pub not_within_margin: Vec<String>,
    /// Primary metrics for which a change of `margin`, or of 10 % without one, was not detectable.
    #[serde(default)]
    pub without_power: Vec<String>,
    /// Failures, and starts that did not come from the warm pool.
    pub counts: Vec<CountComparison>,
    pub metrics: Vec<MetricComparison>,
}

impl AbReport {
    /// Computes the report and the exit status of the command from recorded data.
    #[must_use]
    pub fn new(recorded: &Recorded) -> (Self, End) {
        let plan = &recorded.plan;
        let graded = grade(recorded);
        let Evaluated {
            comparison,
            pairs,
            decided_after,
        } = evaluate(recorded);
        let done = recorded.blocks.len() / 2 + recorded.left_out;
        let is_complete =
            decided_after.is_some() || u32::try_from(done).is_ok_and(|pairs| pairs == plan.blocks);
        let not_within_margin = plan.margin.map_or(Vec::new(), |margin| {
            compare::not_within(&comparison.metrics, margin)
        });
        let without_power =
            compare::without_power(&comparison, plan.margin.unwrap_or(compare::MARGIN));
        let is_open = !(not_within_margin.is_empty() && without_power.is_empty());
        let end = match end(&comparison, is_complete, graded.grade) {
            // Without a pair that counts, nothing was learned about the targets.
            End::TargetUnreachable if pairs == 0 => End::Inconclusive,
            End::Pass if is_open => End::Inconclusive,
            end => end,
        };
        let report = Self {
            format: FORMAT,
            scenario: plan.scenario.name.clone(),
            started_unix_ms: plan.started_unix_ms,
            reproduce: plan.reproduce.clone(),
            exit_code: end.code(),
            grade: graded.grade,
            grade_reasons: graded.reasons,
            same_files: plan.a.same_files(&plan.b),
            a: plan.a.clone(),
            b: plan.b.clone(),
            blocks: plan.blocks,
            decided_after,
            pairs,
            pairs_left_out: recorded.left_out,
            pairs_disturbed: recorded.disturbed,
            blocks_needed: comparison.blocks_needed,
            tolerance: plan.tolerance,
            margin: plan.margin,
            not_within_margin,
            without_power,
            counts: comparison.counts,
            metrics: comparison.metrics,
        };
        (report, end)
    }

    /// Pretty JSON with a final newline.
    #[must_use]
    pub fn json(&self) -> String {
        // Serializing plain values does not fail.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }
}

/// The evaluation that counts.
struct Evaluated {
    comparison: Comparison,
    /// Pairs that were compared.
    pairs: usize,
    /// The early look that decided; `None` for all recorded pairs.
    decided_after: Option<u32>,
}

/// Evaluates the recorded pairs at each planned look, up to the first one that decides.
fn evaluate(recorded: &Recorded) -> Evaluated {
    let plan = &recorded.plan;
    let rule = Rule {
        primary: plan.primary.clone(),
        alpha: sequential::alpha(&plan.looks),
        tolerance: plan.tolerance,
    };
    let margin = plan.margin.unwrap_or(compare::MARGIN);
    // The last block is ignored if its pair is incomplete.
    let whole = &recorded.blocks[..recorded.blocks.len() / 2 * 2];
    let done = whole.len() / 2 + recorded.left_out;
    let early = plan.looks.iter().filter(|look| **look < plan.blocks);
    for look in early {
        let seen = usize::try_from(*look).unwrap_or(usize::MAX);
        if seen > done {
            break;
        }
        let blocks: Vec<Block> = whole.iter().filter(|b| b.pair < seen).cloned().collect();
        let comparison = compare::compare(&plan.scenario, &blocks, &rule, plan.seed);
        if sequential::decides(&comparison, margin) {
            return Evaluated {
                comparison,
                pairs: blocks.len() / 2,
                decided_after: Some(*look),
            };
        }
    }
    Evaluated {
        comparison: compare::compare(&plan.scenario, whole, &rule, plan.seed),
        pairs: whole.len() / 2,
        decided_after: None,
    }
}

/// Grade of the host over the whole run. Uncommitted changes in the source trees of the builds lower it; changes in
/// the source tree of `cube-bench` do not.
fn grade(recorded: &Recorded) -> Graded {
    let Some(facts) = &recorded.host else {
        return Graded {
            grade: Grade::Unfit,
            reasons: vec!["no block was completed".to_owned()],
        };
    };
    let builds = [&recorded.plan.a, &recorded.plan.b];
    let mut facts = facts.clone();
    facts.dirty_tree = Some(builds.iter().any(|build| build.dirty_tree != Some(false)));
    let noise: Vec<_> = recorded
        .blocks
        .iter()
        .flat_map(|block| block.summary.noise.iter().copied())
        .collect();
    grade::grade(&facts, NoiseLevel::of(&noise))
}

fn end(comparison: &Comparison, is_complete: bool, grade: Grade) -> End {
    let verdicts = || {
        let counts = comparison.counts.iter().map(|count| count.verdict);
        counts.chain(comparison.metrics.iter().map(|metric| metric.verdict))
    };
    let any = |finding| verdicts().any(|verdict| verdict == finding);
    let withheld = comparison.metrics.iter().any(|metric| metric.withheld);
    if !is_complete {
        End::Interrupted
    } else if !comparison.both_replied {
        End::TargetUnreachable
    } else if any(Finding::Worse) {
        End::GateFailed
    } else if any(Finding::TooFewBlocks)
        || withheld
        || comparison.metrics.is_empty()
        || grade == Grade::Unfit
    {
        End::Inconclusive
    } else {
        End::Pass
    }
}

/// The report for a terminal.
#[must_use]
pub fn render(report: &AbReport) -> String {
    let sections: Vec<String> = sections(report).iter().map(terminal::section).collect();
    sections.join("\n")
}

/// The report for a comment on a pull request.
#[must_use]
pub fn markdown(report: &AbReport) -> String {
    let sections: Vec<String> = sections(report).iter().map(markdown::section).collect();
    format!(
        "{}\nReproduce: `{}`\n",
        sections.join("\n"),
        report.reproduce
    )
}

/// The report as JUnit XML, with a case for each count and each primary metric.
#[must_use]
pub fn junit(report: &AbReport) -> String {
    let counts = report.counts.iter();
    let counts = counts.map(|count| {
        let shown = format!(
            "{} of {} and {} of {}",
            count.a, count.a_n, count.b, count.b_n
        );
        (&count.name, count.verdict, shown)
    });
    let primary = report.metrics.iter().filter(|metric| metric.primary);
    let metrics = primary.map(|metric| {
        let shown = format!("{:.2} and {:.2} {}", metric.a, metric.b, metric.unit);
        (&metric.metric, metric.verdict, shown)
    });
    let is_open = |name: &String| {
        report.without_power.contains(name) || report.not_within_margin.contains(name)
    };
    let case = |(name, verdict, shown): (&String, Finding, String)| Case {
        class: report.scenario.clone(),
        name: name.clone(),
        seconds: None,
        outcome: match verdict {
            Finding::Worse => Outcome::Failed,
            Finding::TooFewBlocks => Outcome::Error("too few blocks"),
            Finding::NotShown if is_open(name) => Outcome::Error("inconclusive"),
            Finding::NotShown | Finding::Better | Finding::Described => Outcome::Passed,
        },
        message: format!(
            "{}: A and B have {shown}; reproduce: {}",
            verdict.words(),
            report.reproduce
        ),
    };
    let mut cases: Vec<Case> = counts.chain(metrics).map(case).collect();
    // A metric that was declared and not measured is not a pass.
    let is_missing = |name: &&String| !cases.iter().any(|case| case.name == **name);
    let missing: Vec<Case> = (report.without_power.iter().filter(is_missing))
        .map(|name| Case {
            class: report.scenario.clone(),
            name: name.clone(),
            seconds: None,
            outcome: Outcome::Error("not measured"),
            message: format!("no samples of this metric; reproduce: {}", report.reproduce),
        })
        .collect();
    cases.extend(missing);
    junit::render(&[(&report.scenario, cases)])
}

fn sections(report: &AbReport) -> Vec<Section> {
    let mut sections = vec![head(report), host(report), counts(report)];
    sections.extend((!report.metrics.is_empty()).then(|| metrics(report)));
    sections.push(Section::remarks("conclusion", notes(report)));
    sections
}

fn head(report: &AbReport) -> Section {
    let starts = |pick: fn(&CountComparison) -> u64| report.counts.first().map_or(0, pick);
    let title = format!(
        "{}: {} blocks of each build in the order A B B A, {} starts of A and {} of B",
        report.scenario,
        report.pairs,
        starts(|count| count.a_n),
        starts(|count| count.b_n),
    );
    let builds = [("A", &report.a), ("B", &report.b)];
    let mut head = Section::list(
        &title,
        builds.map(|(letter, build)| (letter.to_owned(), describe(build))),
    );
    if report.same_files {
        let same = "A and B are the same files: every change below is noise or chance";
        head.notes.push(same.to_owned());
    }
    head
}

fn host(report: &AbReport) -> Section {
    Section::remarks(
        &format!("host graded {}", report.grade),
        report.grade_reasons.clone(),
    )
}

fn describe(build: &Build) -> String {
    let short = |text: &str| text.chars().take(8).collect::<String>();
    let mut text = build.path.display().to_string();
    if let Some(commit) = &build.commit {
        text.push_str(&format!("  commit {}", short(commit)));
        if build.dirty_tree == Some(true) {
            text.push_str(" (modified)");
        }
    }
    for (program, sum) in &build.binaries {
        text.push_str(&format!("  {program} {}", short(sum)));
    }
    if let Some(sum) = build.template.get("memory") {
        text.push_str(&format!("  template {}", short(sum)));
    }
    text
}

fn counts(report: &AbReport) -> Section {
    let row = |count: &CountComparison| {
        vec![
            count.name.clone(),
            format!("{} of {}", count.a, count.a_n),
            format!("{} of {}", count.b, count.b_n),
            format!("{:.4}", count.p),
            count.verdict.words().to_owned(),
        ]
    };
    judged(
        "counts",
        &["A", "B", "p"],
        report.counts.iter().map(row).collect(),
    )
}

fn metrics(report: &AbReport) -> Section {
    let row = |metric: &MetricComparison| {
        let interval = metric
            .ratio_ci95
            .map(|[low, high]| format!("{low:.3}–{high:.3}"));
        let detectable = metric.detectable_share;
        let detectable = detectable.map(|share| format!("{:.1} %", share * 100.0));
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "n/a".to_owned());
        let reason = metric.reason.as_ref();
        let reason = reason.map_or(String::new(), |reason| format!(": {reason}"));
        vec![
            label(metric),
            format!("{:.2}", metric.a),
            format!("{:.2}", metric.b),
            format!("{:.3}", metric.ratio),
            or_none(interval),
            format!("{:.4}", metric.p_adjusted),
            or_none(detectable),
            format!("{}{reason}", metric.verdict.words()),
        ]
    };
    let columns = ["A", "B", "B/A", "95 %", "p", "detectable"];
    judged(
        "metrics",
        &columns,
        report.metrics.iter().map(row).collect(),
    )
}

/// A table of numbers whose last column is the verdict.
fn judged(title: &str, numbers: &[&str], rows: Vec<Vec<String>>) -> Section {
    let numbers = numbers
        .iter()
        .map(|title| Column::Number((*title).to_owned()));
    let verdict = Column::Text("verdict".to_owned());
    Section {
        title: title.to_owned(),
        columns: numbers.chain([verdict]).collect(),
        rows,
        notes: Vec::new(),
    }
}

/// Name with unit, such as `first_exec.p50 ms`; page faults are counts and have no unit.
fn label(metric: &MetricComparison) -> String {
    match metric.unit.as_str() {
        "faults" => metric.metric.clone(),
        unit => format!("{} {unit}", metric.metric),
    }
}

fn notes(report: &AbReport) -> Vec<String> {
    let mut notes = Vec::new();
    if report.metrics.is_empty() {
        notes.push(
            "no metric has enough samples: P50 needs 10 starts of each build, P95 needs 100 and 20 in each block"
                .to_owned(),
        );
    }
    notes.push(format!(
        "verdicts of the {} primary metrics: p of at most {LEVEL} after correction for them and for the looks, and a change \
         of more than {} %; the other rows describe",
        report.metrics.iter().filter(|metric| metric.primary).count(),
        report.tolerance * 100.0
    ));
    if let Some(look) = report.decided_after {
        notes.push(format!(
            "decided at the planned look after {look} of {} pairs",
            report.blocks
        ));
    }
    if let Some(margin) = report.margin {
        let percent = margin * 100.0;
        notes.push(match report.not_within_margin.as_slice() {
            [] => format!("B is shown to be worse by at most {percent} % in every primary metric"),
            open => format!(
                "not shown that B is worse by at most {percent} %: {}; more blocks help",
                open.join(", ")
            ),
        });
    }
    for name in &report.without_power {
        notes.push(format!(
            "not decided: this run could miss a change of {name} by {} %; use more --blocks or --starts",
            report.margin.unwrap_or(compare::MARGIN) * 100.0
        ));
    }
    let planned = usize::try_from(report.blocks).unwrap_or(usize::MAX);
    if report.pairs_left_out > 0 {
        notes.push(format!(
            "{} of {planned} pairs are left out: {} disturbed by other programs, {} without memory for a block",
            report.pairs_left_out,
            report.pairs_disturbed,
            report.pairs_left_out - report.pairs_disturbed
        ));
    }
    if report.decided_after.is_none() && report.pairs + report.pairs_left_out < planned {
        notes.push(format!(
            "the run was cut short: {} of {planned} pairs of blocks are complete",
            report.pairs
        ));
    }
    let too_few = |metric: &&MetricComparison| metric.verdict == Finding::TooFewBlocks;
    for metric in report.metrics.iter().filter(too_few) {
        notes.push(format!(
            "too few blocks for {}: a change needs {} pairs with values to reach p {LEVEL}, and {} have them: use at least \
             --blocks {1}, or more --starts",
            metric.metric, report.blocks_needed, metric.pairs
        ));
    }
    notes
}
