//! The metrics that are compared, and their raw samples in a block.

use model::StartPhase;
use stats::rank::nearest_rank;

use crate::{
    event::CloneLedger,
    plan::Subject,
    scenario::{Arrival, Quantile, Scenario},
    summary::{
        cost::{self, whole},
        fold::Summary,
        turns,
    },
};
use stats::quantile::{INFINITE, Samples};

/// Number of samples that a block needs for its P95. With fewer samples, nearest rank returns the maximum.
const BLOCK_NEEDS_P95: usize = 20;

/// Source of the samples of a metric. Times are in nanoseconds, memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Source {
    /// Latency of a phase, from the intended start.
    Phase(StartPhase),
    /// Times of the turn at this index.
    Turn(usize),
    /// Page faults of the VMM from its start to the first turn.
    StartFaults,
    /// Page faults of the VMM during the turn at this index.
    TurnFaults(usize),
    /// Private pages of a clone: guest memory and VMM.
    PrivateBytes,
    /// Proportional set size of a VMM.
    PssBytes,
    /// Decrease of available memory per additional clone; one sample for each block.
    MemorySlope,
    /// CPU time per start of the server with its VMs, or of the VMMs; one sample for each block.
    CpuPerStart,
    /// Starts per second, in thousandths; one sample for each block. The only source for which more is better.
    StartsPerSecond,
}

/// One quantile of a source.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Metric {
    pub(super) name: String,
    pub(super) source: Source,
    pub(super) quantile: Quantile,
}

impl Source {
    /// Samples of one block. A latency or turn time that was not reached is [`INFINITE`]; other values that could
    /// not be read are absent.
    pub(super) fn samples(self, summary: &Summary) -> Vec<u64> {
        let clones = &summary.clones;
        match self {
            Self::Phase(phase) => summary.phase(phase).all().to_vec(),
            Self::Turn(index) => turns::latencies(clones, index).all().to_vec(),
            Self::StartFaults => clones.iter().filter_map(|clone| clone.faults).collect(),
            Self::TurnFaults(index) => clones
                .iter()
                .filter_map(|clone| clone.turns.get(index)?.faults)
                .collect(),
            Self::PrivateBytes => summary.ledgers.iter().filter_map(private_bytes).collect(),
            Self::PssBytes => summary.ledgers.iter().filter_map(|l| l.pss_bytes).collect(),
            Self::MemorySlope => memory_slope(summary).into_iter().collect(),
            Self::CpuPerStart => {
                let rate = cost::cpu_ns_per_start(summary, Subject::Clone);
                rate.value().and_then(whole).into_iter().collect()
            }
            Self::StartsPerSecond => starts_per_s(summary).into_iter().collect(),
        }
    }

    /// Unit of the metric in a report, and the factor by which samples are divided to convert them to this unit.
    pub(super) fn unit(self) -> (&'static str, f64) {
        match self {
            Self::Phase(_) | Self::Turn(_) => ("ms", 1e6),
            Self::StartFaults | Self::TurnFaults(_) => ("faults", 1.0),
            Self::PrivateBytes | Self::PssBytes | Self::MemorySlope => ("MB", 1e6),
            Self::CpuPerStart => ("ms", 1e6),
            Self::StartsPerSecond => ("per s", 1e3),
        }
    }
}

impl Metric {
    /// Whether a larger value is better.
    pub(super) fn is_rate(&self) -> bool {
        matches!(self.source, Source::StartsPerSecond)
    }

    /// All metrics that a scenario can have. Metrics without samples are dropped later.
    pub(super) fn all(scenario: &Scenario) -> Vec<Self> {
        let mut metrics = Vec::new();
        let mut add = |name: &str, source, quantiles: &[Quantile]| {
            metrics.extend(quantiles.iter().map(|quantile| Self {
                name: format!("{name}.{}", quantile.name()),
                source,
                quantile: *quantile,
            }));
        };
        let times = [Quantile::P50, Quantile::P95];
        for phase in StartPhase::ALL {
            add(phase.name(), Source::Phase(phase), &times);
        }
        let median = [Quantile::P50];
        add("first_exec.faults", Source::StartFaults, &median);
        for index in 0..scenario.turns.len() {
            let number = index + 1;
            add(&format!("turn.{number}"), Source::Turn(index), &times);
            let faults = format!("turn.{number}.faults");
            add(&faults, Source::TurnFaults(index), &median);
        }
        add("memory.private", Source::PrivateBytes, &median);
        add("memory.pss", Source::PssBytes, &median);
        add("memory.slope", Source::MemorySlope, &median);
        add("cpu_per_start", Source::CpuPerStart, &median);
        if !matches!(scenario.arrival, Arrival::Open { .. }) {
            // The rate of an open loop is part of the scenario.
            add("starts_per_s", Source::StartsPerSecond, &median);
        }
        metrics
    }

    /// Quantile over all blocks of a build; `None` with too few samples, or if it is zero or lies among failures.
    pub(super) fn pooled(&self, samples: Vec<u64>) -> Option<f64> {
        let needs = match self.source {
            Source::MemorySlope | Source::CpuPerStart | Source::StartsPerSecond => 1,
            _ => self.quantile.needs(),
        };
        let samples = Samples::new(samples);
        finite(&samples, self.quantile).filter(|_| samples.n() >= needs)
    }

    /// Quantile of one block; `None` with too few samples, or if it is zero or lies among failures.
    pub(super) fn of_block(&self, samples: Vec<u64>) -> Option<f64> {
        let needs = match self.quantile {
            Quantile::P95 | Quantile::P99 => BLOCK_NEEDS_P95,
            Quantile::P50 | Quantile::Max => 1,
        };
        let samples = Samples::new(samples);
        finite(&samples, self.quantile).filter(|_| samples.n() >= needs)
    }
}

fn finite(samples: &Samples, quantile: Quantile) -> Option<f64> {
    let value = nearest_rank(samples.all(), quantile.permille())?;
    (value != INFINITE && value > 0).then_some(value as f64)
}

fn private_bytes(ledger: &CloneLedger) -> Option<u64> {
    Some(ledger.guest_private_bytes? + ledger.vmm_private_bytes?)
}

/// Successful starts over the time of measured rounds, in thousandths of a start per second.
fn starts_per_s(summary: &Summary) -> Option<u64> {
    let mut seconds = 0.0;
    for times in summary.rounds.values() {
        seconds += times.end_ns?.saturating_sub(times.base_ns) as f64 / 1e9;
    }
    let started = summary.clones.iter().filter(|a| a.failure.is_none());
    whole(started.count() as f64 / seconds * 1e3)
}

/// The slope in bytes. `None` for a slope below one byte, which is noise of the host and cannot be used in a ratio.
fn memory_slope(summary: &Summary) -> Option<u64> {
    whole(summary.memory_slope()?.value)
}
