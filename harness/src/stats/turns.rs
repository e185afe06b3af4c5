//! What clones did after their first command: times and page faults of each turn, and what a clone pays until
//! it works as fast as a warm VM.

use super::quantile::{INFINITE, Samples};
use crate::event::{Attempt, Exchanged, Turn};

/// Times of the turn at `index`: of each start from its question to its answer, of an exchange all that was measured in
/// it. A start that did not get there, or got a wrong answer, is one [`INFINITE`].
#[must_use]
pub fn latencies(attempts: &[Attempt], index: usize) -> Samples {
    Samples::new(attempts.iter().flat_map(|a| times(a, index)).collect())
}

/// The same of one start.
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

/// Of the exchange at `index`, all times until a change of the policy was felt; empty where there was none.
#[must_use]
pub fn effects(attempts: &[Attempt], index: usize) -> Samples {
    let exchanges = exchanges(attempts, index);
    Samples::new(exchanges.flat_map(|e| e.effects_ns.clone()).collect())
}

/// Bytes that each exchange at `index` moved; `None` where that was not measured.
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

/// Mean page faults of the turn at `index` over those that know; `None` if none does.
#[must_use]
pub fn mean_faults(attempts: &[Attempt], index: usize) -> Option<f64> {
    mean(attempts.iter().filter_map(|a| a.turns.get(index)?.faults))
}

/// Mean page faults up to first exec; `None` if nobody knows them.
#[must_use]
pub fn mean_faults_to_first_exec(attempts: &[Attempt]) -> Option<f64> {
    mean(attempts.iter().filter_map(|attempt| attempt.faults))
}

/// What clones paid for being new: of each, the time of all its turns less as many warm ones. Only where all
/// `turns` of a clone are the same work. A clone that did not do them all is [`INFINITE`].
#[must_use]
pub fn tax(attempts: &[Attempt], turns: usize) -> Samples {
    let ns = attempts
        .iter()
        .map(|attempt| excess(attempt, turns, |turn| Some(turn.took_ns)).unwrap_or(INFINITE));
    Samples::new(ns.collect())
}

/// The same in page faults, as a mean over the clones that know.
#[must_use]
pub fn mean_tax_faults(attempts: &[Attempt], turns: usize) -> Option<f64> {
    mean(
        attempts
            .iter()
            .filter_map(|a| excess(a, turns, |t| t.faults)),
    )
}

/// The sum over all turns less as many times the median of the later half: that is the warm VM. Zero where a
/// clone was faster in its first turns. `None` if a turn is missing.
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

    /// A measured clone that took these turns.
    pub(crate) fn attempt_with(turns: Vec<Turn>) -> Attempt {
        Attempt {
            round: 0,
            subject: Subject::Clone,
            row: Row::Measured,
            arrival: 0,
            intended_ns: 0,
            actual_ns: 0,
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
    fn the_tax_is_what_a_warm_vm_would_not_have_paid() {
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
