//! Scenarios: a TOML file is merged with the embedded defaults and validated into a [`Scenario`].
//!
//! `scenarios/defaults.toml` documents every key with its default. It is also the list of known keys, except for
//! the keys of `[[turns]]`, `[[parent]]`, `[[peers]]` and `[[gates]]`, which `keys` lists. This module only reads
//! the scenario file; it changes nothing on the host.

mod change;
mod config;
mod event;
mod gate_spec;
mod keys;
mod lives;
mod network;
mod peers;
mod steps;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use model::{Bytes, WorkingSetPrefault};
use serde::{Deserialize, Serialize};

use crate::{
    trace::{self, Trace},
    work::{self, WorkError, WorkSet},
};

pub use change::{BadChange, Change};
pub use event::{EventCount, EventKind, EventSpec, EventTime};
pub use gate_spec::{GateSpec, Limit, Metric, Timed};
pub use lives::{Lifetime, MixSpec};
pub use network::{ExchangeSpec, NetworkSpec};
pub use stats::quantile::Quantile;

/// Defaults and documentation of all keys.
pub const DEFAULTS: &str = include_str!("../../scenarios/defaults.toml");

/// The scenario of `cube-bench peers` if no file is given.
pub const PEERS: &str = include_str!("../../scenarios/peers.toml");

/// A validated scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// Target of the comparison rounds, which are interleaved with the rounds of `target`. `None` for no such
    /// rounds.
    #[serde(default)]
    pub beside: Option<BesideKind>,
    /// Prefault setting of the comparison rounds; `None` uses the setting of `target`.
    #[serde(default)]
    pub beside_prefault: Option<WorkingSetPrefault>,
    /// Other systems that the same run measures, interleaved with `target`.
    #[serde(default)]
    pub peers: Vec<PeerSpec>,
    /// `None` leaves the network of the host unchanged and sends no network options.
    #[serde(default)]
    pub network: Option<NetworkSpec>,
    /// Arrival times of clones.
    pub arrival: Arrival,
    /// Several rates instead of the rate of `arrival`; `None` unless its kind is "steady".
    #[serde(default)]
    pub steady: Option<SteadySpec>,
    /// Templates from which sandboxes are created, chosen at random by the seed; empty for only the template of
    /// `target`.
    #[serde(default)]
    pub mix: Vec<MixSpec>,
    /// Lifetimes of sandboxes, chosen at random by the seed, with [`HoldUntil::Lifetime`] and without a trace.
    #[serde(default)]
    pub lifetime: Option<Lifetime>,
    /// Arrivals, templates and lifetimes that replace random ones.
    #[serde(default)]
    pub trace: Option<Trace>,
    /// First command of each clone.
    pub exec: ExecSpec,
    /// Work that measured and cold clones run instead of `exec`, chosen at random by the seed. `None` runs `exec`
    /// in each clone.
    #[serde(default)]
    pub work: Option<WorkSet>,
    /// Commands, cells and exchanges after the first command, each timed separately.
    #[serde(default)]
    pub turns: Vec<TurnSpec>,
    /// Steps that prepare the parent sandbox from which each round's clones are forked; if empty, clones are created
    /// from the template.
    #[serde(default)]
    pub parent: Vec<ParentStep>,
    /// Event at a node of the target's cluster during each round of the target; `None` for no event.
    #[serde(default)]
    pub event: Option<EventSpec>,
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

/// Another system of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerSpec {
    /// Name in reports, unique in the scenario.
    pub name: String,
    pub target: TargetSpec,
    /// First command of each sandbox.
    pub exec: ExecSpec,
}

/// The target of a scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetSpec {
    pub kind: TargetKind,
    /// URL of the API; `None` starts a `cube-api` on this host.
    #[serde(default)]
    pub api_url: Option<String>,
    /// URL for requests to sandboxes, with the placeholders `{id}` and `{port}`; `None` uses the URL of the API.
    #[serde(default)]
    pub sandbox_url: Option<String>,
    /// Path of a create on a server with E2B's API.
    #[serde(default)]
    pub api: CreateApi,
    /// Environment variable with the key of the API.
    #[serde(default = "default_key_env")]
    pub api_key_env: String,
    /// Program and options of an adapter or of a runtime; empty for the runtime's defaults.
    #[serde(default)]
    pub command: Vec<String>,
    /// Size of the warm pool of the server that the run starts; 0 for no pool.
    #[serde(default)]
    pub warm: u32,
    /// Interval at which the number of warm sandboxes is read during rounds of the target; `None` does not read it.
    #[serde(default)]
    pub watch: Option<Duration>,
    /// Number of nodes of the cluster that the run starts; 0 for a single server.
    #[serde(default)]
    pub nodes: u8,
    /// Nodes of the target's cluster that receive requests, in turn; empty for all.
    #[serde(default)]
    pub by: Vec<String>,
    /// Nodes that take no new sandboxes and forward all creates.
    #[serde(default)]
    pub closed: Vec<String>,
    /// Name of a directory below `templates/` of the artifacts.
    pub template: String,
    /// Guest RAM that the template must have; `None` accepts any size.
    pub memory: Option<Bytes>,
    pub prefault: WorkingSetPrefault,
    /// Timeout of each step of a create.
    pub start_timeout: Duration,
}

