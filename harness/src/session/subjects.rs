//! Prepares the subjects of a scenario: its target, the target of the comparison rounds, and the server if the run
//! starts one.

pub(super) mod cluster;
mod direct;
mod server;

use std::{fs, path::Path, sync::Arc};

use testbed::{artifacts, cluster::Cluster, leftovers::RunDir, server::LocalServer};

use super::{SessionError, Settings, at};
use crate::{
    account::Account,
    exchange::{Network, Placement},
    host::facts::HostFacts,
    memory::FileId,
    scenario::{Scenario, TargetKind, TargetSpec},
    target::{Target, adapter::Adapter, host_process::HostProcess},
};

/// The targets of a run and the server behind them. Fields are dropped in this order.
pub(super) struct Subjects {
    pub(super) target: Box<dyn Target>,
    /// Target of the comparison rounds, if the scenario has any.
    pub(super) beside: Option<Box<dyn Target>>,
    /// The template's memory file as `vmm-direct` maps it; `None` for other targets.
    pub(super) memory: Option<FileId>,
    /// The `cube-api` of the run. The target uses it, so it must be dropped after the target.
    pub(super) server: Option<LocalServer>,
    /// Dropped after the server has ended, which removes its cgroup.
    pub(super) account: Option<Arc<Account>>,
}

impl Subjects {
    /// A target without comparison rounds.
    pub(super) fn only(target: Box<dyn Target>) -> Self {
        Self {
            target,
            beside: None,
            memory: None,
            server: None,
            account: None,
        }
    }
}

/// Directory and network of the run, created before the subjects.
#[derive(Clone, Copy)]
pub(super) struct Surroundings<'a> {
    pub(super) run_dir: &'a Arc<RunDir>,
    /// `None` if the scenario has no `[network]`.
    pub(super) network: Option<&'a Network>,
    /// `None` unless the target is a cluster that the run starts.
    pub(super) cluster: Option<&'a Cluster>,
    /// Directory for the results of the run.
    pub(super) results: &'a Path,
    /// Name of the system in the run; `target` for the scenario's target.
    pub(super) name: &'a str,
    /// Nodes of the cluster that receive the system's requests; empty for its default.
    pub(super) by: &'a [String],
}

/// Moves the calling thread into new network namespaces if the scenario has a `[network]`; otherwise returns `None`.
pub(super) fn enter_network(
    scenario: &Scenario,
    settings: &Settings,
) -> Result<Option<Network>, SessionError> {
    let Some(spec) = scenario.network.clone() else {
        return Ok(None);
    };
    let probe = artifacts::find_probe(settings.probe.as_deref())?;
    let program = fs::read(&probe).map_err(at(&probe))?;
    let placement = match scenario.beside() {
        Some(_) => Placement::OneCpu,
        None => Placement::Free,
    };
    Ok(Some(Network::enter(spec, program, placement)?))
}

/// Prepares the targets of the scenario, and adds their endpoint, server program and template to the facts of the host.
pub(super) fn start(
    scenario: &Scenario,
    settings: &Settings,
    surroundings: Surroundings<'_>,
    host: &mut HostFacts,
) -> Result<Subjects, SessionError> {
    let spec = &scenario.target;
    let run_dir = surroundings.run_dir;
    match (spec.kind, &spec.api_url) {
        (TargetKind::VmmDirect, _) => direct::start(scenario, settings, run_dir, host),
        (TargetKind::E2b | TargetKind::Cubesandbox, Some(url)) => {
            server::at_url(url, scenario, settings, surroundings, host)
        }
        (TargetKind::E2b, None) => match surroundings.cluster {
            Some(cluster) if scenario.cluster().is_some() || !surroundings.by.is_empty() => {
                cluster::target(cluster, scenario, settings, surroundings.by, host)
            }
            _ => server::start(scenario, settings, surroundings, host),
        },
        _ => {
            let target = of_host(spec, surroundings)?;
            let beside = direct::beside(scenario, settings, run_dir, host, None)?;
            Ok(Subjects {
                beside,
                ..Subjects::only(target)
            })
        }
    }
}

/// A target that is a program on this host.
fn of_host(
    spec: &TargetSpec,
    surroundings: Surroundings<'_>,
) -> Result<Box<dyn Target>, SessionError> {
    if spec.kind != TargetKind::Adapter {
        // Validation rejects a CubeSandbox target without URL; the caller prepares the other kinds.
        return Ok(Box::new(HostProcess));
    }
    let log = format!("adapter-{}.stderr", surroundings.name);
    let log = surroundings.results.join(log);
    match Adapter::start(&spec.command, &spec.template, spec.start_timeout, &log) {
        Ok(adapter) => Ok(Box::new(adapter)),
        Err(failure) => Err(SessionError::Target {
            kind: spec.kind.name(),
            why: failure.message,
        }),
    }
}
