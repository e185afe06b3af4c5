//! The deserialized form of a scenario file, and its validation into a [`Scenario`].

use std::{path::PathBuf, time::Duration};

use model::{Bytes, WorkingSetPrefault};
use serde::Deserialize;

use testbed::{
    cluster::{MAX_NODES, name_of},
    endpoint::Endpoint,
};

use crate::trace::Trace;

use super::{
    Arrival, BesideKind, CreateApi, ExecSpec, GateSpec, HoldSpec, HoldUntil, InterferenceSpec,
    MemorySpec, Metric, PeerSpec, Scenario, Spacing, SteadySpec, TargetKind, TargetSpec, Timed,
    TurnSpec,
    event::{EventConfig, EventKind, EventSpec},
    gate_spec::GateConfig,
    lives::{self, MixConfig},
    network::{ExchangeSpec, NetworkConfig},
    steps::{ParentConfig, TurnConfig},
};

// Upper limits. A larger value is treated as a typing mistake.

/// Starts in one round, and workers of a closed loop.
const MAX_STARTS: u32 = 100_000;
/// Warm sandboxes.
const MAX_WARM: u32 = 10_000;
/// Turns of a scenario; a turn with `times` counts that many times.
pub(super) const MAX_TURNS: usize = 1000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScenarioConfig {
    name: String,
    description: String,
    seed: u64,
    rounds: u32,
    warmup_rounds: u32,
    cold_rounds: u32,
    target: TargetConfig,
    beside: BesideConfig,
    network: NetworkConfig,
    arrival: ArrivalConfig,
    mix: Vec<MixConfig>,
    exec: ExecConfig,
    work: WorkConfig,
    turns: Vec<TurnConfig>,
    parent: Vec<ParentConfig>,
    peers: Vec<toml::Table>,
    event: EventConfig,
    hold: HoldConfig,
    memory: MemoryConfig,
    baseline: BaselineConfig,
    interference: InterferenceConfig,
    gates: Vec<GateConfig>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TargetConfig {
    kind: TargetKind,
    api_url: String,
    sandbox_url: String,
    api: CreateApi,
    api_key_env: String,
    command: Vec<String>,
    warm: u32,
    watch: String,
    nodes: u8,
    by: Vec<String>,
    closed: Vec<String>,
    template: String,
    memory: String,
    prefault: WorkingSetPrefault,
    start_timeout: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BesideConfig {
    kind: BesideName,
    prefault: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum BesideName {
    None,
    VmmDirect,
    HostProcess,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ArrivalConfig {
    kind: ArrivalKind,
    starts: u32,
    workers: u32,
    rate_per_s: f64,
    rates_per_s: Vec<f64>,
    lasts: String,
    spacing: Spacing,
    trace: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ArrivalKind {
    Burst,
    Closed,
    Open,
    Steady,
    Trace,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExecConfig {
    argv: Vec<String>,
    cell: String,
    user: String,
    expect_stdout: String,
    timeout: String,
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

/// Keys set in tables whose kind decides which keys are allowed.
pub(super) struct Given {
    arrival: Vec<String>,
    event: Vec<String>,
}

/// The keys of `[arrival]` and `[event]` that the scenario file sets. They must be read before the merge with the
/// defaults, which adds all other keys.
pub(super) fn keys_given(typed: &toml::Table) -> Given {
    Given {
        arrival: keys_of(typed, "arrival"),
        event: keys_of(typed, "event"),
    }
}

fn keys_of(typed: &toml::Table, table: &str) -> Vec<String> {
    let table = typed.get(table).and_then(toml::Value::as_table);
    table
        .into_iter()
        .flat_map(toml::Table::keys)
        .cloned()
        .collect()
}

/// Checks that work can replace the first command of the scenario.
pub(super) fn can_draw_work(scenario: &Scenario) -> Result<(), String> {
    if !scenario.parent.is_empty() {
        return Err("forks cannot run work: remove work.file or parent".to_owned());
    }
    if !scenario.peers.is_empty() {
        return Err("peers run the command of [exec]: remove work.file or peers".to_owned());
    }
    if scenario.hold.exec_after {
        return Err(
            "hold.exec_after repeats the first command, which differs between clones with work.file"
                .to_owned(),
        );
    }
    Ok(())
}

impl ScenarioConfig {
    /// The key `work.file`, not yet resolved; `None` if it is empty.
    pub(super) fn work_file(&self) -> Option<PathBuf> {
        (!self.work.file.is_empty()).then(|| PathBuf::from(&self.work.file))
    }

    /// The key `arrival.trace`, not yet read; `None` if it is empty.
    pub(super) fn trace_file(&self) -> Option<PathBuf> {
        (!self.arrival.trace.is_empty()).then(|| PathBuf::from(&self.arrival.trace))
    }

    /// Validates the scenario. `trace` is the content of [`Self::trace_file`]. `name` is used if the file has no
    /// `name`; `given` is the result of [`keys_given`]. The error describes the first invalid value.
    pub(super) fn check(
        self,
        name: &str,
        given: &Given,
        trace: Option<Trace>,
    ) -> Result<Scenario, String> {
        if self.rounds == 0 {
            return Err("rounds is 0, it must be at least 1".to_owned());
        }
        let is_held = matches!(self.hold.until, HoldUntil::Round | HoldUntil::End);
        if self.memory.measure && !is_held {
            return Err(
                "memory.measure needs held clones: set hold.until to \"round\" or \"end\""
                    .to_owned(),
            );
        }
        if self.hold.idle_each_round && (self.hold.until != HoldUntil::End || !self.memory.measure)
        {
            return Err(
                "hold.idle_each_round needs clones that accumulate: set hold.until to \"end\" and memory.measure to true"
                    .to_owned(),
            );
        }
        let (beside, beside_prefault) = self.beside.check(&self.target)?;
        if self.cold_rounds > 0
            && !self.target.kind.maps_template()
            && beside != Some(BesideKind::VmmDirect)
        {
            return Err(format!(
                "cold_rounds cannot drop the template of {} from the page cache: set beside.kind to \"vmm-direct\"",
                match self.target.kind {
                    TargetKind::E2b => "a server",
                    kind => kind.name(),
                }
            ));
        }
        let exec = self.exec.check()?;
        let turns = turns(self.turns, &exec)?;
        let parent = self.parent.into_iter();
        let parent = parent
            .map(|step| step.check(&exec))
            .collect::<Result<Vec<_>, _>>()?;
        if !parent.is_empty() && (self.target.kind != TargetKind::E2b || beside.is_some()) {
            return Err("parent needs target.kind \"e2b\" and beside.kind \"none\"".to_owned());
        }
        let peers = super::peers::check(self.peers, &exec)?;
        if !peers.is_empty() {
            can_have_peers(self.hold.until, !turns.is_empty(), self.memory.measure)?;
        }
        let network = self.network.check();
        if beside == Some(BesideKind::HostProcess) {
            can_run_on_the_host(&exec, &turns, network.is_some())?;
        }
        let (arrival, steady) = self.arrival.check(&given.arrival, trace.as_ref())?;
        let mix = lives::mix(self.mix, trace.as_ref())?;
        let lifetime = lives::lifetime(self.hold.until, &self.hold.lifetime, trace.is_some())?;
        if self.hold.until == HoldUntil::Lifetime && (beside.is_some() || !parent.is_empty()) {
            return Err("hold.until \"lifetime\" needs beside.kind \"none\" and no parent".into());
        }
        if !mix.is_empty() {
            let has_templates =
                matches!(self.target.kind, TargetKind::E2b | TargetKind::Cubesandbox);
            if !has_templates || beside.is_some() || !parent.is_empty() {
                return Err(
                    "mix needs target.kind \"e2b\" or \"cubesandbox\", beside.kind \"none\" and no parent"
                        .into(),
                );
            }
        }
        if network.is_some() {
            can_have_a_network(&self.target, beside.is_some(), arrival)?;
        }
        for turn in turns.iter().filter(|turn| turn.exchange.is_some()) {
            can_exchange(turn, network.is_some(), beside.is_some())?;
        }
        let baseline = self.baseline.check(&exec)?;
        let event = self.event.check(&given.event, self.target.nodes)?;
        let target = self.target.check()?;
        can_be_a_cluster(&target, &peers)?;
        if target.nodes > 0
            && (!mix.is_empty()
                || !parent.is_empty()
                || network.is_some()
                || beside.is_some()
                || self.cold_rounds > 0)
        {
            return Err(
                "target.nodes excludes mix, parent, [network], [beside] and cold_rounds".to_owned(),
            );
        }
        let gates = gates(
            self.gates,
            turns.len(),
            beside.is_some(),
            baseline.is_some(),
            event.as_ref(),
        )?;
        Ok(Scenario {
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
            beside,
            beside_prefault,
            peers,
            network,
            arrival,
            steady,
            mix,
            lifetime,
            trace,
            baseline,
            exec,
            work: None,
            turns,
            parent,
            event,
            hold: HoldSpec {
                until: self.hold.until,
                at_least: duration("hold.at_least", &self.hold.at_least)?,
                exec_after: self.hold.exec_after,
                idle_each_round: self.hold.idle_each_round,
            },
            memory: self.memory.check()?,
            interference: Some(self.interference.check()?),
            gates,
        })
    }
}

/// Checks the node names in the target, and in peers that are nodes of its cluster.
fn can_be_a_cluster(target: &TargetSpec, peers: &[PeerSpec]) -> Result<(), String> {
    let is_node = |name: &String| (0..target.nodes).any(|at| name_of(at) == *name);
    let lists = [
        ("target.by".to_owned(), &target.by),
        ("target.closed".to_owned(), &target.closed),
    ];
    let of_peers = peers
        .iter()
        .map(|peer| (format!("peer {}: by", peer.name), &peer.target.by));
    for (key, names) in lists.into_iter().chain(of_peers) {
        let Some(other) = names.iter().find(|name| !is_node(name)) else {
            continue;
        };
        return Err(match (target.nodes, key.strip_prefix("peer")) {
            (0, None) => format!("{key} names nodes of a cluster: set target.nodes"),
            (0, Some(_)) => {
                format!("{key} names nodes of the target's cluster: set target.nodes")
            }
            (nodes, _) => format!(
                "{key}: the cluster has no node {other:?}, its {nodes} nodes are a, b and so on"
            ),
        });
    }
    match peers
        .iter()
        .find(|peer| peer.target.nodes > 0 || !peer.target.closed.is_empty())
    {
        None => Ok(()),
        Some(peer) => Err(format!(
            "peer {}: only the target can be a cluster: name its nodes in by",
            peer.name
        )),
    }
}

/// Checks that the attempts of a comparison are comparable: each must end when its sandbox is gone.
fn can_have_peers(until: HoldUntil, turns: bool, memory: bool) -> Result<(), String> {
    if until != HoldUntil::Exec {
        return Err(
            "peers are compared until their sandboxes are gone: set hold.until to \"exec\"".into(),
        );
    }
    if turns || memory {
        return Err("peers run one command: remove turns and memory.measure".into());
    }
    Ok(())
}

/// Checks that the first command and the turns can run as processes on the host.
fn can_run_on_the_host(exec: &ExecSpec, turns: &[TurnSpec], network: bool) -> Result<(), String> {
    let why = if exec.cell.is_some() || turns.iter().any(|turn| turn.exec.cell.is_some()) {
        "the host has no interpreter for cells"
    } else if network {
        "processes of the host have no network policy"
    } else {
        return Ok(());
    };
    Err(format!("beside.kind \"host-process\": {why}"))
}

/// All turns of the scenario, with each configured turn repeated `times` times.
fn turns(typed: Vec<TurnConfig>, exec: &ExecSpec) -> Result<Vec<TurnSpec>, String> {
    let mut turns = Vec::new();
    for turn in typed {
        turns.extend(turn.check(exec)?);
        if turns.len() > MAX_TURNS {
            return Err(format!("the scenario has more than {MAX_TURNS} turns"));
        }
    }
    Ok(turns)
}

/// Checks that the scenario can have a network. Only a server started by the run can use the uplink that the run
/// creates. Comparison clones copy the cgroup of a warm sandbox, and all have the same guest address, so only one
/// of them can be connected at a time.
fn can_have_a_network(target: &TargetConfig, beside: bool, arrival: Arrival) -> Result<(), String> {
    if target.kind != TargetKind::E2b || !target.api_url.is_empty() {
        return Err(
            "network.kind \"isolated\" needs target.kind \"e2b\" without target.api_url".into(),
        );
    }
    let at_once = match arrival {
        Arrival::Closed { workers, .. } => workers,
        Arrival::Burst { starts } | Arrival::Open { starts, .. } => starts,
    };
    if beside && target.warm == 0 {
        return Err(
            "comparison clones copy the cgroup of a warm sandbox: set target.warm to at least 1"
                .into(),
        );
    }
    if beside && at_once > 1 {
        return Err(format!(
            "arrival starts up to {at_once} clones at once, but only one comparison clone can have a network"
        ));
    }
    Ok(())
}

fn can_exchange(turn: &TurnSpec, network: bool, beside: bool) -> Result<(), String> {
    let name = &turn.name;
    let has_policy = matches!(
        turn.exchange,
        Some(ExchangeSpec::Denied | ExchangeSpec::Churn { .. })
    );
    match (network, beside) {
        (false, _) => Err(format!(
            "turn {name:?} is an exchange, which needs network.kind \"isolated\""
        )),
        (true, true) if has_policy => Err(format!(
            "turn {name:?} needs a network policy, and comparison clones have none: set beside.kind to \"none\""
        )),
        (true, _) => Ok(()),
    }
}

fn gates(
    typed: Vec<GateConfig>,
    turns: usize,
    beside: bool,
    baseline: bool,
    event: Option<&EventSpec>,
) -> Result<Vec<GateSpec>, String> {
    let gates: Vec<GateSpec> = typed
        .into_iter()
        .map(GateSpec::try_from)
        .collect::<Result<_, _>>()?;
    for gate in &gates {
        let name = &gate.name;
        if let Metric::Turn(turn, _)
        | Metric::TurnRatio(turn)
        | Metric::BaselineRatio(Timed::Turn(turn), _) = gate.metric
            && !(1..=turns).contains(&turn)
        {
            return Err(format!(
                "gate {name}: turn {turn} does not exist, the scenario has {turns} turns"
            ));
        }
        if matches!(gate.metric, Metric::BaselineRatio(..)) && !baseline {
            return Err(format!(
                "gate {name}: a ratio to host processes needs their rounds: set baseline.kind to \"host-process\""
            ));
        }
        let needed = match gate.metric {
            Metric::Event(time, _) => Some(time.kind()),
            Metric::EventCount(_) => Some(EventKind::DrainNode),
            _ => None,
        };
        if let Some(kind) = needed
            && event.is_none_or(|event| event.kind != kind)
        {
            return Err(format!(
                "gate {name}: {} needs an event: set event.kind to {:?}",
                gate.metric,
                kind.name()
            ));
        }
        if matches!(gate.metric, Metric::TurnRatio(_)) && !beside {
            return Err(format!(
                "gate {name}: a ratio of turns needs comparison rounds: set beside.kind"
            ));
        }
    }
    Ok(gates)
}

impl TargetConfig {
    pub(super) fn check(self) -> Result<TargetSpec, String> {
        let plain = !self.template.is_empty()
            && self
                .template
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
            && !self.template.starts_with('.');
        if !plain {
            return Err(format!(
                "target.template: {:?} is not the name of a directory below templates/",
                self.template
            ));
        }
        let memory = match self.memory.as_str() {
            "" => None,
            text => Some(
                text.parse::<Bytes>()
                    .map_err(|e| format!("target.memory: {e}"))?,
            ),
        };
        let [api_url, sandbox_url] =
            [self.api_url, self.sandbox_url].map(|url| match url.as_str() {
                "" => None,
                _ => Some(url),
            });
        let is_api = matches!(self.kind, TargetKind::E2b | TargetKind::Cubesandbox);
        let given = [
            ("api_url", api_url.is_some() && !is_api),
            ("sandbox_url", sandbox_url.is_some() && !is_api),
            (
                "api",
                self.api != CreateApi::V2 && self.kind != TargetKind::E2b,
            ),
            ("warm", self.warm > 0 && self.kind != TargetKind::E2b),
            ("nodes", self.nodes > 0 && self.kind != TargetKind::E2b),
            (
                "command",
                !self.command.is_empty() && self.kind != TargetKind::Adapter,
            ),
        ];
        if let Some((key, _)) = given.iter().find(|(_, given)| *given) {
            return Err(format!(
                "target.{key} has no meaning for kind {:?}",
                self.kind.name()
            ));
        }
        if self.kind == TargetKind::Adapter && self.command.is_empty() {
            return Err(
                "target.command is empty, it must name the adapter's program, for example one of scenarios/adapters"
                    .to_owned(),
            );
        }
        if self.kind == TargetKind::Cubesandbox && (api_url.is_none() || sandbox_url.is_none()) {
            return Err(
                "kind \"cubesandbox\" needs target.api_url, such as \"http://HOST:3000\", and target.sandbox_url, such as \"https://{port}-{id}.cube.app\""
                    .to_owned(),
            );
        }
        if self.warm > 0 && api_url.is_some() {
            return Err(
                "target.warm applies only to a server that the run starts: remove target.api_url"
                    .to_owned(),
            );
        }
        if self.nodes > 0 && api_url.is_some() {
            return Err(
                "target.nodes applies only to a cluster that the run starts: set target.nodes to 0, or remove target.api_url"
                    .to_owned(),
            );
        }
        if self.nodes == 1 || self.nodes > MAX_NODES {
            return Err(format!(
                "target.nodes is {}, it must be 0 or lie between 2 and {MAX_NODES}",
                self.nodes
            ));
        }
        if self.warm > MAX_WARM {
            return Err(format!(
                "target.warm is {}, it must be at most {MAX_WARM}",
                self.warm
            ));
        }
        let watch = duration("target.watch", &self.watch)?;
        let watch = Some(watch).filter(|interval| !interval.is_zero());
        if watch.is_some() && self.warm == 0 {
            return Err(
                "target.watch reads the number of warm sandboxes: set target.warm".to_owned(),
            );
        }
        if let Some(url) = &api_url {
            Endpoint::parse(url).map_err(|e| format!("target.api_url: {e}"))?;
        }
        if let Some(pattern) = &sandbox_url {
            let url = pattern.replace("{id}", "i0").replace("{port}", "1");
            Endpoint::parse(&url).map_err(|e| format!("target.sandbox_url: {e}"))?;
        }
        Ok(TargetSpec {
            kind: self.kind,
            api_url,
            sandbox_url,
            api: self.api,
            api_key_env: self.api_key_env,
            command: self.command,
            warm: self.warm,
            watch,
            nodes: self.nodes,
            by: self.by,
            closed: self.closed,
            template: self.template,
            memory,
            prefault: self.prefault,
            start_timeout: positive("target.start_timeout", &self.start_timeout)?,
        })
    }
}

impl BesideConfig {
    fn check(
        &self,
        target: &TargetConfig,
    ) -> Result<(Option<BesideKind>, Option<WorkingSetPrefault>), String> {
        let prefault = match self.prefault.as_str() {
            "" => None,
            "on" => Some(WorkingSetPrefault::On),
            "off" => Some(WorkingSetPrefault::Off),
            other => {
                return Err(format!(
                    "beside.prefault is {other:?}, it must be \"on\", \"off\" or empty"
                ));
            }
        };
        let differs = prefault.is_some_and(|prefault| prefault != target.prefault);
        match (&self.kind, target.kind) {
            (BesideName::None, _) if prefault.is_some() => {
                Err("beside.prefault has no meaning for kind \"none\"".to_owned())
            }
            (BesideName::None, _) => Ok((None, None)),
            (BesideName::VmmDirect, TargetKind::VmmDirect) if !differs => Err(
                "beside.kind \"vmm-direct\" is the same as the target: set beside.prefault to the other value"
                    .to_owned(),
            ),
            (BesideName::VmmDirect, _) => Ok((Some(BesideKind::VmmDirect), prefault)),
            (BesideName::HostProcess, _) if prefault.is_some() => {
                Err("beside.prefault has no meaning for kind \"host-process\"".to_owned())
            }
            (BesideName::HostProcess, _) => Ok((Some(BesideKind::HostProcess), None)),
        }
    }
}

impl ArrivalConfig {
    fn check(
        self,
        keys: &[String],
        trace: Option<&Trace>,
    ) -> Result<(Arrival, Option<SteadySpec>), String> {
        let (kind, meaningful): (&str, &[&str]) = match self.kind {
            ArrivalKind::Burst => ("burst", &["kind", "starts"]),
            ArrivalKind::Closed => ("closed", &["kind", "starts", "workers"]),
            ArrivalKind::Open => ("open", &["kind", "starts", "rate_per_s", "spacing"]),
            ArrivalKind::Steady => ("steady", &["kind", "rates_per_s", "lasts", "spacing"]),
            ArrivalKind::Trace => ("trace", &["kind", "trace"]),
        };
        if let Some(key) = keys.iter().find(|k| !meaningful.contains(&k.as_str())) {
            return Err(format!("arrival.{key} has no meaning for kind {kind:?}"));
        }
        between("arrival.starts", self.starts)?;
        between("arrival.workers", self.workers)?;
        rate("arrival.rate_per_s", self.rate_per_s)?;
        let arrival = match self.kind {
            ArrivalKind::Burst => Arrival::Burst {
                starts: self.starts,
            },
            ArrivalKind::Closed => Arrival::Closed {
                workers: self.workers,
                starts: self.starts,
            },
            ArrivalKind::Open => Arrival::Open {
                starts: self.starts,
                rate_per_s: self.rate_per_s,
                spacing: self.spacing,
            },
            ArrivalKind::Steady => return self.steady(),
            ArrivalKind::Trace => return lives::arrival(trace),
        };
        Ok((arrival, None))
    }

    fn steady(self) -> Result<(Arrival, Option<SteadySpec>), String> {
        let lasts = positive("arrival.lasts", &self.lasts)?;
        for per_s in &self.rates_per_s {
            rate("arrival.rates_per_s", *per_s)?;
        }
        let (Some(first), Some(last)) = (self.rates_per_s.first(), self.rates_per_s.last()) else {
            return Err("arrival.rates_per_s is empty, it must name at least one rate".to_owned());
        };
        if !self.rates_per_s.is_sorted_by(|a, b| a < b) {
            return Err("arrival.rates_per_s must ascend".to_owned());
        }
        let most = last * lasts.as_secs_f64();
        if most > f64::from(MAX_STARTS) {
            return Err(format!(
                "arrival.rates_per_s and arrival.lasts cause {most:.0} starts in a round, at most {MAX_STARTS} are allowed"
            ));
        }
        let arrival = Arrival::Open {
            // The mean number at the last rate; the plan determines the actual number at random.
            starts: (1..=MAX_STARTS)
                .find(|n| f64::from(*n) >= most)
                .unwrap_or(MAX_STARTS),
            rate_per_s: *first,
            spacing: self.spacing,
        };
        let rates_per_s = self.rates_per_s;
        Ok((arrival, Some(SteadySpec { rates_per_s, lasts })))
    }
}

impl ExecConfig {
    fn check(self) -> Result<ExecSpec, String> {
        if self.argv.is_empty() {
            return Err("exec.argv is empty, it must name a program".to_owned());
        }
        Ok(ExecSpec {
            argv: self.argv,
            cell: Some(self.cell).filter(|cell| !cell.is_empty()),
            language: None,
            user: self.user,
            expect_stdout: self.expect_stdout,
            timeout: positive("exec.timeout", &self.timeout)?,
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

fn rate(key: &str, per_s: f64) -> Result<(), String> {
    if per_s.is_finite() && (0.001..=1e6).contains(&per_s) {
        return Ok(());
    }
    Err(format!(
        "{key} is {per_s}, it must lie between 0.001 and 1000000"
    ))
}

fn between(key: &str, n: u32) -> Result<(), String> {
    if (1..=MAX_STARTS).contains(&n) {
        return Ok(());
    }
    Err(format!(
        "{key} is {n}, it must lie between 1 and {MAX_STARTS}"
    ))
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