/// Place where sandboxes run. It decides which properties of this host matter for a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Behind an endpoint or an adapter. As far as the harness can tell, this host is only the client.
    Elsewhere,
    /// On this host, without KVM.
    HostKernel,
    /// In VMs of this project on this host.
    #[default]
    OwnVms,
}

/// Interfaces through which sandboxes are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetKind {
    /// One `cube-vmm` process for each clone, driven through its control socket.
    VmmDirect,
    /// A server with E2B's API.
    E2b,
    /// A CubeSandbox server: E2B's API with different status codes.
    Cubesandbox,
    /// A program that speaks the protocol of docs/measure/adapters.md. Older recorded runs have kinds of their own for the
    /// systems whose adapters are now in scenarios/adapters.
    #[serde(alias = "bubblewrap", alias = "runc", alias = "crun", alias = "runsc")]
    Adapter,
    /// Processes of the host.
    Process,
}

impl TargetKind {
    /// Name in scenarios and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::VmmDirect => "vmm-direct",
            Self::E2b => "e2b",
            Self::Cubesandbox => "cubesandbox",
            Self::Adapter => "adapter",
            Self::Process => "process",
        }
    }

    /// Whether the harness itself runs VMs of this project, so that it can drop their template from the page cache.
    #[must_use]
    pub fn maps_template(self) -> bool {
        self == Self::VmmDirect
    }
}

/// Endpoint for creates on a server with E2B's API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CreateApi {
    /// `POST /v2/sandboxes`.
    #[default]
    V2,
    /// `POST /sandboxes`.
    V1,
}

fn default_key_env() -> String {
    "E2B_API_KEY".to_owned()
}

/// Subjects of the comparison rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BesideKind {
    /// Clones as in [`TargetKind::VmmDirect`].
    VmmDirect,
    /// Processes of the host, which run the first command and the turns.
    HostProcess,
}

/// Arrival times of clones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrival {
    /// All clones of a round at the same instant.
    Burst {
        /// Clones in a round.
        starts: u32,
    },
    /// A fixed number of workers. Each starts its next clone as soon as its previous attempt has ended.
    Closed {
        workers: u32,
        /// Clones in a round, over all workers.
        starts: u32,
    },
    /// A fixed mean rate, whether or not earlier clones have finished.
    Open {
        /// Clones in a round.
        starts: u32,
        /// Mean rate in clones per second.
        rate_per_s: f64,
        spacing: Spacing,
    },
}

impl Arrival {
    /// Clones in a round.
    #[must_use]
    pub fn starts(self) -> u32 {
        match self {
            Self::Burst { starts } | Self::Closed { starts, .. } | Self::Open { starts, .. } => {
                starts
            }
        }
    }
}

/// Open loops at several rates. Each repetition has one round for each rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SteadySpec {
    /// Mean rates in clones per second, ascending.
    pub rates_per_s: Vec<f64>,
    /// Time during which clones arrive in a round.
    pub lasts: Duration,
}

/// Gaps between the arrivals of an open loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spacing {
    /// Exponentially distributed gaps, as from independent customers.
    Poisson,
    /// Equal gaps.
    Constant,
}

/// A command or a cell, with its expected output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecSpec {
    /// Program and arguments; may be empty if there is a cell.
    pub argv: Vec<String>,
    /// Code for the interpreter of the sandbox, which replaces `argv`.
    #[serde(default)]
    pub cell: Option<String>,
    /// Language of the cell; `None` uses the interpreter's default, Python.
    #[serde(default)]
    pub language: Option<String>,
    /// User inside the guest. Ignored for cells, which run as the user of the interpreter, and for the baseline, which
    /// runs as the user of the harness.
    pub user: String,
    /// Exact standard output expected; for a cell, its printed output followed by the text of its result.
    pub expect_stdout: String,
    /// Timeout from the request to the complete response.
    pub timeout: Duration,
}

