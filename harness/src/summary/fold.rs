//! Folds the events of a run into a [`Summary`]: the only place where raw events become rows, phases and counts.

use std::collections::{BTreeMap, BTreeSet};

use model::StartPhase;

use super::interference::{self, Interference};
use crate::{
    event::{
        Attempt, CloneLedger, EndReason, Failure, FailureCause, Happened, IdleSample, MemoryPoint,
        NoiseSample, RunEvent, RunStarted, Spent, StartKind, System,
    },
    memory::CPU_LISTS_FREE,
    plan::{Row, Subject},
    scenario::{EventCount, EventTime, Scenario},
};
use stats::{
    quantile::{INFINITE, Samples},
    slope::{self, Point, Slope},
};

/// The data of a run that reports and gates use.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// `None` only before the first event.
    pub started: Option<RunStarted>,
    /// Modules that a new sandbox had loaded; `None` unless the scenario takes its work from a file and the target
    /// could be queried.
    pub loaded: Option<BTreeSet<String>>,
    /// `None` if the run has not ended yet, was killed, or was not recorded to its end.
    pub ended: Option<EndReason>,
    /// Measured starts of the target, in the order in which their attempts ended.
    pub clones: Vec<Attempt>,
    /// Measured starts of the comparison rounds.
    pub beside: Vec<Attempt>,
    /// Systems of a comparison; empty without other systems.
    pub systems: Vec<System>,
    /// Measured starts of each other system, by position in the scenario.
    pub peers: BTreeMap<u16, Vec<Attempt>>,
    /// Measured starts of the baseline.
    pub baseline: Vec<Attempt>,
    /// Measured starts of the null target.
    pub null: Vec<Attempt>,
    /// Measured rounds, and those excluded from all rows because of other programs.
    pub interference: Interference,
    /// Starts while the template was not in the page cache.
    pub cold: Vec<Attempt>,
    /// Number of warm-up starts, of all subjects.
    pub warm_up: u32,
    /// Times of each measured round of clones.
    pub rounds: BTreeMap<u32, RoundTimes>,
    /// For each measured round of clones, the number of sandboxes started by earlier measured rounds. They are
    /// alive if the scenario holds them to the end of the run.
    pub alive_before: BTreeMap<u32, u32>,
    /// Times of each measured round of the baseline.
    pub baseline_rounds: BTreeMap<u32, RoundTimes>,
    /// Mean rate of the arrivals of each measured round of clones, if the scenario has several.
    pub rates: BTreeMap<u32, f64>,
    /// Round, time and number of warm slots, in reading order.
    pub stock: Vec<(u32, u64, u32)>,
    /// Events of measured rounds.
    pub happened: Vec<Happened>,
    /// Costs of measured rounds, of all subjects.
    pub spent: Vec<Spent>,
    pub memory: Vec<MemoryPoint>,
    pub ledgers: Vec<CloneLedger>,
    /// CPU time of idle clones.
    pub idle: Vec<IdleSample>,
    /// Times of the first command repeated in held clones. Failures, including those of repeated denied exchanges,
    /// are [`INFINITE`].
    pub after_hold_ns: Vec<u64>,
    /// First message of each failure cause in held clones.
    pub after_hold_failures: BTreeMap<FailureCause, String>,
    pub noise: Vec<NoiseSample>,
}

/// Clusters into which the starts of closed and open loops are divided, for their intervals.
pub(crate) const CLUSTERS: usize = 20;

/// Start and end of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundTimes {
    /// Time from which the arrivals are counted.
    pub base_ns: u64,
    /// `None` if the round did not end before the last recorded event.
    pub end_ns: Option<u64>,
}

/// Folds the events of a run, and excludes disturbed repetitions.
#[must_use]
pub fn fold<'a>(events: impl IntoIterator<Item = &'a RunEvent>) -> Summary {
    let mut summary = Summary::default();
    for event in events {
        summary.apply(event);
    }
    interference::leave_out(&mut summary);
    summary
}

