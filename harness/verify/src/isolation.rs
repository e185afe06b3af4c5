//! `cube-bench verify isolation`: can a sandbox reach what it must not?
//!
//! ```text
//! cases ─► group by policy ─► a sandbox ─► probe: every case at once ─► findings ─┐
//! world: outside ───────────────────────────────► witness: what arrived ──────────┼─► judge ─► report
//!        neighbour ─────────────────────────────► what it heard ──────────────────┤
//!        server ────────────────────────────────► events: what was refused ───────┘
//! ```
//! Nothing is believed that only one end says. A case that must be blocked passes if the guest got no answer, nothing
//! arrived anywhere, and the server tells of the refusal. Each kind has cases that must get through, since a network
//! that is dead would pass all others. What could not be tried is no pass.

pub mod cases;
pub mod judge;
pub mod report;
mod sandbox;
mod scripts;
mod target;
mod world;

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use model::chain;
use netprobe::{Action, Finding, Outcome, Probe};
use serde::{Deserialize, Serialize};

use cases::{Case, CaseError, Expect, Group};
use judge::{Evidence, Judged, Verdict, judge};
use sandbox::{Customer, Guest, NetworkEvent, SandboxError};
pub use target::TargetSpec;
use testbed::{
    artifacts::{self, ArtifactError},
    endpoint::BadUrl,
    exit::End,
    leftovers::{self, RunDir},
    server::{Door, LocalServer, ServerError, ServerSpec, Tls},
    world::WorldError,
};
use world::{NAME_SERVER, UPLINK, World};

/// What must not be answered is waited for as long.
const BLOCKED_MS: u64 = 1200;
/// What must be answered may take as long on a busy host.
const PASS_MS: u64 = 20_000;
/// Events are told in the second after the packet.
const EVENT_PATIENCE: Duration = Duration::from_secs(8);
/// Sandboxes that the server keeps ready.
const WARM: u32 = 2;
/// An echo that the neighbour may ask.
const ECHO: &str = "198.51.100.20:5000";

/// What is proved, and with what.
#[derive(Clone, Debug)]
pub struct IsolationSpec {
    /// Directory with `templates/`.
    pub artifacts: PathBuf,
    /// The VMM, if given.
    pub vmm: Option<PathBuf>,
    /// The server, if given.
    pub api: Option<PathBuf>,
    /// The probe, if given.
    pub probe: Option<PathBuf>,
    /// Where the directory of the server is made.
    pub run_root: PathBuf,
    /// Template id or name.
    pub template: String,
    /// See [`Scope`].
    pub scope: Scope,
    /// Names of cases or classes; empty: all of the scope.
    pub only: Vec<String>,
    /// A server that runs already; absent: one of the prover's own, in a world of its own.
    pub target: Option<TargetSpec>,
}

/// Which cases a command is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// All.
    Isolation,
    /// What a policy lets out.
    Egress,
}

impl Scope {
    /// The name of the command.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Isolation => "isolation",
            Self::Egress => "egress",
        }
    }
}

