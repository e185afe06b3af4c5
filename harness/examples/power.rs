//! How likely gates and `cube-bench ab` catch a regression, from recorded runs. Prints a Markdown table:
//!
//! ```text
//! cargo run -p harness --example power
//! ```
//! Each trial is a new run: rounds of a recorded one, sampled with replacement, so their spread and shape are those of a
//! real host. Then all stamps, the memory of a clone, or the CPU time are multiplied. Differences between runs that
//! rounds of one run do not show are not simulated.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a development tool on the files of this repository, with positive values far below 2^64"
)]

use std::path::Path;

use harness::{
    ab::{
        Side,
        builds::Build,
        order,
        record::{AbPlan, Block, FORMAT, Recorded},
        report::AbReport,
        sequential,
    },
    event::{Attempt, MemoryPoint, Spent},
    gate::{self, Verdict},
    host::{facts::HostFacts, grade::Grade},
    plan::Subject,
    scenario::{self, HoldUntil, Limit, Scenario},
    session::RecordedRun,
    summary::fold::{RoundTimes, Summary, available},
};
use model::Timeline;
use stats::random::SplitMix64;
use testbed::exit::End;

const SEEDS: u64 = 20;
const FACTORS: [f64; 4] = [1.0, 1.05, 1.1, 1.2];
/// Scenarios with the recorded run of each.
const RUNS: [(&str, &str); 4] = [
    ("single-api", "single-api-ring3-2core-20261124"),
    ("50-concurrent", "50-concurrent-ring3-2core-20261124"),
    ("code-interpreter", "code-interpreter-ring3-2core-20261122"),
    ("density", "density-ring3-2core-20261122"),
];

/// What a regression multiplies.
#[derive(Clone, Copy)]
struct Factors {
    time: f64,
    memory: f64,
    cpu: f64,
}

/// One measured round of a recorded run.
#[derive(Clone)]
struct Repetition {
    clones: Vec<Attempt>,
    spent: Vec<Spent>,
    memory: Vec<MemoryPoint>,
    times: Option<RoundTimes>,
}

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    println!("| scenario | gate or rule | regression of | A/A | +5 % | +10 % | +20 % |");
    println!("|---|---|---|--:|--:|--:|--:|");
    for (name, run) in RUNS {
        let scenario = scenario::load(&root.join(format!("scenarios/{name}.toml")), None).unwrap();
        let recorded = RecordedRun::read(&root.join("results").join(run)).unwrap();
        let repetitions = repetitions(&recorded.summary);
        gates(&scenario, &recorded, &repetitions);
        // Rounds in which clones accumulate cannot be blocks of a comparison.
        if scenario.hold.until != HoldUntil::End {
            ab(&scenario, &recorded, &repetitions);
        }
    }
}

/// A row for each gate with a limit on a time, a size or CPU time: how often it is not met, so that the run does not pass.
fn gates(scenario: &Scenario, recorded: &RecordedRun, repetitions: &[Repetition]) {
    let class = recorded.facts.class();
    for gate in &scenario.gates {
        let of = match gate.limit {
            Limit::Bytes(_) => "memory",
            Limit::Nanoseconds(_) if gate.metric.to_string() == "cpu_per_start" => "CPU",
            Limit::Nanoseconds(_) | Limit::Times(_) => "time",
            Limit::Count(_) | Limit::AtLeast(_) | Limit::PerSecond(_) | Limit::Percent(_) => {
                continue;
            }
        };
        let caught = |factor: f64, seed: u64| {
            let summary = resampled(
                scenario,
                &recorded.summary,
                repetitions,
                factors(of, factor),
                seed,
            );
            let one = std::slice::from_ref(gate);
            let judged = gate::judge(one, &summary, Grade::Indicative, Some(class.as_str()));
            judged[0].verdict != Verdict::Met
        };
        let what = format!("gate `{}` {}", gate.metric, limit(&gate.limit));
        let hits = FACTORS.map(|factor| (0..SEEDS).filter(|seed| caught(factor, *seed)).count());
        row(&scenario.name, &what, of, hits);
    }
}

fn limit(limit: &Limit) -> String {
    match limit {
        Limit::Nanoseconds(ns) => format!("{} ms", *ns as f64 / 1e6),
        Limit::Bytes(bytes) => format!("{} MB", *bytes as f64 / 1e6),
        other => format!("{other:?}"),
    }
}

/// A row for each kind of regression, for a comparison of 12 blocks with the default primary metrics.
fn ab(scenario: &Scenario, recorded: &RecordedRun, repetitions: &[Repetition]) {
    let has_cpu = repetitions.iter().any(|r| !r.spent.is_empty());
    let has_memory = repetitions.iter().any(|r| !r.memory.is_empty());
    let kinds = [("time", true), ("CPU", has_cpu), ("memory", has_memory)];
    for (of, _) in kinds.into_iter().filter(|(_, is_measured)| *is_measured) {
        let ended = |factor| {
            let seeds = 0..SEEDS;
            let factors = factors(of, factor);
            let ends =
                seeds.map(|seed| compared(scenario, &recorded.facts, repetitions, factors, seed));
            ends.collect::<Vec<End>>()
        };
        let ends = FACTORS.map(ended);
        for (what, end) in [
            ("worse", End::GateFailed),
            ("inconclusive", End::Inconclusive),
        ] {
            let hits = ends
                .each_ref()
                .map(|ends| ends.iter().filter(|found| **found == end).count());
            let what = format!("`ab`, 12 blocks: {what}");
            row(&scenario.name, &what, of, hits);
        }
    }
}

