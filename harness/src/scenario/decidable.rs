//! Finds gates that no run of their scenario can decide: such a run would take its minutes and end inconclusive.

use stats::{bootstrap::NEEDS_CLUSTERS, quantile::Quantile};

use super::{GateSpec, HoldUntil, Metric, OtherRow, Scenario, TargetKind, Timed};
use crate::{
    plan::{self, Row, Start, Subject},
    summary::fold::CLUSTERS,
};

/// Repetitions that the median of pairs of rounds needs.
const NEEDS_PAIRS: usize = 10;

/// A sentence with the cause and the cure for each gate of the scenario that cannot be decided.
#[must_use]
pub fn undecidable(scenario: &Scenario) -> Vec<String> {
    let planned = Planned::of(scenario);
    let gates = scenario.gates.iter();
    gates
        .filter_map(|gate| {
            let why = reason(gate.metric, scenario, &planned)?;
            let GateSpec { name, metric, .. } = gate;
            Some(format!("gate {name}: {metric} can never be decided: {why}"))
        })
        .collect()
}

/// The measured rounds of clones that a scenario plans.
struct Planned {
    rounds: usize,
    starts: usize,
    /// Clusters of the bootstrap, as [`crate::summary::fold`] makes them.
    clusters: usize,
}

impl Planned {
    fn of(scenario: &Scenario) -> Self {
        let plan = plan::build(scenario);
        let is_measured =
            |round: &&plan::Round| round.row == Row::Measured && round.subject == Subject::Clone;
        let rounds: Vec<&plan::Round> = plan.rounds.iter().filter(is_measured).collect();
        let parts = CLUSTERS.div_ceil(rounds.len().max(1));
        let clusters = rounds.iter().map(|round| {
            let n = round.arrivals.len();
            let first = round.arrivals.first();
            let is_burst = first != Some(&Start::WhenFree)
                && round.arrivals.iter().all(|start| Some(start) == first);
            let size = if is_burst { n } else { n.div_ceil(parts) };
            n.div_ceil(size.max(1))
        });
        Self {
            clusters: clusters.sum(),
            starts: rounds.iter().map(|round| round.arrivals.len()).sum(),
            rounds: rounds.len(),
        }
    }

    /// Why a quantile over all starts would have no value or no interval.
    fn quantile(&self, quantile: Quantile) -> Option<String> {
        let (needs, starts) = (quantile.needs(), self.starts);
        if starts < needs {
            return Some(format!(
                "it needs {needs} starts and the scenario has {starts}: raise rounds or arrival.starts, or use a lower quantile"
            ));
        }
        let few = quantile != Quantile::Max && self.clusters < NEEDS_CLUSTERS;
        few.then(|| self.few_rounds(NEEDS_CLUSTERS))
    }

    fn few_rounds(&self, needs: usize) -> String {
        let rounds = self.rounds;
        format!("it needs {needs} rounds and the scenario has {rounds}: raise rounds")
    }

    fn rounds(&self, needs: usize) -> Option<String> {
        (self.rounds < needs).then(|| self.few_rounds(needs))
    }
}

/// Why a metric can never be decided; `None` if it can.
fn reason(metric: Metric, scenario: &Scenario, planned: &Planned) -> Option<String> {
    match metric {
        // A turn that is an exchange has many samples for each start.
        Metric::Turn(number, _) | Metric::BaselineRatio(Timed::Turn(number), _)
            if is_exchange(scenario, number) =>
        {
            None
        }
        Metric::Phase(_, quantile)
        | Metric::Turn(_, quantile)
        | Metric::BaselineRatio(Timed::Phase(_) | Timed::Turn(_), quantile) => {
            planned.quantile(quantile)
        }
        Metric::Other(OtherRow::Beside, _, quantile) => because(
            scenario.beside().is_none(),
            "it has no comparison rounds: set mode.kind to \"beside\"",
        )
        .or_else(|| planned.quantile(quantile)),
        Metric::Other(OtherRow::Cold, _, quantile) => {
            let (needs, has) = (quantile.needs(), scenario.cold_rounds);
            let few = usize::try_from(has).is_ok_and(|has| has < needs);
            few.then(|| {
                format!(
                    "it needs {needs} cold starts and the scenario has {has}: raise cold_rounds"
                )
            })
        }
        Metric::Round(quantile) => planned.rounds(quantile.needs()),
        Metric::BaselineRatio(Timed::Round, quantile) => {
            planned.rounds(quantile.needs().max(NEEDS_CLUSTERS))
        }
        Metric::TurnRatio(_) => planned.rounds(NEEDS_PAIRS),
        Metric::Event(_, Quantile::Max) | Metric::EventCount(_) | Metric::Failures => None,
        Metric::Event(..) => planned.rounds(NEEDS_CLUSTERS),
        cost => reason_of_cost(cost, scenario, planned),
    }
}

