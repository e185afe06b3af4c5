//! `cube-bench ab`: compares two builds, or reports a recorded comparison again.

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

use clap::Args;
use harness::{
    ab::{
        record,
        report::{self, AbReport, REPORT_FILE},
        run::{self, AbSettings},
        tally::Tally,
    },
    scenario::{self, Scenario},
    session::SessionError,
};
use testbed::{artifacts, exit::End};

use super::{CommandError, PlainFormat, RunRoot};

#[derive(Args)]
pub(super) struct Ab {
    /// Build A, the reference: a checkout after `cargo xtask prepare`, a directory with bin/ and templates/, or the
    /// URL of an API (its key is read from E2B_API_KEY)
    #[arg(required_unless_present = "report")]
    a: Option<PathBuf>,
    /// Build B, the candidate
    #[arg(required_unless_present = "report")]
    b: Option<PathBuf>,
    /// Scenario that each block runs; its gates, baseline and cold rounds are ignored
    #[arg(long, value_name = "FILE", default_value = "scenarios/single.toml")]
    scenario: PathBuf,
    /// Separate scenario for B, to compare two configurations, for example of one build
    #[arg(long, value_name = "FILE")]
    scenario_b: Option<PathBuf>,
    /// Repeat the whole comparison N times, each with its own seed, and print how many reported a change. If A and B
    /// are the same build, each change is a false alarm; exit code 3 if significantly more than 5 % report one
    #[arg(long, value_name = "N", conflicts_with = "report", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: Option<u32>,
    /// Blocks of each build; blocks run in the order A B B A
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=400))]
    blocks: u32,
    /// Starts in each block [default: as in one round of the scenario]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    starts: Option<u32>,
    /// Seed of arrivals and of the bootstrap [default: the scenario's]
    #[arg(long)]
    seed: Option<u64>,
    /// Smallest change in percent that is reported as better or worse
    #[arg(long, value_name = "PERCENT", default_value_t = 2.0, value_parser = percent)]
    tolerance: f64,
    /// Primary metric, such as first_exec.p50 or memory.slope; may be repeated. Only primary metrics get a verdict
    /// [default: first_exec.p50, and cpu_per_start and memory.slope where they are measured]
    #[arg(long = "metric", value_name = "NAME", conflicts_with = "report")]
    metrics: Vec<String>,
    /// Largest accepted slowdown in percent: the run is inconclusive unless every primary metric is shown to stay within
    /// it
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    margin: Option<f64>,
    /// New directory for the results [default: target/cube/results/ab-NAME-TIME, or below $CUBE_ARTIFACTS]
    #[arg(long, value_name = "DIR", conflicts_with = "report")]
    results: Option<PathBuf>,
    /// Recompute the report of the recorded comparison in DIR; measures nothing
    #[arg(long, value_name = "DIR", conflicts_with_all = ["a", "b"])]
    report: Option<PathBuf>,
    #[command(flatten)]
    run_root: RunRoot,
    /// Also write the verdicts as JUnit XML to this file
    #[arg(long, value_name = "FILE", conflicts_with = "repeat")]
    junit: Option<PathBuf>,
    /// Also write the report as Markdown to this file
    #[arg(long, value_name = "FILE", conflicts_with = "repeat")]
    markdown: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t)]
    format: PlainFormat,
}

