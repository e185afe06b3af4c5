//! Rules between the parts of a scenario.

use testbed::cluster::{MAX_NODES, name_of};

use super::{
    Arrival, BesideSpec, ClusterSpec, EventKind, ExchangeSpec, GateSpec, HoldUntil, Metric, Mode,
    Scenario, TargetKind, Timed, TurnSpec,
};

/// The error describes the first part that does not fit the others.
pub(super) fn check(scenario: &Scenario) -> Result<(), String> {
    held(scenario)?;
    mode(scenario)?;
    cold(scenario)?;
    network(scenario)?;
    for turn in &scenario.turns {
        exchange(turn, scenario)?;
    }
    for gate in &scenario.gates {
        self::gate(gate, scenario).map_err(|why| format!("gate {}: {why}", gate.name))?;
    }
    Ok(())
}

/// Checks that work can replace the first command of the scenario.
pub(super) fn can_draw_work(scenario: &Scenario) -> Result<(), String> {
    match &scenario.mode {
        Mode::Forks(_) => Err("forks cannot run work: remove work.file, or change mode.kind".into()),
        Mode::Systems(_) => {
            Err("systems run the command of [exec]: remove work.file, or change mode.kind".into())
        }
        _ if scenario.hold.exec_after => Err(
            "hold.exec_after repeats the first command, which differs between clones with work.file"
                .into(),
        ),
        _ => Ok(()),
    }
}

fn held(scenario: &Scenario) -> Result<(), String> {
    let (until, memory) = (scenario.hold.until, scenario.memory.is_some());
    if memory && !matches!(until, HoldUntil::Round | HoldUntil::End) {
        return Err(
            "memory.measure needs held clones: set hold.until to \"round\" or \"end\"".into(),
        );
    }
    if scenario.hold.idle_each_round && !(until == HoldUntil::End && memory) {
        return Err(
            "hold.idle_each_round needs clones that accumulate: set hold.until to \"end\" and memory.measure to true"
                .into(),
        );
    }
    let has_lifetimes = !matches!(scenario.mode, Mode::Beside(_) | Mode::Forks(_));
    if until == HoldUntil::Lifetime && !has_lifetimes {
        return Err(format!(
            "hold.until \"lifetime\" has no meaning in mode {:?}",
            scenario.mode.name()
        ));
    }
    Ok(())
}

fn mode(scenario: &Scenario) -> Result<(), String> {
    let target = &scenario.target;
    match &scenario.mode {
        Mode::Single => Ok(()),
        Mode::Beside(beside) => self::beside(*beside, scenario),
        Mode::Systems(_) => systems(scenario),
        Mode::Forks(_) if target.kind != TargetKind::E2b => {
            Err("mode \"forks\" needs target.kind \"e2b\"".into())
        }
        Mode::Forks(_) => Ok(()),
        Mode::Mix(_) | Mode::Trace(_) => {
            let has_templates = matches!(target.kind, TargetKind::E2b | TargetKind::Cubesandbox);
            if has_templates || scenario.templates().is_empty() {
                return Ok(());
            }
            Err("mode.templates needs target.kind \"e2b\" or \"cubesandbox\"".into())
        }
        Mode::Cluster(cluster) => self::cluster(cluster, scenario),
    }
}

/// Checks that the comparison rounds differ from the target, and that the host can run the work of its processes.
fn beside(beside: BesideSpec, scenario: &Scenario) -> Result<(), String> {
    let target = &scenario.target;
    let has_cell =
        scenario.exec.cell.is_some() || scenario.turns.iter().any(|turn| turn.exec.cell.is_some());
    match beside {
        BesideSpec::VmmDirect { prefault } => {
            let differs = prefault.is_some_and(|prefault| prefault != target.prefault);
            if target.kind == TargetKind::VmmDirect && !differs {
                return Err(
                    "mode.with \"vmm-direct\" is the same as the target: set mode.prefault to the other value"
                        .into(),
                );
            }
            Ok(())
        }
        BesideSpec::HostProcess if has_cell => {
            Err("mode.with \"host-process\": the host has no interpreter for cells".into())
        }
        BesideSpec::HostProcess if scenario.network.is_some() => {
            Err("mode.with \"host-process\": processes of the host have no network policy".into())
        }
        BesideSpec::HostProcess => Ok(()),
    }
}

/// Checks that the attempts of a comparison are comparable: each must end when its sandbox is gone.
fn systems(scenario: &Scenario) -> Result<(), String> {
    if scenario.hold.until != HoldUntil::Exec {
        return Err(
            "systems are compared until their sandboxes are gone: set hold.until to \"exec\""
                .into(),
        );
    }
    if !scenario.turns.is_empty() {
        return Err("systems run one command: remove turns".into());
    }
    Ok(())
}

