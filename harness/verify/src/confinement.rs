//! `cube-bench verify confinement`: what can code that has taken a VMM over do to the host and to other sandboxes?
//!
//! ```text
//! attempts ─► a clone of the release VMM, guest running ─► intruder: system calls made by that process ─┐
//! scene: files, sockets, a neighbour, a process of root's ───► look from outside ───────────────────────┼─► judge ─► report
//! VMs of the harness and of a server ─► /proc: users, capabilities, filter, limits, descriptors ────────┘
//! ```
//! An attempt is held if the kernel refused it as it should (the process ended by SIGSYS, or EACCES, EPERM) and nothing
//! has changed outside. Refused in any other way it proves nothing: the attempt may be at fault.

mod attempts;
mod calls;
mod clone;
mod group;
mod intruder;
mod pool;
pub mod report;
mod scene;
mod state;
mod witness;

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    time::Instant,
};

use model::MANIFEST_NAME;
use model::chain;
use serde::{Deserialize, Serialize};
use vmm_control::ControlError;

use attempts::Attempt;
pub use attempts::Class;
use clone::Cloner;
use intruder::{Intruder, Kin, Try};
use scene::Scene;
use testbed::{
    artifacts::{self, ArtifactError},
    exit::End,
    server::ServerError,
    world::{self, WorldError},
};

/// What is proved, and with what.
#[derive(Clone, Debug)]
pub struct ConfinementSpec {
    /// Directory with `templates/`.
    pub artifacts: PathBuf,
    /// The VMM, if given.
    pub vmm: Option<PathBuf>,
    /// The server, if given.
    pub api: Option<PathBuf>,
    /// Where the directory of the server is made.
    pub run_root: PathBuf,
    /// Template id or name.
    pub template: String,
    /// See [`Starts`].
    pub starts: Starts,
    /// Names of cases or classes; empty: all.
    pub only: Vec<String>,
}

/// How the VMMs that are tried are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starts {
    /// By the harness and by a server's pool.
    Both,
    /// By the harness alone; needs no program but the VMM.
    Direct,
}

/// Why nothing was proved.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
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
    /// A sandbox of the server's.
    #[error("the server gives no sandbox: {0}")]
    Sandbox(String),
    /// A clone.
    #[error("a clone cannot be started")]
    Vmm(#[source] ControlError),
    /// A directory, file or process.
    #[error("cannot use {path}")]
    Io {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> ConfinementError {
    let path = path.to_owned();
    move |source| ConfinementError::Io { path, source }
}

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Refused as it should be, and nothing has changed.
    Pass,
    /// It got what it wanted, or something has changed.
    Breach,
    /// Refused in a way that proves nothing.
    Unproven,
    /// It could not be tried.
    NotTried,
}

impl Verdict {
    /// The name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Breach => "breach",
            Self::Unproven => "unproven",
            Self::NotTried => "not_tried",
        }
    }
}

/// A case and its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    /// Name of the case.
    pub case: String,
    /// See [`Class`].
    pub class: Class,
    /// What would be lost.
    pub why: String,
    /// See [`Verdict`].
    pub verdict: Verdict,
    /// How the kernel may refuse.
    pub expected: String,
    /// What the process that tried it was answered.
    pub inside: String,
    /// What the look from outside found; empty: nothing.
    pub outside: String,
}

/// Everything that was found out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proof {
    /// [`report::FORMAT`].
    pub format: u32,
    /// In the order of the classes.
    pub cases: Vec<Judged>,
    /// Seconds that it took.
    pub seconds: f64,
}

impl Proof {
    /// A breach is the worst; what is not proved is no pass; nothing tried is nothing proved.
    #[must_use]
    pub fn end(&self) -> End {
        let any = |verdict| self.cases.iter().any(|case| case.verdict == verdict);
        let all_pass = self.cases.iter().all(|case| case.verdict == Verdict::Pass);
        match () {
            () if any(Verdict::Breach) => End::Breach,
            () if all_pass && !self.cases.is_empty() => End::Pass,
            () => End::Inconclusive,
        }
    }
}

