//! Compares a sandbox's clocks with the caller's.
//!
//! A sample reads the guest's clock at an unknown moment within its round trip. Therefore, only the sample with the
//! shortest round trip is used, and half of that round trip is added to the allowed difference.

use std::time::{Duration, UNIX_EPOCH};

use super::{evaluate::printable, list::Between, probe::Timed};
use crate::{
    report::{Case, Verdict},
    sandbox::Sandbox,
};

/// Allowed difference. Tokens and certificates need a second; schedulers and logs need less.
const ALLOWED_MS: f64 = 50.0;
/// Samples of one measurement.
const SAMPLES: usize = 12;
/// A sample with a longer half round trip proves nothing.
const MAX_ERROR_MS: f64 = 500.0;
/// Source of the evidence.
const CLOCK: &str = "clock";
const PAUSE: Duration = Duration::from_secs(10);
const WALL: &str = "date +%s.%N";
const MONOTONIC: &str = "python3 -c 'import time; print(time.monotonic())'";

#[derive(Clone, Copy, Debug, PartialEq)]
struct Offset {
    /// The guest's wall clock minus the caller's.
    ms: f64,
    /// Bound on the error of `ms`.
    error_ms: f64,
}

/// Compares the wall clocks.
pub(super) fn wall(sandbox: &Sandbox, between: Between) -> Case {
    let why = "certificates, tokens and schedules need the time; a clone resumes with the clock of its template";
    let expected = format!("within {ALLOWED_MS} ms of the caller's clock and half a round trip");
    let offset = sandbox
        .run_timed(WALL, SAMPLES)
        .map_err(|error| error.to_string())
        .and_then(|samples| offset(&samples));
    let (verdict, evidence) = match offset {
        Ok(offset) => (
            evaluate_offset(offset),
            format!("{:+.1} ms, ±{:.1} ms", offset.ms, offset.error_ms),
        ),
        Err(why) => (Verdict::NotTried, why),
    };
    case("wall-clock", between, (why, &expected), verdict, evidence)
}

fn evaluate_offset(offset: Offset) -> Verdict {
    match offset {
        Offset { error_ms, .. } if error_ms > MAX_ERROR_MS => Verdict::NotTried,
        Offset { ms, error_ms } if ms.abs() <= ALLOWED_MS + error_ms => Verdict::Pass,
        _ => Verdict::Fail,
    }
}

fn offset(samples: &[Timed]) -> Result<Offset, String> {
    let best = samples.iter().min_by_key(|sample| sample.took);
    let best = best.ok_or("no sample was taken")?;
    let half_ms = millis(best.took) / 2.0;
    let caller = best.wall.duration_since(UNIX_EPOCH);
    let caller = caller.map_err(|_| "the caller's clock is before 1970")?;
    Ok(Offset {
        ms: seconds(&best.output)? * 1000.0 - millis(caller) - half_ms,
        error_ms: half_ms,
    })
}

/// Pauses a sandbox, and compares both clocks afterwards.
pub(super) fn paused(sandbox: &Sandbox) -> [Case; 2] {
    let why = "a jump makes every timer of every program fire at once";
    let expected = "the clock advances, by at most the caller's time outside the pause";
    let report = |verdict, evidence| {
        let texts = (why, expected);
        case("monotonic-clock", Between::Pause, texts, verdict, evidence)
    };
    let before = sandbox.run_timed(MONOTONIC, 1);
    let pause = sandbox.pause_for(PAUSE);
    // Read the wall clock first: after other commands, a late correction would go unnoticed.
    let wall = wall(sandbox, Between::Pause);
    let after = sandbox.run_timed(MONOTONIC, 1);
    let advance = match (before, pause, after) {
        (Ok(before), Ok(pause), Ok(after)) => advance(&before, &after, pause),
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => Err(error.to_string()),
    };
    let monotonic = match advance {
        Ok(advance) => report(
            advance.evaluate(),
            format!(
                "the clock advanced by {:.0} ms; the caller's time outside the pause was {:.0} ms",
                advance.guest_ms, advance.caller_ms
            ),
        ),
        Err(why) => {
            // The reading of the wall clock proves nothing either.
            let wall = wall
                .with(CLOCK, why.clone())
                .judged(Verdict::NotTried, [""; 0]);
            return [wall, report(Verdict::NotTried, why)];
        }
    };
    [wall, monotonic]
}

