//! `cube-bench verify confinement`: what can code that has taken over a VMM do to the host and to other sandboxes?
//!
//! ```text
//! attempts ─► a clone in the release VMM, guest running ─► intruder: system calls made in that process ─┐
//! scene: files, sockets, another sandbox, a process of root ─► observed from outside ───────────────────┼─► classify ─► report
//! VMMs started directly and by a server ─► /proc: users, capabilities, seccomp, limits, descriptors ────┘
//! ```
//! An attempt passes if the kernel refused it as expected (SIGSYS from the seccomp filter, EACCES or EPERM) and nothing
//! changed outside. Any other refusal proves nothing, because the attempt itself may be wrong.

mod attempts;
mod calls;
mod clone;
mod group;
mod intruder;
mod pool;
mod process;
pub mod report;
mod scene;
mod state;

use std::{collections::BTreeSet, time::Instant};

use model::chain;
use serde::{Deserialize, Serialize};
use testbed::{artifacts, exit::End, world};

use crate::{
    proof::{CaseResult, end_of},
    setup::{Setup, VerifyError},
};

use attempts::Attempt;
pub use attempts::Class;
use clone::Cloner;
use intruder::{Intruder, Relation, Try};
use scene::Scene;

/// Options of the confinement suite.
#[derive(Clone, Debug)]
pub struct ConfinementSpec {
    pub setup: Setup,
    pub starts: Starts,
    /// Names of cases or classes; empty: all.
    pub only: Vec<String>,
}

/// How the VMMs under test are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starts {
    /// By this suite, and by the pool of a server.
    Both,
    /// By this suite only, which needs no other program than the VMM.
    Direct,
}

/// A case and its result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseReport {
    /// Name of the case.
    pub case: String,
    pub class: Class,
    /// Consequence if the attempt succeeds.
    pub why: String,
    #[serde(rename = "verdict")]
    pub result: CaseResult,
    /// Refusals that pass.
    pub expected: String,
    /// The kernel's answer to the process that made the attempt.
    pub inside: String,
    /// Change that was observed from outside; empty: none.
    pub outside: String,
}

/// Results of a run of the suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proof {
    /// Always [`report::FORMAT`].
    pub format: u32,
    /// Ordered by class.
    pub cases: Vec<CaseReport>,
    /// Duration of the run.
    pub seconds: f64,
}

impl Proof {
    /// [`End::Breach`] if any case is a breach, [`End::Pass`] if there are cases and all pass, else
    /// [`End::Inconclusive`].
    #[must_use]
    pub fn end(&self) -> End {
        end_of(self.cases.iter().map(|case| case.result))
    }
}

