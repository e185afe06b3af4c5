//! A worker thread: starts clones, runs their commands and turns, and records the attempts.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, AtomicU32, Ordering},
    mpsc::Sender,
};

use model::{StartPhase, Timeline};

use super::{expiry::Expiring, held::HeldClone};
use crate::{
    clock,
    event::{Attempt, Exchanged, Failure, RunEvent, Turn},
    exchange::{FirstCommand, Network},
    memory,
    plan::{Round, Start, Subject},
    scenario::{ExecSpec, HoldUntil, Scenario, TurnSpec},
    target::{CloneId, Sandbox, Target, exec_and_compare},
};

/// State that all workers of a round share.
pub(super) struct Worker<'a> {
    pub(super) round: &'a Round,
    pub(super) scenario: &'a Scenario,
    pub(super) network: Option<&'a Network>,
    pub(super) target: &'a dyn Target,
    /// Base time of the round in nanoseconds of CLOCK_MONOTONIC, set after the worker threads were created.
    pub(super) base: &'a OnceLock<u64>,
    /// Number of the next arrival.
    pub(super) next: &'a AtomicU32,
    pub(super) interrupted: &'a AtomicBool,
}

impl Worker<'_> {
    /// Waits for the base time, and then takes arrivals until none is left or the run is interrupted. Clones that are
    /// not killed here are sent to `keep`.
    ///
    /// Clones with a lifetime are sent to one of `expiry`, which is empty if the scenario has no lifetimes.
    pub(super) fn work(
        &self,
        keep: &Sender<HeldClone>,
        expiry: &[Sender<Expiring>],
        events: &Sender<RunEvent>,
    ) {
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
            let replied_ns = attempt.timeline.at(StartPhase::Replied).unwrap_or(free_ns);
            // Sending to `events` fails only if the recorder has failed, which also interrupts the run. The receiver of
            // `keep` outlives the round.
            let _ = events.send(RunEvent::Attempt(attempt));
            let Some(clone) = clone else { continue };
            let at = usize::try_from(arrival).unwrap_or(usize::MAX);
            let expiry = expiry.get(at % expiry.len().max(1));
            match self.round.lifetimes_ms.get(at).zip(expiry) {
                Some((ms, expiry)) => {
                    let at_ns = replied_ns + ms * 1_000_000;
                    let _ = expiry.send(Expiring { at_ns, clone });
                }
                None => {
                    let _ = keep.send(clone);
                }
            }
        }
    }

    fn attempt(&self, arrival: u32, intended_ns: u64) -> (Attempt, Option<HeldClone>) {
        let actual_ns = clock::monotonic_ns();
        let id = CloneId {
            round: self.round.index,
            arrival,
        };
        let mut attempt = Attempt {
            round: self.round.index,
            subject: self.round.subject,
            row: self.round.row,
            arrival,
            intended_ns,
            actual_ns,
            work: self.item(arrival),
            template: self.template(arrival),
            timeline: Timeline::default(),
            start: None,
            faults: None,
            turns: Vec::new(),
            failure: None,
            ended_ns: actual_ns,
        };
        let (failure, clone) = match self.start(id, &mut attempt) {
            Ok(sandbox) => self.keep_or_kill(id, sandbox),
            Err(failure) => (Some(failure), None),
        };
        attempt.failure = failure;
        attempt.ended_ns = clock::monotonic_ns();
        (attempt, clone)
    }

    /// Starts a clone and runs its command and turns. `attempt` is updated after each step, so that after a failure it
    /// contains all earlier steps.
    fn start(&self, id: CloneId, attempt: &mut Attempt) -> Result<Box<dyn Sandbox>, Failure> {
        let is_sandbox = match self.round.subject {
            Subject::Clone | Subject::Beside | Subject::Peer(_) => true,
            Subject::HostProcess | Subject::Null => false,
        };
        let network = self.network.filter(|_| is_sandbox);
        let first = FirstCommand::prepare(self.command(attempt.work), network)?;
        let mut sandbox = self.target.create(id, &mut attempt.timeline)?;
        attempt.start = sandbox.start_kind();
        let first_byte = first.run(sandbox.as_mut())?;
        let first_exec = clock::monotonic_ns();
        if let Some(at) = first_byte {
            attempt.timeline.stamp(StartPhase::FirstNetworkByte, at);
        }
        attempt.timeline.stamp(StartPhase::FirstExec, first_exec);
        if is_sandbox && !self.scenario.turns.is_empty() {
            self.turns(sandbox.as_mut(), attempt)?;
        }
        Ok(sandbox)
    }

    /// Runs all turns. Page faults are read between turns, outside the measured time.
    fn turns(&self, sandbox: &mut dyn Sandbox, attempt: &mut Attempt) -> Result<(), Failure> {
        let turns = &self.scenario.turns;
        if let Some(network) = self.network
            && turns.iter().any(|turn| turn.exchange.is_some())
        {
            network.put_probe(sandbox, &self.scenario.exec)?;
        }
        let pid = sandbox.pid();
        let faults = || pid.and_then(memory::page_faults);
        let mut before = faults();
        attempt.faults = before;
        for turn in turns {
            let began = clock::monotonic_ns();
            let exchange = self.turn(sandbox, turn)?;
            let took_ns = clock::monotonic_ns() - began;
            let after = faults();
            attempt.turns.push(Turn {
                took_ns,
                faults: after
                    .zip(before)
                    .map(|(after, before)| after.saturating_sub(before)),
                exchange,
            });
            before = after;
        }
        Ok(())
    }

    fn turn(
        &self,
        sandbox: &mut dyn Sandbox,
        turn: &TurnSpec,
    ) -> Result<Option<Exchanged>, Failure> {
        match (turn.exchange, self.network) {
            (Some(exchange), Some(network)) => network.exchange(sandbox, exchange, &turn.exec),
            (Some(_), None) | (None, _) => exec_and_compare(sandbox, &turn.exec).map(|()| None),
        }
    }

    fn keep_or_kill(
        &self,
        id: CloneId,
        sandbox: Box<dyn Sandbox>,
    ) -> (Option<Failure>, Option<HeldClone>) {
        let is_mortal = match self.scenario.hold.until {
            HoldUntil::Exec => true,
            HoldUntil::Lifetime => self.round.lifetimes_ms.is_empty(),
            HoldUntil::Round | HoldUntil::End => false,
        };
        if is_mortal {
            return (sandbox.kill().err(), None);
        }
        (None, Some(HeldClone { id, sandbox }))
    }

    fn item(&self, arrival: u32) -> Option<usize> {
        let index = usize::try_from(arrival).ok()?;
        self.round.work.get(index).copied()
    }

    fn template(&self, arrival: u32) -> Option<u16> {
        let index = usize::try_from(arrival).ok()?;
        self.round.templates.get(index).copied()
    }

    fn command(&self, work: Option<usize>) -> &ExecSpec {
        let set = self.scenario.work.as_ref();
        let item = set.zip(work).and_then(|(set, item)| set.items.get(item));
        match (self.round.subject, &self.scenario.baseline) {
            (Subject::HostProcess, Some(command)) => command,
            (Subject::Peer(n), _) => {
                let peer = self.scenario.peers().get(usize::from(n));
                peer.map_or(&self.scenario.exec, |peer| &peer.exec)
            }
            (Subject::HostProcess, None)
            | (Subject::Clone | Subject::Beside | Subject::Null, _) => {
                item.map_or(&self.scenario.exec, |item| &item.exec)
            }
        }
    }
}