/// Time on both clocks from the sample before a pause to the sample after it.
#[derive(Clone, Copy, Debug)]
struct Advance {
    guest_ms: f64,
    /// The caller's time without the pause, round trips included.
    caller_ms: f64,
}

impl Advance {
    fn evaluate(self) -> Verdict {
        if self.guest_ms >= 0.0 && self.guest_ms <= self.caller_ms {
            Verdict::Pass
        } else {
            Verdict::Fail
        }
    }
}

fn advance(before: &[Timed], after: &[Timed], pause: Duration) -> Result<Advance, String> {
    let (Some(before), Some(after)) = (before.first(), after.last()) else {
        return Err("no sample was taken".to_owned());
    };
    let whole = after.started + after.took - before.started;
    Ok(Advance {
        guest_ms: (seconds(&after.output)? - seconds(&before.output)?) * 1000.0,
        caller_ms: millis(whole.saturating_sub(pause)),
    })
}

fn case(
    hazard: &str,
    between: Between,
    (why, expected): (&str, &str),
    verdict: Verdict,
    evidence: String,
) -> Case {
    let case = Case {
        expected: expected.to_owned(),
        ..Case::new(between.name(), hazard, why)
    };
    case.with(CLOCK, evidence).judged(verdict, [""; 0])
}

/// Decodes the output of [`WALL`] or [`MONOTONIC`].
fn seconds(output: &str) -> Result<f64, String> {
    let number = output.trim().parse();
    number.map_err(|_| format!("not a time: {}", printable(output)))
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Instant, SystemTime};

    fn sample(output: &str, wall_ms: u64, took_ms: u64) -> Timed {
        Timed {
            wall: SystemTime::UNIX_EPOCH + Duration::from_millis(wall_ms),
            started: Instant::now(),
            took: Duration::from_millis(took_ms),
            output: output.to_owned(),
        }
    }

    #[test]
    fn the_sample_with_the_shortest_round_trip_counts() {
        let samples = [
            sample("99.000", 1_000, 400),
            sample("2.065\n", 2_000, 10),
            sample("77.000", 3_000, 30),
        ];
        let offset = offset(&samples).unwrap();
        assert!((offset.ms - 60.0).abs() < 0.01 && (offset.error_ms - 5.0).abs() < 0.01);
        assert_eq!(evaluate_offset(offset), Verdict::Fail);
    }

    #[test]
    fn half_a_round_trip_is_added_to_the_limit_unless_it_is_too_long() {
        for (ms, error_ms, wanted) in [
            (-54.0, 5.0, Verdict::Pass),
            (-56.0, 5.0, Verdict::Fail),
            (56.0, 5.0, Verdict::Fail),
            (0.0, 501.0, Verdict::NotTried),
        ] {
            assert_eq!(
                evaluate_offset(Offset { ms, error_ms }),
                wanted,
                "{ms} {error_ms}"
            );
        }
    }

    #[test]
    fn a_clock_that_jumps_or_runs_backwards_fails() {
        let started = Instant::now();
        let at = |output: &str, after_ms: u64| Timed {
            started: started + Duration::from_millis(after_ms),
            ..sample(output, 0, 100)
        };
        let pause = Duration::from_secs(10);
        let verdict = |after: &str| {
            let (before, after) = ([at("5.00", 0)], [at(after, 11_000)]);
            advance(&before, &after, pause).unwrap().evaluate()
        };
        // 1.1 s outside the pause.
        assert_eq!(verdict("5.90"), Verdict::Pass);
        assert_eq!(verdict("4.99"), Verdict::Fail);
        assert_eq!(verdict("15.90"), Verdict::Fail);
        assert!(advance(&[at("x", 0)], &[at("1", 1)], pause).is_err());
    }
}
