//! Times and page faults of turns, and the tax: extra time or page faults of a new clone until it is as fast as a
//! warm VM.

use super::fold::clusters;
use crate::event::{Attempt, Exchanged, Turn};
use stats::quantile::{INFINITE, Samples};

/// Times of the turn at `index` over all starts. For a command, a cell or a denied exchange, each start contributes
/// one time; for other exchanges, it contributes all times of the peer. A start whose turn failed or was not
/// reached contributes one [`INFINITE`].
#[must_use]
pub fn latencies(attempts: &[Attempt], index: usize) -> Samples {
    Samples::clustered(&clusters(attempts.iter(), |a| times(a, index)))
}

/// Times of the turn at `index` of one start, as in [`latencies`].
#[must_use]
pub fn times(attempt: &Attempt, index: usize) -> Vec<u64> {
    match attempt.turns.get(index) {
        None => vec![INFINITE],
        Some(turn) => match &turn.exchange {
            None => vec![turn.took_ns],
            Some(exchanged) => exchanged.times_ns.clone(),
        },
    }
}

/// Times until a policy change took effect, over all exchanges at `index`; empty unless the exchange is `churn`.
#[must_use]
pub fn effects(attempts: &[Attempt], index: usize) -> Samples {
    let exchanges = exchanges(attempts, index);
    Samples::new(exchanges.flat_map(|e| e.effects_ns.clone()).collect())
}

/// Bytes that each connection of the exchange at `index` transferred; `None` unless the exchange is `send` or
/// `receive`.
#[must_use]
pub fn bytes(attempts: &[Attempt], index: usize) -> Option<u64> {
    let mut exchanges = exchanges(attempts, index);
    exchanges.next().map(|e| e.bytes).filter(|bytes| *bytes > 0)
}

fn exchanges(attempts: &[Attempt], index: usize) -> impl Iterator<Item = &Exchanged> {
    attempts
        .iter()
        .filter_map(move |a| a.turns.get(index)?.exchange.as_ref())
}

/// Mean page faults of the turn at `index`; `None` if no start recorded them.
#[must_use]
pub fn mean_faults(attempts: &[Attempt], index: usize) -> Option<f64> {
    mean(attempts.iter().filter_map(|a| a.turns.get(index)?.faults))
}

/// Mean page faults from the start of the VMM to the first turn; `None` if no start recorded them.
#[must_use]
pub fn mean_faults_to_first_exec(attempts: &[Attempt]) -> Option<f64> {
    mean(attempts.iter().filter_map(|attempt| attempt.faults))
}

/// The tax of each clone in nanoseconds: the time of all its turns minus the time of the same number of warm turns.
/// Meaningful only if all `turns` do the same work. A clone that did not complete all turns counts as [`INFINITE`].
#[must_use]
pub fn tax(attempts: &[Attempt], turns: usize) -> Samples {
    Samples::clustered(&clusters(attempts.iter(), |attempt| {
        vec![excess(attempt, turns, |turn| Some(turn.took_ns)).unwrap_or(INFINITE)]
    }))
}

/// The mean tax in page faults; `None` if no clone recorded page faults for all turns.
#[must_use]
pub fn mean_tax_faults(attempts: &[Attempt], turns: usize) -> Option<f64> {
    mean(
        attempts
            .iter()
            .filter_map(|a| excess(a, turns, |t| t.faults)),
    )
}

/// The sum over all turns minus `turns` times the median of the later half, which represents a warm VM. Zero if the
/// difference is negative; `None` if a value is missing.
fn excess(attempt: &Attempt, turns: usize, value: impl Fn(&Turn) -> Option<u64>) -> Option<u64> {
    let values: Vec<u64> = attempt.turns.iter().filter_map(value).collect();
    if values.len() != turns {
        return None;
    }
    let mut warm = values[turns / 2..].to_vec();
    warm.sort_unstable();
    let warm = *warm.get(warm.len().saturating_sub(1) / 2)?;
    let all: u64 = values.iter().sum();
    Some(all.saturating_sub(warm.saturating_mul(turns as u64)))
}

fn mean(values: impl Iterator<Item = u64>) -> Option<f64> {
    let values: Vec<u64> = values.collect();
    (!values.is_empty()).then(|| values.iter().sum::<u64>() as f64 / values.len() as f64)
}

#[cfg(test)]
pub(crate) mod tests {
    use model::Timeline;

    use super::*;
    use crate::plan::{Row, Subject};

    /// A measured clone that ran these turns.
    pub(crate) fn attempt_with(turns: Vec<Turn>) -> Attempt {
        Attempt {
            round: 0,
            subject: Subject::Clone,
            row: Row::Measured,
            arrival: 0,
            intended_ns: 0,
            actual_ns: 0,
            work: None,
            template: None,
            timeline: Timeline::default(),
            start: None,
            faults: None,
            turns,
            failure: None,
            ended_ns: 0,
        }
    }

    fn attempt(turns: &[(u64, Option<u64>)]) -> Attempt {
        let turn = |(took_ns, faults): &(u64, Option<u64>)| Turn {
            took_ns: *took_ns,
            faults: *faults,
            exchange: None,
        };
        attempt_with(turns.iter().map(turn).collect())
    }

    #[test]
    fn the_tax_is_the_time_beyond_that_of_a_warm_vm() {
        let paid = attempt(&[(50, Some(9)), (20, Some(3)), (11, Some(1)), (10, Some(1))]);
        assert_eq!(excess(&paid, 4, |t| Some(t.took_ns)), Some(91 - 40));
        assert_eq!(excess(&paid, 4, |t| t.faults), Some(14 - 4));
        let even = attempt(&[(10, None), (12, None)]);
        assert_eq!(excess(&even, 2, |t| Some(t.took_ns)), Some(0));
        assert_eq!(mean_tax_faults(std::slice::from_ref(&even), 2), None);
        let short = [paid, attempt(&[(1, None)])];
        assert_eq!(tax(&short, 4).failed(), 1, "a clone that did not finish");
        assert_eq!(latencies(&short, 1).failed(), 1);
        assert_eq!(mean_faults(&short, 0), Some(9.0));
    }
}
