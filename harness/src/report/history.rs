//! Trends over recorded runs: one HTML page without scripts, with a section for each scenario on each host.
//!
//! The runs of a section are ordered by start time. A section with a single run has no plot. The page does not
//! compare runs: runs at different times are not interleaved, so a step between two points is a reason to run
//! `cube-bench ab`, not a result.

use maud::{Markup, html};
use stats::chart::{Frame, legend, place};

use super::{
    document::Document,
    html,
    phase::PhaseDocument,
    section::{Column, Section},
    units::milliseconds,
};
use crate::{check::Division, gate::Verdict};

/// Colours of P50 and P95.
const COLOURS: [&str; 2] = ["var(--p1)", "var(--p8)"];

/// A directory below one of the directories given on the command line.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Path as shown on the page.
    pub name: String,
    /// The report, or the reason why there is none.
    pub run: Result<Document, String>,
    /// Whether the run answers a shipped question; `None` if it cannot be read.
    pub division: Option<Division>,
}

/// A value of each run, with its 95 % confidence interval.
#[derive(Clone, Debug, PartialEq)]
struct Point {
    /// Number of the run in its section, from 1.
    run: usize,
    value: f64,
    interval: Option<[f64; 2]>,
}

/// A plot: its title, its unit, and its curves by name, in the order of [`COLOURS`].
#[derive(Clone, Debug, PartialEq)]
struct Trend {
    title: String,
    unit: &'static str,
    curves: Vec<(&'static str, Vec<Point>)>,
}

/// Renders the page.
#[must_use]
pub fn render(entries: &[Entry]) -> String {
    let sections = sections(entries);
    let unread: Vec<(&str, &str)> = entries
        .iter()
        .filter_map(|entry| Some((entry.name.as_str(), entry.run.as_ref().err()?.as_str())))
        .collect();
    let read = entries.len() - unread.len();
    let body = html! {
        header {
            h1 { "History" }
            p { (read) " recorded runs. Bars are 95 % confidence intervals within a run. "
                "Runs at different times also differ by their host's condition: use " code { "cube-bench ab" } " to compare builds." }
        }
        @for runs in &sections { (section(runs)) }
        @if !unread.is_empty() {
            section {
                h2 { "Not shown" }
                ul { @for (name, why) in unread { li { code { (name) } ": " (why) } } }
            }
        }
    };
    html::page("History", &body)
}

type Runs<'a> = Vec<(&'a str, &'a Document)>;

/// Groups runs by scenario and host, each group ordered by start time.
fn sections(entries: &[Entry]) -> Vec<Runs<'_>> {
    let key = |d: &Document| {
        let host = &d.host;
        (
            d.scenario.clone(),
            host.cpu_model.clone(),
            host.cores,
            host.platform.clone(),
        )
    };
    let mut runs: Runs<'_> = entries
        .iter()
        .filter_map(|entry| Some((entry.name.as_str(), entry.run.as_ref().ok()?)))
        .collect();
    runs.sort_by_key(|(name, d)| (key(d), d.started_unix_ms, *name));
    runs.chunk_by(|a, b| key(a.1) == key(b.1))
        .map(<[_]>::to_vec)
        .collect()
}

fn section(runs: &[(&str, &Document)]) -> Markup {
    let Some((_, first)) = runs.first() else {
        return html! {};
    };
    let host = &first.host;
    html! {
        section {
            h2 { (first.scenario) }
            p.facts {
                span { (host.cpu_model.as_deref().unwrap_or("unknown CPU")) }
                span { (host.cores) " cores" }
                span { "platform " (host.platform.as_deref().unwrap_or("unknown")) }
            }
            @if runs.len() > 1 { @for trend in trends(runs) { (plot(&trend, runs.len())) } }
            (html::table(&table(runs)))
        }
    }
}

