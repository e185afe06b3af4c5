//! `cube-bench run`: runs a scenario, and what other commands that run scenarios share with it.

use std::path::{Path, PathBuf};

use clap::Args;
use harness::{
    scenario::{Change, Scenario},
    session::{self, Settings},
};
use testbed::{
    artifacts,
    exit::End,
    options::{Format, Places, RunRoot},
};

use super::{
    CommandError, load,
    report::{Strict, report},
};

#[derive(Args)]
pub(super) struct Run {
    /// Scenario file, such as scenarios/50-concurrent.toml
    scenario: PathBuf,
    /// Work file that replaces the scenario's; scenarios/work/README.md describes the format
    #[arg(long, value_name = "FILE")]
    work: Option<PathBuf>,
    /// Measure this E2B-compatible server instead of the scenario's target: --set target.kind=e2b and
    /// target.api_url
    #[arg(long, value_name = "URL")]
    target: Option<String>,
    #[command(flatten)]
    options: RunOptions,
}

#[derive(Args)]
pub(super) struct RunOptions {
    /// Replace a key of the scenario, such as rounds=5 or arrival.starts=20; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(super) changes: Vec<Change>,
    #[command(flatten)]
    places: Places,
    /// Path of cube-netprobe, which scenarios with a network copy into sandboxes [default: in $CUBE_BIN, else in the
    /// directory of this program]
    #[arg(long, value_name = "PATH")]
    probe: Option<PathBuf>,
    /// Process of the server at target.api_url, whose CPU time is not interference [default: the process that listens
    /// there, if it is on this host]
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// Path of etcd 3.5.13 or later, for scenarios with a cluster [default: ARTIFACTS/stages/etcd/etcd, else in PATH]
    #[arg(long, value_name = "PATH")]
    etcd: Option<PathBuf>,
    /// Directory for the results of this run [default: ARTIFACTS/results/NAME-TIME]
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    #[command(flatten)]
    run_root: RunRoot,
    #[command(flatten)]
    strict: Strict,
    #[arg(long, value_enum, default_value_t)]
    pub(super) format: Format,
}

impl Run {
    pub(super) fn carry_out(mut self) -> Result<End, CommandError> {
        self.options
            .changes
            .extend(self.target.iter().flat_map(target_changes));
        let loaded = load(&self.scenario, self.work.as_deref(), &self.options.changes)?;
        let mut command = format!("cube-bench run {}", shared_path(&self.scenario));
        if let Some(work) = &self.work {
            command.push_str(&format!(" --work {}", shared_path(work)));
        }
        run(&loaded, command, self.options)
    }
}

/// The keys that `--target URL` stands for.
pub(super) fn target_changes(url: &String) -> Vec<Change> {
    let texts = [
        "target.kind=e2b".to_owned(),
        format!("target.api_url={url}"),
    ];
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

/// `command` is the command line without options that change the scenario.
pub(super) fn run(
    scenario: &Scenario,
    command: String,
    options: RunOptions,
) -> Result<End, CommandError> {
    let output = (options.format, options.strict.strictness());
    let dir = record_run(scenario, command, options)?;
    let end = report(&dir, output)?;
    eprintln!("cube-bench: results are in {}", dir.display());
    Ok(end)
}

/// Runs a scenario and returns the directory of its results, which has no reports yet.
pub(super) fn record_run(
    scenario: &Scenario,
    mut command: String,
    options: RunOptions,
) -> Result<PathBuf, CommandError> {
    for change in &options.changes {
        command.push_str(&format!(" --set '{}'", change.text()));
    }
    let settings = Settings {
        artifacts: options
            .places
            .artifacts
            .unwrap_or_else(artifacts::default_dir),
        vmm: options.places.vmm,
        api: options.places.api,
        probe: options.probe,
        etcd: options.etcd,
        results: options.results,
        server_pid: options.server_pid,
        run_root: options.run_root.run_root,
        reproduce: command,
    };
    Ok(session::run(scenario, &settings)?)
}

/// A path that is valid for others: relative to the current directory, or else starting at the directory
/// `scenarios`. Records of runs are published, and directories of this host mean nothing elsewhere.
pub(super) fn shared_path(path: &Path) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    if let Ok(inside) = path.strip_prefix(&here) {
        return inside.display().to_string();
    }
    let above = path
        .ancestors()
        .find(|part| part.ends_with("scenarios"))
        .and_then(Path::parent);
    let short = above.and_then(|above| path.strip_prefix(above).ok());
    short.unwrap_or(path).display().to_string()
}
