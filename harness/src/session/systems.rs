//! The systems of a comparison: the scenario's target and its peers, each probed once before the run.

use std::sync::Arc;

use testbed::server::LocalServer;

use super::{
    SessionError, Settings,
    subjects::{self, Subjects, Surroundings},
};
use crate::{
    account::Account,
    event::{Failure, System},
    host::facts::HostFacts,
    plan::Subject,
    scenario::{ExecSpec, Mode, Scenario, TargetSpec},
    target::{About, Absent, CloneId, Target, exec_and_compare},
};
use model::{Timeline, chain};

/// Everything started by a run. Fields are dropped in this order: targets before their servers.
pub(super) struct Systems {
    pub(super) target: Subjects,
    /// In the order of the scenario; a missing system is [`Absent`].
    pub(super) peers: Vec<Box<dyn Target>>,
    /// The target and the peers; empty if the scenario has no peers.
    pub(super) found: Vec<System>,
    /// Each cgroup is removed after its server has ended.
    _servers: Vec<(Option<LocalServer>, Option<Arc<Account>>)>,
}

impl Systems {
    pub(super) fn is_missing(&self, subject: Subject) -> bool {
        let mut found = self.found.iter();
        found.any(|system| system.subject == subject && system.missing.is_some())
    }
}

/// Prepares the target and the peers. With peers, a system that cannot be prepared, or whose first sandbox fails,
/// is marked as missing, and the run continues without it.
pub(super) fn start(
    scenario: &Scenario,
    settings: &Settings,
    surroundings: Surroundings<'_>,
    host: &mut HostFacts,
) -> Result<Systems, SessionError> {
    let target = subjects::start(scenario, settings, surroundings, host);
    if scenario.peers().is_empty() {
        host.sandboxes = scenario.target.place();
        let target = target?;
        let reported = host.software.take();
        host.software = reported.or_else(|| target.target.about().describe());
        return Ok(Systems {
            target,
            peers: Vec::new(),
            found: Vec::new(),
            _servers: Vec::new(),
        });
    }
    let mut all = Found {
        systems: Vec::new(),
        host,
    };
    let identity = (Subject::Clone, "target");
    let target = all.add(identity, &scenario.target, &scenario.exec, target);
    let (mut peers, mut servers) = (Vec::new(), Vec::new());
    for (n, peer) in (0..).zip(scenario.peers()) {
        let alone = Scenario {
            target: peer.target.clone(),
            mode: Mode::Single,
            network: None,
            cold_rounds: 0,
            ..scenario.clone()
        };
        let surroundings = Surroundings {
            name: &peer.name,
            by: &peer.by,
            ..surroundings
        };
        // Endpoint and template in the facts are the target's.
        let mut facts = all.host.clone();
        let subjects = subjects::start(&alone, settings, surroundings, &mut facts);
        all.host.binaries.extend(facts.binaries);
        let identity = (Subject::Peer(n), peer.name.as_str());
        let subjects = all.add(identity, &peer.target, &peer.exec, subjects);
        peers.push(subjects.target);
        servers.push((subjects.server, subjects.account));
    }
    let found = all.systems;
    let used = found.iter().filter(|system| system.missing.is_none());
    let places = used.map(|system| match system.subject {
        Subject::Peer(n) => scenario.peers()[usize::from(n)].target.place(),
        _ => scenario.target.place(),
    });
    host.sandboxes = places.max().unwrap_or_default();
    Ok(Systems {
        target,
        peers,
        found,
        _servers: servers,
    })
}

/// The systems so far, and the facts about the host.
struct Found<'a> {
    systems: Vec<System>,
    host: &'a mut HostFacts,
}

impl Found<'_> {
    /// Probes a system and records it.
    fn add(
        &mut self,
        (subject, name): (Subject, &str),
        spec: &TargetSpec,
        exec: &ExecSpec,
        started: Result<Subjects, SessionError>,
    ) -> Subjects {
        let arrival = u32::try_from(self.systems.len()).unwrap_or(u32::MAX);
        let probed = started.map_err(|error| chain(&error)).and_then(|subjects| {
            let outcome = probe(subjects.target.as_ref(), arrival, exec);
            outcome.map_err(|failure| failure.message)?;
            Ok(subjects)
        });
        let about = probed.as_ref().map(|subjects| subjects.target.about());
        let About { version, platform } = about.unwrap_or_default();
        let missing = probed.as_ref().err().cloned();
        if let Some(why) = &missing {
            eprintln!("cube-bench: {name} is not measured: {why}");
        }
        self.systems.push(System {
            subject,
            name: name.to_owned(),
            kind: spec.kind,
            version,
            platform,
            missing,
        });
        probed.unwrap_or_else(|why| Subjects::only(Box::new(Absent(why))))
    }
}

/// Starts a sandbox, runs the command and removes the sandbox.
fn probe(target: &dyn Target, arrival: u32, exec: &ExecSpec) -> Result<(), Failure> {
    target.await_ready().map_err(|e| Failure {
        cause: crate::event::FailureCause::Create,
        message: e.to_string(),
    })?;
    let id = CloneId {
        round: u32::MAX,
        arrival,
    };
    let mut sandbox = target.create(id, &mut Timeline::default())?;
    exec_and_compare(sandbox.as_mut(), exec)?;
    sandbox.kill()
}
