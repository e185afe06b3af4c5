//! The report as Markdown, for issues and pull requests.

use std::fmt::Write;

use super::{
    View,
    document::{Document, PhaseDocument},
    html::cell,
    terminal::{mb, quantity},
};
use crate::scenario::Quantile;

#[must_use]
pub fn render(view: &View<'_>) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut out, view, &Document::new(view));
    out
}

fn write(out: &mut String, view: &View<'_>, d: &Document) -> std::fmt::Result {
    writeln!(out, "# {}\n\n{}\n", d.scenario, view.scenario.description)?;
    writeln!(
        out,
        "n = {}, host graded **{}**, platform {}, {} cores, {}, Linux {}.",
        d.n,
        d.host.grade,
        d.host.platform.as_deref().unwrap_or("unknown"),
        d.host.cores,
        d.host.cpu_model.as_deref().unwrap_or("unknown CPU"),
        d.host.kernel.as_deref().unwrap_or("unknown"),
    )?;
    for reason in &d.host.grade_reasons {
        writeln!(out, "- {reason}")?;
    }
    writeln!(
        out,
        "\n| ms from the intended start | n | P50 | P95 | P99 | max |"
    )?;
    writeln!(out, "|---|--:|--:|--:|--:|--:|")?;
    for (name, row) in d.rows() {
        line(out, &name, row)?;
    }
    costs(out, d)?;
    if let Some(interference) = &d.interference {
        writeln!(out, "\n{}.", interference.sentences().join(". "))?;
    }
    peers(out, d)?;
    ratios(out, d)?;
    faults(out, d)?;
    memory(out, d)?;
    gates(out, view)?;
    writeln!(out, "\nReproduce: `{}`", view.reproduce)
}

fn line(out: &mut String, name: &str, p: &PhaseDocument) -> std::fmt::Result {
    writeln!(
        out,
        "| {name} | {} | {} | {} | {} | {} |",
        p.n,
        cell(p, p.p50_ms, Quantile::P50),
        cell(p, p.p95_ms, Quantile::P95),
        cell(p, p.p99_ms, Quantile::P99),
        cell(p, p.max_ms, Quantile::Max),
    )
}

fn costs(out: &mut String, d: &Document) -> std::fmt::Result {
    let rows = d.cost_rows();
    if !rows.is_empty() {
        writeln!(out, "\n| cost | |\n|---|---|")?;
    }
    for (name, value) in rows {
        writeln!(out, "| {name} | {value} |")?;
    }
    Ok(())
}

fn peers(out: &mut String, d: &Document) -> std::fmt::Result {
    let Some(peers) = &d.peers else {
        return Ok(());
    };
    writeln!(out, "\n| {} |", peers.columns().join(" | "))?;
    writeln!(out, "|---|--:|--:|--:|--:|--:|--:|--:|--:|")?;
    for row in peers.rows() {
        writeln!(out, "| {} |", row.join(" | "))?;
    }
    writeln!(out)?;
    for note in peers.notes() {
        writeln!(out, "- {note}")?;
    }
    Ok(())
}

fn ratios(out: &mut String, d: &Document) -> std::fmt::Result {
    let Some(names) = d.ratio_columns() else {
        return Ok(());
    };
    writeln!(out, "\n| {} |\n|---|--:|--:|--:|--:|", names.join(" | "))?;
    for row in d.ratio_rows() {
        writeln!(out, "| {} |", row.join(" | "))?;
    }
    Ok(())
}

fn faults(out: &mut String, d: &Document) -> std::fmt::Result {
    let rows = d.fault_rows();
    if rows.is_empty() {
        return Ok(());
    }
    let beside = d.beside_name.as_deref().unwrap_or_default();
    writeln!(out, "\n| page faults of one VMM, mean | | {beside} |")?;
    writeln!(out, "|---|--:|--:|")?;
    for (name, ours, theirs) in rows {
        writeln!(out, "| {name} | {ours} | {theirs} |")?;
    }
    Ok(())
}

fn memory(out: &mut String, d: &Document) -> std::fmt::Result {
    let Some(memory) = &d.memory else {
        return Ok(());
    };
    let slope = mb(memory.slope_bytes_per_clone);
    writeln!(out, "\n| memory of one more clone | {slope} |\n|---|--:|")?;
    for (name, bytes) in memory.ledger.parts() {
        writeln!(out, "| {name} | {} |", mb(bytes))?;
    }
    for (name, value) in memory.rows() {
        writeln!(out, "| {name} | {value} |")?;
    }
    Ok(())
}

fn gates(out: &mut String, view: &View<'_>) -> std::fmt::Result {
    if view.gates.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n| gate | verdict | measured | limit | n | reason |")?;
    writeln!(out, "|---|---|--:|--:|--:|---|")?;
    for gate in &view.gates {
        writeln!(
            out,
            "| {} (`{}`) | **{}** | {} | {} | {} | {} |",
            gate.name,
            gate.metric,
            gate.verdict.word(),
            quantity(gate.measured, &gate.unit),
            quantity(Some(gate.limit), &gate.unit),
            gate.n,
            gate.reason,
        )?;
    }
    Ok(())
}
