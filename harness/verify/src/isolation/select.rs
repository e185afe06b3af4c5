//! The cases that a run covers, and their probes.

use netprobe::Probe;

use super::{
    IsolationSpec, Scope,
    cases::{Case, Class, Expect, Group},
    l7,
    timing::{BLOCKED_MS, PASS_MS},
};
use crate::setup::VerifyError;

/// Keeps the cases that `spec.only` names, or every case in the scope if it is empty. Fails if a name is unknown.
pub(super) fn select(
    mut groups: Vec<Group>,
    spec: &IsolationSpec,
) -> Result<Vec<Group>, VerifyError> {
    let is_named = |case: &Case, name: &String| case.name == *name || case.class.name() == name;
    let all = || groups.iter().flat_map(|group| &group.cases);
    let others = l7::names()?;
    let is_other = |name: &String| {
        let mut others = others.iter();
        others.any(|(class, other)| other == name || class.name() == name)
    };
    if let Some(name) = spec
        .only
        .iter()
        .find(|name| !all().any(|case| is_named(case, name)) && !is_other(name))
    {
        let classes = all().map(|case| case.class);
        let classes = classes.chain(others.iter().map(|(class, _)| *class));
        let mut classes: Vec<&str> = classes.map(Class::name).collect();
        classes.sort_unstable();
        classes.dedup();
        return Err(VerifyError::Unknown {
            kind: "case or class",
            name: name.clone(),
            known: format!("the classes {}", classes.join(", ")),
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

/// The probe of a case that is not a script.
pub(super) fn probe(case: &Case) -> Option<Probe> {
    Some(Probe {
        name: case.payload(),
        first: case.first.clone(),
        action: case.action.clone()?,
        within_ms: match case.expect {
            Expect::Blocked if case.guest.is_empty() => BLOCKED_MS,
            // The guest gets a response in either case: the expected one or a refusal.
            Expect::Blocked | Expect::Pass => PASS_MS,
        },
    })
}
