//! What to run: a TOML file over the embedded defaults, checked into a [`Scenario`].
//!
//! `scenarios/defaults.toml` is the reference and the list of known keys at once, so neither can be
//! forgotten. Nothing here touches the host.

mod config;
mod gate_spec;
mod keys;
mod network;
mod steps;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use model::{Bytes, WorkingSetPrefault};
use serde::{Deserialize, Serialize};

pub use gate_spec::{GateSpec, Limit, Metric, Quantile};
pub use network::{ExchangeSpec, NetworkSpec};

/// The commented reference.
pub const DEFAULTS: &str = include_str!("../../scenarios/defaults.toml");

/// A validated scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scenario {
    /// Name in reports.
    pub name: String,
    /// For the reader of a report; may be empty.
    pub description: String,
    /// Seed of plans and permutation tests.
    pub seed: u64,
    /// Measured rounds, at least one.
    pub rounds: u32,
    /// Rounds before them that are not counted.
    pub warmup_rounds: u32,
    /// Single clones of a template that is not in the page cache.
    pub cold_rounds: u32,
    /// What is started.
    pub target: TargetSpec,
    /// What is started in rounds beside it, for comparison; absent when nothing is.
    #[serde(default)]
    pub beside: Option<TargetKind>,
    /// How those differ in their restore; absent: they do not.
    #[serde(default)]
    pub beside_prefault: Option<WorkingSetPrefault>,
    /// The network around the sandboxes; absent: what the host has, and nothing is said about it.
    #[serde(default)]
    pub network: Option<NetworkSpec>,
    /// When it is started.
    pub arrival: Arrival,
    /// What it runs first.
    pub exec: ExecSpec,
    /// What it runs after that, each timed by itself.
    #[serde(default)]
    pub turns: Vec<TurnSpec>,
    /// What runs in the sandbox that a round's clones are forks of; empty: they are clones of the template.
    #[serde(default)]
    pub parent: Vec<ParentStep>,
    /// How long it stays.
    pub hold: HoldSpec,
    /// What is read about memory; absent when nothing is.
    pub memory: Option<MemorySpec>,
    /// What runs on the host between the rounds; absent when nothing does.
    pub baseline: Option<ExecSpec>,
    /// What must hold.
    pub gates: Vec<GateSpec>,
}

/// What is started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetSpec {
    /// See [`TargetKind`].
    pub kind: TargetKind,
    /// Where the API is; absent: a server of the run's own, on this host.
    #[serde(default)]
    pub api_url: Option<String>,
    /// Where requests to sandboxes go, `{id}` and `{port}` filled in; absent: where the API is.
    #[serde(default)]
    pub sandbox_url: Option<String>,
    /// Sandboxes that the server of the run's own keeps ready.
    #[serde(default)]
    pub warm: u32,
    /// Directory below `templates/` of the artifacts.
    pub template: String,
    /// Guest RAM the template must have; absent: any.
    pub memory: Option<Bytes>,
    /// See [`WorkingSetPrefault`].
    pub prefault: WorkingSetPrefault,
    /// Bound of each step of a create.
    pub start_timeout: Duration,
}

/// The doors through which a sandbox can be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetKind {
    /// A `cube-vmm` per clone, through its control socket.
    VmmDirect,
    /// An endpoint that speaks E2B's API.
    E2b,
}

/// When clones are started.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrival {
    /// All at one instant.
    Burst {
        /// Clones in a round.
        starts: u32,
    },
    /// Loops that start the next when the last is done.
    Closed {
        /// Loops.
        workers: u32,
        /// Clones in a round, over all loops.
        starts: u32,
    },
    /// At a rate, whatever becomes of earlier ones.
    Open {
        /// Clones in a round.
        starts: u32,
        /// Mean rate.
        rate_per_s: f64,
        /// Gaps.
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

/// Gaps between the arrivals of an open loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spacing {
    /// Exponential gaps, as independent customers make them.
    Poisson,
    /// Equal gaps.
    Constant,
}

/// A command or a cell, and what it must say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecSpec {
    /// Argument vector, empty only beside a cell.
    pub argv: Vec<String>,
    /// Code for the sandbox's interpreter, in place of a command.
    #[serde(default)]
    pub cell: Option<String>,
    /// User inside the guest; the baseline runs as the harness does, a cell as its interpreter.
    pub user: String,
    /// Standard output, exactly; of a cell what it prints and then the text of its result.
    pub expect_stdout: String,
    /// Bound of the whole exchange.
    pub timeout: Duration,
}

impl ExecSpec {
    /// What is run, for messages.
    #[must_use]
    pub fn describe(&self) -> String {
        match &self.cell {
            Some(code) => format!("cell {code:?}"),
            None => format!("{:?}", self.argv),
        }
    }
}