fn factors(of: &str, factor: f64) -> Factors {
    let only = |name| if of == name { factor } else { 1.0 };
    Factors {
        time: only("time"),
        memory: only("memory"),
        cpu: only("CPU"),
    }
}

fn row(scenario: &str, what: &str, of: &str, hits: [usize; 4]) {
    let shares = hits.map(|hits| format!("{} %", hits as u64 * 100 / SEEDS));
    println!("| {scenario} | {what} | {of} | {} |", shares.join(" | "));
}

fn repetitions(summary: &Summary) -> Vec<Repetition> {
    let rounds = summary.rounds.iter();
    rounds
        .map(|(round, times)| Repetition {
            clones: (summary.clones.iter())
                .filter(|a| a.round == *round)
                .cloned()
                .collect(),
            spent: (summary.spent.iter())
                .filter(|s| s.round == *round && s.subject == Subject::Clone && s.cpu_ns.is_some())
                .copied()
                .collect(),
            memory: (summary.memory.iter())
                .filter(|p| p.group == *round)
                .cloned()
                .collect(),
            times: Some(*times),
        })
        .collect()
}

/// A run of the scenario's number of rounds.
fn resampled(
    scenario: &Scenario,
    recorded: &Summary,
    repetitions: &[Repetition],
    factors: Factors,
    seed: u64,
) -> Summary {
    let mut random = SplitMix64::new(seed);
    let mut summary = Summary {
        started: recorded.started.clone(),
        ..Summary::default()
    };
    for round in 0..scenario.rounds {
        let chosen = &repetitions[random.below(repetitions.len())];
        add(&mut summary, changed(chosen, factors), round);
    }
    let groups: std::collections::BTreeSet<u32> = recorded.memory.iter().map(|p| p.group).collect();
    if groups.len() == 1 {
        summary.memory = accumulated(recorded, factors.memory, &mut random);
    }
    summary
}

/// A series of samples with growing numbers of clones: its steps, sampled with replacement.
fn accumulated(recorded: &Summary, factor: f64, random: &mut SplitMix64) -> Vec<MemoryPoint> {
    let steps = recorded.memory_steps();
    let mut bytes = 1e12;
    let mut points = recorded.memory.clone();
    let mut alive = 0;
    for point in &mut points {
        let added = point.alive.saturating_sub(alive);
        alive = point.alive;
        bytes -= steps[random.below(steps.len())] * factor * f64::from(added);
        point.meminfo = [("MemAvailable".to_owned(), bytes as u64)].into();
    }
    points
}

fn changed(repetition: &Repetition, factors: Factors) -> Repetition {
    let mut changed = repetition.clone();
    for clone in &mut changed.clones {
        let mut timeline = Timeline::default();
        for (phase, at) in clone.timeline.iter() {
            let took = at.saturating_sub(clone.intended_ns) as f64 * factors.time;
            timeline.stamp(phase, clone.intended_ns + took as u64);
        }
        clone.timeline = timeline;
        for turn in &mut clone.turns {
            turn.took_ns = (turn.took_ns as f64 * factors.time) as u64;
        }
    }
    for spent in &mut changed.spent {
        spent.cpu_ns = spent.cpu_ns.map(|ns| (ns as f64 * factors.cpu) as u64);
    }
    let empty = changed
        .memory
        .iter()
        .find(|point| point.alive == 0)
        .and_then(available);
    for point in changed.memory.iter_mut().filter(|point| point.alive > 0) {
        if let (Some(empty), Some(now)) = (empty, available(point)) {
            let bytes = empty - (empty - now) * factors.memory;
            point.meminfo = [("MemAvailable".to_owned(), bytes as u64)].into();
        }
    }
    changed
}

fn add(summary: &mut Summary, repetition: Repetition, round: u32) {
    let Repetition {
        clones,
        spent,
        memory,
        times,
    } = repetition;
    summary
        .clones
        .extend(clones.into_iter().map(|a| Attempt { round, ..a }));
    summary
        .spent
        .extend(spent.into_iter().map(|s| Spent { round, ..s }));
    let points = memory
        .into_iter()
        .map(|p| MemoryPoint { group: round, ..p });
    summary.memory.extend(points);
    summary.rounds.extend(times.map(|times| (round, times)));
}

fn compared(
    scenario: &Scenario,
    host: &HostFacts,
    repetitions: &[Repetition],
    factors: Factors,
    seed: u64,
) -> End {
    let blocks = 12;
    let mut random = SplitMix64::new(seed);
    let none = Factors {
        time: 1.0,
        memory: 1.0,
        cpu: 1.0,
    };
    let block = |(index, side): (usize, Side)| {
        let chosen = &repetitions[random.below(repetitions.len())];
        let mut summary = Summary::default();
        let factors = if side == Side::B { factors } else { none };
        add(&mut summary, changed(chosen, factors), 0);
        Block {
            side,
            pair: index / 2,
            summary,
        }
    };
    let build = |name: &str| Build::find(Path::new(name), scenario).unwrap();
    let recorded = Recorded {
        blocks: order(blocks).into_iter().enumerate().map(block).collect(),
        plan: AbPlan {
            format: FORMAT,
            scenario: scenario.clone(),
            scenario_b: None,
            a: build("http://a"),
            b: build("http://b"),
            blocks,
            seed,
            tolerance: 0.02,
            primary: Vec::new(),
            looks: sequential::looks(blocks),
            margin: None,
            reproduce: String::new(),
            started_unix_ms: 0,
        },
        left_out: 0,
        disturbed: 0,
        host: Some(HostFacts {
            debug_build: false,
            ..host.clone()
        }),
    };
    AbReport::new(&recorded).1
}
