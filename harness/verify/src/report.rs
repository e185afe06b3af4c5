//! The report of a suite: its cases with their verdicts, and the figures that some suites measure. The functions are
//! pure: a terminal, scripts, CI systems and issues get renderings of the same data.

use std::{
    collections::BTreeMap,
    fmt::{Result, Write},
    time::Instant,
};

use serde::{Deserialize, Serialize};
use testbed::{
    exit::End,
    junit::{self, Outcome},
};

/// Format number of the JSON document.
pub const FORMAT: u32 = 3;

/// A suite of `cube-verify`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Suite {
    E2b,
    CloneHazards,
    Isolation,
    /// The cases of `Isolation` about allowed destinations.
    Egress,
    Confinement,
    Restarts,
    Lifecycle,
}

impl Suite {
    /// Name on the command line and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::E2b => "e2b",
            Self::CloneHazards => "clone-hazards",
            Self::Isolation => "isolation",
            Self::Egress => "egress",
            Self::Confinement => "confinement",
            Self::Restarts => "restarts",
            Self::Lifecycle => "lifecycle",
        }
    }

    /// Options that select one case; `None` if the suite has none.
    fn only(self, case: &Case) -> Option<String> {
        match self {
            Self::E2b => Some(format!(" --sdk {} --feature {}", case.class, case.name)),
            Self::Isolation | Self::Egress | Self::Confinement => {
                Some(format!(" --case {}", case.name))
            }
            Self::CloneHazards | Self::Restarts | Self::Lifecycle => None,
        }
    }
}

/// Result of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The case ended as expected, and every observation confirms it.
    Pass,
    /// The subject does not exist here, as the list of cases allows.
    Absent,
    /// A hazard was found, and the list explains why it is accepted.
    Known,
    /// A hazard was found, and is for the template's author to judge.
    Warned,
    /// An attempt got through, or sandboxes share something that they must not share.
    Breach,
    /// Something does not work as promised.
    Fail,
    /// The case of an SDK exceeded its time limit.
    TimedOut,
    /// The case of an SDK was not run: the SDK is not installed, has no such case, or its process ended.
    NotRun,
    /// The attempt was made, but an observation that would prove the outcome is missing or contradicts it.
    Unproven,
    /// The guest reports the expected outcome, and nothing observed the other end.
    GuestsWord,
    /// The attempt could not be made.
    NotTried,
}

impl Verdict {
    /// Name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Absent => "absent",
            Self::Known => "known",
            Self::Warned => "warned",
            Self::Breach => "breach",
            Self::Fail => "fail",
            Self::TimedOut => "timed_out",
            Self::NotRun => "not_run",
            Self::Unproven => "unproven",
            Self::GuestsWord => "guests_word",
            Self::NotTried => "not_tried",
        }
    }

    /// Exit status of a run with one required case.
    #[must_use]
    pub fn end(self) -> End {
        match self {
            Self::Pass | Self::Absent | Self::Known | Self::Warned => End::Pass,
            Self::Breach => End::Breach,
            Self::Fail | Self::TimedOut | Self::NotRun => End::GateFailed,
            Self::Unproven | Self::GuestsWord | Self::NotTried => End::Inconclusive,
        }
    }

    /// Text in tables: in capitals if the case needs attention.
    fn sign(self) -> String {
        let words = self.name().replace('_', " ");
        match self {
            Self::Pass | Self::Absent | Self::Known => words,
            _ => words.to_uppercase(),
        }
    }

    fn outcome(self) -> Outcome {
        match self {
            Self::Pass => Outcome::Passed,
            Self::Absent | Self::Known | Self::Warned => Outcome::Skipped,
            Self::Breach | Self::Fail => Outcome::Failed,
            Self::TimedOut | Self::NotRun | Self::Unproven | Self::GuestsWord | Self::NotTried => {
                Outcome::Error(self.name())
            }
        }
    }
}

/// A case and its result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Group of the case, for example the kind of attempt, the SDK, or the template and the compared sandboxes.
    pub class: String,
    /// Name of the case, in most suites unique in its class.
    #[serde(rename = "case")]
    pub name: String,
    pub verdict: Verdict,
    /// Whether the verdict counts for the exit status.
    pub required: bool,
    /// Why the case exists; empty: the name says it.
    pub why: String,
    /// Result with which the case passes; empty: the name says it.
    pub expected: String,
    /// Observations, by source.
    pub evidence: BTreeMap<String, String>,
    /// Reasons for the verdict; empty for a pass.
    pub problems: Vec<String>,
    /// Duration. `None`: not measured.
    pub seconds: Option<f64>,
}

impl Case {
    /// A case that has not been tried yet.
    #[must_use]
    pub fn new(class: &str, name: &str, why: &str) -> Self {
        Self {
            class: class.to_owned(),
            name: name.to_owned(),
            verdict: Verdict::NotTried,
            required: true,
            why: why.to_owned(),
            expected: String::new(),
            evidence: BTreeMap::new(),
            problems: Vec::new(),
            seconds: None,
        }
    }