impl Ab {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        match (&self.report, self.repeat) {
            (Some(dir), _) => self.print_report(dir),
            (None, None) => {
                let scenario = super::load(&self.scenario, None, &[])?;
                let results = self.results_dir(&scenario);
                self.measure(&scenario, &results, self.seed)?;
                self.print_report(&results)
            }
            (None, Some(times)) => self.repeated(times),
        }
    }

    fn results_dir(&self, scenario: &Scenario) -> PathBuf {
        self.results.clone().unwrap_or_else(|| {
            let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
            let name = format!("ab-{}-{}", scenario.name, now.replace([':', '-'], ""));
            artifacts::default_dir().join("results").join(name)
        })
    }

    /// Repeats the comparison, and counts the reports that found a change.
    fn repeated(self, times: u32) -> Result<End, CommandError> {
        let scenario = super::load(&self.scenario, None, &[])?;
        let results = self.results_dir(&scenario);
        let mut tally = Tally::default();
        for index in 0..times {
            let dir = results.join(format!("{index:03}"));
            let seed = self.seed.unwrap_or(scenario.seed) + u64::from(index);
            self.measure(&scenario, &dir, Some(seed))?;
            let (report, end) = write_report(&dir)?;
            tally.add(&report);
            eprintln!(
                "cube-bench: comparison {} of {times}: exit code {}",
                index + 1,
                end.code()
            );
            if end == End::Interrupted {
                return Ok(end);
            }
        }
        match self.format {
            PlainFormat::Human => print!("{}", tally.render()),
            PlainFormat::Json => super::print_json(&tally.document()),
        }
        Ok(tally.end())
    }

    /// Runs all blocks.
    fn measure(
        &self,
        scenario: &Scenario,
        results: &Path,
        seed: Option<u64>,
    ) -> Result<(), CommandError> {
        let other = self.scenario_b.as_deref();
        let other = other.map(|path| scenario::load(path, None)).transpose()?;
        let settings = AbSettings {
            reproduce: self.command_line(),
            a: self.a.clone().unwrap_or_default(),
            b: self.b.clone().unwrap_or_default(),
            scenario_b: other,
            blocks: self.blocks,
            starts: self.starts,
            seed,
            tolerance: self.tolerance / 100.0,
            primary: self.metrics.clone(),
            margin: self.margin.map(|percent| percent / 100.0),
            results: results.to_owned(),
            run_root: self.run_root.run_root.clone(),
        };
        let done = run::run(scenario, &settings);
        eprintln!("cube-bench: results are in {}", settings.results.display());
        Ok(done?)
    }

    fn print_report(&self, dir: &Path) -> Result<End, CommandError> {
        let (report, end) = write_report(dir)?;
        let files = [
            (&self.junit, report::junit as fn(&AbReport) -> String),
            (&self.markdown, report::markdown as fn(&AbReport) -> String),
        ];
        for (path, render) in files {
            if let Some(path) = path.clone() {
                std::fs::write(&path, render(&report))
                    .map_err(|source| SessionError::Io { path, source })?;
            }
        }
        match self.format {
            PlainFormat::Human => print!("{}", report::render(&report)),
            PlainFormat::Json => print!("{}", report.json()),
        }
        Ok(end)
    }

    fn command_line(&self) -> String {
        let path = |path: &Option<PathBuf>| {
            let path = path.as_deref().unwrap_or(Path::new(""));
            path.display().to_string()
        };
        let mut line = format!(
            "cube-bench ab {} {} --scenario {} --blocks {} --tolerance {}",
            path(&self.a),
            path(&self.b),
            self.scenario.display(),
            self.blocks,
            self.tolerance,
        );
        for metric in &self.metrics {
            line.push_str(&format!(" --metric {metric}"));
        }
        if let Some(margin) = self.margin {
            line.push_str(&format!(" --margin {margin}"));
        }
        if let Some(other) = &self.scenario_b {
            line.push_str(&format!(" --scenario-b {}", other.display()));
        }
        if let Some(starts) = self.starts {
            line.push_str(&format!(" --starts {starts}"));
        }
        if let Some(seed) = self.seed {
            line.push_str(&format!(" --seed {seed}"));
        }
        line
    }
}

/// Parses a percentage from 0 to 1000.
fn percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=1000.0).contains(&value) => Ok(value),
        _ => Err("expected a percentage from 0 to 1000, such as 2 or 0.5".to_owned()),
    }
}

fn write_report(dir: &Path) -> Result<(AbReport, End), CommandError> {
    let recorded = record::read(dir)?;
    let (report, end) = AbReport::new(&recorded);
    let path = dir.join(REPORT_FILE);
    std::fs::write(&path, report.json()).map_err(|source| SessionError::Io { path, source })?;
    Ok((report, end))
}
