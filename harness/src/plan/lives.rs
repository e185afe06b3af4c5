//! Lifetimes and templates of arrivals, random by seed or from a trace.

use std::time::Duration;

use stats::random::SplitMix64;

use super::{MAX_OPEN_WORKERS, Round, Row, Start, Subject};
use crate::scenario::{Lifetime, MixSpec, Scenario};

/// A separate sequence of random numbers, so that arrivals do not depend on whether there are lifetimes.
const SEQUENCE: u64 = 0x6c69_7665;

/// Adds the scenario's trace arrivals to all rounds except cold ones, and its lifetimes and templates to rounds of
/// clones.
pub(super) fn add(scenario: &Scenario, rounds: &mut [Round]) {
    let mut random = SplitMix64::new(scenario.seed ^ SEQUENCE);
    for round in rounds.iter_mut().filter(|round| round.row != Row::Cold) {
        if let Some(trace) = scenario.trace() {
            let at = |ms: u64| Start::AtNs(ms * 1_000_000);
            let requests = || trace.requests.iter();
            round.arrivals = requests().map(|request| at(request.arrival_ms)).collect();
            let count = u32::try_from(round.arrivals.len()).unwrap_or(u32::MAX);
            round.workers = count.clamp(1, MAX_OPEN_WORKERS);
            if round.subject == Subject::Clone {
                round.lifetimes_ms = requests().map(|request| request.lifetime_ms).collect();
                if !scenario.templates().is_empty() {
                    round.templates = requests().map(|request| request.template).collect();
                }
            }
            continue;
        }
        if round.subject != Subject::Clone {
            continue;
        }
        for _ in 0..round.arrivals.len() {
            if let Some(lifetime) = scenario.lifetime {
                round.lifetimes_ms.push(drawn_ms(lifetime, &mut random));
            }
            if !scenario.templates().is_empty() {
                round
                    .templates
                    .push(drawn_template(scenario.templates(), &mut random));
            }
        }
    }
}

fn drawn_ms(lifetime: Lifetime, random: &mut SplitMix64) -> u64 {
    let (least, most) = (lifetime.least.as_secs_f64(), lifetime.most.as_secs_f64());
    let drawn = Duration::from_secs_f64(least + random.unit() * (most - least));
    u64::try_from(drawn.as_millis()).unwrap_or(u64::MAX)
}

fn drawn_template(mix: &[MixSpec], random: &mut SplitMix64) -> u16 {
    let all: u64 = mix.iter().map(|of| u64::from(of.weight)).sum();
    let mut left = random.next_u64() % all.max(1);
    for (n, of) in (0..).zip(mix) {
        let weight = u64::from(of.weight);
        if left < weight {
            return n;
        }
        left -= weight;
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{plan, scenario};

    const TEXT: &str = "seed = 5\nrounds = 2\n[target]\nkind = 'e2b'\n[hold]\nuntil = 'lifetime'\nlifetime = '10s..120s'\n\
        [arrival]\nkind = 'open'\nstarts = 4000\nrate_per_s = 50\n[mode]\nkind = 'mix'\n[[mode.templates]]\ntemplate = 'a'\nweight = 6\n\
        [[mode.templates]]\ntemplate = 'b'\nweight = 3\n[[mode.templates]]\ntemplate = 'c'";

    #[test]
    fn lifetimes_are_uniform_and_templates_have_their_weights() {
        let s = scenario::parse("t", TEXT).unwrap();
        let plan = plan::build(&s);
        assert_eq!(plan, plan::build(&s), "the same seed gives the same plan");
        let clones = |plan: &plan::Plan| -> Vec<Round> {
            let rounds = plan.rounds.iter().cloned();
            rounds
                .filter(|r| r.subject == Subject::Clone && r.row == Row::Measured)
                .collect()
        };
        let rounds = clones(&plan);
        let lives: Vec<u64> = rounds.iter().flat_map(|r| r.lifetimes_ms.clone()).collect();
        assert_eq!(lives.len(), 8000);
        assert!(lives.iter().all(|ms| (10_000..=120_000).contains(ms)));
        let mean = lives.iter().sum::<u64>() as f64 / 8000.0;
        // The standard error of the mean is 355 ms.
        assert!((mean - 65_000.0).abs() < 1800.0, "{mean}");
        for (n, share) in [(0, 0.6), (1, 0.3), (2, 0.1)] {
            let templates = rounds.iter().flat_map(|r| &r.templates);
            let found = templates.filter(|t| **t == n).count() as f64 / 8000.0;
            assert!((found - share).abs() < 0.03, "{n}: {found}");
        }
        for other in plan.rounds.iter().filter(|r| r.subject != Subject::Clone) {
            assert!(other.lifetimes_ms.is_empty() && other.templates.is_empty());
        }
        // The arrivals equal those of the scenario without lifetimes and mix.
        let plain = "seed = 5\nrounds = 2\n[target]\nkind = 'e2b'\n[arrival]\nkind = 'open'\nstarts = 4000\nrate_per_s = 50";
        let plain = clones(&plan::build(&scenario::parse("t", plain).unwrap()));
        assert_eq!(plain[1].arrivals, rounds[1].arrivals);
        assert_ne!(rounds[0].lifetimes_ms, rounds[1].lifetimes_ms);
    }
}
