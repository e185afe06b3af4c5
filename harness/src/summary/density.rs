//! Starts by the number of living sandboxes, and the largest number within bounds.
//!
//! A *level* is the state after a measured round of a scenario whose sandboxes live to the end of the run. Nothing
//! is interpolated: the result is one of the measured levels, and the next measured one above it.

use model::StartPhase;

use super::fold::{Summary, available};
use crate::{
    event::Attempt,
    scenario::{HoldUntil, Quantile},
};
use stats::quantile::{Estimate, INFINITE, Samples};

/// The quantiles of a level cover at least this many of the last starts up to it. A P95 needs as many.
pub const WINDOW: usize = 100;

/// A start of a sandbox, with the number of sandboxes that were alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartAt {
    /// Sandboxes that were alive, this one included.
    pub alive: u32,
    /// Time to first exec; [`INFINITE`] if the start failed.
    pub first_exec_ns: u64,
}

/// State after a measured round.
#[derive(Clone, Debug)]
pub struct Level {
    /// Sandboxes that are alive.
    pub alive: u32,
    /// Sandboxes that would be alive if every start up to here had succeeded.
    pub target: u32,
    /// Failed starts up to here.
    pub failed: usize,
    /// The last [`WINDOW`] starts, or all of the last round if it has more.
    pub first_exec: Samples,
    /// Decrease of available memory since no sandbox was alive; `None` if it was not measured.
    pub memory_bytes: Option<f64>,
    /// CPU time of all sandboxes while they idle, per second; `None` if it was not measured at this level.
    pub idle_cpu_ms_per_s: Option<f64>,
}

/// Limits for all sandboxes. `None` sets no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bounds {
    /// Largest P95 of the time to first exec, in milliseconds.
    pub p95_ms: Option<f64>,
    /// Maximum memory of all sandboxes together.
    pub memory_bytes: Option<f64>,
    /// Maximum CPU time of all idle sandboxes together, per second.
    pub idle_cpu_ms_per_s: Option<f64>,
}

/// Verdict of the bounds on a level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    Yes,
    /// Exceeded bounds, as text.
    No(Vec<String>),
    /// Values that were not measured, as text. No measured value exceeds its bound.
    Unknown(Vec<String>),
}

/// The largest number of sandboxes within bounds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Largest {
    /// The largest level that holds, if every level below it holds too; `None` if there is none.
    pub holds: Option<u32>,
    /// The target of the lowest level that does not hold, with the reasons; `None` if every level that could be
    /// judged holds.
    pub misses: Option<(u32, Vec<String>)>,
    /// Why the last level without a verdict could not be judged.
    pub unknown: Vec<String>,
}

/// Measured starts in the order in which they ended. Empty unless sandboxes live to the end of the run.
#[must_use]
pub fn starts(summary: &Summary) -> Vec<StartAt> {
    let mut starts = Vec::new();
    for (round, before) in accumulated(summary) {
        let mut alive = before;
        for attempt in of_round(summary, round) {
            alive += u32::from(attempt.failure.is_none());
            starts.push(StartAt {
                alive,
                first_exec_ns: first_exec_ns(attempt),
            });
        }
    }
    starts
}

/// The levels of a run, ascending. Empty unless sandboxes live to the end of the run.
#[must_use]
pub fn levels(summary: &Summary) -> Vec<Level> {
    let mut seen: Vec<u64> = Vec::new();
    let mut failed = 0;
    let levels = accumulated(summary).into_iter().map(|(round, before)| {
        let of_round = of_round(summary, round);
        let ok = of_round.iter().filter(|a| a.failure.is_none()).count();
        failed += of_round.len() - ok;
        seen.extend(of_round.iter().map(|attempt| first_exec_ns(attempt)));
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let alive = before.saturating_add(count(ok));
        let window = seen.len().min(WINDOW.max(of_round.len()));
        Level {
            alive,
            target: before.saturating_add(count(of_round.len())),
            failed,
            first_exec: Samples::new(seen[seen.len() - window..].to_vec()),
            memory_bytes: memory(summary, alive),
            idle_cpu_ms_per_s: idle_cpu(summary, alive),
        }
    });
    levels.collect()
}

/// The largest level within the bounds.
#[must_use]
pub fn largest(levels: &[Level], bounds: &Bounds) -> Largest {
    let mut found = Largest::default();
    for level in levels {
        match level.held(bounds) {
            Held::Yes => found.holds = Some(level.alive),
            Held::Unknown(why) => found.unknown = why,
            Held::No(why) => {
                found.misses = Some((level.target, why));
                break;
            }
        }
    }
    found
}

