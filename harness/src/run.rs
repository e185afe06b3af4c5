//! Carries out a plan. One dispatcher (the caller's thread) goes through the rounds; worker threads carry
//! out arrivals; everything they see leaves as [`RunEvent`]s. Nothing here computes a result.
//!
//! ```text
//! for each round: page cache → settle, memory sample → workers ─► attempts
//!                 held clones: idle, memory sample, ledger, one more command, kill
//! ```
//! The dispatcher owns the held clones. Workers share the next arrival's number and nothing else.

mod held;
mod worker;

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc::{Sender, channel},
    },
    thread,
    time::Duration,
};

use crate::{
    clock,
    event::{EndReason, Failure, RunEvent},
    exchange::Network,
    memory,
    plan::{Plan, Round, Row, Subject},
    scenario::{HoldUntil, Scenario},
    target::{PageCache, Target},
};
use held::HeldClone;

/// Workers wait for their base at least so long, plus [`LEAD_PER_WORKER`] for each of them.
const LEAD: Duration = Duration::from_millis(20);
const LEAD_PER_WORKER: Duration = Duration::from_micros(200);
/// A wait notices an interrupt after this at the latest.
const INTERRUPT_CHECK: Duration = Duration::from_millis(50);
/// Workers are many and shallow.
const WORKER_STACK: usize = 256 << 10;

/// What a run needs.
pub struct Runner<'a> {
    /// What is run.
    pub scenario: &'a Scenario,
    /// Its rounds.
    pub plan: &'a Plan,
    /// What clones are started from.
    pub target: &'a dyn Target,
    /// What the rounds beside them are started from; a plan without such rounds needs none.
    pub beside: Option<&'a dyn Target>,
    /// What baseline rounds are started from.
    pub baseline: &'a dyn Target,
    /// What lies around the sandboxes; a scenario without a network needs none.
    pub network: Option<&'a Network>,
    /// The template's memory file, for the ledger; absent if the target has none.
    pub guest_memory: Option<memory::FileId>,
    /// Where events go.
    pub events: Sender<RunEvent>,
    /// Set by SIGINT: no further attempt is started.
    pub interrupted: &'a AtomicBool,
}

