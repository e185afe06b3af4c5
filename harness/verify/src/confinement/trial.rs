//! Makes one attempt in a seized process and derives its result.

use super::{
    attempts::{Attempt, Change},
    intruder::{Intruder, Try},
    scene::Scene,
    spec::CaseReport,
};
use crate::proof::CaseResult;

/// The report of an attempt that could not be made.
pub(super) fn not_tried(attempt: &Attempt, why: &str) -> CaseReport {
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
pub(super) fn try_in(attempt: &Attempt, scene: &Scene, seized: Try<Intruder>) -> CaseReport {
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

fn classify(attempt: &Attempt, done: &Try<()>, change: Change) -> (CaseResult, String) {
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
    use crate::confinement::{
        attempts::{Class, Refusal},
        intruder::Stop,
    };
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
