//! `cube-bench verify isolation`: tests whether a sandbox can reach a destination that its policy or its isolation
//! forbids.
//!
//! ```text
//! cases ─► grouped by policy ─► a sandbox ─► probe: all cases of a group at once ─► findings ─┐
//! world: outside, host ─────────────────────► capture: packets that arrived ──────────────────┼─► evaluate ─► report
//!        neighbour ─────────────────────────► payloads that it received ──────────────────────┤
//!        server ────────────────────────────► events: packets that it refused ────────────────┘
//! ```
//! The classes `l7` and `secrets` have their own server, sandbox and judge (`isolation::l7`).
//!
//! No result relies on one end alone. A case that must be blocked passes if the guest got no response, no packet
//! arrived anywhere, and the server reports the refusal if the case expects a report. Control cases must get
//! through, because a network that is down would block everything. A case that could not be tried is not a pass.

pub mod cases;
pub mod evaluate;
mod l7;
mod observed;
mod sandbox;
mod scripts;
mod select;
mod stage;
mod target;
mod timing;
mod world;

use std::{fs, net::IpAddr, path::PathBuf, thread, time::Instant};

use model::chain;
use netprobe::{Action, Finding, Outcome, Probe};
use testbed::{artifacts, server::LocalServer};

use crate::{
    report::{self, Report, Suite, Verdict},
    sandbox::{Sandbox, SandboxError},
    setup::{Setup, VerifyError, api_of, at},
};
use cases::{Case, Group};
use evaluate::{Evidence, evaluate};
use sandbox::{Customer, NetworkEvent};
use select::{probe, select};
use stage::Stage;
use timing::EVENT_TIMEOUT;
use world::{NAME_SERVER, UPLINK, World};

/// Sandboxes that the server keeps ready.
const WARM: u32 = 2;

/// Options of the isolation suite.
#[derive(Clone, Debug)]
pub struct IsolationSpec {
    pub setup: Setup,
    /// Path of `cube-netprobe`. `None`: from `$CUBE_BIN`, else beside this program.
    pub probe: Option<PathBuf>,
    /// Path of `cube-egress`. `None`: from `$CUBE_BIN`, else beside this program.
    pub egress: Option<PathBuf>,
    /// Path of `mitmdump`, whose outcomes of the class `l7` are compared. `None`: no comparison.
    pub oracle: Option<PathBuf>,
    pub scope: Scope,
    /// Names of cases or classes; empty: every case in the scope.
    pub only: Vec<String>,
    /// A running server. `None`: the suite starts one in its own network namespaces.
    pub target: Option<TargetSpec>,
}

/// The cases that a command covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every case.
    Isolation,
    /// Cases about allowed destinations.
    Egress,
}

impl Scope {
    fn suite(self) -> Suite {
        match self {
            Self::Isolation => Suite::Isolation,
            Self::Egress => Suite::Egress,
        }
    }
}

/// A running server.
#[derive(Clone, Debug)]
pub struct TargetSpec {
    /// Its base URL.
    pub url: String,
    /// Sent as `X-API-KEY`.
    pub key: String,
    /// An address of this host that the server's sandboxes can reach, if there is one.
    pub outside: Option<IpAddr>,
}

/// Runs the cases. Without a target, the process moves into new network namespaces and stays there, so the caller must
/// not have started any thread.
///
/// # Errors
/// Returns a [`VerifyError`] if a name is unknown or the suite cannot start. The result of a case is never an error.
pub fn run(spec: &IsolationSpec) -> Result<Report, VerifyError> {
    match &spec.target {
        Some(target) => target::run(spec, target),
        None => run_in_namespaces(spec),
    }
}

fn run_in_namespaces(spec: &IsolationSpec) -> Result<Report, VerifyError> {
    let begun = Instant::now();
    let groups = select(cases::load()?, spec)?;
    let requests = l7::select(spec)?;
    // Peers listen at the ports of all cases, so that a selected case behaves as in a full run.
    let mut world = World::enter(&cases::ports(&cases::load()?))?;
    let mut reports = Vec::new();
    if !requests.is_empty() {
        reports = l7::run(&world, spec, &requests)?;
    }
    if !groups.is_empty() {
        world.capture.forget();
        reports = [try_groups(world, spec, &groups)?, reports].concat();
    }
    Ok(Report::new(spec.scope.suite(), None, reports, begun, ()))
}

