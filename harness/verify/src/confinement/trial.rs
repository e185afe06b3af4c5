//! Makes one attempt in a seized process and derives its result.

use super::{
    attempts::{Attempt, Change},
    intruder::{Intruder, Try},
    scene::Scene,
};
use crate::report::{Case, Verdict};

/// The report of an attempt that could not be made.
pub(super) fn not_tried(attempt: &Attempt, why: &str) -> Case {
    case(attempt).judged(Verdict::NotTried, [why])
}

fn case(attempt: &Attempt) -> Case {
    Case {
        expected: attempt.expected(),
        ..Case::new(attempt.class.name(), attempt.name, attempt.why)
    }
}

/// Makes an attempt in a seized process.
pub(super) fn try_in(attempt: &Attempt, scene: &Scene, seized: Try<Intruder>) -> Case {
    let mut intruder = match seized {
        Ok(intruder) => intruder,
        Err(stop) => return not_tried(attempt, &stop.describe()),
    };
    let done = (attempt.act)(&mut intruder, scene);
    let change = (attempt.look)(scene, &intruder);
    let (verdict, outside) = classify(attempt, &done, change);
    let inside = match done {
        Ok(()) => "the attempt succeeded".to_owned(),
        Err(stop) => stop.describe(),
    };
    case(attempt)
        .with("inside", inside)
        .judged(verdict, outside)
}

/// The verdict, and the change that was observed from outside or the reason why nothing could be observed.
fn classify(attempt: &Attempt, done: &Try<()>, change: Change) -> (Verdict, Option<String>) {
    match (done, change) {
        (_, Ok(Some(what))) => (Verdict::Breach, Some(what)),
        (Ok(()), Ok(None)) => (Verdict::Breach, None),
        (Ok(()), Err(error)) => (Verdict::Breach, Some(error.to_string())),
        (Err(_), Err(error)) => (Verdict::Unproven, Some(format!("cannot observe: {error}"))),
        (Err(stop), Ok(None)) if attempt.refusals.iter().any(|r| r.is(stop)) => {
            (Verdict::Pass, None)
        }
        (Err(_), Ok(None)) => (Verdict::Unproven, None),
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
        let verdict = |done: Try<()>, change| classify(&ATTEMPT, &done, change).0;
        let refused = |errno| Err(Stop::Refused("open", errno));
        let changed = || Ok(Some("changed".to_owned()));
        assert_eq!(verdict(refused(Errno::EACCES), Ok(None)), Verdict::Pass);
        let killed = |signal| Err(Stop::Killed("open", signal));
        assert_eq!(verdict(killed(Signal::SIGSYS), Ok(None)), Verdict::Pass);
        assert_eq!(
            verdict(killed(Signal::SIGSEGV), Ok(None)),
            Verdict::Unproven
        );
        assert_eq!(verdict(refused(Errno::ENOENT), Ok(None)), Verdict::Unproven);
        assert_eq!(verdict(refused(Errno::EACCES), changed()), Verdict::Breach);
        assert_eq!(verdict(Ok(()), Ok(None)), Verdict::Breach);
        let blind = Err(io::Error::other("gone"));
        assert_eq!(verdict(refused(Errno::EACCES), blind), Verdict::Unproven);
        assert_eq!(ATTEMPT.expected(), "EACCES or SIGSYS");
    }
}
