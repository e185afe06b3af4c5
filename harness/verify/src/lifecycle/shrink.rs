//! Shrinks a plan that leads to a finding: removes steps as long as the rest still leads to a finding.

use std::time::Instant;

use super::plan::{Action, Op, Step};

/// Removes as many steps as possible so that `fails` still holds: first halves, then smaller parts, finally single
/// steps. `fails` may depend on chance: a part kept by mistake makes the result longer, never wrong. At `deadline`,
/// returns the shortest steps found so far.
pub(super) fn shrink(
    steps: Vec<Step>,
    deadline: Instant,
    mut fails: impl FnMut(&[Step]) -> bool,
) -> Vec<Step> {
    let mut best = steps;
    let mut part = best.len().div_ceil(2);
    while part > 0 {
        let mut at = 0;
        let mut is_shorter = false;
        while at < best.len() {
            if Instant::now() >= deadline {
                return best;
            }
            let end = (at + part).min(best.len());
            let mut rest = best.clone();
            rest.drain(at..end);
            let rest = without_orphans(rest);
            if !rest.is_empty() && fails(&rest) {
                best = rest;
                is_shorter = true;
            } else {
                at = end;
            }
        }
        // After single steps have been removed, others may have become unnecessary.
        if part > 1 || !is_shorter {
            part /= 2;
        }
    }
    best
}

/// Removes steps without effect: they need a sandbox or a snapshot that no step makes.
fn without_orphans(steps: Vec<Step>) -> Vec<Step> {
    let (mut handles, mut images) = (Vec::new(), Vec::new());
    let mut has_effect = |step: &Step| match step.op {
        Op::Create { to, from, .. } => {
            let is_possible = from.is_none_or(|from| images.contains(&from));
            handles.extend(is_possible.then_some(to));
            is_possible
        }
        Op::On(on, action) => {
            let is_possible = handles.contains(&on);
            match action {
                Action::Fork(to) => handles.extend(is_possible.then_some(to)),
                Action::Snapshot(image) => images.extend(is_possible.then_some(image)),
                _ => {}
            }
            is_possible
        }
        Op::List | Op::KillServer { .. } => true,
    };
    steps.into_iter().filter(|step| has_effect(step)).collect()
}
