//! `cube-bench saturate`: finds the highest start rate whose P95 stays within a bound.

use std::{
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use clap::Args;
use harness::{
    saturate::{
        self, Options,
        search::{Ended, Search},
    },
    session::{self, SessionError, Settings},
};
use testbed::{artifacts, exit::End, options::Places};

use super::{CommandError, PlainFormat, RunRoot, print_json, run::shared_path};

#[derive(Args)]
pub(super) struct Saturate {
    /// Scenario whose sandboxes are started; its arrivals, gates, baseline and cold rounds are ignored
    scenario: PathBuf,
    /// Bound on the P95 of first exec, for example 50ms
    #[arg(long, value_parser = humantime::parse_duration)]
    p95: Duration,
    /// First rate, in starts per second
    #[arg(long, value_name = "RATE", default_value_t = 10.0, value_parser = rate)]
    from: f64,
    /// Highest rate to try
    #[arg(long, value_name = "RATE", default_value_t = 1000.0, value_parser = rate)]
    to: f64,
    /// Length of a trial; a trial has at least 100 starts
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration)]
    trial: Duration,
    /// The search ends when the two rates around the capacity differ by at most this share
    #[arg(long, value_name = "PERCENT", default_value_t = 5.0, value_parser = percent)]
    precision: f64,
    #[command(flatten)]
    places: Places,
    /// New directory for the trials [default: ARTIFACTS/results/saturate-NAME-TIME]
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    #[command(flatten)]
    run_root: RunRoot,
    #[arg(long, value_enum, default_value_t)]
    format: PlainFormat,
}

impl Saturate {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        let scenario = super::load(&self.scenario, None, &[])?;
        let artifacts = self.places.artifacts.unwrap_or_else(artifacts::default_dir);
        let results = self.results.unwrap_or_else(|| {
            let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
            let name = format!("saturate-{}-{}", scenario.name, now.replace([':', '-'], ""));
            artifacts.join("results").join(name)
        });
        let settings = Settings {
            artifacts,
            vmm: self.places.vmm,
            api: self.places.api,
            probe: None,
            etcd: None,
            results: None,
            server_pid: None,
            run_root: self.run_root.run_root,
            reproduce: format!(
                "cube-bench saturate {} --p95 {}",
                shared_path(&self.scenario),
                humantime::format_duration(self.p95)
            ),
        };
        let options = Options {
            search: Search {
                from_per_s: self.from,
                to_per_s: self.to.max(self.from),
                precision: self.precision / 100.0,
                repeats: 3,
            },
            p95: self.p95,
            trial: self.trial,
            results: results.clone(),
        };
        let interrupted = session::watch_signals()?;
        let report = saturate::run(&scenario, &settings, &options, &interrupted)?;
        write(&results, &report)?;
        match self.format {
            PlainFormat::Human => print!("{}", report.render()),
            PlainFormat::Json => print_json(&report),
        }
        Ok(match report.found.ended {
            Ended::Found | Ended::BelowFirst | Ended::AboveLast => End::Pass,
            Ended::Generator => End::Inconclusive,
        })
    }
}

fn write(results: &Path, report: &saturate::SaturationReport) -> Result<(), CommandError> {
    let path = results.join("report.json");
    let text = serde_json::to_string_pretty(report).unwrap_or_default();
    std::fs::write(&path, text).map_err(|source| SessionError::Io { path, source })?;
    Ok(())
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.1..=100_000.0).contains(&value) => Ok(value),
        _ => Err("expected starts per second from 0.1 to 100000".to_owned()),
    }
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.5..=50.0).contains(&value) => Ok(value),
        _ => Err("expected a percentage from 0.5 to 50".to_owned()),
    }
}
