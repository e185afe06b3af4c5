//! The sections of a run's report: rows and sentences of its [`Document`], in the order of all renderers.

use std::collections::BTreeMap;

use model::StartPhase;
use stats::quantile::Quantile;
use testbed::exit::End;

use super::{
    View,
    cluster::ClusterDocument,
    density,
    document::{CLONE_ROW, Document},
    interference::InterferenceDocument,
    load::LoadDocument,
    memory::MemoryDocument,
    peers::PeersDocument,
    phase::PhaseDocument,
    section::{Column, Section},
    turns::{self, TurnsDocument},
    units::quantity,
};
use crate::gate::GateResult;

type Latencies<'a> = Vec<(String, &'a PhaseDocument)>;

/// Subject, host and grade of the measurement.
pub(super) fn head(view: &View<'_>, d: &Document) -> Section {
    let host = &d.host;
    let title = format!("{} — n = {}, host graded {}", d.scenario, d.n, host.grade);
    let mut notes = vec![view.scenario.description.clone(), d.place()];
    notes.retain(|note| !note.is_empty());
    if !host.built_from.is_empty() {
        notes.push(host.programs());
    }
    notes.extend(host.grade_reasons.iter().cloned());
    if d.exit_code == End::TargetUnreachable.code() {
        notes.push("no create was answered".to_owned());
    }
    if d.ended != "complete" {
        let why = d.end_message.as_deref();
        let why = why.map_or(String::new(), |why| format!(" ({why})"));
        notes.push(format!("the run ended early: {}{why}", d.ended));
    }
    Section::remarks(&title, notes)
}

/// All sections except the head and the gates. None is empty.
pub(super) fn results(view: &View<'_>, d: &Document) -> Vec<Section> {
    let sections = [
        d.peers.as_ref().map(PeersDocument::section),
        Some(latency(d)),
        Some(costs(d)),
        d.interference.as_ref().map(InterferenceDocument::section),
        turns::ratios(d),
        Some(turns::faults(d)),
        Some(density::section(&d.levels)),
        d.memory.as_ref().map(MemoryDocument::section),
        Some(failures(view)),
    ];
    let sections = sections.into_iter().flatten();
    sections.filter(|section| !section.is_empty()).collect()
}

/// Empty without gates.
pub(super) fn gates(view: &View<'_>, d: &Document) -> Section {
    let row = |gate: &GateResult| {
        vec![
            format!("{} ({})", gate.name, gate.metric),
            gate.verdict.word().to_owned(),
            quantity(gate.measured, &gate.unit),
            quantity(Some(gate.limit), &gate.unit),
            gate.n.to_string(),
            gate.reason.clone(),
        ]
    };
    let excuse = view.is_excused().then(|| {
        format!(
            "A missed time or rate on a host graded {} makes the run inconclusive (exit code 5); with --strict it fails.",
            d.host.grade
        )
    });
    Section {
        title: "gates".to_owned(),
        columns: vec![
            Column::Verdict("verdict".to_owned()),
            Column::Number("measured".to_owned()),
            Column::Number("limit".to_owned()),
            Column::Number("n".to_owned()),
            Column::Remark("reason".to_owned()),
        ],
        rows: view.gates.iter().map(row).collect(),
        notes: excuse.into_iter().collect(),
    }
}

fn latency(d: &Document) -> Section {
    let row = |(name, p): (String, &PhaseDocument)| {
        let quantiles = Quantile::ALL.map(|quantile| p.cell(quantile));
        let cells = [name, p.n.to_string()].into_iter().chain(quantiles);
        cells.chain([p.p95_interval()]).collect()
    };
    Section::numbers(
        "latency, ms from the intended start",
        ["n", "P50", "P95", "P99", "max", "P95, 95 % interval"],
        latencies(d).into_iter().map(row).collect(),
    )
}

