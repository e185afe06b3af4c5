//! One thread that carries out arrivals.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, AtomicU32, Ordering},
    mpsc::Sender,
};

use model::{StartPhase, Timeline};

use super::held::HeldClone;
use crate::{
    clock,
    event::{Attempt, Failure, RunEvent, StartKind},
    plan::{Round, Start, Subject},
    scenario::{ExecSpec, HoldUntil, Scenario},
    target::{CloneId, Sandbox, Target, exec_and_compare},
};

/// What all workers of a round share.
pub(super) struct Worker<'a> {
    pub(super) round: &'a Round,
    pub(super) scenario: &'a Scenario,
    pub(super) target: &'a dyn Target,
    /// Set once all workers are there.
    pub(super) base: &'a OnceLock<u64>,
    /// The next arrival's number.
    pub(super) next: &'a AtomicU32,
    pub(super) interrupted: &'a AtomicBool,
}

impl Worker<'_> {
    /// Carries out arrivals until none is left.
    pub(super) fn work(&self, keep: &Sender<HeldClone>, events: &Sender<RunEvent>) {
        let base_ns = *self.base.wait();
        clock::sleep_until(base_ns);
        let mut free_ns = base_ns;
        loop {
            let arrival = self.next.fetch_add(1, Ordering::Relaxed);
            let start = usize::try_from(arrival)
                .ok()
                .and_then(|i| self.round.arrivals.get(i));
            let Some(start) = start else { return };
            if self.interrupted.load(Ordering::Relaxed) {
                return;
            }
            let intended_ns = match start {
                Start::AtNs(ns) => base_ns + ns,
                Start::WhenFree => free_ns,
            };
            clock::sleep_until(intended_ns);
            let (attempt, clone) = self.attempt(arrival, intended_ns);
            free_ns = attempt.ended_ns;
            // Both receivers outlive the round.
            let _ = events.send(RunEvent::Attempt(attempt));
            if let Some(clone) = clone {
                let _ = keep.send(clone);
            }
        }
    }

    fn attempt(&self, arrival: u32, intended_ns: u64) -> (Attempt, Option<HeldClone>) {
        let actual_ns = clock::monotonic_ns();
        let id = CloneId {
            round: self.round.index,
            arrival,
        };
        let mut timeline = Timeline::default();
        let mut start = None;
        let (failure, clone) = match self.start(id, &mut timeline, &mut start) {
            Ok(sandbox) => self.keep_or_kill(id, sandbox),
            Err(failure) => (Some(failure), None),
        };
        let attempt = Attempt {
            round: self.round.index,
            subject: self.round.subject,
            row: self.round.row,
            arrival,
            intended_ns,
            actual_ns,
            timeline,
            start,
            failure,
            ended_ns: clock::monotonic_ns(),
        };
        (attempt, clone)
    }

    /// `kind` is known as soon as the create was answered, also when the command fails.
    fn start(
        &self,
        id: CloneId,
        timeline: &mut Timeline,
        kind: &mut Option<StartKind>,
    ) -> Result<Box<dyn Sandbox>, Failure> {
        let mut sandbox = self.target.create(id, timeline)?;
        *kind = sandbox.start_kind();
        exec_and_compare(sandbox.as_mut(), self.command())?;
        timeline.stamp(StartPhase::FirstExec, clock::monotonic_ns());
        Ok(sandbox)
    }

    fn keep_or_kill(
        &self,
        id: CloneId,
        sandbox: Box<dyn Sandbox>,
    ) -> (Option<Failure>, Option<HeldClone>) {
        if self.scenario.hold.until == HoldUntil::Exec {
            return (sandbox.kill().err(), None);
        }
        (None, Some(HeldClone { id, sandbox }))
    }

    fn command(&self) -> &ExecSpec {
        match (self.round.subject, &self.scenario.baseline) {
            (Subject::HostProcess, Some(command)) => command,
            (Subject::HostProcess, None) | (Subject::Clone | Subject::Beside, _) => {
                &self.scenario.exec
            }
        }
    }
}
