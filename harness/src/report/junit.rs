//! The report as JUnit XML for CI systems, with one test case for each gate. A missed gate is a failure, whatever the
//! host; an inconclusive one is an error. Neither passes.

use std::fmt::Write;

use testbed::xml::escape;

use super::View;
use crate::gate::Verdict;

#[must_use]
pub fn render(view: &View<'_>) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut out, view);
    out
}

fn write(out: &mut String, view: &View<'_>) -> std::fmt::Result {
    let count = |verdict| view.gates.iter().filter(|g| g.verdict == verdict).count();
    let suite = escape(&view.scenario.name);
    writeln!(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>")?;
    writeln!(
        out,
        "<testsuites><testsuite name=\"{suite}\" tests=\"{}\" failures=\"{}\" errors=\"{}\">",
        view.gates.len(),
        count(Verdict::Missed),
        count(Verdict::Inconclusive),
    )?;
    for gate in &view.gates {
        writeln!(
            out,
            "  <testcase classname=\"{suite}\" name=\"{}\">",
            escape(&gate.name)
        )?;
        let text = escape(&format!("{}; reproduce: {}", gate.reason, view.reproduce));
        match gate.verdict {
            Verdict::Met => {}
            Verdict::Missed => writeln!(out, "    <failure message=\"{text}\"/>")?,
            Verdict::Inconclusive => {
                writeln!(out, "    <error type=\"inconclusive\" message=\"{text}\"/>")?
            }
        }
        writeln!(out, "  </testcase>")?;
    }
    writeln!(out, "</testsuite></testsuites>")
}