fn try_groups(
    world: World,
    spec: &IsolationSpec,
    groups: &[Group],
) -> Result<Vec<report::Case>, VerifyError> {
    let program = artifacts::find_probe(spec.probe.as_deref())?;
    let program = fs::read(&program).map_err(at(&program))?;
    let run_dir = spec.setup.run_dir()?;
    let mut options = spec.setup.server(WARM)?;
    options.options = ["--uplink", UPLINK, "--dns-server", NAME_SERVER]
        .map(str::to_owned)
        .to_vec();
    let server = LocalServer::start(run_dir.path(), options)?;
    let api = api_of(&server, sandbox::TIMEOUT);
    let customer = Customer::new(api, &spec.setup.template, program);
    let mut stage = Stage {
        server,
        world,
        customer,
    };
    stage.world.capture.forget();
    let neighbour = stage
        .customer
        .create(&scripts::allowing(&["198.51.100.20"]))?;
    let mut reports = Vec::new();
    for group in groups {
        group.announce();
        reports.extend(try_group(&mut stage, &neighbour, group));
    }
    let all = groups.iter().flat_map(|group| &group.cases);
    for case in all.filter(|case| case.script.is_some()) {
        eprintln!("cube-bench: {}", case.name);
        reports.push(scripts::try_script(&mut stage, &neighbour, case));
    }
    Ok(reports)
}

/// Tries the cases of a group that are not scripts, all in one sandbox and at the same time.
fn try_group(stage: &mut Stage, neighbour: &Sandbox, group: &Group) -> Vec<report::Case> {
    let cases: Vec<&Case> = group
        .cases
        .iter()
        .filter(|case| case.script.is_none())
        .collect();
    if cases.is_empty() {
        return Vec::new();
    }
    stage.world.capture.forget();
    let payloads = cases.iter().map(|case| case.payload()).collect();
    let mut problems = Vec::new();
    let (tried, heard) = while_listening(neighbour, &group.name, payloads, || {
        let guest = stage.customer.create(&group.create)?;
        let probes: Vec<Probe> = cases.iter().filter_map(|case| probe(case)).collect();
        Ok::<_, SandboxError>((guest.probe(&probes)?, guest))
    });
    let (findings, events) = match tried {
        Ok((findings, guest)) => {
            let enough = |events: &[NetworkEvent]| {
                cases.iter().all(|case| evaluate::is_reported(case, events))
            };
            let events = guest.await_events(Instant::now() + EVENT_TIMEOUT, enough);
            (
                findings,
                events.unwrap_or_else(|error| record(&mut problems, &error)),
            )
        }
        Err(error) => (Vec::new(), record(&mut problems, &error)),
    };
    if let Err(error) = stage.world.capture.settle() {
        problems.push(error.to_string());
    }
    let evidence = |case: &Case| Evidence {
        finding: findings.iter().find(|f| f.name == case.payload()),
        seen: stage.world.capture.seen(),
        events: &events,
        heard: heard.as_deref(),
    };
    let report = |case: &&Case| with_problems(evaluate(case, evidence(case)), &problems);
    cases.iter().map(report).collect()
}

/// Adds an error to the problems, and returns an empty list for the values that could not be read.
fn record<T>(problems: &mut Vec<String>, error: &SandboxError) -> Vec<T> {
    problems.push(chain(error));
    Vec::new()
}

/// Adds problems that affect a whole group. With any of them, no case of the group passes.
fn with_problems(mut case: report::Case, problems: &[String]) -> report::Case {
    if case.verdict == Verdict::Pass && !problems.is_empty() {
        case.verdict = Verdict::Unproven;
    }
    case.problems.extend(problems.iter().cloned());
    case
}

/// Runs `work` while the neighbour listens, and returns the payloads that the neighbour received; `None` if it could
/// not listen.
///
/// The neighbour stops listening when it receives an echo that it requested from outside. By then, it has read
/// everything that arrived before the echo.
fn while_listening<T>(
    neighbour: &Sandbox,
    what: &str,
    payloads: Vec<String>,
    work: impl FnOnce() -> T,
) -> (T, Option<Vec<String>>) {
    let until = format!("neighbour-end-of-{what}");
    let hear = Probe {
        name: format!("neighbour-{what}"),
        first: Vec::new(),
        action: Action::Hear {
            words: payloads,
            until: until.clone(),
        },
        within_ms: 120_000,
    };
    thread::scope(|scope| {
        let listener = scope.spawn(|| neighbour.probe(&[hear]));
        let done = work();
        scripts::send_until(|| listener.is_finished(), neighbour, until);
        let heard = listener
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let heard = heard.ok().and_then(|findings| findings.into_iter().next());
        let heard = heard.filter(|finding| finding.outcome != Outcome::Failed);
        let payloads = |f: Finding| f.said.split_whitespace().map(str::to_owned).collect();
        (done, heard.map(payloads))
    })
}
