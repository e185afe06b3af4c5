//! Scenarios: a TOML file is merged with the embedded defaults and validated into a [`Scenario`].
//!
//! `scenarios/defaults.toml` documents every key with its default. It is also the list of known keys, except for
//! the keys of `[mode]`, `[[turns]]` and `[[gates]]`, which `keys` lists. This module only reads the scenario file; it
//! changes nothing on the host.

mod mode;

mod arrival;
mod event;
mod gate_spec;
mod lives;
mod network;
mod peers;
mod steps;
mod target;

mod change;
mod config;
mod decidable;
mod keys;
mod rules;

use std::{path::Path, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use crate::{
    trace,
    work::{self, WorkError, WorkSet},
};

pub use arrival::{Arrival, Spacing, SteadySpec};
pub use change::{BadChange, Change};
pub use decidable::undecidable;
pub use event::{EventCount, EventKind, EventSpec, EventTime};
pub use gate_spec::{GateSpec, Limit, Metric, OtherRow, Timed};
pub use lives::{HoldSpec, HoldUntil, Lifetime, MixSpec};
pub use mode::{BesideSpec, ClusterSpec, Mode, PeerSpec, TraceSpec};
pub use network::{ExchangeSpec, NetworkSpec};
pub use stats::quantile::Quantile;
pub use steps::{ExecSpec, ParentStep, TurnSpec};
pub use target::{CreateApi, Place, TargetKind, TargetSpec};

/// Defaults and documentation of all keys.
pub const DEFAULTS: &str = include_str!("../../scenarios/defaults.toml");

/// The scenario of `cube-bench peers` if no file is given.
pub const PEERS: &str = include_str!("../../scenarios/peers.toml");

/// A validated scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct Scenario {
    /// Name in reports: the key `name`, or the file name without extension.
    pub name: String,
    /// Shown in reports; may be empty.
    pub description: String,
    /// Seed of plans and permutation tests.
    pub seed: u64,
    /// Measured rounds, at least one.
    pub rounds: u32,
    /// Rounds before the measured ones; recorded, but not part of any result.
    pub warmup_rounds: u32,
    /// Rounds that each start one clone while the template is not in the page cache; they come before all other rounds.
    pub cold_rounds: u32,
    pub target: TargetSpec,
    pub mode: Mode,
    /// `None` leaves the network of the host unchanged and sends no network options.
    #[serde(default)]
    pub network: Option<NetworkSpec>,
    /// Arrival times of clones.
    pub arrival: Arrival,
    /// Several rates instead of the rate of `arrival`; `None` unless its kind is "steady".
    #[serde(default)]
    pub steady: Option<SteadySpec>,
    /// Lifetimes of sandboxes, chosen at random by the seed, with [`HoldUntil::Lifetime`] and without a trace.
    #[serde(default)]
    pub lifetime: Option<Lifetime>,
    /// First command of each clone.
    pub exec: ExecSpec,
    /// Work that measured and cold clones run instead of `exec`, chosen at random by the seed. `None` runs `exec`
    /// in each clone.
    #[serde(default)]
    pub work: Option<WorkSet>,
    /// Commands, cells and exchanges after the first command, each timed separately.
    #[serde(default)]
    pub turns: Vec<TurnSpec>,
    /// How long clones live.
    pub hold: HoldSpec,
    /// `None` if memory is not measured.
    pub memory: Option<MemorySpec>,
    /// Command of the host-process rounds; `None` for no such rounds.
    pub baseline: Option<ExecSpec>,
    pub gates: Vec<GateSpec>,
    /// Rule that excludes disturbed repetitions. `None` keeps all; older recorded runs have no rule.
    #[serde(default)]
    pub interference: Option<InterferenceSpec>,
}

impl Serialize for Scenario {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for Scenario {
    /// Also reads scenarios that versions without modes recorded.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut recorded = serde_json::Map::deserialize(deserializer)?;
        mode::convert_recorded(&mut recorded).map_err(D::Error::custom)?;
        Self::deserialize(serde_json::Value::Object(recorded)).map_err(D::Error::custom)
    }
}

/// Limits beyond which a round is disturbed by other programs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct InterferenceSpec {
    /// Share of the host's CPU time that other programs may use, 0 to 1. Kernel threads do not count.
    pub foreign_cpu_share: f64,
    /// Share of the time in which some task may wait for memory, 0 to 1.
    pub memory_wait_share: f64,
}

impl InterferenceSpec {
    /// The rule as a sentence.
    #[must_use]
    pub fn describe(&self) -> String {
        format!(
            "other programs use more than {} % of the CPU time of a round, or tasks wait for memory in more than {} % of it",
            self.foreign_cpu_share * 100.0,
            self.memory_wait_share * 100.0
        )
    }
}

/// How memory is measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemorySpec {
    /// Wait before each sample.
    pub settle: Duration,
    /// Share of MemTotal in use, between 0 and 1. Once it is reached, the run ends before the next measured round.
    pub stop_at_share: f64,
}

/// A scenario file that cannot be read or is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    #[error("cannot read scenario {path}")]
    Read {
        path: String,
        #[source]
        source: std::io::Error,
    },
    /// The text is not TOML, a value has the wrong type, or a required key is missing.
    #[error("cannot parse scenario {name}")]
    Toml {
        name: String,
        #[source]
        source: Box<toml::de::Error>,
    },
    #[error("scenario {name}: unknown key `{key}`{}", nearest.as_ref().map(|n| format!(", the nearest known key is `{n}`")).unwrap_or_default())]
    UnknownKey {
        name: String,
        /// Dotted path of the key.
        key: String,
        /// Dotted path of the known key with the smallest edit distance; `None` if the table has no keys.
        nearest: Option<String>,
    },
    /// A value that is out of range, or keys that contradict each other.
    #[error("scenario {name}: {what}")]
    Value { name: String, what: String },
    /// The work file cannot be used.
    #[error("scenario {name}")]
    Work {
        name: String,
        #[source]
        source: Box<WorkError>,
    },
}

