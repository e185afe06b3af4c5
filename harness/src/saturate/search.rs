//! The search for the highest rate that a target sustains.
//!
//! ```text
//! rate ─► trial ─► Holds        doubled, until a trial does not hold
//!              └─► Misses       then bisected between the highest that held and the lowest that missed
//!              └─► Generator    the harness itself was late: no statement about the target; the search ends
//! ```
//! The search is a pure function of its trials. A rate holds if no start failed and the P95 is within the bound.

use serde::{Deserialize, Serialize};

/// Bounds and limits of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Search {
    /// First rate, in starts per second.
    pub from_per_s: f64,
    /// Highest rate to try.
    pub to_per_s: f64,
    /// The search ends when the lowest rate that missed exceeds the highest that held by at most this share.
    pub precision: f64,
    /// Number of trials of a rate, which decide by majority. It is odd, because single trials near the capacity
    /// vary.
    pub repeats: u32,
}

/// Result of one trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// All starts succeeded, and the P95 is within the bound.
    Holds,
    /// A start failed, or the P95 exceeds the bound.
    Misses,
    /// The harness started too late although workers were free: the harness itself is saturated.
    Generator,
}

/// Reason for the end of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// The capacity lies between the two rates.
    Found,
    /// Even the first rate missed.
    BelowFirst,
    /// The highest rate held.
    AboveLast,
    /// The harness was saturated: the capacity is at least the highest rate that held.
    Generator,
}

/// Result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saturation {
    /// Highest rate that held, in starts per second; 0 if none did.
    pub held_per_s: f64,
    /// Lowest rate that missed; `null` if none did.
    pub missed_per_s: Option<f64>,
    pub ended: Ended,
}

impl Search {
    /// Runs the search. `trial` measures one rate.
    ///
    /// # Errors
    /// Returns the first error of a trial.
    pub fn run<E>(
        &self,
        mut trial: impl FnMut(f64) -> Result<Verdict, E>,
    ) -> Result<Saturation, E> {
        let mut held = 0.0;
        let mut missed: Option<f64> = None;
        let mut rate = self.from_per_s;
        let ended = loop {
            match self.majority(rate, &mut trial)? {
                Verdict::Holds => held = rate,
                Verdict::Misses => missed = Some(rate),
                Verdict::Generator => break Ended::Generator,
            }
            rate = match missed {
                None if held >= self.to_per_s => break Ended::AboveLast,
                None => (held * 2.0).min(self.to_per_s),
                Some(_) if held == 0.0 => break Ended::BelowFirst,
                Some(missed) if missed <= held * (1.0 + self.precision) => break Ended::Found,
                Some(missed) => f64::midpoint(held, missed),
            };
        };
        Ok(Saturation {
            held_per_s: held,
            missed_per_s: missed,
            ended,
        })
    }

    fn majority<E>(
        &self,
        rate: f64,
        trial: &mut impl FnMut(f64) -> Result<Verdict, E>,
    ) -> Result<Verdict, E> {
        let (mut holds, mut misses) = (0, 0);
        while holds.max(misses) * 2 <= self.repeats {
            match trial(rate)? {
                Verdict::Holds => holds += 1,
                Verdict::Misses => misses += 1,
                Verdict::Generator => return Ok(Verdict::Generator),
            }
        }
        Ok(if holds > misses {
            Verdict::Holds
        } else {
            Verdict::Misses
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stats::random::SplitMix64;

    /// A server with a token bucket: `capacity` tokens per second and room for `burst` of them. A start takes a
    /// token, or waits for one. Time is simulated.
    struct TokenBucket {
        capacity: f64,
        burst: f64,
        random: SplitMix64,
    }

    impl TokenBucket {
        /// P95 of the waits of `starts` Poisson arrivals.
        fn p95_s(&mut self, rate: f64, starts: usize) -> f64 {
            let (mut now, mut tokens, mut last) = (0.0_f64, self.burst, 0.0_f64);
            let mut waits: Vec<f64> = (0..starts)
                .map(|_| {
                    now += self.random.exponential() / rate;
                    tokens = (tokens + (now - last) * self.capacity).min(self.burst) - 1.0;
                    last = now;
                    (-tokens / self.capacity).max(0.0)
                })
                .collect();
            waits.sort_by(f64::total_cmp);
            waits[starts * 95 / 100]
        }
    }

    fn search(to_per_s: f64) -> Search {
        Search {
            from_per_s: 10.0,
            to_per_s,
            precision: 0.02,
            repeats: 3,
        }
    }

    #[test]
    fn the_capacity_of_a_token_bucket_is_found_within_5_percent() {
        for (seed, capacity) in [(1, 37.0), (2, 150.0), (3, 480.0), (4, 1000.0)] {
            let mut server = TokenBucket {
                capacity,
                burst: 1.0,
                random: SplitMix64::new(seed),
            };
            // Long enough for a queue to exceed the bound if the rate is slightly too high.
            let trial = |rate: f64| -> Result<Verdict, ()> {
                let p95 = server.p95_s(rate, 20_000);
                let bound = 100.0 / capacity;
                Ok(if p95 <= bound {
                    Verdict::Holds
                } else {
                    Verdict::Misses
                })
            };
            let found = search(1e5).run(trial).unwrap();
            assert_eq!(found.ended, Ended::Found);
            let error = found.held_per_s / capacity - 1.0;
            assert!(error.abs() <= 0.05, "{capacity}: {found:?}, {error}");
        }
    }

    #[test]
    fn a_saturated_generator_ends_the_search_without_a_capacity() {
        let trial = |rate: f64| -> Result<Verdict, ()> {
            Ok(if rate > 300.0 {
                Verdict::Generator
            } else {
                Verdict::Holds
            })
        };
        let found = search(1e5).run(trial).unwrap();
        assert_eq!((found.held_per_s, found.missed_per_s), (160.0, None));
        assert_eq!(found.ended, Ended::Generator);
    }

    #[test]
    fn the_ends_of_the_range_are_named() {
        let all = search(80.0).run(|_| Ok::<_, ()>(Verdict::Holds)).unwrap();
        assert_eq!((all.held_per_s, all.ended), (80.0, Ended::AboveLast));
        let none = search(80.0).run(|_| Ok::<_, ()>(Verdict::Misses)).unwrap();
        assert_eq!((none.held_per_s, none.missed_per_s), (0.0, Some(10.0)));
        assert_eq!(none.ended, Ended::BelowFirst);
        let error = search(80.0).run(|_| Err::<Verdict, _>("no")).unwrap_err();
        assert_eq!(error, "no");
    }

    proptest! {
        #[test]
        fn the_search_ends_around_any_capacity(capacity in 11.0_f64..50_000.0) {
            let mut trials = 0;
            let found = search(1e5).run(|rate| {
                trials += 1;
                Ok::<_, ()>(if rate <= capacity { Verdict::Holds } else { Verdict::Misses })
            }).unwrap();
            prop_assert!(found.held_per_s <= capacity);
            prop_assert!(found.missed_per_s.unwrap() > capacity);
            prop_assert!(found.held_per_s >= capacity / 1.02);
            prop_assert!(trials < 80, "{trials}");
        }
    }
}