impl Summary {
    /// Adds one event to the summary.
    pub fn apply(&mut self, event: &RunEvent) {
        match event {
            RunEvent::RunStarted(started) => self.started = Some((**started).clone()),
            RunEvent::RoundStarted {
                round,
                subject,
                row: Row::Measured,
                base_ns,
                rate_per_s,
            } => {
                if let (Subject::Clone, Some(rate)) = (subject, rate_per_s) {
                    self.rates.insert(*round, *rate);
                }
                let times = RoundTimes {
                    base_ns: *base_ns,
                    end_ns: None,
                };
                self.interference.rounds.push((*round, *subject));
                match subject {
                    Subject::Clone => {
                        let started = self.clones.iter().filter(|a| a.failure.is_none()).count();
                        let started = u32::try_from(started).unwrap_or(u32::MAX);
                        self.alive_before.insert(*round, started);
                        self.rounds.insert(*round, times)
                    }
                    Subject::HostProcess => self.baseline_rounds.insert(*round, times),
                    Subject::Beside | Subject::Null | Subject::Peer(_) => None,
                };
            }
            RunEvent::RoundStarted { .. } => {}
            RunEvent::Systems { systems } => self.systems.clone_from(systems),
            RunEvent::Loaded { modules } => self.loaded = Some(modules.clone()),
            RunEvent::RoundUsage { round, usage } => {
                self.interference.usage.insert(*round, *usage);
            }
            RunEvent::RoundEnded { round, at_ns } => {
                let both = [&mut self.rounds, &mut self.baseline_rounds];
                for times in both.into_iter().filter_map(|rounds| rounds.get_mut(round)) {
                    times.end_ns = Some(*at_ns);
                }
            }
            RunEvent::Attempt(attempt) => self.attempt(attempt),
            RunEvent::Stock { round, at_ns, warm } => self.stock.push((*round, *at_ns, *warm)),
            RunEvent::Happened(happened) => {
                if happened.row == Row::Measured {
                    self.happened.push(happened.clone());
                }
            }
            RunEvent::Spent(spent) => self.spent.push(*spent),
            RunEvent::Memory(point) => self.memory.push(point.clone()),
            RunEvent::Idle(sample) => self.idle.push(*sample),
            RunEvent::Ledger(ledger) => self.ledgers.push(ledger.clone()),
            RunEvent::AfterHold {
                took_ns, failure, ..
            } => self.after_hold(*took_ns, failure.as_ref()),
            RunEvent::Noise(sample) => self.noise.push(*sample),
            RunEvent::RunEnded { why, .. } => self.ended = Some(why.clone()),
        }
    }

    fn attempt(&mut self, attempt: &Attempt) {
        let row = match (attempt.row, attempt.subject) {
            (Row::WarmUp, _) => {
                self.warm_up += 1;
                return;
            }
            (Row::Cold, _) => &mut self.cold,
            (Row::Measured, Subject::Clone) => &mut self.clones,
            (Row::Measured, Subject::Beside) => &mut self.beside,
            (Row::Measured, Subject::HostProcess) => &mut self.baseline,
            (Row::Measured, Subject::Null) => &mut self.null,
            (Row::Measured, Subject::Peer(n)) => self.peers.entry(n).or_default(),
        };
        row.push(attempt.clone());
    }

    fn after_hold(&mut self, took_ns: Option<u64>, failure: Option<&Failure>) {
        self.after_hold_ns.push(took_ns.unwrap_or(INFINITE));
        if let Some(failure) = failure {
            self.after_hold_failures
                .entry(failure.cause)
                .or_insert_with(|| failure.message.clone());
        }
    }

    /// The scenario; `None` only before the first event.
    #[must_use]
    pub fn scenario(&self) -> Option<&Scenario> {
        self.started.as_ref().map(|started| &started.scenario)
    }

    /// Number of failed starts among the measured clones, by cause.
    #[must_use]
    pub fn failures(&self) -> BTreeMap<FailureCause, u64> {
        let mut counts = BTreeMap::new();
        for failure in self.clones.iter().filter_map(|a| a.failure.as_ref()) {
            *counts.entry(failure.cause).or_insert(0) += 1;
        }
        counts
    }

    /// First message of each failure cause in measured clones, comparison rounds, cold starts and the baseline.
    #[must_use]
    pub fn failure_examples(&self) -> BTreeMap<FailureCause, &str> {
        let mut examples = BTreeMap::new();
        for failure in self
            .clones
            .iter()
            .chain(&self.beside)
            .chain(&self.cold)
            .chain(&self.baseline)
            .filter_map(|a| a.failure.as_ref())
        {
            examples
                .entry(failure.cause)
                .or_insert(failure.message.as_str());
        }
        examples
    }

    /// Latencies of all measured clones by phase, as in [`ladder`].
    #[must_use]
    pub fn phases(&self) -> Vec<(StartPhase, Samples)> {
        ladder(&self.clones.iter().collect::<Vec<_>>())
    }

    /// Latencies of a phase over all measured clones; a clone that did not reach the phase counts as [`INFINITE`].
    #[must_use]
    pub fn phase(&self, phase: StartPhase) -> Samples {
        latencies(self.clones.iter(), phase)
    }

