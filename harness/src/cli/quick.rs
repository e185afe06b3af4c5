//! `cube-bench quick`: measures an endpoint in two minutes.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use clap::Args;
use harness::{
    quick,
    scenario::{self, Change},
    session::{RecordedRun, SessionError, Settings},
};
use testbed::{artifacts, exit::End, options::RunRoot};

use super::{
    CommandError,
    report::{viewed, write_reports},
    run::target_changes,
};

#[derive(Args)]
pub(super) struct Quick {
    /// URL of a server with E2B's API; its key is read from E2B_API_KEY
    url: String,
    /// Replace a key of both scenarios, such as target.sandbox_url=… or target.api=v1; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    changes: Vec<Change>,
    /// Maximum total time of both runs
    #[arg(long, default_value = "2m", value_parser = humantime::parse_duration)]
    time: Duration,
    /// New directory for the results [default: ARTIFACTS/results/quick-TIME]
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    #[command(flatten)]
    run_root: RunRoot,
}

impl Quick {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        let artifacts = artifacts::default_dir();
        let results = self.results.unwrap_or_else(|| {
            let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
            let name = format!("quick-{}", now.replace([':', '-'], ""));
            artifacts.join("results").join(name)
        });
        let own = results.join("scenarios");
        let io_error = |source| SessionError::Io {
            path: own.clone(),
            source,
        };
        fs::create_dir_all(&own).map_err(io_error)?;
        for (name, text) in quick::FILES {
            fs::write(own.join(name), text).map_err(io_error)?;
        }
        let mut reproduce = format!("cube-bench quick {}", self.url);
        for change in &self.changes {
            reproduce.push_str(&format!(" --set '{}'", change.text()));
        }
        let changes = [target_changes(&self.url), self.changes].concat();
        let load = |name: &str| scenario::load_changed(&own.join(name), None, &changes);
        let scenarios = [load(quick::FILES[0].0)?, load(quick::FILES[1].0)?];
        let settings = Settings {
            artifacts,
            vmm: None,
            api: None,
            probe: None,
            etcd: None,
            server_pid: None,
            results: None,
            run_root: self.run_root.run_root,
            reproduce,
        };
        let report = quick::run(&self.url, &scenarios, &settings, &results, self.time)?;
        for dir in report.dirs() {
            let recorded = RecordedRun::read(dir)?;
            write_reports(&viewed(&recorded, dir)?, dir)?;
        }
        print!("{}", report.render());
        for dir in report.dirs() {
            eprintln!("cube-bench: {}", dir.join("report.html").display());
        }
        Ok(report.end())
    }
}