/// Proves it. The process moves into a network of its own for good, so no thread may run yet.
///
/// # Errors
/// See [`ConfinementError`]; what a case finds is a verdict, not an error.
pub fn run(spec: &ConfinementSpec) -> Result<Proof, ConfinementError> {
    let begun = Instant::now();
    let all = attempts::all();
    check_names(spec, &all)?;
    let vmm = artifacts::find_vmm(spec.vmm.as_deref())?;
    let template = find_template(spec)?;
    let _outside = match spec.starts {
        Starts::Both => Some(world::enter([])?),
        Starts::Direct => {
            world::alone()?;
            None
        }
    };
    let mut scene = Scene::set(template.clone())?;
    let cloner = Cloner::new(vmm, template);
    let mut cases = Vec::new();
    for attempt in all.iter().filter(|a| is_chosen(spec, a.name, a.class)) {
        cases.push(try_direct(attempt, &mut scene, &cloner)?);
    }
    let is_state_chosen = |case: &Judged| is_chosen(spec, &case.case, case.class);
    cases.extend(
        state::of_clones(&scene, &cloner)?
            .into_iter()
            .filter(is_state_chosen),
    );
    if spec.starts == Starts::Both {
        cases.extend(pool::prove(spec, &mut scene, &cloner)?);
    }
    Ok(Proof {
        format: report::FORMAT,
        cases,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

fn is_chosen(spec: &ConfinementSpec, name: &str, class: Class) -> bool {
    let named = |word: &String| word == name || word == class.name();
    spec.only.is_empty() || spec.only.iter().any(named)
}

fn check_names(spec: &ConfinementSpec, all: &[&Attempt]) -> Result<(), ConfinementError> {
    let mut classes: BTreeSet<&str> = all.iter().map(|a| a.class.name()).collect();
    classes.insert(Class::State.name());
    let is_known = |name: &&String| {
        let name = name.as_str();
        classes.contains(name)
            || state::NAMES.contains(&name)
            || pool::is_case(name)
            || all.iter().any(|a| a.name == name)
    };
    match spec.only.iter().find(|name| !is_known(name)) {
        None => Ok(()),
        Some(name) => Err(ConfinementError::Unknown {
            name: name.clone(),
            classes: classes.into_iter().collect::<Vec<_>>().join(", "),
        }),
    }
}

fn find_template(spec: &ConfinementSpec) -> Result<PathBuf, ConfinementError> {
    let dir = spec.artifacts.join("templates").join(&spec.template);
    let path = dir.join(MANIFEST_NAME);
    let missing = |source| ArtifactError::Template {
        name: spec.template.clone(),
        path: path.clone(),
        source,
    };
    path.metadata().map_err(missing)?;
    Ok(dir.canonicalize().map_err(missing)?)
}

/// One attempt in a clone of its own.
fn try_direct(
    attempt: &Attempt,
    scene: &mut Scene,
    cloner: &Cloner,
) -> Result<Judged, ConfinementError> {
    scene.reset(cloner)?;
    let clone = match cloner.start(&scene.path("")) {
        Ok(clone) => clone,
        Err(error) => return Ok(not_tried(attempt, &chain(&error))),
    };
    if let Err(error) = scene.group.take(clone.pid()) {
        return Ok(not_tried(attempt, &error.to_string()));
    }
    Ok(try_in(
        attempt,
        scene,
        Intruder::enter(clone.pid(), Kin::Child),
    ))
}

fn not_tried(attempt: &Attempt, why: &str) -> Judged {
    Judged {
        case: attempt.name.to_owned(),
        class: attempt.class,
        why: attempt.why.to_owned(),
        verdict: Verdict::NotTried,
        expected: attempt.expected(),
        inside: why.to_owned(),
        outside: String::new(),
    }
}

/// One attempt in a process that was entered.
fn try_in(attempt: &Attempt, scene: &Scene, entered: Try<Intruder>) -> Judged {
    let mut intruder = match entered {
        Ok(intruder) => intruder,
        Err(stop) => return not_tried(attempt, &stop.describe()),
    };
    let done = (attempt.act)(&mut intruder, scene);
    let seen = (attempt.look)(scene, &intruder);
    let (verdict, outside) = judge(attempt, &done, seen);
    Judged {
        verdict,
        inside: match done {
            Ok(()) => "it got what it wanted".to_owned(),
            Err(stop) => stop.describe(),
        },
        outside,
        ..not_tried(attempt, "")
    }
}

fn judge(attempt: &Attempt, done: &Try<()>, seen: attempts::Seen) -> (Verdict, String) {
    match (done, seen) {
        (_, Ok(Some(what))) => (Verdict::Breach, what),
        (Ok(()), Ok(None)) => (Verdict::Breach, String::new()),
        (Ok(()), Err(error)) => (Verdict::Breach, error.to_string()),
        (Err(_), Err(error)) => (Verdict::Unproven, format!("cannot look: {error}")),
        (Err(stop), Ok(None)) => {
            if attempt.refusals.iter().any(|r| r.is(stop)) {
                (Verdict::Pass, String::new())
            } else {
                (Verdict::Unproven, String::new())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attempts::Refusal;
    use intruder::Stop;
    use nix::{errno::Errno, sys::signal::Signal};

    const ATTEMPT: Attempt = Attempt {
        name: "test",
        class: Class::Files,
        why: "A test.",
        refusals: &[
            Refusal::Error(Errno::EACCES),
            Refusal::Death(Signal::SIGSYS),
        ],
        act: |_, _| Ok(()),
        look: |_, _| Ok(None),
    };

    #[test]
    fn a_refusal_counts_if_it_is_the_expected_one_and_nothing_has_changed() {
        let judged = |done: Try<()>, seen| judge(&ATTEMPT, &done, seen).0;
        let refused = |errno| Err(Stop::Refused("open", errno));
        let changed = || Ok(Some("changed".to_owned()));
        assert_eq!(judged(refused(Errno::EACCES), Ok(None)), Verdict::Pass);
        let killed = |signal| Err(Stop::Killed("open", signal));
        assert_eq!(judged(killed(Signal::SIGSYS), Ok(None)), Verdict::Pass);
        assert_eq!(judged(killed(Signal::SIGSEGV), Ok(None)), Verdict::Unproven);
        assert_eq!(judged(refused(Errno::ENOENT), Ok(None)), Verdict::Unproven);
        assert_eq!(judged(refused(Errno::EACCES), changed()), Verdict::Breach);
        assert_eq!(judged(Ok(()), Ok(None)), Verdict::Breach);
        let blind = Err(io::Error::other("gone"));
        assert_eq!(judged(refused(Errno::EACCES), blind), Verdict::Unproven);
        assert_eq!(ATTEMPT.expected(), "EACCES or SIGSYS");
    }
}