    /// Measured clones by origin. A clone whose create failed has the origin `None`. Empty if no clone has an origin,
    /// because the target does not report it.
    #[must_use]
    pub fn by_start(&self) -> BTreeMap<Option<StartKind>, Vec<&Attempt>> {
        let mut kinds: BTreeMap<_, Vec<&Attempt>> = BTreeMap::new();
        for clone in &self.clones {
            kinds.entry(clone.start).or_default().push(clone);
        }
        if kinds.keys().all(Option::is_none) {
            kinds.clear();
        }
        kinds
    }

    /// Suffix for sentences about all clones that counts the origins, such as `; over 90 warm and 10 restored
    /// starts`. Empty if all clones have the same origin.
    #[must_use]
    pub fn mixture(&self) -> String {
        let kinds = self.by_start();
        if kinds.len() < 2 {
            return String::new();
        }
        let parts: Vec<_> = kinds
            .iter()
            .map(|(kind, clones)| format!("{} {}", clones.len(), start_name(*kind)))
            .collect();
        format!("; over {} starts", parts.join(" and "))
    }

    /// First-exec latencies of the baseline.
    #[must_use]
    pub fn baseline_samples(&self) -> Samples {
        latencies(self.baseline.iter(), StartPhase::FirstExec)
    }

    /// First-exec latencies of the null target.
    #[must_use]
    pub fn null_samples(&self) -> Samples {
        latencies(self.null.iter(), StartPhase::FirstExec)
    }

    /// First-exec latencies of cold starts.
    #[must_use]
    pub fn cold_samples(&self) -> Samples {
        latencies(self.cold.iter(), StartPhase::FirstExec)
    }

    /// Durations of completed measured rounds of clones; a round with a failed start counts as [`INFINITE`].
    #[must_use]
    pub fn round_samples(&self) -> Samples {
        Samples::new(walls(&self.rounds, &self.clones).concat())
    }

    /// Durations of completed measured rounds of the baseline; a round with a failed start counts as [`INFINITE`].
    #[must_use]
    pub fn baseline_round_samples(&self) -> Samples {
        Samples::new(walls(&self.baseline_rounds, &self.baseline).concat())
    }

    /// A duration over all events, with each event as one cluster. A condition that was not met in time counts as
    /// [`INFINITE`].
    #[must_use]
    pub fn event_samples(&self, of: EventTime) -> Samples {
        let events = self.happened.iter();
        let times = events.filter_map(|event| event.times.get(&of));
        let clusters = times.map(|times| times.iter().map(|ns| ns.unwrap_or(INFINITE)).collect());
        Samples::clustered(&clusters.collect::<Vec<_>>())
    }

    /// The sum of a count over all events; `None` if no event has it.
    #[must_use]
    pub fn event_count(&self, of: EventCount) -> Option<u64> {
        let counts = self
            .happened
            .iter()
            .filter_map(|event| event.counts.get(&of));
        counts.copied().reduce(|sum, count| sum + count)
    }

    /// Number of successful measured starts of the target in a round.
    pub(super) fn started_in(&self, round: u32) -> usize {
        let of_round = self.clones.iter().filter(|a| a.round == round);
        of_round.filter(|a| a.failure.is_none()).count()
    }

    /// Increase of the value with the name `line` in [`MemoryPoint::meminfo`] per clone, in bytes.
    #[must_use]
    pub fn meminfo_slope(&self, line: &str) -> Option<Slope> {
        self.slope_of(|point| Some(*point.meminfo.get(line)? as f64))
    }

    /// Increase per clone of a value of the samples.
    #[must_use]
    pub fn slope_of(&self, bytes: impl Fn(&MemoryPoint) -> Option<f64>) -> Option<Slope> {
        let points: Vec<Point> = self
            .memory
            .iter()
            .filter_map(|p| {
                Some(Point {
                    group: p.group,
                    x: f64::from(p.alive),
                    y: bytes(p)?,
                })
            })
            .collect();
        slope::fit(&points)
    }

    /// Decrease of available memory per clone, in bytes.
    #[must_use]
    pub fn memory_slope(&self) -> Option<Slope> {
        let rise = self.slope_of(available)?;
        Some(Slope {
            value: -rise.value,
            interval95: rise.interval95.map(|(low, high)| (-high, -low)),
        })
    }