/// The plots of a section. Plots without a value are omitted.
fn trends(runs: &[(&str, &Document)]) -> Vec<Trend> {
    let mut kinds: Vec<String> = runs
        .iter()
        .flat_map(|(_, d)| d.first_execs().into_iter().map(|(kind, _)| kind))
        .collect();
    kinds.sort();
    kinds.dedup();
    let latency = |title: String, of: &dyn Fn(&Document) -> Option<PhaseDocument>| Trend {
        title,
        unit: "ms",
        curves: vec![
            (
                "P50",
                points(runs, |d| {
                    of(d).and_then(|p| Some((p.p50_ms?, p.p50_ci95_ms)))
                }),
            ),
            (
                "P95",
                points(runs, |d| {
                    of(d).and_then(|p| Some((p.p95_ms?, p.p95_ci95_ms)))
                }),
            ),
        ],
    };
    let mut trends: Vec<Trend> = kinds
        .into_iter()
        .map(|kind| {
            let of = |d: &Document| {
                let mut all = d.first_execs().into_iter();
                all.find_map(|(k, p)| (k == kind).then(|| p.clone()))
            };
            latency(format!("{kind}first exec"), &of)
        })
        .collect();
    trends.push(latency("host process".to_owned(), &|d| d.baseline.clone()));
    trends.push(Trend {
        title: "memory of one more clone".to_owned(),
        unit: "MB",
        curves: vec![(
            "slope",
            points(runs, |d| {
                let memory = d.memory.as_ref()?;
                let mb = |bytes: f64| bytes / 1e6;
                Some((
                    mb(memory.slope_bytes_per_clone?),
                    memory.slope_ci95.map(|ci| ci.map(mb)),
                ))
            }),
        )],
    });
    trends.retain(|trend| trend.curves.iter().any(|(_, points)| !points.is_empty()));
    trends
}

fn points(
    runs: &[(&str, &Document)],
    of: impl Fn(&Document) -> Option<(f64, Option<[f64; 2]>)>,
) -> Vec<Point> {
    let point = |(index, (_, d)): (usize, &(&str, &Document))| {
        let (value, interval) = of(d)?;
        Some(Point {
            run: index + 1,
            value,
            interval,
        })
    };
    runs.iter().enumerate().filter_map(point).collect()
}

fn plot(trend: &Trend, runs: usize) -> Markup {
    let all = trend.curves.iter().flat_map(|(_, points)| points);
    let top = all
        .map(|p| p.interval.map_or(p.value, |[_, high]| high.max(p.value)))
        .fold(0.0, f64::max);
    let frame = Frame::new(220.0, runs as f64 + 0.5, top * 1.05);
    let content = html! {
        @for ((_, points), colour) in trend.curves.iter().zip(COLOURS) {
            (curve(&frame, points, colour))
        }
    };
    let entries: Vec<(String, String)> = trend
        .curves
        .iter()
        .zip(COLOURS)
        .map(|((name, _), colour)| ((*name).to_owned(), colour.to_owned()))
        .collect();
    html! {
        h3 { (trend.title) }
        (frame.svg(&trend.title, "run", trend.unit, &content))
        (legend(&entries))
    }
}

fn curve(frame: &Frame, points: &[Point], colour: &str) -> Markup {
    let at = |p: &Point| {
        let x = place(frame.x(p.run as f64));
        format!("{x} {}", place(frame.y(p.value)))
    };
    let line: Vec<String> = points.iter().map(at).collect();
    html! {
        @if !line.is_empty() {
            path class="curve" style={ "stroke:" (colour) } d={ "M" (line.join("L")) } {}
        }
        @for p in points {
            @let x = place(frame.x(p.run as f64));
            @if let Some([low, high]) = p.interval {
                line style={ "stroke:" (colour) } x1=(x) x2=(x) y1=(place(frame.y(low))) y2=(place(frame.y(high))) {}
            }
            circle style={ "fill:" (colour) } cx=(x) cy=(place(frame.y(p.value))) r="3.5" {}
        }
    }
}