/// The same for memory, CPU time, rates and counts of a server.
fn reason_of_cost(metric: Metric, scenario: &Scenario, planned: &Planned) -> Option<String> {
    let of_server = scenario.target.kind == TargetKind::E2b;
    let by_url = scenario.target.api_url.is_some();
    let has_pool = of_server && scenario.target.api_url.is_none() && scenario.target.warm > 0;
    match metric {
        Metric::MemorySlope => because(
            scenario.memory.is_none(),
            "memory is not measured: set memory.measure to true",
        )
        .or_else(|| planned.rounds(2)),
        Metric::NotWarm | Metric::HitRate => because(
            !of_server,
            "only a server reports warm starts: set target.kind to \"e2b\"",
        ),
        Metric::AfterHoldFailures => because(
            !scenario.hold.exec_after && scenario.hold.until != HoldUntil::Lifetime,
            "no command is repeated: set hold.exec_after to true",
        ),
        Metric::MemoryRss | Metric::MemoryPss => because(
            scenario.memory.is_none(),
            "memory is not measured: set memory.measure to true",
        )
        .or_else(|| because(by_url, "the processes of a server by URL are not visible: remove target.api_url"))
        .or_else(|| planned.rounds(NEEDS_CLUSTERS)),
        Metric::CpuPerStart => because(
            by_url,
            "the CPU time of a server by URL is not counted per start: remove target.api_url",
        )
        .or_else(|| {
            because(
                scenario.hold.until == HoldUntil::End && !of_server,
                "VMMs that outlive their round are not counted: set hold.until to \"round\" or \"exec\"",
            )
        })
        .or_else(|| planned.rounds(NEEDS_CLUSTERS)),
        Metric::SustainedRate => because(
            scenario.steady.is_none(),
            "it has one rate: set arrival.kind to \"steady\"",
        ),
        Metric::DensityAlive => because(
            scenario.hold.until != HoldUntil::End,
            "sandboxes do not accumulate: set hold.until to \"end\"",
        ),
        Metric::DrainRate => because(
            !of_server,
            "only a server has a pool: set target.kind to \"e2b\"",
        )
        .or_else(|| planned.rounds(NEEDS_CLUSTERS)),
        Metric::SustainableRate => because(
            scenario.hold.until != HoldUntil::Exec,
            "sandboxes are held: set hold.until to \"exec\"",
        )
        .or_else(|| {
            because(
                of_server && !has_pool,
                "the pool of the server is not visible: remove target.api_url and set target.warm",
            )
        })
        .or_else(|| planned.rounds(NEEDS_CLUSTERS)),
        _ => None,
    }
}

fn because(is_impossible: bool, why: &str) -> Option<String> {
    is_impossible.then(|| why.to_owned())
}

fn is_exchange(scenario: &Scenario, number: usize) -> bool {
    let turn = scenario.turns.get(number.saturating_sub(1));
    turn.is_some_and(|turn| turn.exchange.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::parse;

    fn why(text: &str, metric: &str, limit: &str) -> Option<String> {
        let gate = format!(
            "{text}\n[[gates]]\nname = \"g\"\nmetric = \"{metric}\"\nlimit = \"{limit}\"\n"
        );
        undecidable(&parse("t", &gate).unwrap()).pop()
    }

    #[test]
    fn a_quantile_needs_its_number_of_starts_and_enough_rounds_for_an_interval() {
        let closed = |starts: u32| format!("[arrival]\nkind = \"closed\"\nstarts = {starts}");
        let few = why(&closed(20), "first_exec.p99", "1s").unwrap();
        assert_eq!(
            few,
            "gate g: first_exec.p99 can never be decided: it needs 500 starts and the scenario has 20: raise rounds or \
             arrival.starts, or use a lower quantile"
        );
        assert_eq!(why(&closed(500), "first_exec.p99", "1s"), None);
        let burst =
            |rounds: u32| format!("rounds = {rounds}\n[arrival]\nkind = \"burst\"\nstarts = 100");
        let few = why(&burst(5), "first_exec.p95", "1s").unwrap();
        assert!(
            few.contains("needs 6 rounds and the scenario has 5"),
            "{few}"
        );
        assert_eq!(why(&burst(6), "first_exec.p95", "1s"), None);
        assert_eq!(why(&burst(1), "first_exec.max", "1s"), None);
        let few = why(&burst(9), "round.p50", "1s").unwrap();
        assert!(few.contains("needs 10 rounds"), "{few}");
    }

    #[test]
    fn a_value_that_is_not_measured_is_named_with_the_key_that_measures_it() {
        let cures = [
            ("", "memory.slope", "5MB", "memory.measure"),
            ("", "not_warm", "0", "target.kind"),
            ("", "drain_per_s", "1/s", "target.kind"),
            ("", "after_hold.failures", "0", "hold.exec_after"),
            ("", "sustainable_per_s", "1/s", "hold.until"),
            ("", "memory.rss", "6MB", "memory.measure"),
            ("", "cpu_per_start", "20ms", "raise rounds"),
            ("", "hit_rate", "99%", "target.kind"),
            ("", "sustained_per_s", "2/s", "arrival.kind"),
            ("", "density.alive", "500", "hold.until"),
            (
                "cold_rounds = 99",
                "cold.first_exec.p95",
                "60ms",
                "cold_rounds",
            ),
            ("", "beside.replied.p50", "5ms", "mode.kind"),
            (
                "[target]\nkind = \"e2b\"\napi_url = \"http://h\"\n[hold]\nuntil = \"exec\"",
                "sustainable_per_s",
                "1/s",
                "target.api_url",
            ),
        ];
        for (text, metric, limit, cure) in cures {
            let found = why(text, metric, limit).unwrap();
            assert!(found.contains(cure), "{metric}: {found}");
        }
        let measured = "rounds = 2\n[hold]\nuntil = \"round\"\n[memory]\nmeasure = true";
        assert_eq!(why(measured, "memory.slope", "5MB"), None);
    }
}