/// Why a run cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The template's memory file cannot be read.
    #[error("cannot read the template's memory")]
    Template(#[source] std::io::Error),
    /// What the target keeps ready does not get ready.
    #[error("the target does not get ready")]
    NotReady(#[source] std::io::Error),
    /// What the clones of a round share cannot be made.
    #[error("a round cannot begin: {}", .0.message)]
    Round(Failure),
    /// The host refuses a worker thread.
    #[error("cannot start worker {number}")]
    Worker {
        /// Its number in the round.
        number: u32,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

impl Runner<'_> {
    /// Runs all rounds. Held clones are killed whatever happens.
    ///
    /// # Errors
    /// See [`RunError`]; failures of single clones are events, not errors.
    pub fn run(&self) -> Result<EndReason, RunError> {
        let mut held = Vec::new();
        let mut why = EndReason::Complete;
        let mut cache = None;
        for round in &self.plan.rounds {
            if let Some(reason) = self.stop_before(round) {
                why = reason;
                break;
            }
            self.prepare_cache(round, &mut cache)?;
            self.round(round, &mut held)?;
        }
        if !held.is_empty() {
            self.look_at(&mut held);
        }
        held::kill_all(held);
        if self.interrupted.load(Ordering::Relaxed) {
            why = EndReason::Interrupted;
        }
        Ok(why)
    }

    fn stop_before(&self, round: &Round) -> Option<EndReason> {
        if self.interrupted.load(Ordering::Relaxed) {
            return Some(EndReason::Interrupted);
        }
        let share = self.scenario.memory?.stop_at_share;
        let used = memory::used_share()?;
        (round.row == Row::Measured && used >= share).then_some(EndReason::MemoryShare)
    }

    fn prepare_cache(&self, round: &Round, last: &mut Option<PageCache>) -> Result<(), RunError> {
        let wanted = match round.row {
            Row::Cold => PageCache::Dropped,
            Row::WarmUp | Row::Measured => PageCache::ReadAhead,
        };
        if wanted == PageCache::Dropped || *last != Some(wanted) {
            for target in self.beside.into_iter().chain([self.target]) {
                target.prepare_cache(wanted).map_err(RunError::Template)?;
            }
        }
        *last = Some(wanted);
        Ok(())
    }

    /// One round, and what is done with the clones that it leaves.
    fn round(&self, round: &Round, held: &mut Vec<HeldClone>) -> Result<(), RunError> {
        let counted = round.row == Row::Measured && round.subject == Subject::Clone;
        if round.subject == Subject::Clone {
            self.target.await_ready().map_err(RunError::NotReady)?;
            self.target.begin_round().map_err(RunError::Round)?;
        }
        if counted && held.is_empty() {
            self.sample_memory(round.index, 0)?;
        }
        let mut started = self.start_all(round)?;
        let until = self.scenario.hold.until;
        if until == HoldUntil::End && counted {
            // All rounds share one group: that of the first round that left clones.
            let group = held.first().map_or(round.index, |first| first.id.round);
            held.append(&mut started);
            self.sample_memory(group, held.len())?;
        } else {
            if until == HoldUntil::Round && counted {
                self.rest(self.scenario.hold.at_least, &started);
                self.sample_memory(round.index, started.len())?;
                self.look_at(&mut started);
            }
            held::kill_all(started);
        }
        Ok(())
    }

    fn look_at(&self, clones: &mut [HeldClone]) {
        if self.scenario.hold.until == HoldUntil::End {
            self.rest(self.scenario.hold.at_least, clones);
        }
        if self.scenario.memory.is_some() {
            for ledger in held::ledgers(clones, self.guest_memory) {
                self.emit(RunEvent::Ledger(ledger));
            }
        }
        if self.scenario.hold.exec_after && !self.interrupted.load(Ordering::Relaxed) {
            held::exec_again(clones, &self.scenario.exec, self.network, &self.events);
            if let Some(network) = self.network {
                held::deny_again(clones, &self.scenario.turns, network, &self.events);
            }
        }
    }

    /// Lets clones idle; without clones there is nothing to wait for.
    fn rest(&self, duration: Duration, clones: &[HeldClone]) {
        if !clones.is_empty() {
            self.wait(duration);
        }
    }

    /// Waits, but not longer than until the run is interrupted.
    fn wait(&self, duration: Duration) {
        let end = clock::monotonic_ns() + clock::nanoseconds(duration);
        while !self.interrupted.load(Ordering::Relaxed) {
            let now = clock::monotonic_ns();
            if now >= end {
                return;
            }
            clock::sleep_until(end.min(now + clock::nanoseconds(INTERRUPT_CHECK)));
        }
    }

    /// What the target keeps ready is part of every sample alike.
    fn sample_memory(&self, group: u32, alive: usize) -> Result<(), RunError> {
        let Some(spec) = self.scenario.memory else {
            return Ok(());
        };
        self.target.await_ready().map_err(RunError::NotReady)?;
        self.wait(spec.settle);
        let alive = u32::try_from(alive).unwrap_or(u32::MAX);
        self.emit(RunEvent::Memory(memory::sample(group, alive)));
        Ok(())
    }

    /// Starts all arrivals of a round and returns the clones that are to be held.
    fn start_all(&self, round: &Round) -> Result<Vec<HeldClone>, RunError> {
        let base = OnceLock::new();
        let next = AtomicU32::new(0);
        let (keep, kept) = channel();
        let worker = worker::Worker {
            round,
            scenario: self.scenario,
            network: self.network,
            target: match round.subject {
                Subject::Clone => self.target,
                Subject::Beside => self.beside.unwrap_or(self.target),
                Subject::HostProcess => self.baseline,
            },
            base: &base,
            next: &next,
            interrupted: self.interrupted,
        };
        let spawned = thread::scope(|scope| {
            let spawned = (0..round.workers).try_for_each(|number| {
                let (keep, events, worker) = (keep.clone(), self.events.clone(), &worker);
                thread::Builder::new()
                    .stack_size(WORKER_STACK)
                    .spawn_scoped(scope, move || worker.work(&keep, &events))
                    .map(|_| ())
                    .map_err(|source| RunError::Worker { number, source })
            });
            let lead = LEAD + LEAD_PER_WORKER * round.workers;
            let base_ns = *base.get_or_init(|| clock::monotonic_ns() + clock::nanoseconds(lead));
            self.emit(RunEvent::RoundStarted {
                round: round.index,
                subject: round.subject,
                row: round.row,
                base_ns,
            });
            spawned
        });
        drop(keep);
        self.emit(RunEvent::RoundEnded {
            round: round.index,
            at_ns: clock::monotonic_ns(),
        });
        spawned.map(|()| kept.iter().collect())
    }

    fn emit(&self, event: RunEvent) {
        // The receiver outlives the run; if its disk failed, the run's end says so.
        let _ = self.events.send(event);
    }
}