fn table(runs: &[(&str, &Document)]) -> Section {
    let row = |(index, (name, d)): (usize, &(&str, &Document))| {
        vec![
            (index + 1).to_string(),
            html::date(d.started_unix_ms),
            (*name).to_owned(),
            commit(d),
            d.host.grade.clone(),
            d.n.to_string(),
            d.failures.values().sum::<u64>().to_string(),
            p95s(d),
            gates(d),
        ]
    };
    let text = |title: &str| Column::Text(title.to_owned());
    let number = |title: &str| Column::Number(title.to_owned());
    Section {
        title: "run".to_owned(),
        columns: vec![
            text("started"),
            text("directory"),
            text("commit"),
            Column::Verdict("grade".to_owned()),
            number("n"),
            number("failed"),
            number("first exec P95, ms"),
            text("gates"),
        ],
        rows: runs.iter().enumerate().map(row).collect(),
        notes: Vec::new(),
    }
}

/// The first characters of the commit; `+` if the tree had changes.
fn commit(d: &Document) -> String {
    let commit = d.host.commit.as_deref().unwrap_or("unknown");
    let changed = if d.host.dirty_tree == Some(true) {
        "+"
    } else {
        ""
    };
    format!("{}{changed}", commit.get(..10).unwrap_or(commit))
}

fn p95s(d: &Document) -> String {
    let all: Vec<String> = d
        .first_execs()
        .iter()
        .filter_map(|(kind, p)| Some(format!("{kind}{}", milliseconds(p.p95_ms?))))
        .collect();
    all.join(", ")
}

/// The failed gates, or the number of gates if all passed.
fn gates(d: &Document) -> String {
    let open = d
        .gates
        .iter()
        .filter(|gate| !matches!(gate.verdict, Verdict::Met | Verdict::OtherHost));
    let open: Vec<String> = open
        .map(|gate| format!("{} {}", gate.verdict.word(), gate.name))
        .collect();
    if open.is_empty() {
        return format!("{} met", d.gates.len());
    }
    open.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::RecordedRun;

    fn published(name: &str) -> Entry {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../results")
            .join(name);
        let recorded = RecordedRun::read(&dir).unwrap();
        Entry {
            name: name.to_owned(),
            run: Ok(Document::new(&recorded.view().unwrap())),
            division: None,
        }
    }

    /// Fixture: a published run, the same run a day later, another scenario, and an unreadable run.
    fn entries() -> Vec<Entry> {
        let mut later = published("single-ring3-2core-20261122");
        later.name = "later".to_owned();
        if let Ok(document) = &mut later.run {
            document.started_unix_ms += 86_400_000;
        }
        vec![
            later,
            published("single-ring3-2core-20261122"),
            published("density-ring3-2core-20261122"),
            Entry {
                name: "broken".to_owned(),
                run: Err("cannot read <events>".to_owned()),
                division: None,
            },
        ]
    }

    #[test]
    fn runs_are_grouped_by_scenario_and_ordered_by_their_start() {
        let entries = entries();
        let names: Vec<Vec<&str>> = sections(&entries)
            .iter()
            .map(|runs| runs.iter().map(|(name, _)| *name).collect())
            .collect();
        let single = ["single-ring3-2core-20261122", "later"];
        assert_eq!(
            names,
            [vec!["density-ring3-2core-20261122"], single.to_vec()]
        );
    }

    #[test]
    fn runs_of_another_host_are_a_section_of_their_own() {
        let mut entries = entries();
        if let Ok(document) = &mut entries[0].run {
            document.host.cores += 1;
        }
        assert_eq!(sections(&entries).len(), 3);
    }

    #[test]
    fn a_trend_has_the_values_and_intervals_of_the_reports() {
        let entries = entries();
        let sections = sections(&entries);
        let (_, second) = sections[1][1];
        let (kind, phase) = &second.first_execs()[0];
        let trends = trends(&sections[1]);
        let title = format!("{kind}first exec");
        let trend = trends.iter().find(|trend| trend.title == title).unwrap();
        let (name, p95) = &trend.curves[1];
        assert_eq!(*name, "P95");
        let want = Point {
            run: 2,
            value: phase.p95_ms.unwrap(),
            interval: phase.p95_ci95_ms,
        };
        assert_eq!(p95.last(), Some(&want));
    }

    #[test]
    fn a_run_that_cannot_be_read_is_listed_with_the_reason_and_escaped() {
        let page = render(&entries());
        assert!(page.contains("3 recorded runs"));
        assert!(page.contains("cannot read &lt;events&gt;"), "{page}");
    }
}