/// Runs the cases. The process moves into a new network namespace and stays there, so the caller must not have started any
/// thread.
///
/// # Errors
/// Returns a [`VerifyError`] if the suite could not start. The outcome of a case is never an error.
pub fn run(spec: &ConfinementSpec) -> Result<Proof, VerifyError> {
    let begun = Instant::now();
    let all = attempts::all();
    check_names(spec, &all)?;
    let vmm = artifacts::find_vmm(spec.setup.vmm.as_deref())?;
    let setup = &spec.setup;
    let template = artifacts::find_template(&setup.artifacts, &setup.template, None)?.dir;
    let _outside = match spec.starts {
        Starts::Both => Some(world::enter([])?),
        Starts::Direct => {
            world::alone()?;
            None
        }
    };
    let mut scene = Scene::new(template.clone())?;
    let cloner = Cloner::new(vmm, template);
    let mut cases = Vec::new();
    for attempt in all.iter().filter(|a| is_selected(spec, a.name, a.class)) {
        cases.push(try_direct(attempt, &mut scene, &cloner)?);
    }
    let is_state_selected = |case: &CaseReport| is_selected(spec, &case.case, case.class);
    cases.extend(
        state::of_clones(&scene, &cloner)?
            .into_iter()
            .filter(is_state_selected),
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

fn is_selected(spec: &ConfinementSpec, name: &str, class: Class) -> bool {
    let named = |word: &String| word == name || word == class.name();
    spec.only.is_empty() || spec.only.iter().any(named)
}

fn check_names(spec: &ConfinementSpec, all: &[&Attempt]) -> Result<(), VerifyError> {
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
        Some(name) => Err(VerifyError::Unknown {
            kind: "case or class",
            name: name.clone(),
            known: format!(
                "the classes {}",
                classes.into_iter().collect::<Vec<_>>().join(", ")
            ),
        }),
    }
}

/// Makes an attempt in a clone that is started for it.
fn try_direct(
    attempt: &Attempt,
    scene: &mut Scene,
    cloner: &Cloner,
) -> Result<CaseReport, VerifyError> {
    scene.reset(cloner)?;
    let clone = match cloner.start(&scene.path("")) {
        Ok(clone) => clone,
        Err(error) => return Ok(not_tried(attempt, &chain(&error))),
    };
    if let Err(error) = scene.group.add(clone.pid()) {
        return Ok(not_tried(attempt, &error.to_string()));
    }
    Ok(try_in(
        attempt,
        scene,
        Intruder::enter(clone.pid(), Relation::Parent),
    ))
}

fn not_tried(attempt: &Attempt, why: &str) -> CaseReport {
    CaseReport {
        case: attempt.name.to_owned(),
        class: attempt.class,
        why: attempt.why.to_owned(),
        result: CaseResult::NotTried,
        expected: attempt.expected(),
        inside: why.to_owned(),
        outside: String::new(),
    }
}

/// Makes an attempt in a seized process.
fn try_in(attempt: &Attempt, scene: &Scene, seized: Try<Intruder>) -> CaseReport {
    let mut intruder = match seized {
        Ok(intruder) => intruder,
        Err(stop) => return not_tried(attempt, &stop.describe()),
    };
    let done = (attempt.act)(&mut intruder, scene);
    let change = (attempt.look)(scene, &intruder);
    let (result, outside) = classify(attempt, &done, change);
    CaseReport {
        result,
        inside: match done {
            Ok(()) => "the attempt succeeded".to_owned(),
            Err(stop) => stop.describe(),
        },
        outside,
        ..not_tried(attempt, "")
    }
}

fn classify(attempt: &Attempt, done: &Try<()>, change: attempts::Change) -> (CaseResult, String) {
    match (done, change) {
        (_, Ok(Some(what))) => (CaseResult::Breach, what),
        (Ok(()), Ok(None)) => (CaseResult::Breach, String::new()),
        (Ok(()), Err(error)) => (CaseResult::Breach, error.to_string()),
        (Err(_), Err(error)) => (CaseResult::Unproven, format!("cannot observe: {error}")),
        (Err(stop), Ok(None)) if attempt.refusals.iter().any(|r| r.is(stop)) => {
            (CaseResult::Pass, String::new())
        }
        (Err(_), Ok(None)) => (CaseResult::Unproven, String::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attempts::Refusal;
    use intruder::Stop;
    use std::io;

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
    fn an_attempt_passes_only_if_it_is_refused_as_expected_and_nothing_has_changed() {
        let result = |done: Try<()>, change| classify(&ATTEMPT, &done, change).0;
        let refused = |errno| Err(Stop::Refused("open", errno));
        let changed = || Ok(Some("changed".to_owned()));
        assert_eq!(result(refused(Errno::EACCES), Ok(None)), CaseResult::Pass);
        let killed = |signal| Err(Stop::Killed("open", signal));
        assert_eq!(result(killed(Signal::SIGSYS), Ok(None)), CaseResult::Pass);
        assert_eq!(
            result(killed(Signal::SIGSEGV), Ok(None)),
            CaseResult::Unproven
        );
        assert_eq!(
            result(refused(Errno::ENOENT), Ok(None)),
            CaseResult::Unproven
        );
        assert_eq!(
            result(refused(Errno::EACCES), changed()),
            CaseResult::Breach
        );
        assert_eq!(result(Ok(()), Ok(None)), CaseResult::Breach);
        let blind = Err(io::Error::other("gone"));
        assert_eq!(result(refused(Errno::EACCES), blind), CaseResult::Unproven);
        assert_eq!(ATTEMPT.expected(), "EACCES or SIGSYS");
    }
}