    /// Decrease of available memory per additional clone between consecutive samples of each group, in bytes.
    #[must_use]
    pub fn memory_steps(&self) -> Vec<f64> {
        let mut groups: BTreeMap<u32, Vec<(f64, f64)>> = BTreeMap::new();
        for point in &self.memory {
            if let Some(bytes) = available(point) {
                let group = groups.entry(point.group).or_default();
                group.push((f64::from(point.alive), bytes));
            }
        }
        let steps = groups.values().flat_map(|points| points.windows(2));
        let steps = steps.filter(|step| step[1].0 > step[0].0);
        steps
            .map(|step| (step[0].1 - step[1].1) / (step[1].0 - step[0].0))
            .collect()
    }

    /// Mean of a field over the ledgers that have it; `None` if no ledger has it.
    #[must_use]
    pub fn mean_of(&self, field: impl Fn(&CloneLedger) -> Option<u64>) -> Option<f64> {
        let read: Vec<u64> = self.ledgers.iter().filter_map(field).collect();
        (!read.is_empty()).then(|| read.iter().sum::<u64>() as f64 / read.len() as f64)
    }
}

/// Durations of completed rounds, from the base time to the end, with each round as one cluster.
pub(super) fn walls(rounds: &BTreeMap<u32, RoundTimes>, attempts: &[Attempt]) -> Vec<Vec<u64>> {
    let failed = |round: &u32| {
        let mut of_round = attempts.iter().filter(|a| a.round == *round);
        of_round.any(|a| a.failure.is_some())
    };
    let wall = |(round, times): (&u32, &RoundTimes)| {
        let end_ns = times.end_ns?;
        let ns = end_ns.saturating_sub(times.base_ns);
        Some(vec![if failed(round) { INFINITE } else { ns }])
    };
    rounds.iter().filter_map(wall).collect()
}

/// Name of an origin in reports; `unanswered` for clones whose create failed.
#[must_use]
pub fn start_name(kind: Option<StartKind>) -> &'static str {
    kind.map_or("unanswered", StartKind::name)
}

/// Latencies of the given starts by phase. Phases that no start reached are omitted, except first exec.
#[must_use]
pub fn ladder(attempts: &[&Attempt]) -> Vec<(StartPhase, Samples)> {
    StartPhase::ALL
        .into_iter()
        .filter(|phase| {
            *phase == StartPhase::FirstExec && !attempts.is_empty()
                || attempts.iter().any(|a| a.timeline.at(*phase).is_some())
        })
        .map(|phase| (phase, latencies(attempts.iter().copied(), phase)))
        .collect()
}

/// MemAvailable plus the free pages in per-CPU lists, in bytes. `None` if MemAvailable could not be read.
#[must_use]
pub fn available(point: &MemoryPoint) -> Option<f64> {
    available_of(&point.meminfo)
}

/// The same for the lines of /proc/meminfo.
#[must_use]
pub fn available_of(meminfo: &BTreeMap<String, u64>) -> Option<f64> {
    let lists = meminfo.get(CPU_LISTS_FREE).copied().unwrap_or(0);
    Some((meminfo.get("MemAvailable")? + lists) as f64)
}

/// Latencies of a phase by cluster; [`INFINITE`] for attempts that did not reach it.
pub fn latencies<'a>(attempts: impl Iterator<Item = &'a Attempt>, phase: StartPhase) -> Samples {
    Samples::clustered(&clusters(attempts, |attempt| {
        vec![attempt.latency_ns(phase).unwrap_or(INFINITE)]
    }))
}

/// The samples of each cluster. A round is a cluster. If there are fewer than [`CLUSTERS`] rounds and their starts
/// are not bursts, they are divided into sequences of consecutive starts, so that there are about that many
/// clusters.
pub(super) fn clusters<'a>(
    attempts: impl Iterator<Item = &'a Attempt>,
    samples: impl Fn(&Attempt) -> Vec<u64>,
) -> Vec<Vec<u64>> {
    let mut rounds: BTreeMap<u32, Vec<&Attempt>> = BTreeMap::new();
    for attempt in attempts {
        rounds.entry(attempt.round).or_default().push(attempt);
    }
    let parts = CLUSTERS.div_ceil(rounds.len().max(1));
    let mut clusters = Vec::new();
    for round in rounds.values_mut() {
        round.sort_by_key(|attempt| attempt.arrival);
        let is_burst = round.iter().all(|a| a.intended_ns == round[0].intended_ns);
        let size = if is_burst {
            round.len()
        } else {
            round.len().div_ceil(parts)
        };
        for part in round.chunks(size.max(1)) {
            clusters.push(part.iter().flat_map(|attempt| samples(attempt)).collect());
        }
    }
    clusters
}
