//! Limits that are derived from a recorded run instead of being chosen.

use super::judge;
use crate::{
    host::grade::Grade,
    scenario::{GateSpec, Limit, Metric},
    summary::{fold::Summary, ratio},
};

/// Standard deviation of a value between runs of one build on one host, as a share. The interval of a run covers only
/// its own rounds. Memory: seven runs of `50-concurrent` in `results/` differ by 1.6 %, with five builds and two CPUs.
/// CPU time and times: runs in `results/` that share host and kernel differ by 2 to 6 % and by 1 to 10 %.
const MEMORY: f64 = 0.015;
const CPU: f64 = 0.025;
const TIME: f64 = 0.05;

/// The limit that a reference run gives a gate: 97.5 % of later runs of the same size are within it, if nothing changed.
/// `None` if the run does not give the metric an interval.
#[must_use]
pub fn limit(gate: &GateSpec, accepted: &Summary) -> Option<Limit> {
    let spread = match gate.metric {
        Metric::MemorySlope | Metric::MemoryRss | Metric::MemoryPss => MEMORY,
        Metric::CpuPerStart => CPU,
        // Both parts of a ratio are of the same run.
        Metric::BaselineRatio(..) | Metric::TurnRatio(_) => 0.0,
        _ => TIME,
    };
    let gates = std::slice::from_ref(gate);
    let found = judge(gates, accepted, Grade::Publishable, gate.host.as_deref()).pop()?;
    let (value, [_, high]) = (found.measured?, found.interval95?);
    let limit = ratio::limit_from(value, high, spread)?;
    Some(match gate.limit {
        Limit::Nanoseconds(_) => Limit::Nanoseconds(up(limit * 1e6, 10_000)),
        Limit::Bytes(_) => Limit::Bytes(up(limit, 10_000)),
        Limit::Times(_) => Limit::Times((limit * 100.0).ceil() / 100.0),
        Limit::Count(_) | Limit::AtLeast(_) | Limit::PerSecond(_) | Limit::Percent(_) => {
            return None;
        }
    })
}

/// Rounds a positive value up to a multiple of `step`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "positive, and far below 2^64"
)]
fn up(value: f64, step: u64) -> u64 {
    ((value / step as f64).ceil() as u64) * step
}