/// Checks that the run can start the cluster, and that all named nodes are its nodes.
fn cluster(cluster: &ClusterSpec, scenario: &Scenario) -> Result<(), String> {
    let nodes = cluster.nodes;
    if !(2..=MAX_NODES).contains(&nodes) {
        return Err(format!(
            "mode.nodes is {nodes}, it must lie between 2 and {MAX_NODES}"
        ));
    }
    if scenario.target.kind != TargetKind::E2b || scenario.target.api_url.is_some() {
        return Err(
            "mode \"cluster\" starts its nodes: it needs target.kind \"e2b\" without target.api_url"
                .into(),
        );
    }
    if scenario.network.is_some() {
        return Err("mode \"cluster\" has sandboxes without a network: remove [network]".into());
    }
    if !cluster.peers.is_empty() {
        systems(scenario)?;
    }
    let own = [
        ("mode.by".to_owned(), &cluster.by),
        ("mode.closed".to_owned(), &cluster.closed),
    ];
    let peers = cluster.peers.iter();
    let peers = peers.map(|peer| (format!("system {}: by", peer.name), &peer.by));
    for (key, names) in own.into_iter().chain(peers) {
        let is_node = |name: &String| (0..nodes).any(|at| name_of(at) == *name);
        if let Some(other) = names.iter().find(|name| !is_node(name)) {
            return Err(format!(
                "{key}: the cluster has no node {other:?}, its {nodes} nodes are a, b and so on"
            ));
        }
    }
    Ok(())
}

fn cold(scenario: &Scenario) -> Result<(), String> {
    let has_clones = matches!(scenario.beside(), Some(BesideSpec::VmmDirect { .. }));
    if scenario.cold_rounds == 0 || scenario.target.kind.maps_template() || has_clones {
        return Ok(());
    }
    Err(format!(
        "cold_rounds cannot drop the template of {} from the page cache: set mode.kind to \"beside\" and mode.with to \"vmm-direct\"",
        match scenario.target.kind {
            TargetKind::E2b => "a server",
            kind => kind.name(),
        }
    ))
}

/// Checks that the scenario can have a network. Only a server started by the run can use the uplink that the run
/// creates. Comparison clones copy the cgroup of a warm sandbox, and all have the same guest address, so only one
/// of them can be connected at a time.
fn network(scenario: &Scenario) -> Result<(), String> {
    let target = &scenario.target;
    if scenario.network.is_none() {
        return Ok(());
    }
    if target.kind != TargetKind::E2b || target.api_url.is_some() {
        return Err(
            "network.kind \"isolated\" needs target.kind \"e2b\" without target.api_url".into(),
        );
    }
    if scenario.beside().is_none() {
        return Ok(());
    }
    if target.warm == 0 {
        return Err(
            "comparison clones copy the cgroup of a warm sandbox: set target.warm to at least 1"
                .into(),
        );
    }
    let at_once = match scenario.arrival {
        Arrival::Closed { workers, .. } => workers,
        Arrival::Burst { starts } | Arrival::Open { starts, .. } => starts,
    };
    if at_once > 1 {
        return Err(format!(
            "arrival starts up to {at_once} clones at once, but only one comparison clone can have a network"
        ));
    }
    Ok(())
}

fn exchange(turn: &TurnSpec, scenario: &Scenario) -> Result<(), String> {
    let name = &turn.name;
    match turn.exchange {
        None => Ok(()),
        Some(_) if scenario.network.is_none() => Err(format!(
            "turn {name:?} is an exchange, which needs network.kind \"isolated\""
        )),
        Some(ExchangeSpec::Denied | ExchangeSpec::Churn { .. }) if scenario.beside().is_some() => {
            Err(format!(
                "turn {name:?} needs a network policy, and comparison clones have none: set mode.kind to \"single\""
            ))
        }
        Some(_) => Ok(()),
    }
}

fn gate(gate: &GateSpec, scenario: &Scenario) -> Result<(), String> {
    let turns = scenario.turns.len();
    if let Metric::Turn(turn, _)
    | Metric::TurnRatio(turn)
    | Metric::BaselineRatio(Timed::Turn(turn), _) = gate.metric
        && !(1..=turns).contains(&turn)
    {
        return Err(format!(
            "turn {turn} does not exist, the scenario has {turns} turns"
        ));
    }
    let needed = match gate.metric {
        Metric::BaselineRatio(..) if scenario.baseline.is_none() => {
            return Err(
                "a ratio to host processes needs their rounds: set baseline.kind to \"host-process\""
                    .into(),
            );
        }
        Metric::TurnRatio(_) if scenario.beside().is_none() => {
            return Err(
                "a ratio of turns needs comparison rounds: set mode.kind to \"beside\"".into(),
            );
        }
        Metric::Event(time, _) => time.kind(),
        Metric::EventCount(_) => EventKind::DrainNode,
        _ => return Ok(()),
    };
    if scenario.event().is_none_or(|event| event.kind != needed) {
        return Err(format!(
            "{} needs an event: set mode.event.kind to {:?}",
            gate.metric,
            needed.name()
        ));
    }
    Ok(())
}