impl Level {
    /// Compares the level with the bounds. A level with a failed start never holds.
    #[must_use]
    pub fn held(&self, bounds: &Bounds) -> Held {
        let (mut missed, mut unknown) = (Vec::new(), Vec::new());
        if self.failed > 0 {
            let (failed, alive) = (self.failed, self.alive);
            missed.push(format!("{failed} starts failed, so {alive} are alive"));
        }
        match (bounds.p95_ms, self.first_exec.quantile(Quantile::P95)) {
            (None, _) => {}
            (Some(_), Estimate::TooFew { needs }) => {
                let n = self.first_exec.n();
                unknown.push(format!("a P95 needs {needs} starts, there were {n}"));
            }
            (Some(_), Estimate::Infinite) => missed.push("the P95 lies among failures".to_owned()),
            (Some(bound), Estimate::Value(ns)) => {
                let ms = ns as f64 / 1e6;
                if ms > bound {
                    missed.push(format!(
                        "the P95 is {ms:.2} ms, above the bound of {bound} ms"
                    ));
                }
            }
        }
        let mut below = |what: &str, unit: (&str, f64), value: Option<f64>, bound: Option<f64>| {
            let (name, scale) = unit;
            match (bound, value) {
                (None, _) => {}
                (Some(_), None) => unknown.push(format!("{what} was not measured")),
                (Some(bound), Some(value)) if value > bound => missed.push(format!(
                    "{what} is {:.1} {name}, above the bound of {:.1} {name}",
                    value * scale,
                    bound * scale
                )),
                (Some(_), Some(_)) => {}
            }
        };
        let (memory, idle) = (self.memory_bytes, self.idle_cpu_ms_per_s);
        below("memory", ("MB", 1e-6), memory, bounds.memory_bytes);
        let unit = ("ms per second", 1.0);
        below("idle CPU time", unit, idle, bounds.idle_cpu_ms_per_s);
        match (missed.is_empty(), unknown.is_empty()) {
            (false, _) => Held::No(missed),
            (true, false) => Held::Unknown(unknown),
            (true, true) => Held::Yes,
        }
    }
}

/// Measured rounds that count, each with the number of sandboxes alive before it.
fn accumulated(summary: &Summary) -> Vec<(u32, u32)> {
    let until = summary.scenario().map(|scenario| scenario.hold.until);
    if until != Some(HoldUntil::End) {
        return Vec::new();
    }
    let rounds = summary.rounds.keys();
    let before = |round: &u32| Some((*round, *summary.alive_before.get(round)?));
    rounds.filter_map(before).collect()
}

fn of_round(summary: &Summary, round: u32) -> Vec<&Attempt> {
    let all = summary.clones.iter();
    all.filter(|attempt| attempt.round == round).collect()
}

fn first_exec_ns(attempt: &Attempt) -> u64 {
    let first_exec = attempt.latency_ns(StartPhase::FirstExec);
    first_exec.unwrap_or(INFINITE)
}

fn memory(summary: &Summary, alive: u32) -> Option<f64> {
    let at = |alive| {
        let mut points = summary.memory.iter();
        available(points.find(|point| point.alive == alive)?)
    };
    Some(at(0)? - at(alive)?)
}

