//! The deserialized form of a scenario file, and its validation into a [`Scenario`].

use std::{path::PathBuf, time::Duration};

use serde::Deserialize;

use super::{
    ExecSpec, GateSpec, HoldSpec, HoldUntil, InterferenceSpec, MemorySpec, Scenario,
    arrival::{self, ArrivalConfig},
    gate_spec::GateConfig,
    lives,
    mode::ModeConfig,
    network::NetworkConfig,
    rules,
    steps::{self, ExecConfig, TurnConfig},
    target::TargetConfig,
};
use crate::trace::Trace;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScenarioConfig {
    name: String,
    description: String,
    seed: u64,
    rounds: u32,
    warmup_rounds: u32,
    cold_rounds: u32,
    mode: ModeConfig,
    target: TargetConfig,
    network: NetworkConfig,
    arrival: ArrivalConfig,
    exec: ExecConfig,
    work: WorkConfig,
    turns: Vec<TurnConfig>,
    hold: HoldConfig,
    memory: MemoryConfig,
    baseline: BaselineConfig,
    interference: InterferenceConfig,
    gates: Vec<GateConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkConfig {
    file: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HoldConfig {
    until: HoldUntil,
    lifetime: String,
    at_least: String,
    exec_after: bool,
    idle_each_round: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryConfig {
    measure: bool,
    settle: String,
    stop_at_share: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BaselineConfig {
    kind: BaselineKind,
    argv: Vec<String>,
    expect_stdout: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InterferenceConfig {
    foreign_cpu_share: f64,
    memory_wait_share: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum BaselineKind {
    None,
    HostProcess,
}

impl ScenarioConfig {
    /// The key `work.file`, not yet resolved; `None` if it is empty.
    pub(super) fn work_file(&self) -> Option<PathBuf> {
        (!self.work.file.is_empty()).then(|| PathBuf::from(&self.work.file))
    }

    /// The trace of the mode, not yet read, if it has one.
    pub(super) fn trace_file(&self) -> Option<PathBuf> {
        self.mode.trace_file().map(PathBuf::from)
    }

    /// Validates the scenario. `trace` is the content of [`Self::trace_file`], and `arrival_keys` are the keys of
    /// `[arrival]` that the file sets. `name` is used if the file has no `name`. The error describes the first invalid
    /// value.
    pub(super) fn check(
        self,
        name: &str,
        arrival_keys: &[String],
        trace: Option<Trace>,
    ) -> Result<Scenario, String> {
        if self.rounds == 0 {
            return Err("rounds is 0, it must be at least 1".to_owned());
        }
        let target = self.target.check()?;
        let exec = self.exec.check()?;
        let (arrival, steady) = match &trace {
            Some(trace) => (arrival::of_trace(trace, arrival_keys)?, None),
            None => self.arrival.check(arrival_keys)?,
        };
        let until = self.hold.until;
        let gates = self.gates.into_iter().map(GateSpec::try_from);
        let scenario = Scenario {
            name: if self.name.is_empty() {
                name.to_owned()
            } else {
                self.name
            },
            description: self.description,
            seed: self.seed,
            rounds: self.rounds,
            warmup_rounds: self.warmup_rounds,
            cold_rounds: self.cold_rounds,
            target,
            lifetime: lives::lifetime(until, &self.hold.lifetime, trace.is_some())?,
            mode: self.mode.check(&exec, trace)?,
            network: self.network.check(),
            arrival,
            steady,
            baseline: self.baseline.check(&exec)?,
            work: None,
            turns: steps::turns(self.turns, &exec)?,
            exec,
            hold: self.hold.check()?,
            memory: self.memory.check()?,
            interference: Some(self.interference.check()?),
            gates: gates.collect::<Result<_, _>>()?,
        };
        rules::check(&scenario)?;
        Ok(scenario)
    }
}

impl HoldConfig {
    fn check(&self) -> Result<HoldSpec, String> {
        Ok(HoldSpec {
            until: self.until,
            at_least: duration("hold.at_least", &self.at_least)?,
            exec_after: self.exec_after,
            idle_each_round: self.idle_each_round,
        })
    }
}

impl MemoryConfig {
    fn check(&self) -> Result<Option<MemorySpec>, String> {
        let settle = duration("memory.settle", &self.settle)?;
        if !(self.stop_at_share > 0.0 && self.stop_at_share < 1.0) {
            return Err(format!(
                "memory.stop_at_share is {}, it must lie between 0 and 1",
                self.stop_at_share
            ));
        }
        Ok(self.measure.then_some(MemorySpec {
            settle,
            stop_at_share: self.stop_at_share,
        }))
    }
}

impl InterferenceConfig {
    fn check(&self) -> Result<InterferenceSpec, String> {
        for (key, share) in [
            ("foreign_cpu_share", self.foreign_cpu_share),
            ("memory_wait_share", self.memory_wait_share),
        ] {
            if !(share > 0.0 && share <= 1.0) {
                return Err(format!(
                    "interference.{key} is {share}, it must be above 0 and at most 1 (which keeps every round)"
                ));
            }
        }
        Ok(InterferenceSpec {
            foreign_cpu_share: self.foreign_cpu_share,
            memory_wait_share: self.memory_wait_share,
        })
    }
}

impl BaselineConfig {
    fn check(self, exec: &ExecSpec) -> Result<Option<ExecSpec>, String> {
        match self.kind {
            BaselineKind::None => Ok(None),
            BaselineKind::HostProcess if self.argv.is_empty() && exec.cell.is_some() => Err(
                "baseline.argv is empty, but the host has no interpreter for exec.cell".to_owned(),
            ),
            BaselineKind::HostProcess if self.argv.is_empty() => Ok(Some(exec.clone())),
            BaselineKind::HostProcess => Ok(Some(ExecSpec {
                argv: self.argv,
                cell: None,
                expect_stdout: self.expect_stdout,
                ..exec.clone()
            })),
        }
    }
}

pub(super) fn duration(key: &str, text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| format!("{key}: {text:?} is not a duration with a unit such as \"250ms\""))
}

pub(super) fn positive(key: &str, text: &str) -> Result<Duration, String> {
    let value = duration(key, text)?;
    if value.is_zero() {
        return Err(format!("{key} is zero, it must be positive"));
    }
    Ok(value)
}
