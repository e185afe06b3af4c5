//! Creates the sandboxes, and runs each probe in the sandboxes that the list names for it.

use std::thread;

use serde_json::{Map, json};

use super::{
    Mode, clock,
    evaluate::{Answer, absent, evaluate},
    list::{Between, Hazard, Rule, Runner},
};
use crate::{
    report::{Case, Verdict},
    sandbox::{Account, Sandbox},
    setup::VerifyError,
};

/// Sets the guest's wall clock one hour ahead, for [`Mode::Sabotage`].
const WRONG_CLOCK: &str = "date -s @$(($(date +%s) + 3600))";

/// Prints something if a program listens at the code interpreter's port, 49999. The columns are those of proc(5).
const INTERPRETER: &str =
    "grep -i ':C34F [0-9A-F]*:0000 0A ' /proc/net/tcp /proc/net/tcp6 2>/dev/null || true";

/// Tries all hazards, in clones, forks and a paused sandbox at the same time.
///
/// # Errors
/// Returns [`VerifyError::Sandbox`] if the endpoint does not create the sandboxes to compare.
pub(super) fn run(
    account: &Account,
    hazards: &[Hazard],
    mode: Mode,
) -> Result<Vec<Case>, VerifyError> {
    let parts = thread::scope(|scope| {
        let parts = [
            scope.spawn(|| clones(account, hazards, mode)),
            scope.spawn(|| forks(account, hazards, mode)),
            scope.spawn(|| paused(account)),
        ];
        parts.map(|part| match part.join() {
            Ok(cases) => cases,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    });
    let parts: Result<Vec<_>, VerifyError> = parts.into_iter().collect();
    Ok(parts?.into_iter().flatten().collect())
}

fn create(account: &Account) -> Result<Sandbox, VerifyError> {
    let options = Map::from_iter([("secure".to_owned(), json!(true))]);
    Ok(account.create(&options)?)
}

fn clones(account: &Account, hazards: &[Hazard], mode: Mode) -> Result<Vec<Case>, VerifyError> {
    let clones = [create(account)?, create(account)?];
    let mut cases = clocks(&clones, mode);
    cases.push(access(&clones, Between::Clones, mode));
    let (asked, absent) = hazards_of(hazards, Between::Clones, &clones[0]);
    cases.extend(absent);
    for hazard in asked {
        cases.push(ask(hazard, Between::Clones, &clones, None, mode));
    }
    Ok(cases)
}

fn paused(account: &Account) -> Result<Vec<Case>, VerifyError> {
    Ok(clock::paused(&create(account)?).into())
}

/// The hazards to try in sandboxes like this one, and cases for those that its template cannot have.
fn hazards_of<'a>(
    hazards: &'a [Hazard],
    between: Between,
    sandbox: &Sandbox,
) -> (Vec<&'a Hazard>, Vec<Case>) {
    // If this fails, the cells are tried and give no output.
    let listening = sandbox.run(Runner::Shell, INTERPRETER, false);
    let has_interpreter = !listening.is_ok_and(|found| found.trim().is_empty());
    let wanted = hazards.iter().filter(|h| h.between.contains(&between));
    let (asked, others): (Vec<_>, Vec<_>) =
        wanted.partition(|h| has_interpreter || h.runner == Runner::Shell);
    let why = "the template has no code interpreter";
    let absent = others.iter().map(|hazard| absent(hazard, between, why));
    (asked, absent.collect())
}

fn clocks(clones: &[Sandbox; 2], mode: Mode) -> Vec<Case> {
    let of = |clone: &Sandbox| {
        if mode == Mode::Sabotage {
            // If this fails, the clock is right and the test of the suite fails.
            let _ = clone.run(Runner::Shell, WRONG_CLOCK, true);
        }
        clock::wall(clone, Between::Clones)
    };
    clones.iter().map(of).collect()
}

/// Prepares the state that forks inherit, runs every probe once in the parent, forks it twice, and compares the forks.
fn forks(account: &Account, hazards: &[Hazard], mode: Mode) -> Result<Vec<Case>, VerifyError> {
    let parent = create(account)?;
    let (asked, absent) = hazards_of(hazards, Between::Forks, &parent);
    let before: Vec<Answer> = asked
        .iter()
        .map(|hazard| prepare(&parent, hazard))
        .collect();
    let forks = match fork_twice(&parent) {
        Ok(forks) => forks,
        Err(why) => {
            let pair = [Err(why.clone()), Err(why)];
            let untried = |hazard: &&Hazard| evaluate(hazard, Between::Forks, &pair, None);
            return Ok(asked.iter().map(untried).chain(absent).collect());
        }
    };
    let mut cases = absent;
    cases.push(access(&forks, Between::Forks, mode));
    for (hazard, before) in asked.iter().zip(&before) {
        cases.push(ask(hazard, Between::Forks, &forks, Some(before), mode));
    }
    Ok(cases)
}

fn fork_twice(parent: &Sandbox) -> Result<[Sandbox; 2], String> {
    let forks = parent.fork(2).map_err(|error| error.to_string())?;
    let count = |forks: Vec<_>| format!("the endpoint made {} forks instead of 2", forks.len());
    forks.try_into().map_err(count)
}

fn prepare(parent: &Sandbox, hazard: &Hazard) -> Answer {
    if let Some(before) = &hazard.before {
        run_program(hazard, parent, before)?;
    }
    run_program(hazard, parent, &hazard.probe)
}

fn ask(
    hazard: &Hazard,
    between: Between,
    pair: &[Sandbox; 2],
    parent: Option<&Answer>,
    mode: Mode,
) -> Case {
    let [first, second] = pair;
    let written = match (&hazard.write, mode) {
        (None, _) => Ok(()),
        (Some(write), Mode::Look) => run_program(hazard, first, write).map(drop),
        (Some(write), Mode::Sabotage) => run_in_both(hazard, pair, write),
    };
    let broken = match (&hazard.sabotage, mode, hazard.rule) {
        (None, _, _) | (_, Mode::Look, _) => Ok(()),
        (Some(sabotage), Mode::Sabotage, Rule::Same) => {
            run_program(hazard, second, sabotage).map(drop)
        }
        (Some(sabotage), Mode::Sabotage, _) => run_in_both(hazard, pair, sabotage),
    };
    let probe = |sandbox: &Sandbox| run_program(hazard, sandbox, &hazard.probe);
    let answers = match written.and(broken) {
        Err(why) => [Err(why.clone()), Err(why)],
        Ok(()) if mode == Mode::Sabotage && compares_with_itself(hazard) => {
            let answer = probe(first);
            [answer.clone(), answer]
        }
        Ok(()) => [probe(first), probe(second)],
    };
    evaluate(hazard, between, &answers, parent)
}

/// Whether [`Mode::Sabotage`] causes the hazard by comparing a sandbox with itself, because the list has no program
/// that causes it.
fn compares_with_itself(hazard: &Hazard) -> bool {
    hazard.rule == Rule::Differs && hazard.sabotage.is_none()
}

fn run_program(hazard: &Hazard, sandbox: &Sandbox, code: &str) -> Answer {
    let output = sandbox.run(hazard.runner, code, hazard.root);
    output.map_err(|error| error.to_string())
}

fn run_in_both(hazard: &Hazard, pair: &[Sandbox; 2], code: &str) -> Result<(), String> {
    pair.iter()
        .try_for_each(|sandbox| run_program(hazard, sandbox, code).map(drop))
}

/// Checks that the credentials of one sandbox do not open the other.
fn access(pair: &[Sandbox; 2], between: Between, mode: Mode) -> Case {
    let [first, second] = [&pair[0], &pair[1]].map(Sandbox::credentials);
    let second = match mode {
        Mode::Look => second,
        Mode::Sabotage => first.clone(),
    };
    let shared = first.lines().any(|line| second.lines().any(|l| l == line));
    let verdict = if shared {
        Verdict::Breach
    } else {
        Verdict::Pass
    };
    let why = "the credentials of one sandbox must not open its twin";
    let case = Case {
        expected: "the two sandboxes have no id or token in common".to_owned(),
        ..Case::new(between.name(), "access-tokens", why)
    };
    // Tokens are secrets and are not printed.
    let (first, second) = (first.lines().count(), second.lines().count());
    case.with("compared", format!("{first} and {second} values"))
        .judged(verdict, [""; 0])
}