fn idle_cpu(summary: &Summary, alive: u32) -> Option<f64> {
    let mut samples = summary.idle.iter();
    let sample = samples.find(|sample| sample.clones == alive)?;
    Some(sample.cpu_ns as f64 / sample.window_ns as f64 * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        event::{EndReason, Failure, FailureCause, IdleSample, MemoryPoint, RunEvent, RunStarted},
        plan::{Row, Subject},
        scenario,
        summary::fold,
    };
    use model::Timeline;

    const MS: u64 = 1_000_000;
    const STEP: u32 = 20;

    /// A simulated host with three known capacities: first exec takes 300 ms beyond `fast` sandboxes and 3 ms
    /// below, and each sandbox takes 4 MB and 0.5 ms of CPU time per second.
    struct Host {
        fast: u32,
        /// Number of the first start that fails.
        fails: u32,
    }

    impl Host {
        fn run(&self, rounds: u32) -> Summary {
            let text = "[hold]\nuntil = 'end'\n[memory]\nmeasure = true";
            let scenario = scenario::parse("t", text).unwrap();
            let mut events = vec![RunEvent::RunStarted(Box::new(RunStarted {
                format: 1,
                scenario,
                reproduce: String::new(),
                started_unix_ms: 0,
                at_ns: 0,
            }))];
            events.push(Self::memory(0));
            for round in 0..rounds {
                events.push(RunEvent::RoundStarted {
                    round,
                    subject: Subject::Clone,
                    row: Row::Measured,
                    base_ns: 0,
                    rate_per_s: None,
                });
                events.extend((0..STEP).map(|arrival| self.start(round, arrival)));
                let at_ns = u64::from(round + 1) * 1000 * MS;
                events.push(RunEvent::RoundEnded { round, at_ns });
                let alive = (round + 1) * STEP;
                events.push(Self::memory(alive));
                events.push(RunEvent::Idle(IdleSample {
                    round: 0,
                    clones: alive,
                    window_ns: 2000 * MS,
                    cpu_ns: u64::from(alive) * MS,
                }));
            }
            let why = EndReason::Complete;
            events.push(RunEvent::RunEnded { why, at_ns: 0 });
            fold::fold(&events)
        }

        fn memory(alive: u32) -> RunEvent {
            let available = 8_000_000_000 - u64::from(alive) * 4_000_000;
            RunEvent::Memory(MemoryPoint {
                group: 0,
                alive,
                at_ns: 0,
                meminfo: [("MemAvailable".to_owned(), available)].into(),
                reclaim: std::collections::BTreeMap::new(),
            })
        }

        fn start(&self, round: u32, arrival: u32) -> RunEvent {
            let number = round * STEP + arrival;
            let took = if number < self.fast { 3 } else { 300 };
            let mut timeline = Timeline::default();
            let fails = number >= self.fails;
            if !fails {
                timeline.stamp(StartPhase::FirstExec, took * MS);
            }
            RunEvent::Attempt(Attempt {
                round,
                subject: Subject::Clone,
                row: Row::Measured,
                arrival,
                intended_ns: 0,
                actual_ns: 0,
                work: None,
                template: None,
                timeline,
                start: None,
                faults: None,
                turns: Vec::new(),
                failure: fails.then(|| Failure {
                    cause: FailureCause::Create,
                    message: "full".into(),
                }),
                ended_ns: took * MS,
            })
        }
    }

    fn bounds(p95_ms: f64, memory_mb: f64, idle: f64) -> Bounds {
        Bounds {
            p95_ms: Some(p95_ms),
            memory_bytes: Some(memory_mb * 1e6),
            idle_cpu_ms_per_s: Some(idle),
        }
    }

    fn found(host: &Host, bounds: Bounds) -> (Option<u32>, Option<u32>, String) {
        let found = largest(&levels(&host.run(20)), &bounds);
        let (missed, why) = found.misses.unzip();
        (found.holds, missed, why.unwrap_or_default().join(", "))
    }

    #[test]
    fn each_bound_finds_its_known_capacity() {
        let host = Host {
            fast: 240,
            fails: 10_000,
        };
        let (holds, misses, why) = found(&host, bounds(50.0, 1e6, 1e6));
        assert_eq!((holds, misses), (Some(240), Some(260)), "{why}");
        assert_eq!(why, "the P95 is 300.00 ms, above the bound of 50 ms");
        let (holds, misses, why) = found(&host, bounds(1e6, 800.0, 1e6));
        assert_eq!((holds, misses), (Some(200), Some(220)), "{why}");
        assert_eq!(why, "memory is 880.0 MB, above the bound of 800.0 MB");
        let (holds, misses, why) = found(&host, bounds(1e6, 1e6, 60.0));
        assert_eq!((holds, misses), (Some(120), Some(140)), "{why}");
        assert!(why.starts_with("idle CPU time is 70.0 ms"), "{why}");
        // With all bounds together, the tightest one decides.
        let (holds, ..) = found(&host, bounds(50.0, 800.0, 60.0));
        assert_eq!(holds, Some(120));
        let (holds, misses, _) = found(&host, bounds(1e6, 1e6, 1e6));
        assert_eq!((holds, misses), (Some(400), None), "all levels hold");
    }

    #[test]
    fn a_failed_start_ends_what_holds_and_counts_as_no_sandbox() {
        let host = Host {
            fast: 1000,
            fails: 150,
        };
        let summary = host.run(9);
        let levels = levels(&summary);
        let found = largest(&levels, &bounds(50.0, 1e6, 1e6));
        assert_eq!(found.holds, Some(140));
        let (missed, why) = found.misses.unwrap();
        assert_eq!(missed, 160, "the number that was tried");
        assert_eq!(why[0], "10 starts failed, so 150 are alive");
        let last = starts(&summary).pop().unwrap();
        assert_eq!((last.alive, last.first_exec_ns), (150, INFINITE));
    }

    #[test]
    fn a_round_whose_starts_all_fail_is_a_level_of_its_own() {
        let host = Host {
            fast: 1000,
            fails: 140,
        };
        let levels = levels(&host.run(8));
        let last = levels.last().unwrap();
        assert_eq!((last.alive, last.target, last.failed), (140, 160, 20));
        // The level that holds differs from the one that misses.
        let found = largest(&levels, &bounds(50.0, 1e6, 1e6));
        assert_eq!(found.holds, Some(140));
        assert_eq!(found.misses.unwrap().0, 160);
    }

    #[test]
    fn too_few_starts_and_unmeasured_values_decide_nothing() {
        let host = Host {
            fast: 1000,
            fails: 1000,
        };
        let mut summary = host.run(4);
        let found = largest(&levels(&summary), &bounds(50.0, 1e6, 1e6));
        assert_eq!((found.holds, found.misses), (None, None));
        assert_eq!(found.unknown, ["a P95 needs 100 starts, there were 80"]);
        summary.idle.clear();
        let idle = Bounds {
            idle_cpu_ms_per_s: Some(1.0),
            ..Bounds::default()
        };
        let found = largest(&levels(&summary), &idle);
        assert_eq!(found.unknown, ["idle CPU time was not measured"]);
    }

    #[test]
    fn scenarios_whose_sandboxes_end_have_no_levels() {
        let mut summary = Host {
            fast: 1,
            fails: 1000,
        }
        .run(2);
        assert_eq!(levels(&summary).len(), 2);
        if let Some(started) = &mut summary.started {
            started.scenario.hold.until = HoldUntil::Round;
        }
        assert!(levels(&summary).is_empty() && starts(&summary).is_empty());
    }
}
