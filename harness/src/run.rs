//! Runs a plan. The calling thread dispatches the rounds, and worker threads start the clones. All observations
//! leave as [`RunEvent`]s; no result is computed here.
//!
//! ```text
//! for each round: page cache → settle, memory sample → workers ─► attempts, beside an event
//!                 held clones: idle, memory sample, ledger, repeated command, kill
//! ```
//! The dispatcher owns the held clones. The workers of a round share only its base time, the number of its next arrival
//! and the interrupt flag.

mod expiry;
mod held;
mod spent;
#[cfg(test)]
mod tests;
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
    account, clock,
    event::{EndReason, Failure, IdleSample, RunEvent},
    exchange::Network,
    host::usage::{self, OwnGroup},
    memory,
    plan::{Plan, Round, Row, Subject},
    scenario::{ExecSpec, HoldUntil, Scenario},
    target::{
        CloneId, Output, PageCache, Target, exec_checked,
        nodes::{Scene, Stage},
        null::Null,
    },
    work,
};
use held::HeldClone;
use model::Timeline;

/// Time from the creation of the last worker thread to the base time of a round, without [`LEAD_PER_WORKER`].
const LEAD: Duration = Duration::from_millis(20);
/// Additional lead for each worker.
const LEAD_PER_WORKER: Duration = Duration::from_micros(200);
/// Interval at which waits check for an interrupt.
const INTERRUPT_CHECK: Duration = Duration::from_millis(50);
/// Stack size of a worker in bytes. It is small because a burst has one worker for each clone.
const WORKER_STACK: usize = 256 << 10;

/// Inputs of a run.
pub struct Runner<'a> {
    pub scenario: &'a Scenario,
    pub plan: &'a Plan,
    /// Starts the clones.
    pub target: &'a dyn Target,
    /// Starts the clones of comparison rounds; `None` if the plan has no such rounds.
    pub beside: Option<&'a dyn Target>,
    /// Start the sandboxes of the peers, in the order of the scenario.
    pub peers: &'a [Box<dyn Target>],
    /// Starts the host processes of the baseline.
    pub baseline: &'a dyn Target,
    /// `None` if the scenario has no network.
    pub network: Option<&'a Network>,
    /// `None` if the scenario has no event.
    pub stage: Option<&'a Stage<'a>>,
    /// cgroup of the run. `None` if it could not be created; CPU usage is then not recorded.
    pub group: Option<&'a OwnGroup>,
    /// Memory file of the template, for the ledger. `None` searches the mappings of each VMM.
    pub guest_memory: Option<memory::FileId>,
    pub events: Sender<RunEvent>,
    /// Once this is set, no further clone is started and waits end early.
    pub interrupted: &'a AtomicBool,
}

