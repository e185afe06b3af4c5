//! The report for a terminal: plain text with about 100 columns and without colours.

use std::fmt::Write;

use super::{View, document::Document, document::PhaseDocument};
use testbed::exit::End;

use crate::{gate::Verdict, scenario::Quantile};

#[must_use]
pub fn render(view: &View<'_>) -> String {
    let document = Document::new(view);
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut out, view, &document);
    out
}

fn write(out: &mut String, view: &View<'_>, d: &Document) -> std::fmt::Result {
    head(out, view, d)?;
    let rows = d.rows();
    let width = rows
        .iter()
        .map(|(name, _)| name.len())
        .max()
        .unwrap_or(0)
        .max(19);
    let above = width - 1;
    writeln!(out, "\n{:<above$}{}", "from intended start", columns_head())?;
    for (name, row) in rows {
        writeln!(out, "{name:<width$}{}", columns(row))?;
    }
    costs(out, d)?;
    if let Some(interference) = &d.interference {
        writeln!(out, "\n{}", interference.sentences().join("\n  "))?;
    }
    peers(out, d)?;
    ratios(out, d)?;
    faults(out, d)?;
    memory(out, d)?;
    failures(out, view, d)?;
    gates(out, view, d)
}

fn head(out: &mut String, view: &View<'_>, d: &Document) -> std::fmt::Result {
    writeln!(
        out,
        "{} — n = {}, host graded {}",
        d.scenario, d.n, d.host.grade
    )?;
    if !view.scenario.description.is_empty() {
        writeln!(out, "{}", view.scenario.description)?;
    }
    writeln!(
        out,
        "platform {}, {} cores, {}, Linux {}",
        d.host.platform.as_deref().unwrap_or("unknown"),
        d.host.cores,
        d.host.cpu_model.as_deref().unwrap_or("unknown CPU"),
        d.host.kernel.as_deref().unwrap_or("unknown"),
    )?;
    if !d.host.built_from.is_empty() {
        writeln!(out, "{}", d.host.programs())?;
    }
    for reason in &d.host.grade_reasons {
        writeln!(out, "  - {reason}")?;
    }
    if d.exit_code == End::TargetUnreachable.code() {
        writeln!(out, "No create was answered.")?;
    }
    if d.ended != "complete" {
        let why = d
            .end_message
            .as_deref()
            .map_or(String::new(), |why| format!(" ({why})"));
        writeln!(out, "The run ended early: {}{why}.", d.ended)?;
    }
    Ok(())
}

fn columns_head() -> String {
    let names = Quantile::ALL.map(|q| format!("{:>15}", format!("{} ms", q.name())));
    format!("{:>7}{}  {}", "n", names.concat(), "P95 interval, 95 %")
}

fn columns(p: &PhaseDocument) -> String {
    let cell = |ms: Option<f64>, quantile: Quantile| match ms {
        Some(ms) => format!("{:>15}", milliseconds(ms)),
        None if p.n >= quantile.needs() => format!("{:>15}", "failed"),
        None => format!("{:>15}", format!("n/a (n = {})", p.n)),
    };
    let interval = p.p95_ci95_ms.map_or(String::new(), |[low, high]| {
        format!("  {}–{}", milliseconds(low), milliseconds(high))
    });
    format!(
        "{:>6}{}{}{}{}{interval}",
        p.n,
        cell(p.p50_ms, Quantile::P50),
        cell(p.p95_ms, Quantile::P95),
        cell(p.p99_ms, Quantile::P99),
        cell(p.max_ms, Quantile::Max),
    )
}

/// Formats milliseconds with two decimals, or with three for values below 1.
pub(super) fn milliseconds(ms: f64) -> String {
    if ms < 1.0 {
        format!("{ms:.3}")
    } else {
        format!("{ms:.2}")
    }
}

fn costs(out: &mut String, d: &Document) -> std::fmt::Result {
    let rows = d.cost_rows();
    if !rows.is_empty() {
        writeln!(out, "\ncost")?;
    }
    for (name, value) in rows {
        writeln!(out, "  {name:<56}{value}")?;
    }
    Ok(())
}