impl TargetSpec {
    /// Where the sandboxes of this target run.
    #[must_use]
    pub fn place(&self) -> Place {
        match (self.kind, &self.api_url) {
            (TargetKind::VmmDirect, _) | (TargetKind::E2b, None) => Place::OwnVms,
            (TargetKind::E2b, Some(_)) | (TargetKind::Cubesandbox | TargetKind::Adapter, _) => {
                Place::Elsewhere
            }
            (TargetKind::Process, _) => Place::HostKernel,
        }
    }
}

impl ExecSpec {
    /// The command or the cell as text for messages.
    #[must_use]
    pub fn describe(&self) -> String {
        match &self.cell {
            Some(code) => format!("cell {code:?}"),
            None => format!("{:?}", self.argv),
        }
    }
}

/// A step that prepares a parent before it is forked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParentStep {
    /// Runs a command or a cell.
    Run(ExecSpec),
    /// Copies a file of this host into the sandbox when the round begins.
    Upload {
        /// Path on this host, relative to the current directory of the harness.
        file: PathBuf,
        /// Absolute path in the sandbox.
        to: String,
    },
}

/// A command, a cell or an exchange after the first command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnSpec {
    /// Name in reports.
    pub name: String,
    /// Command or cell; for an exchange, only the timeout applies.
    pub exec: ExecSpec,
    /// Traffic with a peer outside the sandbox, which replaces the command or cell.
    #[serde(default)]
    pub exchange: Option<ExchangeSpec>,
}

/// How long clones live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldSpec {
    pub until: HoldUntil,
    /// Idle time of held clones before they are inspected and killed; with [`HoldUntil::Round`], also before the memory
    /// sample. Ignored with [`HoldUntil::Exec`].
    pub at_least: Duration,
    /// Whether each held clone repeats its first command, and the first denied exchange if any, before it is
    /// killed.
    pub exec_after: bool,
    /// Whether the CPU time of the idle clones is also measured after each measured round; only with
    /// [`HoldUntil::End`].
    #[serde(default)]
    pub idle_each_round: bool,
}

/// When clones of measured rounds are killed. Warm-up clones, cold clones, comparison clones and host processes
/// live at most until the end of their round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HoldUntil {
    /// After its first command and its turns.
    Exec,
    /// When its lifetime has passed since the response to its create.
    Lifetime,
    /// After all clones of its round have finished or failed and the held clones were inspected.
    Round,
    /// After the last round.
    End,
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
/// Returns [`ScenarioError::Read`] if the file cannot be read, and otherwise the errors of [`parse`].
pub fn load(path: &Path, work: Option<&Path>) -> Result<Scenario, ScenarioError> {
    load_changed(path, work, &[])
}