/// All rows of latencies with their names. The rows of phases are separate for each origin.
fn latencies(d: &Document) -> Latencies<'_> {
    let beside_name = beside_row(d).unwrap_or_default();
    let mut rows: Latencies<'_> = d.load.iter().flat_map(LoadDocument::latencies).collect();
    if has_rates(d) {
        // With several rates, these rows would mix them.
        return rows;
    }
    if d.starts.is_empty() {
        let name = d.start_name.as_ref();
        let prefix = name.map_or(String::new(), |name| format!("{name}: "));
        rows.extend(ladder(d, &prefix, &d.phases));
    }
    for (kind, phases) in &d.starts {
        rows.extend(ladder(d, &format!("{}: ", start_row(kind)), phases));
    }
    if let Some(phases) = &d.beside {
        rows.extend(ladder(d, &format!("{beside_name}: "), phases));
    }
    let templates = d.templates.iter();
    rows.extend(templates.map(|(name, row)| (format!("template {name}: first_exec"), row)));
    rows.extend(d.work.iter().flat_map(|work| work.rows(beside_name)));
    rows.extend(d.turns.iter().flat_map(TurnsDocument::rows));
    for (name, row) in d.beside_turns.iter().flat_map(TurnsDocument::rows) {
        rows.push((format!("{beside_name}: {name}"), row));
    }
    for (name, row) in [
        ("whole round", &d.round),
        ("host process", &d.baseline),
        ("null target (harness alone)", &d.null_target),
        ("clone, page cache dropped: first_exec", &d.cold),
        ("repeated command", &d.after_hold),
    ] {
        rows.extend(row.as_ref().map(|row| (name.to_owned(), row)));
    }
    rows.extend(d.cluster.iter().flat_map(ClusterDocument::latencies));
    rows
}

/// The rows of all phases in order. The last row carries the label of the first work.
fn ladder<'a>(
    d: &Document,
    prefix: &str,
    phases: &'a BTreeMap<String, PhaseDocument>,
) -> Latencies<'a> {
    let row = |phase: StartPhase| {
        let row = phases.get(phase.name())?;
        let label = match phase {
            StartPhase::FirstExec => format!(" ({})", d.first_work.words()),
            _ => String::new(),
        };
        Some((format!("{prefix}{}{label}", phase.name()), row))
    };
    StartPhase::ALL.into_iter().filter_map(row).collect()
}

fn has_rates(d: &Document) -> bool {
    let load = d.load.as_ref();
    load.is_some_and(|load| !load.rates.is_empty())
}

/// Name of the comparison rounds in rows. Those without a server are new clones whose template is in the page
/// cache.
fn beside_row(d: &Document) -> Option<&str> {
    match d.beside_name.as_deref()? {
        "direct" => Some(CLONE_ROW),
        other => Some(other),
    }
}

/// Name of an origin in rows. A sandbox from the pool is not a cold start: it was restored before the request
/// arrived.
fn start_row(kind: &str) -> &str {
    match kind {
        "warm" => "warm slot",
        "restored" => "clone by the server",
        other => other,
    }
}

fn costs(d: &Document) -> Section {
    let load = d.load.iter().flat_map(LoadDocument::costs);
    let cluster = d.cluster.iter();
    let cluster = cluster.flat_map(|cluster| cluster.costs(d.host.cores));
    let costs = d.cost.rows(beside_row(d).unwrap_or_default(), has_rates(d));
    Section::list("cost", load.chain(cluster).chain(costs))
}

fn failures(view: &View<'_>) -> Section {
    let counts = view.summary.failures();
    let first = view
        .summary
        .failure_examples()
        .into_iter()
        .map(|(cause, message)| {
            let count = counts.get(&cause).copied().unwrap_or(0);
            vec![
                cause.name().to_owned(),
                count.to_string(),
                message.to_owned(),
            ]
        });
    let repeated = view
        .summary
        .after_hold_failures
        .iter()
        .map(|(cause, message)| {
            let name = format!("repeated command, {}", cause.name());
            vec![name, String::new(), message.clone()]
        });
    Section {
        title: "failures of measured starts".to_owned(),
        columns: vec![
            Column::Number("n".to_owned()),
            Column::Remark("first message".to_owned()),
        ],
        rows: first.chain(repeated).collect(),
        notes: Vec::new(),
    }
}