/// An error that stops a run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("cannot read the memory file of the template")]
    Template(#[source] std::io::Error),
    /// The warm pool of the server was not refilled in time.
    #[error("the target did not become ready")]
    NotReady(#[source] std::io::Error),
    /// The parent of a round's forks could not be created or prepared.
    #[error("cannot prepare a round: {}", .0.message)]
    Round(Failure),
    /// The modules that a new sandbox has loaded could not be listed.
    #[error("cannot list the modules of a new sandbox: {}", .0.message)]
    Loaded(Failure),
    #[error("cannot start the thread of worker {number}")]
    Worker {
        /// Number of the worker in its round.
        number: u32,
        #[source]
        source: std::io::Error,
    },
}

impl Runner<'_> {
    /// Runs the rounds until the plan is complete, the memory limit is reached or the run is interrupted. Held clones
    /// are killed in all cases, including errors.
    ///
    /// # Errors
    /// Returns [`RunError`] if the rounds cannot continue. Failures of single clones are events, not
    /// errors.
    pub fn run(&self) -> Result<EndReason, RunError> {
        let mut held = Vec::new();
        let mut why = EndReason::Complete;
        let mut cache = None;
        self.list_loaded()?;
        for round in &self.plan.rounds {
            if let Some(reason) = self.stop_before(round) {
                why = reason;
                break;
            }
            self.prepare_cache(round, &mut cache)?;
            let failed = self.round(round, &mut held)?;
            if failed > 0 && self.scenario.hold.until == HoldUntil::End {
                why = EndReason::Limit {
                    message: format!(
                        "{failed} of {} starts failed while {} clones were alive",
                        round.arrivals.len(),
                        held.len()
                    ),
                };
                break;
            }
        }
        if !held.is_empty() {
            self.inspect(&mut held);
        }
        held::kill_all(held);
        if self.interrupted.load(Ordering::Relaxed) {
            why = EndReason::Interrupted;
        }
        Ok(why)
    }

    /// Records the modules that new sandboxes have loaded, if the scenario has work. For commands, the known
    /// warm-ups suffice and no sandbox is needed, but they do not apply to a server that the run did not start.
    fn list_loaded(&self) -> Result<(), RunError> {
        let Some(set) = &self.scenario.work else {
            return Ok(());
        };
        let modules = match set.kind.list_modules() {
            None if self.scenario.target.api_url.is_some() => return Ok(()),
            None => work::trained_programs().into_iter().collect(),
            Some(cell) => {
                let command = ExecSpec {
                    cell: Some(cell.to_owned()),
                    language: set.kind.language().map(str::to_owned),
                    ..self.scenario.exec.clone()
                };
                let output = self.ask_new_sandbox(&command).map_err(RunError::Loaded)?;
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                text.lines().map(str::to_owned).collect()
            }
        };
        self.emit(RunEvent::Loaded { modules });
        Ok(())
    }

    fn ask_new_sandbox(&self, command: &ExecSpec) -> Result<Output, Failure> {
        let id = CloneId {
            round: u32::MAX,
            arrival: 0,
        };
        let mut sandbox = self.target.create(id, &mut Timeline::default())?;
        let output = exec_checked(sandbox.as_mut(), command)?;
        sandbox.kill()?;
        Ok(output)
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

    /// Runs one round and returns how many starts of a measured round left no clone. The remaining clones are moved
    /// to `held`, or inspected and killed, as the scenario requires.
    fn round(&self, round: &Round, held: &mut Vec<HeldClone>) -> Result<usize, RunError> {
        let counted = round.row == Row::Measured && round.subject == Subject::Clone;
        let mut scene = None;
        if round.subject == Subject::Clone {
            self.target.begin_round().map_err(RunError::Round)?;
            let prepared = self.stage.map(Stage::prepare).transpose();
            scene = prepared.map_err(RunError::Round)?;
        }
        // Wait before rounds of every subject: a pool that is being filled takes CPU time from all others. The
        // parent of forks took a warm slot when the round was prepared.
        for peer in self.peers {
            peer.await_ready().map_err(RunError::NotReady)?;
        }
        self.target.await_ready().map_err(RunError::NotReady)?;
        if counted && held.is_empty() {
            self.sample_memory(round.index, 0)?;
        }
        let mut meter = spent::Meter::start(self, round);
        let mut started = self.start_all(round, scene, &mut meter)?;
        // Clones that do not outlive their attempt are not counted.
        let failed = round.arrivals.len().saturating_sub(started.len());
        let until = self.scenario.hold.until;
        if until == HoldUntil::End && counted {
            // Clones accumulate over rounds, so all memory samples belong to the group of the first held clone.
            let group = held.first().map_or(round.index, |first| first.id.round);
            held.append(&mut started);
            self.sample_memory(group, held.len())?;
            if self.scenario.hold.idle_each_round {
                self.rest(self.scenario.hold.at_least, held);
                self.measure_idle(held);
            }
        } else {
            if until == HoldUntil::Round && counted {
                self.rest(self.scenario.hold.at_least, &started);
                self.sample_memory(round.index, started.len())?;
                self.inspect(&mut started);
            }
            held::kill_all(started);
        }
        let subject = self.target_of(round.subject);
        subject.await_ready().map_err(RunError::NotReady)?;
        if round.row == Row::Measured {
            self.emit(RunEvent::Spent(meter.end()));
        }
        Ok(if counted { failed } else { 0 })
    }

    /// The target of a subject.
    fn target_of(&self, subject: Subject) -> &dyn Target {
        match subject {
            Subject::Clone => self.target,
            Subject::Beside => self.beside.unwrap_or(self.target),
            Subject::HostProcess => self.baseline,
            Subject::Null => &Null,
            Subject::Peer(n) => {
                let peer = self.peers.get(usize::from(n));
                peer.map_or(self.target, Box::as_ref)
            }
        }
    }

    /// Reads the ledgers of held clones, and repeats the first command and the denied exchange in them, if the scenario
    /// requires it.
    fn inspect(&self, clones: &mut [HeldClone]) {
        if self.scenario.hold.until == HoldUntil::End {
            self.rest(self.scenario.hold.at_least, clones);
        }
        if self.scenario.memory.is_some() {
            self.measure_idle(clones);
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

    /// Measures the CPU time of clones for as long as they have idled: the scenario's `at_least`.
    fn measure_idle(&self, clones: &[HeldClone]) {
        let duration = self.scenario.hold.at_least;
        let Some(first) = clones.first().filter(|_| !duration.is_zero()) else {
            return;
        };
        let pids: Vec<u32> = clones
            .iter()
            .filter_map(|clone| clone.sandbox.pid())
            .collect();
        // A process that has ended has no CPU time to add.
        let cpu_ns = || {
            pids.iter()
                .map(|pid| account::process_cpu_ns(*pid))
                .sum::<std::io::Result<u64>>()
        };
        let (before, began) = (cpu_ns(), clock::monotonic_ns());
        self.wait(duration);
        if let (Ok(before), Ok(after)) = (before, cpu_ns()) {
            self.emit(RunEvent::Idle(IdleSample {
                round: first.id.round,
                clones: u32::try_from(pids.len()).unwrap_or(u32::MAX),
                window_ns: clock::monotonic_ns() - began,
                cpu_ns: after.saturating_sub(before),
            }));
        }
    }

    /// Lets clones idle for `duration`. Returns immediately if there are no clones.
    fn rest(&self, duration: Duration, clones: &[HeldClone]) {
        if !clones.is_empty() {
            self.wait(duration);
        }
    }

    /// Waits for `duration` or until the run is interrupted.
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

    /// Samples the memory of the host, if the scenario measures memory. First waits until the warm pool is refilled, so
    /// that every sample includes a full pool.
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

    /// Starts all arrivals of a round, waits until all attempts, lifetimes and the event of `scene` have ended, and
    /// returns the clones that are still alive. `meter` is read when the last attempt has ended.
    fn start_all(
        &self,
        round: &Round,
        scene: Option<Scene>,
        meter: &mut spent::Meter<'_>,
    ) -> Result<Vec<HeldClone>, RunError> {
        let base = OnceLock::new();
        let next = AtomicU32::new(0);
        let (keep, kept) = channel();
        let worker = worker::Worker {
            round,
            scenario: self.scenario,
            network: self.network,
            target: self.target_of(round.subject),
            base: &base,
            next: &next,
            interrupted: self.interrupted,
        };
        let before = self.group.map(OwnGroup::read);
        let over = AtomicBool::new(false);
        let expiring = match self.scenario.hold.until {
            HoldUntil::Lifetime => expiry::THREADS,
            HoldUntil::Exec | HoldUntil::Round | HoldUntil::End => 0,
        };
        let (expiry, expired): (Vec<_>, Vec<_>) = (0..expiring).map(|_| channel()).unzip();
        let spawned = thread::scope(|scope| {
            self.watch_stock(scope, round, &over);
            for expired in expired {
                let (events, interrupted) = (self.events.clone(), self.interrupted);
                scope.spawn(move || expiry::kill_in_time(&expired, interrupted, &events));
            }
            let workers: Result<Vec<_>, _> = (0..round.workers)
                .map(|number| {
                    let (keep, events, worker) = (keep.clone(), self.events.clone(), &worker);
                    let expiry = expiry.clone();
                    thread::Builder::new()
                        .stack_size(WORKER_STACK)
                        .spawn_scoped(scope, move || worker.work(&keep, &expiry, &events))
                        .map_err(|source| RunError::Worker { number, source })
                })
                .collect();
            let lead = LEAD + LEAD_PER_WORKER * round.workers;
            let base_ns = *base.get_or_init(|| clock::monotonic_ns() + clock::nanoseconds(lead));
            self.emit(RunEvent::RoundStarted {
                round: round.index,
                subject: round.subject,
                row: round.row,
                base_ns,
                rate_per_s: round.rate_per_s,
            });
            if let Some((stage, scene)) = self.stage.zip(scene) {
                let events = self.events.clone();
                scope.spawn(move || {
                    let happened = stage.run(scene, round, base_ns);
                    // Sending fails only if the recorder has failed.
                    let _ = events.send(RunEvent::Happened(happened));
                });
            }
            let spawned = workers.map(|workers| {
                for worker in workers {
                    if let Err(panic) = worker.join() {
                        over.store(true, Ordering::Relaxed);
                        std::panic::resume_unwind(panic);
                    }
                }
            });
            over.store(true, Ordering::Relaxed);
            meter.starts_ended();
            if let Some((before, group)) = before.zip(self.group) {
                self.emit(RunEvent::RoundUsage {
                    round: round.index,
                    usage: before.until(&group.read(), usage::host_cores()),
                });
            }
            self.emit(RunEvent::RoundEnded {
                round: round.index,
                at_ns: clock::monotonic_ns(),
            });
            // Let the scope end once the last lifetime and the event have ended.
            drop(expiry);
            spawned
        });
        drop(keep);
        spawned.map(|()| kept.iter().collect())
    }

    /// Records the number of warm slots until the round is over, if the scenario watches it.
    fn watch_stock<'s>(
        &'s self,
        scope: &'s thread::Scope<'s, '_>,
        round: &'s Round,
        over: &'s AtomicBool,
    ) {
        let is_target = round.subject == Subject::Clone && round.row == Row::Measured;
        let Some(interval) = self.scenario.target.watch.filter(|_| is_target) else {
            return;
        };
        let events = self.events.clone();
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                let at_ns = clock::monotonic_ns();
                if let Some(pool) = self.target.pool() {
                    let (round, warm) = (round.index, pool.warm);
                    // Sending fails only if the recorder has failed.
                    let _ = events.send(RunEvent::Stock { round, at_ns, warm });
                }
                clock::sleep_until(at_ns + clock::nanoseconds(interval));
            }
        });
    }

    fn emit(&self, event: RunEvent) {
        // Sending fails only if the recorder has failed, and then the session returns the error of the recorder.
        let _ = self.events.send(event);
    }
}