fn peers(out: &mut String, d: &Document) -> std::fmt::Result {
    let Some(peers) = &d.peers else {
        return Ok(());
    };
    let rows: Vec<_> = std::iter::once(peers.columns())
        .chain(peers.rows())
        .collect();
    let width = |column: usize| {
        let lengths = rows.iter().map(|row| row[column].chars().count());
        lengths.max().unwrap_or(0)
    };
    writeln!(out, "\nsystems, milliseconds from the intended start")?;
    for row in &rows {
        let cells = row.iter().enumerate().map(|(column, text)| {
            let width = width(column);
            match column {
                0 => format!("{text:<width$}"),
                _ => format!("{text:>width$}"),
            }
        });
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    for note in peers.notes() {
        writeln!(out, "  {note}")?;
    }
    if peers.missing > 0 {
        writeln!(
            out,
            "{} of the systems are missing on this host",
            peers.missing
        )?;
    }
    Ok(())
}

fn ratios(out: &mut String, d: &Document) -> std::fmt::Result {
    let rows = d.ratio_rows();
    let Some(names) = d.ratio_columns() else {
        return Ok(());
    };
    writeln!(out)?;
    for [name, ratio, interval, ours, theirs] in std::iter::once(names).chain(rows) {
        writeln!(
            out,
            "{name:<36}{ratio:>9}{interval:>16}{ours:>14}{theirs:>14}"
        )?;
    }
    Ok(())
}

fn faults(out: &mut String, d: &Document) -> std::fmt::Result {
    let rows = d.fault_rows();
    if rows.is_empty() {
        return Ok(());
    }
    let beside = d.beside_name.as_deref().unwrap_or_default();
    writeln!(out, "\n{:<36}{beside:>16}", "page faults of one VMM, mean")?;
    for (name, ours, theirs) in rows {
        writeln!(out, "  {name:<24}{ours:>10}{theirs:>16}")?;
    }
    Ok(())
}

fn memory(out: &mut String, d: &Document) -> std::fmt::Result {
    let Some(memory) = &d.memory else {
        return Ok(());
    };
    writeln!(
        out,
        "\nmemory of one more clone: {} (95 % {}; {} points, up to {} clones)",
        mb(memory.slope_bytes_per_clone),
        memory.slope_ci95.map_or("n/a".to_owned(), |[low, high]| {
            format!("{} to {}", mb(Some(low)), mb(Some(high)))
        }),
        memory.points,
        memory.most_clones,
    )?;
    for (name, bytes) in memory.ledger.parts() {
        writeln!(out, "  {name:<34}{:>10}", mb(bytes))?;
    }
    for (name, value) in memory.rows() {
        writeln!(out, "  {name:<44}{value}")?;
    }
    Ok(())
}

/// Formats bytes as megabytes (10^6) with three decimals.
pub(super) fn mb(bytes: Option<f64>) -> String {
    bytes.map_or("n/a".to_owned(), |b| format!("{:.3} MB", b / 1e6))
}

fn failures(out: &mut String, view: &View<'_>, d: &Document) -> std::fmt::Result {
    let examples = view.summary.failure_examples();
    if examples.is_empty() && view.summary.after_hold_failures.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nfailures of measured starts: {:?}", d.failures)?;
    for (cause, message) in examples {
        writeln!(out, "  {}: {message}", cause.name())?;
    }
    for (cause, message) in &view.summary.after_hold_failures {
        writeln!(out, "  repeated command, {}: {message}", cause.name())?;
    }
    Ok(())
}

fn gates(out: &mut String, view: &View<'_>, d: &Document) -> std::fmt::Result {
    if view.gates.is_empty() {
        return Ok(());
    }
    writeln!(out, "\ngates")?;
    for gate in &view.gates {
        writeln!(
            out,
            "  {:<13}{}: {} = {}, limit {}, n = {}",
            gate.verdict.word(),
            gate.name,
            gate.metric,
            quantity(gate.measured, &gate.unit),
            quantity(Some(gate.limit), &gate.unit),
            gate.n,
        )?;
        writeln!(out, "               {}", gate.reason)?;
        if gate.verdict == Verdict::Missed {
            writeln!(out, "               reproduce: {}", view.reproduce)?;
        }
    }
    if view.is_excused() {
        writeln!(
            out,
            "\nA missed time or rate on a host graded {} makes the run inconclusive (exit code 5); with --strict it fails.",
            d.host.grade
        )?;
    }
    Ok(())
}

/// Formats a measured value or a limit of a gate: bytes as megabytes, counts and ratios without a unit, rates with
/// `/s`, and all others with `unit`.
pub(super) fn quantity(value: Option<f64>, unit: &str) -> String {
    match (value, unit) {
        (None, _) => "n/a".to_owned(),
        (value, "bytes") => mb(value),
        (Some(value), "count") => number(value),
        (Some(value), "times") => format!("{value:.3}"),
        (Some(value), "per_s") => format!("{}/s", number(value)),
        (Some(value), unit) => format!("{} {unit}", number(value)),
    }
}

/// Formats whole numbers without decimals, and all others with two decimals.
fn number(x: f64) -> String {
    if x.fract() == 0.0 {
        format!("{x:.0}")
    } else {
        format!("{x:.2}")
    }
}
