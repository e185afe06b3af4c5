//! The sandboxes of the suite, and who is asked what.

use std::thread;

use super::{
    Between, Finding, Mode, Verdict, Weight, clock,
    judge::{Answer, judge},
    list::{Hazard, Rule, Runner},
    subject::{Account, Subject},
};
use crate::conformance::VerifyError;

/// What breaks the wall clock for the suite's own test.
const WRONG_CLOCK: &str = "date -s @$(($(date +%s) + 3600))";

/// Makes the sandboxes and asks them everything: clones, forks and the one that is paused at the same time.
///
/// # Errors
/// [`VerifyError::Target`] when there are not two sandboxes to compare.
pub(super) fn run(
    account: &Account,
    hazards: &[Hazard],
    mode: Mode,
) -> Result<Vec<Finding>, VerifyError> {
    let parts = thread::scope(|scope| {
        let parts = [
            scope.spawn(|| clones(account, hazards, mode)),
            scope.spawn(|| forks(account, hazards, mode)),
            scope.spawn(|| paused(account)),
        ];
        parts.map(|part| match part.join() {
            Ok(findings) => findings,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    });
    let parts: Result<Vec<_>, VerifyError> = parts.into_iter().collect();
    Ok(parts?.into_iter().flatten().collect())
}

fn create(account: &Account) -> Result<Subject<'_>, VerifyError> {
    account.create().map_err(VerifyError::Target)
}

fn clones(account: &Account, hazards: &[Hazard], mode: Mode) -> Result<Vec<Finding>, VerifyError> {
    let clones = [create(account)?, create(account)?];
    let mut findings = clocks(&clones, mode);
    findings.push(access(&clones, Between::Clones, mode));
    for hazard in hazards_of(hazards, Between::Clones) {
        findings.push(ask(hazard, Between::Clones, &clones, None, mode));
    }
    Ok(findings)
}

fn paused(account: &Account) -> Result<Vec<Finding>, VerifyError> {
    Ok(clock::paused(&create(account)?).into())
}

fn hazards_of(hazards: &[Hazard], between: Between) -> impl Iterator<Item = &Hazard> {
    let wanted = move |hazard: &&Hazard| hazard.between.contains(&between);
    hazards.iter().filter(wanted)
}

fn clocks(clones: &[Subject<'_>; 2], mode: Mode) -> Vec<Finding> {
    let of = |clone: &Subject<'_>| {
        if mode == Mode::Sabotage {
            // What it did is seen by the clock.
            let _ = clone.run(Runner::Shell, WRONG_CLOCK, true);
        }
        clock::wall(clone, Between::Clones)
    };
    clones.iter().map(of).collect()
}

/// The parent gets what forks are to inherit, and has used every generator before it is forked.
fn forks(account: &Account, hazards: &[Hazard], mode: Mode) -> Result<Vec<Finding>, VerifyError> {
    let parent = create(account)?;
    let asked: Vec<&Hazard> = hazards_of(hazards, Between::Forks).collect();
    let said: Vec<Answer> = asked
        .iter()
        .map(|hazard| prepare(&parent, hazard))
        .collect();
    let forks = match parent.fork() {
        Ok(forks) => forks,
        Err(why) => {
            let pair = [Err(why.clone()), Err(why)];
            let untried = |hazard: &&Hazard| judge(hazard, Between::Forks, &pair, None);
            return Ok(asked.iter().map(untried).collect());
        }
    };
    let mut findings = vec![access(&forks, Between::Forks, mode)];
    for (hazard, said) in asked.iter().zip(&said) {
        findings.push(ask(hazard, Between::Forks, &forks, Some(said), mode));
    }
    Ok(findings)
}

fn prepare(parent: &Subject<'_>, hazard: &Hazard) -> Answer {
    if let Some(before) = &hazard.before {
        parent.run(hazard.runner, before, hazard.root)?;
    }
    parent.run(hazard.runner, &hazard.probe, hazard.root)
}

fn ask(
    hazard: &Hazard,
    between: Between,
    pair: &[Subject<'_>; 2],
    parent: Option<&Answer>,
    mode: Mode,
) -> Finding {
    let [first, second] = pair;
    let written = match (&hazard.write, mode) {
        (None, _) => Ok(()),
        (Some(write), Mode::Look) => tell(hazard, first, write),
        (Some(write), Mode::Sabotage) => {
            tell(hazard, first, write).and_then(|()| tell(hazard, second, write))
        }
    };
    let broken = match (&hazard.sabotage, mode, hazard.rule) {
        (None, _, _) | (_, Mode::Look, _) => Ok(()),
        (Some(sabotage), Mode::Sabotage, Rule::Same) => tell(hazard, second, sabotage),
        (Some(sabotage), Mode::Sabotage, _) => {
            tell(hazard, first, sabotage).and_then(|()| tell(hazard, second, sabotage))
        }
    };
    let probe = |subject: &Subject<'_>| subject.run(hazard.runner, &hazard.probe, hazard.root);
    let answers = match written.and(broken) {
        Err(why) => [Err(why.clone()), Err(why)],
        Ok(()) if mode == Mode::Sabotage && itself(hazard) => {
            let said = probe(first);
            [said.clone(), said]
        }
        Ok(()) => [probe(first), probe(second)],
    };
    judge(hazard, between, &answers, parent)
}

/// Whether the suite's own test can only compare a sandbox with itself.
fn itself(hazard: &Hazard) -> bool {
    hazard.rule == Rule::Differs && hazard.sabotage.is_none()
}

fn tell(hazard: &Hazard, subject: &Subject<'_>, code: &str) -> Result<(), String> {
    subject.run(hazard.runner, code, hazard.root).map(drop)
}

/// What lets a client into one sandbox must not let it into the other.
fn access(pair: &[Subject<'_>; 2], between: Between, mode: Mode) -> Finding {
    let [first, second] = [&pair[0], &pair[1]].map(Subject::access);
    let second = match mode {
        Mode::Look => second,
        Mode::Sabotage => first.clone(),
    };
    let shared = first.lines().any(|line| second.lines().any(|l| l == line));
    Finding {
        hazard: "access-tokens".to_owned(),
        between,
        why: "who may enter one sandbox must not enter its twin".to_owned(),
        expected: "ids and tokens of the two have nothing in common".to_owned(),
        verdict: if shared { Verdict::Fail } else { Verdict::Pass },
        weight: Weight::Breach,
        // Tokens are no evidence to print.
        evidence: vec![format!(
            "{} and {} values compared",
            first.lines().count(),
            second.lines().count()
        )],
    }
}
