//! JUnit XML, as CI systems read it.

use std::fmt::{Result, Write};

/// A test case.
#[derive(Clone, Debug)]
pub struct Case {
    pub class: String,
    pub name: String,
    /// `None`: not measured.
    pub seconds: Option<f64>,
    pub outcome: Outcome,
    /// Shown unless the case passed.
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Passed,
    Skipped,
    Failed,
    /// There is no result, for this reason.
    Error(&'static str),
}

/// Renders suites, each a name and its cases.
#[must_use]
pub fn render(suites: &[(&str, Vec<Case>)]) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut out, suites);
    out
}

fn write(out: &mut String, suites: &[(&str, Vec<Case>)]) -> Result {
    writeln!(
        out,
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>"
    )?;
    for (suite, cases) in suites {
        let (mut failed, mut errors, mut skipped) = (0, 0, 0);
        for case in cases {
            match case.outcome {
                Outcome::Passed => {}
                Outcome::Skipped => skipped += 1,
                Outcome::Failed => failed += 1,
                Outcome::Error(_) => errors += 1,
            }
        }
        writeln!(
            out,
            "<testsuite name=\"{}\" tests=\"{}\" failures=\"{failed}\" errors=\"{errors}\" skipped=\"{skipped}\">",
            escape(suite),
            cases.len(),
        )?;
        for case in cases {
            let (class, name) = (escape(&case.class), escape(&case.name));
            write!(out, "  <testcase classname=\"{class}\" name=\"{name}\"")?;
            if let Some(seconds) = case.seconds {
                write!(out, " time=\"{seconds:.3}\"")?;
            }
            let message = escape(&case.message);
            match case.outcome {
                Outcome::Passed => write!(out, ">")?,
                Outcome::Skipped => write!(out, "><skipped message=\"{message}\"/>")?,
                Outcome::Failed => write!(out, "><failure message=\"{message}\"/>")?,
                Outcome::Error(kind) => {
                    write!(out, "><error type=\"{kind}\" message=\"{message}\"/>")?;
                }
            }
            writeln!(out, "</testcase>")?;
        }
        writeln!(out, "</testsuite>")?;
    }
    writeln!(out, "</testsuites>")
}

/// Escapes `text` for an attribute value. Control characters, most of which XML does not allow, become spaces.
fn escape(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '&' => "&amp;".to_owned(),
            '<' => "&lt;".to_owned(),
            '>' => "&gt;".to_owned(),
            '"' => "&quot;".to_owned(),
            c if c.is_control() => " ".to_owned(),
            c => c.to_string(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_and_control_characters_are_escaped() {
        assert_eq!(escape("<a b=\"&\">\u{1}"), "&lt;a b=&quot;&amp;&quot;&gt; ");
    }
}