/// Why nothing was proved.
#[derive(Debug, thiserror::Error)]
pub enum IsolationError {
    /// The cases.
    #[error(transparent)]
    Cases(#[from] CaseError),
    /// A name that means nothing.
    #[error("there is no case or class {name:?}; classes are: {classes}")]
    Unknown {
        /// As typed.
        name: String,
        /// All classes.
        classes: String,
    },
    /// Program or template.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The namespaces.
    #[error(transparent)]
    World(#[from] WorldError),
    /// The server.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The target's URL.
    #[error(transparent)]
    Url(#[from] BadUrl),
    /// The address outside that was named.
    #[error("cannot listen at the address outside, which has to be one of this machine's")]
    Outside(#[source] io::Error),
    /// The neighbour, without whom nothing is proved.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// A directory or file.
    #[error("cannot use {path}")]
    Io {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// Everything that was found out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proof {
    /// [`report::FORMAT`].
    pub format: u32,
    /// See [`Scope`].
    pub scope: Scope,
    /// URL of a server that ran already; absent: it was one of the prover's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// In the order of the files.
    pub cases: Vec<Judged>,
    /// Seconds that it took.
    pub seconds: f64,
}

impl Proof {
    /// A breach is the worst; what is not proved is no pass; nothing tried is nothing proved.
    #[must_use]
    pub fn end(&self) -> End {
        let any = |verdict| self.cases.iter().any(|case| case.verdict == verdict);
        match () {
            () if any(Verdict::Breach) => End::Breach,
            () if self.cases.iter().all(|case| case.verdict == Verdict::Pass)
                && !self.cases.is_empty() =>
            {
                End::Pass
            }
            () => End::Inconclusive,
        }
    }
}

/// Where a proof happens.
#[derive(Debug)]
struct Stage {
    /// Ended first: its VMs are in the world.
    server: LocalServer,
    world: World,
    customer: Customer,
}

/// Proves it. Without a target the process moves into namespaces of its own for good, so no thread may run yet.
///
/// # Errors
/// See [`IsolationError`]; what a case finds is a verdict, not an error.
pub fn run(spec: &IsolationSpec) -> Result<Proof, IsolationError> {
    match &spec.target {
        Some(target) => target::run(spec, target),
        None => in_own_world(spec),
    }
}

fn in_own_world(spec: &IsolationSpec) -> Result<Proof, IsolationError> {
    let begun = Instant::now();
    let groups = chosen(cases::load()?, spec)?;
    let program = artifacts::find_probe(spec.probe.as_deref())?;
    let program = fs::read(&program).map_err(at(&program))?;
    // Ports of all cases, so that a part is tried as the whole is.
    let mut world = World::enter(&cases::ports(&cases::load()?))?;
    leftovers::sweep(&spec.run_root).map_err(at(&spec.run_root))?;
    let run_dir = RunDir::create(&spec.run_root).map_err(at(&spec.run_root))?;
    let server = own_server(spec, run_dir.path())?;
    let customer = Customer {
        api: server.endpoint().clone(),
        key: server.key().to_owned(),
        template: spec.template.clone(),
        program,
    };
    world.witness.forget();
    let mut stage = Stage {
        server,
        world,
        customer,
    };
    let neighbour = stage
        .customer
        .create(&scripts::allowing(&["198.51.100.20"]))?;
    let mut judged = Vec::new();
    for group in &groups {
        eprintln!(
            "cube-bench: {} cases under the policy {}",
            group.cases.len(),
            group.name
        );
        judged.extend(try_group(&mut stage, &neighbour, group));
    }
    let scripted: Vec<&Case> = groups
        .iter()
        .flat_map(|g| &g.cases)
        .filter(|c| c.script.is_some())
        .collect();
    for case in scripted {
        eprintln!("cube-bench: {}", case.name);
        judged.push(scripts::try_script(&mut stage, &neighbour, case));
    }
    drop(neighbour);
    Ok(Proof {
        format: report::FORMAT,
        scope: spec.scope,
        target: None,
        cases: judged,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Those cases of the scope that are named; all if none is.
fn chosen(mut groups: Vec<Group>, spec: &IsolationSpec) -> Result<Vec<Group>, IsolationError> {
    let is_named = |case: &Case, name: &String| case.name == *name || case.class.name() == name;
    let all = || groups.iter().flat_map(|group| &group.cases);
    if let Some(name) = spec
        .only
        .iter()
        .find(|name| !all().any(|case| is_named(case, name)))
    {
        let mut classes: Vec<&str> = all().map(|case| case.class.name()).collect();
        classes.sort_unstable();
        classes.dedup();
        return Err(IsolationError::Unknown {
            name: name.clone(),
            classes: classes.join(", "),
        });
    }
    for group in &mut groups {
        group.cases.retain(|case| {
            if spec.only.is_empty() {
                spec.scope == Scope::Isolation || case.class.is_egress()
            } else {
                spec.only.iter().any(|name| is_named(case, name))
            }
        });
    }
    groups.retain(|group| !group.cases.is_empty());
    Ok(groups)
}

fn own_server(spec: &IsolationSpec, dir: &Path) -> Result<LocalServer, IsolationError> {
    let templates = spec.artifacts.join("templates");
    let spec = ServerSpec {
        program: artifacts::find_api(spec.api.as_deref())?,
        vmm: artifacts::find_vmm(spec.vmm.as_deref())?,
        templates: templates.canonicalize().map_err(at(&templates))?,
        warm: WARM,
        domain: None,
        door: Door::Locked,
        tls: Tls::Off,
        options: ["--uplink", UPLINK, "--dns-server", NAME_SERVER]
            .map(str::to_owned)
            .to_vec(),
    };
    Ok(LocalServer::start(dir, spec)?)
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> IsolationError {
    let path = path.to_owned();
    move |source| IsolationError::Io { path, source }
}

/// All attempts under one policy, in one sandbox and at the same time.
fn try_group(stage: &mut Stage, neighbour: &Guest, group: &Group) -> Vec<Judged> {
    let cases: Vec<&Case> = group
        .cases
        .iter()
        .filter(|case| case.script.is_none())
        .collect();
    if cases.is_empty() {
        return Vec::new();
    }
    stage.world.witness.forget();
    let words = cases.iter().map(|case| case.word()).collect();
    let mut wrong = Vec::new();
    let (tried, heard) = while_heard(neighbour, &group.name, words, || {
        let guest = stage.customer.create(&group.create)?;
        let probes: Vec<Probe> = cases.iter().filter_map(|case| probe(case)).collect();
        Ok::<_, SandboxError>((guest.probe(&probes)?, guest))
    });
    let (findings, events) = match tried {
        Ok((findings, guest)) => {
            let enough =
                |events: &[NetworkEvent]| cases.iter().all(|case| judge::is_told(case, events));
            let events = guest.await_events(Instant::now() + EVENT_PATIENCE, enough);
            (
                findings,
                events.unwrap_or_else(|error| noted(&mut wrong, &error)),
            )
        }
        Err(error) => (Vec::new(), noted(&mut wrong, &error)),
    };
    if let Err(error) = stage.world.witness.settle() {
        wrong.push(error.to_string());
    }
    let seen = stage.world.witness.seen();
    let judge_one = |case: &&Case| {
        let finding = findings
            .iter()
            .find(|finding: &&Finding| finding.name == case.word());
        let heard = heard.as_deref();
        let mut judged = judge(
            case,
            Evidence {
                finding,
                seen,
                events: &events,
                heard,
            },
        );
        doubt(&mut judged, &wrong);
        judged
    };
    cases.iter().map(judge_one).collect()
}

fn noted<T>(wrong: &mut Vec<String>, error: &SandboxError) -> Vec<T> {
    wrong.push(chain(error));
    Vec::new()
}

/// What went wrong for all cases of a group makes a pass of none of them.
fn doubt(judged: &mut Judged, wrong: &[String]) {
    if judged.verdict == Verdict::Pass && !wrong.is_empty() {
        judged.verdict = Verdict::Unproven;
    }
    judged.wrong.extend(wrong.iter().cloned());
}

fn probe(case: &Case) -> Option<Probe> {
    Some(Probe {
        name: case.word(),
        first: case.first.clone(),
        action: case.action.clone()?,
        within_ms: match case.expect {
            Expect::Blocked if case.guest.is_empty() => BLOCKED_MS,
            // An answer comes, if only a refusal.
            Expect::Blocked | Expect::Pass => PASS_MS,
        },
    })
}

/// Does something while the neighbour listens; which of the words it heard, `None` if it could not listen. Its own
/// echo ends it, so that what was there to hear before has been heard.
fn while_heard<T>(
    neighbour: &Guest,
    what: &str,
    words: Vec<String>,
    work: impl FnOnce() -> T,
) -> (T, Option<Vec<String>>) {
    let until = format!("neighbour-end-of-{what}");
    let hear = Probe {
        name: format!("neighbour-{what}"),
        first: Vec::new(),
        action: Action::Hear {
            words,
            until: until.clone(),
        },
        within_ms: 120_000,
    };
    thread::scope(|scope| {
        let ear = scope.spawn(|| neighbour.probe(&[hear]));
        let done = work();
        scripts::speak_until(|| ear.is_finished(), neighbour, until);
        let heard = ear
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let heard = heard.ok().and_then(|findings| findings.into_iter().next());
        let words = heard.filter(|finding| finding.outcome != Outcome::Failed);
        (
            done,
            words.map(|finding| finding.said.split_whitespace().map(str::to_owned).collect()),
        )
    })
}