    /// The only case of a run without findings: it passes unless there is a doubt.
    #[must_use]
    pub fn promise(class: &str, name: &str, doubt: Option<&str>) -> Self {
        let verdict = match doubt {
            None => Verdict::Pass,
            Some(_) => Verdict::Unproven,
        };
        Self::new(class, name, "").judged(verdict, doubt)
    }

    /// The case with this verdict and these reasons.
    #[must_use]
    pub fn judged(
        mut self,
        verdict: Verdict,
        problems: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        self.verdict = verdict;
        self.problems = problems.into_iter().map(Into::into).collect();
        self
    }

    /// The case with one more observation.
    #[must_use]
    pub fn with(mut self, source: &str, found: impl Into<String>) -> Self {
        self.evidence.insert(source.to_owned(), found.into());
        self
    }

    /// Whether reports leave out the details.
    fn is_fine(&self) -> bool {
        matches!(self.verdict, Verdict::Pass | Verdict::Absent)
    }

    /// The reasons, then the observations.
    fn reasons(&self) -> String {
        let found = self.evidence.iter();
        let found = found.map(|(source, found)| format!("{source}: {found}"));
        let all: Vec<String> = self.problems.iter().cloned().chain(found).collect();
        all.join("; ")
    }
}

/// Measurements that a suite reports in addition to its cases. By default there are none.
pub trait Figures: Serialize {
    /// Text before the cases on a terminal.
    fn terminal(&self) -> String {
        String::new()
    }

    /// The same in Markdown.
    fn markdown(&self) -> String {
        String::new()
    }

    /// Exit status of the run, given that of its cases.
    fn end(&self, of_cases: End) -> End {
        of_cases
    }
}

impl Figures for () {}

/// Result of a run of a suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report<F = ()> {
    /// Always [`FORMAT`].
    pub format: u32,
    pub suite: Suite,
    /// URL of the tested server. `None`: the suite started a server.
    pub target: Option<String>,
    /// In the order of the lists of cases.
    pub cases: Vec<Case>,
    /// Duration of the run.
    pub seconds: f64,
    /// `null` for suites without measurements.
    pub figures: F,
}

impl<F: Figures> Report<F> {
    /// The report of a run that began at `begun` and has ended.
    #[must_use]
    pub fn new(
        suite: Suite,
        target: Option<String>,
        cases: Vec<Case>,
        begun: Instant,
        figures: F,
    ) -> Self {
        Self {
            format: FORMAT,
            suite,
            target,
            cases,
            seconds: begun.elapsed().as_secs_f64(),
            figures,
        }
    }

    /// Exit status: the worst of the required cases. A breach is worse than a failure, and a failure is worse than a
    /// case that proves nothing. A run without cases proves nothing.
    #[must_use]
    pub fn end(&self) -> End {
        let required = self.cases.iter().filter(|case| case.required);
        let ends: Vec<End> = required.map(|case| case.verdict.end()).collect();
        let worst = [End::Breach, End::GateFailed, End::Inconclusive];
        let worst = worst.into_iter().find(|end| ends.contains(end));
        self.figures.end(match worst {
            Some(worst) => worst,
            None if self.cases.is_empty() => End::Inconclusive,
            None => End::Pass,
        })
    }

    /// For scripts: one JSON document.
    #[must_use]
    pub fn json(&self) -> String {
        // Serialization cannot fail: every field is a plain value.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// For CI systems: one JUnit test case for each case.
    #[must_use]
    pub fn junit(&self) -> String {
        let case = |case: &Case| junit::Case {
            class: case.class.clone(),
            name: case.name.clone(),
            seconds: case.seconds,
            outcome: case.verdict.outcome(),
            message: match self.repeat(case) {
                Some(command) => format!("{}; run again: {command}", case.reasons()),
                None => case.reasons(),
            },
        };
        let cases = self.cases.iter().map(case).collect();
        junit::render(&[(self.suite.name(), cases)])
    }

    /// For a terminal: the figures, a table of the cases, then details of those that did not pass.
    #[must_use]
    pub fn terminal(&self) -> String {
        let mut out = self.figures.terminal();
        // Writing to a string cannot fail.
        let _ = self.write_terminal(&mut out);
        out
    }

    fn write_terminal(&self, out: &mut String) -> Result {
        let table = self.table();
        let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max();
        let widths: Vec<usize> = (0..table[0].len()).filter_map(width).collect();
        for row in &table {
            let cells = row.iter().zip(&widths);
            let line: Vec<String> = cells
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            writeln!(out, "{}", line.join("  ").trim_end())?;
        }
        for case in self.cases.iter().filter(|case| !case.is_fine()) {
            self.write_details(out, case)?;
        }
        writeln!(out, "\n{}", self.counts())
    }

    fn write_details(&self, out: &mut String, case: &Case) -> Result {
        let Case { class, name, .. } = case;
        let must = if case.required { "" } else { " (not required)" };
        write!(out, "\n{name} ({class}): {}{must}", case.verdict.name())?;
        match case.problems.as_slice() {
            [] => writeln!(out)?,
            problems => writeln!(out, ": {}", problems.join("; "))?,
        }
        let repeat = self.repeat(case).unwrap_or_default();
        let fixed = [("why", &case.why), ("expected", &case.expected)];
        let found = case.evidence.iter().map(|(key, text)| (key.as_str(), text));
        for (key, text) in fixed.into_iter().chain(found).chain([("repeat", &repeat)]) {
            if !text.is_empty() {
                writeln!(out, "  {key:<9} {text}")?;
            }
        }
        Ok(())
    }

    /// For issues and documentation: the same as Markdown.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut out = self.figures.markdown();
        let _ = self.write_markdown(&mut out);
        out
    }

