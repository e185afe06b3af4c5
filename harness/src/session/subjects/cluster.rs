//! A cluster that the run starts, and the events that hit one of its nodes.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{Arc, Mutex, atomic::AtomicBool},
};

use testbed::{
    artifacts,
    cluster::{self, Cluster, Hub, Node},
    leftovers::RunDir,
    server::{Door, ServerSpec, Site, Tls},
};

use super::{
    SessionError, Settings, Subjects, at, direct,
    server::{NO_NETWORK, e2b, fixed_stock, help_of, install, server_options},
};
use crate::{
    host::facts::HostFacts,
    scenario::{ClusterSpec, EventKind, Scenario, TargetSpec},
    target::{
        e2b::{Complaints, E2b},
        nodes::{Nodes, Stage},
    },
};

/// Starts the cluster of the scenario's target.
pub(in crate::session) fn start(
    (hub, wanted): (&Hub, &ClusterSpec),
    scenario: &Scenario,
    settings: &Settings,
    run_dir: &RunDir,
    host: &HostFacts,
) -> Result<Cluster, SessionError> {
    let spec = &scenario.target;
    direct::refuse_without_kvm(host)?;
    let etcd = artifacts::find_etcd(settings.etcd.as_deref(), &settings.artifacts)?;
    let template = artifacts::find_template(&settings.artifacts, &spec.template, spec.memory)?;
    let templates = run_dir.path().join("cluster-templates");
    install(&template.dir, &templates.join(&spec.template)).map_err(at(&templates))?;
    let program = artifacts::find_api(settings.api.as_deref())?;
    let server = ServerSpec {
        vmm: artifacts::find_vmm(settings.vmm.as_deref())?,
        templates,
        warm: spec.warm,
        domain: None,
        door: Door::Locked,
        tls: Tls::Off,
        site: Site::Loopback,
        options: [
            &server_options(&settings.artifacts, false)[..],
            &NO_NETWORK.map(str::to_owned),
            &fixed_stock(&help_of(&program), spec.warm),
        ]
        .concat(),
        environment: Vec::new(),
        program,
    };
    let spec = cluster::ClusterSpec {
        nodes: wanted.nodes,
        etcd: &etcd,
        server,
    };
    let cluster = Cluster::start(hub, run_dir.path(), &spec)?;
    cluster.close(&wanted.closed).map_err(at(run_dir.path()))?;
    let device = |path: &Path| fs::metadata(path).map(|meta| meta.dev()).ok();
    let is_apart = device(&template.dir) != device(run_dir.path());
    if is_apart
        && wanted
            .event
            .is_some_and(|event| event.kind == EventKind::DrainNode)
    {
        eprintln!(
            "cube-bench: moves will copy the memory of the template, because nodes cannot link its files across file \
             systems: set --run-root to a directory on the file system of {}",
            template.dir.display()
        );
    }
    Ok(cluster)
}

/// One node of a cluster as a target.
fn node(spec: &TargetSpec, node: &Node) -> E2b {
    let server = node.server();
    let mut target = e2b(spec, server.endpoint().clone(), server.key().to_owned());
    target.sandboxes = Some(server.sandboxes());
    target.warm = spec.warm;
    target.log = Arc::new(Mutex::new(Complaints::of(&server.log())));
    target
}

/// The cluster as a target, reached through the nodes of the mode or of a peer, or through all but the event's node.
pub(super) fn target(
    cluster: &Cluster,
    scenario: &Scenario,
    settings: &Settings,
    by: &[String],
    host: &mut HostFacts,
) -> Result<Subjects, SessionError> {
    let spec = &scenario.target;
    let all = cluster.nodes();
    if let Some(node) = all.first() {
        host.add_binary("cube-api", node.server().program());
    }
    let template = artifacts::find_template(&settings.artifacts, &spec.template, spec.memory)?;
    host.template = Some(direct::facts_of(&template, "mapped by cube-api".to_owned()));
    host.endpoint = Some(format!(
        "{} nodes started by the run, {} warm in each",
        all.len(),
        spec.warm
    ));
    let unnamed = match scenario.event() {
        _ if !by.is_empty() => 0,
        Some(_) => all.len().saturating_sub(1),
        None => all.len(),
    };
    let is_asked = |at: &usize| *at < unnamed || by.iter().any(|by| by == all[*at].name());
    Ok(Subjects::only(Box::new(Nodes {
        asked: (0..all.len()).filter(is_asked).collect(),
        all: all.iter().map(|of| node(spec, of)).collect(),
    })))
}

/// The event in each round of the target, if any.
pub(in crate::session) fn stage<'a>(
    scenario: &'a Scenario,
    cluster: &'a Cluster,
    interrupted: &'a AtomicBool,
) -> Option<Stage<'a>> {
    let wanted = scenario.cluster()?;
    Some(Stage {
        cluster,
        spec: wanted.event?,
        closed: &wanted.closed,
        first: node(&scenario.target, &cluster.nodes()[0]),
        exec: &scenario.exec,
        interrupted,
    })
}