/// Reads and validates a scenario file. `work` replaces its work file.
///
/// # Errors
/// Returns [`ScenarioError::Read`] if the file cannot be read, [`ScenarioError::Value`] for a gate that the scenario can
/// never decide, and otherwise the errors of [`parse`].
pub fn load(path: &Path, work: Option<&Path>) -> Result<Scenario, ScenarioError> {
    load_changed(path, work, &[])
}

/// Like [`load`], with keys that replace keys of the file. Changes may leave gates that cannot be decided, for example
/// in a first try with few rounds; [`undecidable`] lists them.
///
/// # Errors
/// Returns the errors of [`load`].
pub fn load_changed(
    path: &Path,
    work: Option<&Path>,
    changes: &[Change],
) -> Result<Scenario, ScenarioError> {
    let text = read(path)?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let dir = path.parent().unwrap_or(Path::new(""));
    let scenario = parse_with(&stem, &text, dir, work, changes)?;
    let open = undecidable(&scenario);
    if open.is_empty() || !changes.is_empty() {
        return Ok(scenario);
    }
    Err(ScenarioError::Value {
        name: stem.into_owned(),
        what: open.join("; "),
    })
}

/// A scenario file in the current form, without its comments; `None` if it has that form.
///
/// # Errors
/// Returns [`ScenarioError::Read`] if the file cannot be read, [`ScenarioError::Toml`] if it is not TOML, and
/// [`ScenarioError::Value`] if it has several modes.
pub fn rewritten(path: &Path) -> Result<Option<String>, ScenarioError> {
    let name = path.display().to_string();
    let text = read(path)?;
    let typed: toml::Table = text.parse().map_err(|source| ScenarioError::Toml {
        name: name.clone(),
        source: Box::new(source),
    })?;
    let converted = mode::converted(&typed).map_err(|what| ScenarioError::Value { name, what })?;
    // Serializing a table that was parsed does not fail.
    Ok(converted.map(|table| toml::to_string_pretty(&table).unwrap_or_default()))
}

fn read(path: &Path) -> Result<String, ScenarioError> {
    std::fs::read_to_string(path).map_err(|source| ScenarioError::Read {
        path: path.display().to_string(),
        source,
    })
}

/// Parses and validates the text of a scenario. `name` is used in errors, and in reports if the text has no `name`.
///
/// # Errors
/// Returns [`ScenarioError::Toml`] if the text is not TOML, a value has the wrong type or a required key is missing,
/// [`ScenarioError::UnknownKey`] for an unknown key, and [`ScenarioError::Value`] for a value out of range or keys that
/// contradict each other.
pub fn parse(name: &str, text: &str) -> Result<Scenario, ScenarioError> {
    parse_changed(name, text, &[])
}

/// Like [`parse`], with keys that replace keys of the text.
///
/// # Errors
/// Returns the errors of [`parse`].
pub fn parse_changed(
    name: &str,
    text: &str,
    changes: &[Change],
) -> Result<Scenario, ScenarioError> {
    parse_with(name, text, Path::new(""), None, changes)
}

/// Like [`parse`]. `work.file` in the text is relative to `dir`; `work` replaces it.
fn parse_with(
    name: &str,
    text: &str,
    dir: &Path,
    work: Option<&Path>,
    changes: &[Change],
) -> Result<Scenario, ScenarioError> {
    let toml_error = |source| ScenarioError::Toml {
        name: name.to_owned(),
        source: Box::new(source),
    };
    let mut typed: toml::Table = text.parse().map_err(toml_error)?;
    for change in changes {
        change.apply(&mut typed);
    }
    let invalid = |what| ScenarioError::Value {
        name: name.to_owned(),
        what,
    };
    let converted = mode::converted(&typed).map_err(invalid)?;
    let typed = converted.unwrap_or(typed);
    let defaults: toml::Table = DEFAULTS.parse().map_err(toml_error)?;
    keys::check(name, &typed, &defaults)?;
    let arrival = typed.get("arrival").and_then(toml::Value::as_table);
    let arrival_keys: Vec<String> = arrival.map_or_else(Vec::new, |t| t.keys().cloned().collect());
    let merged = keys::merge(defaults, typed);
    let merged = keys::complete_systems(merged);
    let config: config::ScenarioConfig = merged.try_into().map_err(toml_error)?;
    let trace = config.trace_file().map(|file| trace::load(&dir.join(file)));
    let file = match work {
        Some(file) => Some(file.to_owned()),
        None => config.work_file().map(|file| dir.join(file)),
    };
    let trace = trace.transpose().map_err(invalid)?;
    let mut scenario = config.check(name, &arrival_keys, trace).map_err(invalid)?;
    if let Some(file) = file {
        let set = work::load(&file, &scenario.exec).map_err(|source| ScenarioError::Work {
            name: name.to_owned(),
            source: Box::new(source),
        })?;
        rules::can_draw_work(&scenario).map_err(invalid)?;
        scenario.work = Some(set);
    }
    Ok(scenario)
}

#[cfg(test)]
mod tests;
