//! The result as text, JSON and JUnit.

use std::fmt::Write;

use super::Proof;
use crate::proof::render_findings;

/// The document of a run.
#[must_use]
pub fn json(proof: &Proof) -> String {
    // Serializing plain values does not fail.
    serde_json::to_string_pretty(proof).unwrap_or_default() + "\n"
}

/// The result for a terminal.
#[must_use]
pub fn terminal(proof: &Proof) -> String {
    let mut out = String::new();
    // Writing to a String does not fail.
    let _ = write_terminal(&mut out, proof);
    out
}

fn write_terminal(out: &mut String, proof: &Proof) -> std::fmt::Result {
    for (action, count) in &proof.done {
        writeln!(out, "{count:>8}  {action}")?;
    }
    writeln!(
        out,
        "{:>8}  requests that failed while something was killed, paused or ended",
        proof.failed
    )?;
    writeln!(
        out,
        "{:>8}  requests rejected for lack of resources",
        proof.refused
    )?;
    writeln!(
        out,
        "{:>8}  sandboxes whose answers were compared with the model, {} not judged\n",
        proof.sandboxes, proof.not_judged
    )?;
    for finding in &proof.findings {
        writeln!(out, "FINDING  {finding}\n")?;
    }
    if let Some(example) = &proof.counterexample {
        writeln!(
            out,
            "Shortest plan with this finding ({} of {} steps, {} plays):",
            example.steps.len(),
            example.planned,
            example.plays
        )?;
        for step in &example.steps {
            writeln!(out, "  {step}")?;
        }
        writeln!(out, "Play it again: {}\n", example.command)?;
    }
    writeln!(
        out,
        "{} findings, {} episodes, {:.0} s, seed {}",
        proof.findings.len(),
        proof.episodes,
        proof.seconds,
        proof.seed
    )
}

/// One failed case for each finding, or one passed case.
#[must_use]
pub fn junit(proof: &Proof) -> String {
    render_findings("lifecycle", "all answers fit the model", &proof.findings)
}