    fn write_markdown(&self, out: &mut String) -> Result {
        writeln!(out, "{}.\n", self.counts())?;
        let details = self.cases.iter().filter(|case| !case.is_fine());
        let details = details.map(|case| {
            let Case { name, class, .. } = case;
            let verdict = case.verdict.name().to_owned();
            vec![name.clone(), class.clone(), verdict, case.reasons()]
        });
        let header = ["case", "class", "verdict", "reason"]
            .map(str::to_owned)
            .to_vec();
        let details: Vec<_> = std::iter::once(header).chain(details).collect();
        write_markdown_table(out, &self.table())?;
        if details.len() > 1 {
            writeln!(out)?;
            write_markdown_table(out, &details)?;
        }
        Ok(())
    }

    /// The header, and a row for each case. If cases of different classes have the same name, each name has one row,
    /// and each class one column.
    fn table(&self) -> Vec<Vec<String>> {
        let cases = &self.cases;
        let has_twin = |case: &Case| {
            cases
                .iter()
                .any(|other| other.name == case.name && other.class != case.class)
        };
        if !cases.iter().any(has_twin) {
            let header = ["class", "case", "verdict"].map(str::to_owned).to_vec();
            let row =
                |case: &Case| vec![case.class.clone(), case.name.clone(), case.verdict.sign()];
            return std::iter::once(header)
                .chain(cases.iter().map(row))
                .collect();
        }
        let classes = distinct(cases.iter().map(|case| case.class.as_str()));
        let names = distinct(cases.iter().map(|case| case.name.as_str()));
        let sign = |name: &str, class: &str| {
            let of_both = cases
                .iter()
                .filter(|case| case.name == name && case.class == class);
            let signs: Vec<String> = of_both.map(|case| case.verdict.sign()).collect();
            signs.join(", ")
        };
        let header = std::iter::once("case").chain(classes.iter().copied());
        let mut table = vec![header.map(str::to_owned).collect()];
        for name in names {
            let signs = classes.iter().map(|class| sign(name, class));
            table.push(std::iter::once(name.to_owned()).chain(signs).collect());
        }
        table
    }

    /// Number of cases by verdict.
    fn counts(&self) -> String {
        let mut counts: BTreeMap<Verdict, usize> = BTreeMap::new();
        for case in &self.cases {
            *counts.entry(case.verdict).or_default() += 1;
        }
        let counts = counts.iter();
        let counts = counts.map(|(verdict, n)| format!("{n} {}", verdict.name().replace('_', " ")));
        let counts: Vec<String> = counts.collect();
        let target = self.target.as_ref();
        format!(
            "{} cases of {} in {:.0} s: {}; {}",
            self.cases.len(),
            self.suite.name(),
            self.seconds,
            counts.join(", "),
            target.map_or("cube-api started by the suite", String::as_str)
        )
    }

    /// The command that runs one case again.
    fn repeat(&self, case: &Case) -> Option<String> {
        let option = match self.suite {
            Suite::E2b => "--api-url",
            _ => "--target",
        };
        let target = self.target.as_ref();
        let target = target.map_or_else(String::new, |url| format!(" {option} {url}"));
        let (suite, only) = (self.suite.name(), self.suite.only(case)?);
        Some(format!("cube-bench verify {suite}{target}{only}"))
    }
}

fn distinct<'a>(texts: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut all = Vec::new();
    for text in texts {
        if !all.contains(&text) {
            all.push(text);
        }
    }
    all
}

fn write_markdown_table(out: &mut String, table: &[Vec<String>]) -> Result {
    let cell = |text: &String| text.replace('|', "\\|").replace(['\n', '\r'], " ");
    for (at, row) in table.iter().enumerate() {
        let cells: Vec<String> = row.iter().map(cell).collect();
        writeln!(out, "| {} |", cells.join(" | "))?;
        if at == 0 {
            writeln!(out, "|{}", "---|".repeat(row.len()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