/// Like [`load`], with keys that replace keys of the file.
///
/// # Errors
/// Returns the errors of [`load`].
pub fn load_changed(
    path: &Path,
    work: Option<&Path>,
    changes: &[Change],
) -> Result<Scenario, ScenarioError> {
    let text = std::fs::read_to_string(path).map_err(|source| ScenarioError::Read {
        path: path.display().to_string(),
        source,
    })?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let dir = path.parent().unwrap_or(Path::new(""));
    parse_with(&stem, &text, dir, work, changes)
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
    let defaults: toml::Table = DEFAULTS.parse().map_err(toml_error)?;
    keys::check(name, &typed, &defaults)?;
    let kind_keys = config::keys_given(&typed);
    let merged = keys::merge(defaults, typed);
    let merged = keys::complete_peers(merged);
    let config: config::ScenarioConfig = merged.try_into().map_err(toml_error)?;
    let trace = config.trace_file().map(|file| trace::load(&dir.join(file)));
    let file = match work {
        Some(file) => Some(file.to_owned()),
        None => config.work_file().map(|file| dir.join(file)),
    };
    let invalid = |what| ScenarioError::Value {
        name: name.to_owned(),
        what,
    };
    let trace = trace.transpose().map_err(invalid)?;
    let mut scenario = config.check(name, &kind_keys, trace).map_err(invalid)?;
    if let Some(file) = file {
        let set = work::load(&file, &scenario.exec).map_err(|source| ScenarioError::Work {
            name: name.to_owned(),
            source: Box::new(source),
        })?;
        config::can_draw_work(&scenario).map_err(invalid)?;
        scenario.work = Some(set);
    }
    Ok(scenario)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refused(text: &str) -> String {
        let error = parse("t", text).unwrap_err();
        match std::error::Error::source(&error) {
            Some(cause) => format!("{error}: {cause}"),
            None => error.to_string(),
        }
    }

    #[test]
    fn an_empty_file_is_the_defaults() {
        let s = parse("t", "").unwrap();
        assert_eq!(s.name, "t");
        assert_eq!(s.arrival, Arrival::Burst { starts: 1 });
        assert_eq!(s.baseline.unwrap().argv, ["/bin/echo", "ok"]);
        assert!(s.memory.is_none());
    }

    #[test]
    fn every_shipped_scenario_loads() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../scenarios");
        let mut n = 0;
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            // The defaults are not a valid scenario: they set keys of several arrival kinds.
            let scenario = path
                .extension()
                .is_some_and(|extension| extension == "toml");
            if !scenario || path.ends_with("defaults.toml") {
                continue;
            }
            load(&path, None).unwrap_or_else(|e| panic!("{}: {e:?}", path.display()));
            n += 1;
        }
        assert!(n >= 8, "{n}");
    }

    #[test]
    fn unknown_keys_name_the_nearest() {
        insta::assert_snapshot!(refused("ruonds = 3"), @"scenario t: unknown key `ruonds`, the nearest known key is `rounds`");
        insta::assert_snapshot!(refused("[arrival]\nstart = 3"), @"scenario t: unknown key `arrival.start`, the nearest known key is `arrival.starts`");
        insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetrik='failures'\nlimit='0'"), @"scenario t: unknown key `gates.metrik`, the nearest known key is `gates.metric`");
    }

    #[test]
    fn errors_name_the_invalid_value() {
        insta::assert_snapshot!(refused("rounds = 0"), @"scenario t: rounds is 0, it must be at least 1");
        insta::assert_snapshot!(refused("[arrival]\nkind='burst'\nworkers=4"), @"scenario t: arrival.workers has no meaning for kind \"burst\"");
        insta::assert_snapshot!(refused("[arrival]\nkind='steady'"), @"scenario t: arrival.rates_per_s is empty, it must name at least one rate");
        insta::assert_snapshot!(refused("[arrival]\nkind='steady'\nrates_per_s=[2,2]"), @"scenario t: arrival.rates_per_s must ascend");
        insta::assert_snapshot!(refused("[arrival]\nkind='steady'\nrates_per_s=[2,99999]"), @"scenario t: arrival.rates_per_s and arrival.lasts cause 5999940 starts in a round, at most 100000 are allowed");
        insta::assert_snapshot!(refused("[arrival]\nrates_per_s=[1]"), @r#"scenario t: arrival.rates_per_s has no meaning for kind "burst""#);
        insta::assert_snapshot!(refused("[target]\nkind='e2b'\nwatch='1ms'"), @"scenario t: target.watch reads the number of warm sandboxes: set target.warm");
        insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='first_exec.p96'\nlimit='1ms'"), @"scenario t: gate a: \"first_exec.p96\" is not a metric: use PHASE.Q, turn.N.Q or round.Q with Q p50, p95, p99 or max, the same with .ratio for the ratio to host processes, or turn.N.ratio, memory.slope, failures, not_warm, after_hold.failures, drain_per_s, sustainable_per_s, event.NAME.Q or event.COUNT");
        insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='first_exec.p95'\nlimit='60'"), @"scenario t: gate a: limit \"60\" is not a duration with a unit such as \"60ms\"");
        insta::assert_snapshot!(refused("[hold]\nat_least='3'"), @r#"scenario t: hold.at_least: "3" is not a duration with a unit such as "250ms""#);
        assert!(refused("[hold]\nat_least=3").contains("invalid type: integer"));
        insta::assert_snapshot!(refused("[[turns]]\nname='a'"), @r#"scenario t: turn "a" needs exactly one of argv and cell"#);
        insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='turn.1.p50'\nlimit='1ms'"), @"scenario t: gate a: turn 1 does not exist, the scenario has 0 turns");
        insta::assert_snapshot!(refused("[[parent]]\ncell='1'"), @r#"scenario t: parent needs target.kind "e2b" and beside.kind "none""#);
        insta::assert_snapshot!(refused("[[parent]]\nupload='a'\nto='b'"), @"scenario t: parent: a step with upload needs an absolute path in `to` and no other key");
        insta::assert_snapshot!(refused("[beside]\nkind='host-process'\n[exec]\ncell='1'"), @r#"scenario t: beside.kind "host-process": the host has no interpreter for cells"#);
        insta::assert_snapshot!(refused("[beside]\nkind='host-process'\nprefault='on'"), @r#"scenario t: beside.prefault has no meaning for kind "host-process""#);
        insta::assert_snapshot!(refused("cold_rounds=1\n[target]\nkind='e2b'\n[beside]\nkind='host-process'"), @r#"scenario t: cold_rounds cannot drop the template of a server from the page cache: set beside.kind to "vmm-direct""#);
        insta::assert_snapshot!(refused("[beside]\nkind='vmm-direct'\nprefault='on'"), @r#"scenario t: beside.kind "vmm-direct" is the same as the target: set beside.prefault to the other value"#);
    }

    #[test]
    fn a_cluster_and_its_events_are_checked() {
        let cluster = |more: &str| format!("[target]\nkind='e2b'\nnodes=3\n{more}");
        insta::assert_snapshot!(refused("[target]\nnodes=2"), @r#"scenario t: target.nodes has no meaning for kind "vmm-direct""#);
        insta::assert_snapshot!(refused("[target]\nkind='e2b'\nnodes=1"), @"scenario t: target.nodes is 1, it must be 0 or lie between 2 and 8");
        insta::assert_snapshot!(refused(&cluster("api_url='http://h:1'")), @"scenario t: target.nodes applies only to a cluster that the run starts: set target.nodes to 0, or remove target.api_url");
        insta::assert_snapshot!(refused(&cluster("by=['d']")), @r#"scenario t: target.by: the cluster has no node "d", its 3 nodes are a, b and so on"#);
        insta::assert_snapshot!(refused("[target]\nkind='e2b'\nclosed=['a']"), @"scenario t: target.closed names nodes of a cluster: set target.nodes");
        insta::assert_snapshot!(refused("[target]\nkind='e2b'\n[hold]\nuntil='exec'\n[[peers]]\nname='p'\nkind='e2b'\nby=['a']"), @"scenario t: peer p: by names nodes of the target's cluster: set target.nodes");
        insta::assert_snapshot!(refused(&cluster("[[mix]]\ntemplate='a'")), @"scenario t: target.nodes excludes mix, parent, [network], [beside] and cold_rounds");
        insta::assert_snapshot!(refused("[event]\nkind='kill-node'"), @"scenario t: event.kind needs a cluster: set target.nodes to at least 2");
        insta::assert_snapshot!(refused(&cluster("[event]\nrunning=2")), @r#"scenario t: event.running has no meaning for kind "none""#);
        insta::assert_snapshot!(refused(&cluster("[event]\nkind='kill-node'\npaused=1")), @"scenario t: event.paused is 1, but only sandboxes that run can be lost: set event.running");
        insta::assert_snapshot!(refused(&cluster("[event]\nkind='drain-node'\nrunning=0")), @"scenario t: event.running is 0, it must lie between 1 and 1000");
        insta::assert_snapshot!(refused(&cluster("[[gates]]\nname='g'\nmetric='event.gap.p95'\nlimit='1s'")), @"scenario t: gate g: event.gap.p95 needs an event: set event.kind to \"drain-node\"");
        let s = parse("t", &cluster("by=['a','b']\n[event]\nkind='drain-node'\nafter='50ms'\npaused=2\nwritten='1MiB'\n[[gates]]\nname='g'\nmetric='event.lost'\nlimit='0'")).unwrap();
        let event = s.event.unwrap();
        assert_eq!(
            (event.running, event.paused, event.written.0),
            (1, 2, 1 << 20)
        );
        assert_eq!(event.after, Duration::from_millis(50));
        assert_eq!(s.gates[0].metric.to_string(), "event.lost");
    }

    /// A scenario with an isolated network and one turn, followed by `more`.
    fn networked(turn: &str, more: &str) -> String {
        format!(
            "[target]\nkind='e2b'\nwarm=1\n[network]\nkind='isolated'\n[[turns]]\nname='a'\n{turn}\n{more}"
        )
    }

    #[test]
    fn exchanges_reject_missing_and_meaningless_keys() {
        insta::assert_snapshot!(refused("[[turns]]\nname='a'\nexchange='echo'\ncount=1"), @r#"scenario t: turn "a" is an exchange, which needs network.kind "isolated""#);
        insta::assert_snapshot!(refused("[network]\nkind='isolated'"), @r#"scenario t: network.kind "isolated" needs target.kind "e2b" without target.api_url"#);
        insta::assert_snapshot!(refused(&networked("exchange='echo'", "")), @r#"scenario t: turn "a": count is required for exchange "echo""#);
        insta::assert_snapshot!(refused(&networked("exchange='send'\namount='1MB'\ncount=1", "")), @r#"scenario t: turn "a": count has no meaning for exchange "send""#);
        insta::assert_snapshot!(refused(&networked("exchange='send'\namount='1'", "")), @r#"scenario t: turn "a": amount: "1" is not a size: write a whole number and one of B, KiB, MiB, GiB, KB, MB, GB"#);
        insta::assert_snapshot!(refused(&networked("exchange='echo'\ncount=0", "")), @r#"scenario t: turn "a": count is 0, it must lie between 1 and 1000000"#);
        insta::assert_snapshot!(refused(&networked("exchange='denied'\nrepeat=2", "")), @r#"scenario t: turn "a": repeat is only allowed for echo, send and receive"#);
        insta::assert_snapshot!(refused(&networked("exchange='shout'", "")), @r#"scenario t: turn "a": exchange is "shout", it must be echo, send, receive, denied or churn"#);
        insta::assert_snapshot!(refused(&networked("exchange='denied'\ncell='1'", "")), @r#"scenario t: turn "a" is an exchange and cannot have argv, cell or expect_stdout"#);
        insta::assert_snapshot!(refused(&networked("exchange='denied'", "[beside]\nkind='vmm-direct'")), @r#"scenario t: turn "a" needs a network policy, and comparison clones have none: set beside.kind to "none""#);
        insta::assert_snapshot!(refused(&networked("exchange='echo'\ncount=1", "[beside]\nkind='vmm-direct'\n[arrival]\nstarts=2")), @"scenario t: arrival starts up to 2 clones at once, but only one comparison clone can have a network");
        insta::assert_snapshot!(refused(&networked("exchange='echo'\ncount=1", "[[gates]]\nname='g'\nmetric='turn.1.ratio'\nlimit='1.1'")), @"scenario t: gate g: a ratio of turns needs comparison rounds: set beside.kind");
        let s = parse(
            "t",
            &networked("exchange='churn'\ncount=3\nevery='2ms'", ""),
        )
        .unwrap();
        let every = Duration::from_millis(2);
        assert_eq!(
            s.turns[0].exchange,
            Some(ExchangeSpec::Churn { count: 3, every })
        );
        let options = s.network.unwrap().options();
        assert_eq!(options["denyOut"][0], "0.0.0.0/0");
    }

    #[test]
    fn a_turn_can_be_repeated_and_limited_by_a_gate() {
        let text = "[[turns]]\nname='w'\ncell='1'\nexpect_stdout='1'\ntimes=2\n[[gates]]\nname='g'\nmetric='turn.2.p95'\nlimit='1ms'";
        let s = parse("t", text).unwrap();
        let names: Vec<_> = s.turns.iter().map(|turn| turn.name.as_str()).collect();
        assert_eq!(names, ["w 1", "w 2"]);
        assert_eq!(s.turns[1].exec.cell.as_deref(), Some("1"));
        assert_eq!(s.turns[1].exec.timeout, s.exec.timeout);
        assert_eq!(s.gates[0].metric, Metric::Turn(2, Quantile::P95));
        assert_eq!(s.gates[0].metric.to_string(), "turn.2.p95");
    }

    proptest! {
        #[test]
        fn hostile_text_is_rejected_without_panic(text in "[a-z_\\[\\]=\"0-9. \n]{0,200}") {
            let _ = parse("fuzz", &text);
        }

        #[test]
        fn hostile_values_are_rejected_without_panic(
            key in prop::sample::select(vec!["seed", "rounds", "arrival.starts", "arrival.rate_per_s",
                "arrival.kind", "hold.until", "memory.stop_at_share", "exec.argv", "target.memory"]),
            value in prop::sample::select(vec!["-1", "0", "1e308", "nan", "\"\"", "[]", "99999999999",
                "\"x\"", "true", "[1]", "{}", "1979-05-27"]),
        ) {
            let _ = parse("fuzz", &format!("{key} = {value}"));
        }
    }
}
