//! `cube-bench verify confinement`: tests what code that has taken over a VMM can do to the host and to other
//! sandboxes.
//!
//! ```text
//! attempts ─► a clone in the release VMM, guest running ─► intruder: system calls made in that process ─┐
//! scene: files, sockets, another sandbox, a process of root ─► observed from outside ───────────────────┼─► classify ─► report
//! cube-egress, cube-image: some of the attempts in each ────────────────────────────────────────────────┤
//! VMMs started directly and by a server ─► /proc: users, capabilities, seccomp, limits, descriptors ────┘
//! ```
//! An attempt passes if the kernel refused it in a way that the attempt lists (usually SIGSYS from the seccomp filter,
//! EACCES or EPERM) and nothing changed outside. Any other refusal proves nothing, because the attempt itself may be
//! wrong.

mod attempts;
mod calls;
mod clone;
mod group;
mod intruder;
mod pool;
mod scene;
mod services;
mod state;
mod trial;

use std::{collections::BTreeSet, time::Instant};

use model::chain;
use testbed::{artifacts, world};

use crate::{
    process,
    report::{Case, Report, Suite},
    setup::{Setup, VerifyError},
};
use attempts::Attempt;
use attempts::Class;
use clone::Cloner;
use intruder::{Intruder, Relation};
use scene::Scene;
use trial::{not_tried, try_in};

/// Options of the confinement suite.
#[derive(Clone, Debug)]
pub struct ConfinementSpec {
    pub setup: Setup,
    pub starts: Starts,
    /// Names of cases or classes; empty: all.
    pub only: Vec<String>,
}

/// The programs that start the VMMs under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starts {
    /// By this suite, and by the pool of a server.
    Both,
    /// By this suite only, which needs no program other than the VMM.
    Direct,
}

impl ConfinementSpec {
    /// Whether the options select a case: they contain its name or its class, or are empty.
    fn selects(&self, name: &str, class: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|word| word == name || word == class)
    }
}

/// Runs the cases. The process moves into a new network namespace and stays there, so the caller must not have started
/// any thread.
///
/// # Errors
/// Returns a [`VerifyError`] if a name is unknown, if a program or the template is missing, or if the targets of the
/// attempts or the server cannot be set up. The result of a case is never an error.
pub fn run(spec: &ConfinementSpec) -> Result<Report, VerifyError> {
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
    for attempt in all.iter().filter(|a| spec.selects(a.name, a.class.name())) {
        cases.push(try_direct(attempt, &mut scene, &cloner)?);
    }
    let is_state_selected = |case: &Case| spec.selects(&case.name, &case.class);
    cases.extend(
        state::of_clones(&scene, &cloner)?
            .into_iter()
            .filter(is_state_selected),
    );
    if spec.starts == Starts::Both {
        cases.extend(pool::prove(spec, &mut scene, &cloner)?);
        cases.extend(services::prove(spec, &mut scene, &cloner)?);
    }
    Ok(Report::new(Suite::Confinement, None, cases, begun, ()))
}

fn check_names(spec: &ConfinementSpec, all: &[&Attempt]) -> Result<(), VerifyError> {
    let mut classes: BTreeSet<&str> = all.iter().map(|a| a.class.name()).collect();
    classes.extend([Class::State, Class::Egress, Class::Image].map(Class::name));
    let is_known = |name: &&String| {
        let name = name.as_str();
        classes.contains(name)
            || state::NAMES.contains(&name)
            || pool::is_case(name)
            || services::is_case(name)
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

/// Starts a clone and makes one attempt in it.
fn try_direct(attempt: &Attempt, scene: &mut Scene, cloner: &Cloner) -> Result<Case, VerifyError> {
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