/// What is done to a parent before it is forked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParentStep {
    /// A command or a cell.
    Run(ExecSpec),
    /// A file of this host, read when the round begins, becomes one of the sandbox.
    Upload {
        /// Seen from where the harness was started.
        file: PathBuf,
        /// In the sandbox.
        to: String,
    },
}

/// A command, a cell or an exchange after the first command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnSpec {
    /// In reports.
    pub name: String,
    /// What is run; of an exchange only its bound is meant.
    pub exec: ExecSpec,
    /// What is done with somebody outside, in place of a command.
    #[serde(default)]
    pub exchange: Option<ExchangeSpec>,
}

/// How long clones stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldSpec {
    /// See [`HoldUntil`].
    pub until: HoldUntil,
    /// Idle time before held clones are looked at.
    pub at_least: Duration,
    /// Whether each held clone must answer once more.
    pub exec_after: bool,
}

/// When a clone is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HoldUntil {
    /// Right after its first command.
    Exec,
    /// When all of its round have answered or failed.
    Round,
    /// After the last round.
    End,
}

/// What is read about memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemorySpec {
    /// Wait before a sample.
    pub settle: Duration,
    /// Share of MemTotal beyond which no further round starts.
    pub stop_at_share: f64,
}

/// Why a scenario is refused.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The file cannot be read.
    #[error("cannot read scenario {path}")]
    Read {
        /// Path as given.
        path: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Not TOML, or a value of the wrong type.
    #[error("scenario {name} is not readable")]
    Toml {
        /// Name of the scenario.
        name: String,
        /// The cause, with line and column where known.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// A key that means nothing.
    #[error("scenario {name}: unknown key `{key}`{}", nearest.as_ref().map(|n| format!(", the nearest known key is `{n}`")).unwrap_or_default())]
    UnknownKey {
        /// Name of the scenario.
        name: String,
        /// Dotted path of the key.
        key: String,
        /// Dotted path of the known key with the least edit distance, if the table has keys at all.
        nearest: Option<String>,
    },
    /// A value that cannot be.
    #[error("scenario {name}: {what}")]
    Value {
        /// Name of the scenario.
        name: String,
        /// What is wrong, with the value.
        what: String,
    },
}

/// Reads a scenario file.
///
/// # Errors
/// See [`ScenarioError`].
pub fn load(path: &Path) -> Result<Scenario, ScenarioError> {
    let text = std::fs::read_to_string(path).map_err(|source| ScenarioError::Read {
        path: path.display().to_string(),
        source,
    })?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    parse(&stem, &text)
}

/// Checks a scenario's text; `name` stands in messages, and in reports unless the text names itself.
///
/// # Errors
/// See [`ScenarioError`].
pub fn parse(name: &str, text: &str) -> Result<Scenario, ScenarioError> {
    let toml_error = |source| ScenarioError::Toml {
        name: name.to_owned(),
        source: Box::new(source),
    };
    let typed: toml::Table = text.parse().map_err(toml_error)?;
    let defaults: toml::Table = DEFAULTS.parse().map_err(toml_error)?;
    keys::check(name, &typed, &defaults)?;
    let kind_keys = config::keys_given(&typed);
    let merged = keys::merge(defaults, typed);
    let config: config::ScenarioConfig = merged.try_into().map_err(toml_error)?;
    config
        .check(name, &kind_keys)
        .map_err(|what| ScenarioError::Value {
            name: name.to_owned(),
            what,
        })
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
            // As a file the defaults would say keys of several arrival kinds at once.
            let scenario = path
                .extension()
                .is_some_and(|extension| extension == "toml");
            if !scenario || path.ends_with("defaults.toml") {
                continue;
            }
            load(&path).unwrap_or_else(|e| panic!("{}: {e:?}", path.display()));
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
    fn values_that_cannot_be_are_named() {
        insta::assert_snapshot!(refused("rounds = 0"), @"scenario t: rounds is 0, at least 1 is needed");
        insta::assert_snapshot!(refused("[arrival]\nkind='burst'\nworkers=4"), @"scenario t: arrival.workers has no meaning for kind \"burst\"");
        insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='first_exec.p96'\nlimit='1ms'"), @"scenario t: gate a: \"first_exec.p96\" is no metric: write PHASE.p50, .p95, .p99 or .max, the same of turn.N or round, turn.N.ratio, memory.slope, failures, not_warm, after_hold.failures or starts_per_s");
        insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='first_exec.p95'\nlimit='60'"), @"scenario t: gate a: limit \"60\" is no duration with a unit such as \"60ms\"");
        insta::assert_snapshot!(refused("[hold]\nat_least='3'"), @r#"scenario t: hold.at_least: "3" is no duration with a unit such as "250ms""#);
        assert!(refused("[hold]\nat_least=3").contains("invalid type: integer"));
        insta::assert_snapshot!(refused("[[turns]]\nname='a'"), @r#"scenario t: turn "a" needs one of argv and cell"#);
        insta::assert_snapshot!(refused("[[gates]]\nname='a'\nmetric='turn.1.p50'\nlimit='1ms'"), @"scenario t: gate a: there are 0 turns, none is number 1");
        insta::assert_snapshot!(refused("[[parent]]\ncell='1'"), @r#"scenario t: parent is for kind "e2b" with nothing beside it"#);
        insta::assert_snapshot!(refused("[[parent]]\nupload='a'\nto='b'"), @"scenario t: parent: upload goes with an absolute path in `to`, and nothing else");
        insta::assert_snapshot!(refused("[beside]\nkind='vmm-direct'\nprefault='on'"), @r#"scenario t: beside.kind is what the target is already: "vmm-direct" with this prefault"#);
    }

    /// An isolated network around sandboxes of an API, with one turn and a line more.
    fn networked(turn: &str, more: &str) -> String {
        format!(
            "[target]\nkind='e2b'\nwarm=1\n[network]\nkind='isolated'\n[[turns]]\nname='a'\n{turn}\n{more}"
        )
    }

    #[test]
    fn exchanges_say_what_they_need() {
        insta::assert_snapshot!(refused("[[turns]]\nname='a'\nexchange='echo'\ncount=1"), @r#"scenario t: turn "a" is an exchange: network.kind must be "isolated""#);
        insta::assert_snapshot!(refused("[network]\nkind='isolated'"), @r#"scenario t: network.kind is "isolated": that needs kind "e2b" without target.api_url"#);
        insta::assert_snapshot!(refused(&networked("exchange='echo'", "")), @r#"scenario t: turn "a": count is needed for exchange "echo""#);
        insta::assert_snapshot!(refused(&networked("exchange='send'\namount='1MB'\ncount=1", "")), @r#"scenario t: turn "a": count has no meaning for exchange "send""#);
        insta::assert_snapshot!(refused(&networked("exchange='send'\namount='1'", "")), @r#"scenario t: turn "a": amount: "1" is not a size: write a whole number and one of B, KiB, MiB, GiB, KB, MB, GB"#);
        insta::assert_snapshot!(refused(&networked("exchange='echo'\ncount=0", "")), @r#"scenario t: turn "a": count is 0, from 1 to 1000000"#);
        insta::assert_snapshot!(refused(&networked("exchange='denied'\nrepeat=2", "")), @r#"scenario t: turn "a": repeat is for echo, send and receive"#);
        insta::assert_snapshot!(refused(&networked("exchange='shout'", "")), @r#"scenario t: turn "a": exchange is "shout": echo, send, receive, denied or churn"#);
        insta::assert_snapshot!(refused(&networked("exchange='denied'\ncell='1'", "")), @r#"scenario t: turn "a" is an exchange, which has no argv, cell or expect_stdout"#);
        insta::assert_snapshot!(refused(&networked("exchange='denied'", "[beside]\nkind='vmm-direct'")), @r#"scenario t: turn "a" needs a policy, which clones beside have none of"#);
        insta::assert_snapshot!(refused(&networked("exchange='echo'\ncount=1", "[beside]\nkind='vmm-direct'\n[arrival]\nstarts=2")), @"scenario t: there is a plain network for one clone beside, and 2 may start at once");
        insta::assert_snapshot!(refused(&networked("exchange='echo'\ncount=1", "[[gates]]\nname='g'\nmetric='turn.1.ratio'\nlimit='1.1'")), @"scenario t: gate g: there is nothing beside to compare with");
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
    fn a_turn_may_be_repeated_and_judged() {
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
        fn hostile_text_is_an_error_and_no_panic(text in "[a-z_\\[\\]=\"0-9. \n]{0,200}") {
            let _ = parse("fuzz", &text);
        }

        #[test]
        fn hostile_values_are_an_error_and_no_panic(
            key in prop::sample::select(vec!["seed", "rounds", "arrival.starts", "arrival.rate_per_s",
                "arrival.kind", "hold.until", "memory.stop_at_share", "exec.argv", "target.memory"]),
            value in prop::sample::select(vec!["-1", "0", "1e308", "nan", "\"\"", "[]", "99999999999",
                "\"x\"", "true", "[1]", "{}", "1979-05-27"]),
        ) {
            let _ = parse("fuzz", &format!("{key} = {value}"));
        }
    }
}
