//! `cube-bench plan` and `cube-bench rewrite`: print a scenario without running it.

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

use clap::Args;
use harness::{
    plan,
    scenario::{self, Change, Scenario},
    session::SessionError,
    trace,
};
use testbed::exit::End;

use super::{CommandError, PlainFormat, load, print_json};

#[derive(Args)]
pub(super) struct Plan {
    /// Scenario file, such as scenarios/50-concurrent.toml
    scenario: PathBuf,
    /// Seed that replaces the scenario's
    #[arg(long)]
    seed: Option<u64>,
    /// Replace a key of the scenario; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    changes: Vec<Change>,
    /// Write the arrivals, templates and lifetimes of the first measured round to this file, which
    /// mode.kind = "trace" replays
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t)]
    format: PlainFormat,
}

#[derive(Args)]
pub(super) struct Rewrite {
    /// Scenario file with tables such as [beside] or [[peers]] instead of [mode]
    scenario: PathBuf,
}

impl Plan {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        let mut scenario = load(&self.scenario, None, &self.changes)?;
        scenario.seed = self.seed.unwrap_or(scenario.seed);
        match self.trace {
            Some(file) => dump_trace(&scenario, &file),
            None => Ok(print_plan(&scenario, self.format)),
        }
    }
}

impl Rewrite {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        match scenario::rewritten(&self.scenario)? {
            Some(text) => print!("{text}"),
            None => eprintln!(
                "cube-bench: {} has the current form",
                self.scenario.display()
            ),
        }
        Ok(End::Pass)
    }
}

fn print_plan(scenario: &Scenario, format: PlainFormat) -> End {
    let plan = plan::build(scenario);
    match format {
        PlainFormat::Json => print_json(&plan),
        PlainFormat::Human => print!("{}", plan.describe()),
    }
    End::Pass
}

fn dump_trace(scenario: &Scenario, file: &Path) -> Result<End, CommandError> {
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let trace = trace::of_plan(scenario, &plan::build(scenario), now)
        .ok_or_else(|| CommandError::Untimed(scenario.name.clone()))?;
    let text = serde_json::to_string_pretty(&trace).unwrap_or_default();
    std::fs::write(file, text).map_err(|source| SessionError::Io {
        path: file.to_owned(),
        source,
    })?;
    println!("{}: {} requests", file.display(), trace.requests.len());
    Ok(End::Pass)
}
