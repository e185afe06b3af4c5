//! `cube-bench density`: the largest number of sandboxes within bounds, from a recorded or a new run.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use harness::{
    report::density::DensityReport,
    scenario::HoldUntil,
    session::{RecordedRun, SessionError},
    summary::density::Bounds,
};
use model::Bytes;
use testbed::{exit::End, options::Format};

use super::{
    CommandError, PlainFormat, print_json,
    report::{viewed, write_reports},
    run::{RunOptions, record_run, shared_path},
};

#[derive(Args)]
pub(super) struct Density {
    /// Directory of a run, or scenario file to run first, such as scenarios/density.toml; it must have hold.until =
    /// "end"
    run: PathBuf,
    /// Maximum P95 of first exec, for example 60ms
    #[arg(long, value_parser = humantime::parse_duration)]
    p95: Option<Duration>,
    /// Maximum memory of all sandboxes together, for example 4GiB
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Maximum CPU time of all idle sandboxes together, in percent of one CPU; needs hold.idle_each_round
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    idle_cpu: Option<f64>,
    #[command(flatten)]
    options: RunOptions,
}

impl Density {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        let bounds = Bounds {
            p95_ms: self.p95.map(|p95| p95.as_nanos() as f64 / 1e6),
            memory_bytes: self.memory.map(|memory| memory.0 as f64),
            idle_cpu_ms_per_s: self.idle_cpu.map(|percent| percent * 10.0),
        };
        if bounds == Bounds::default() {
            return Err(CommandError::NoBound);
        }
        let format = match self.options.format {
            Format::Json => PlainFormat::Json,
            Format::Human | Format::Junit => PlainFormat::Human,
        };
        let is_recorded = self.run.is_dir();
        let dir = if is_recorded {
            if !self.options.changes.is_empty() {
                return Err(CommandError::Recorded(self.run));
            }
            self.run
        } else {
            let scenario = super::load(&self.run, None, &self.options.changes)?;
            if scenario.hold.until != HoldUntil::End {
                return Err(CommandError::NotHeld(self.run));
            }
            let command = format!("cube-bench run {}", shared_path(&self.run));
            let dir = record_run(&scenario, command, self.options)?;
            eprintln!("cube-bench: results are in {}", dir.display());
            dir
        };
        let recorded = RecordedRun::read(&dir)?;
        let view = viewed(&recorded, &dir)?;
        let name = &view.scenario.name;
        let report = DensityReport::new(name, view.summary, &bounds);
        if report.levels.is_empty() {
            return Err(CommandError::NotHeld(dir));
        }
        // A recorded run may be a published one, which must not change.
        if !is_recorded {
            write_reports(&view, &dir)?;
            let path = dir.join("density.json");
            let text = serde_json::to_string_pretty(&report).unwrap_or_default();
            std::fs::write(&path, text).map_err(|source| SessionError::Io { path, source })?;
        }
        match format {
            PlainFormat::Human => print!("{}", report.render()),
            PlainFormat::Json => print_json(&report),
        }
        Ok(match (report.holds, report.misses) {
            (None, None) => End::Inconclusive,
            _ => End::Pass,
        })
    }
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 && value <= 1e6 => Ok(value),
        _ => Err("expected a percentage of one CPU above 0".to_owned()),
    }
}
