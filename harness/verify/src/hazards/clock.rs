//! Clocks of a sandbox against the caller's. A sample knows the guest's clock only up to its own round trip, so the
//! shortest of several is taken and half of it added to what is allowed.

use std::time::{Duration, UNIX_EPOCH};

use super::{
    Between, Finding, Verdict, Weight,
    judge::printable,
    subject::{Subject, Timed},
};

/// Tokens and certificates are checked to the second; schedulers and logs want better.
const ALLOWED_MS: f64 = 50.0;
/// Samples of one measurement.
const SAMPLES: usize = 12;
/// With a longer half round trip nothing can be said.
const MAX_ERROR_MS: f64 = 500.0;
/// How long the sandbox is paused.
const PAUSE: Duration = Duration::from_secs(10);
const WALL: &str = "date +%s.%N";
const MONOTONIC: &str = "python3 -c 'import time; print(time.monotonic())'";

/// The guest's wall clock minus the caller's, in milliseconds, and the bound of the error.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Offset {
    ms: f64,
    error_ms: f64,
}

/// Finding of the wall clock as it is now.
pub(super) fn wall(subject: &Subject<'_>, between: Between) -> Finding {
    let why = "certificates, tokens, schedules; a clone wakes up in its template's past";
    let expected = format!("within {ALLOWED_MS} ms of the caller's clock and half a round trip");
    let offset = subject
        .timed(WALL, SAMPLES)
        .and_then(|samples| offset(&samples));
    let (verdict, evidence) = match offset {
        Ok(offset) => (
            judge_wall(offset),
            format!("{:+.1} ms, ±{:.1} ms", offset.ms, offset.error_ms),
        ),
        Err(why) => (Verdict::NotTried, why),
    };
    finding("wall-clock", between, (why, &expected), verdict, evidence)
}

fn judge_wall(offset: Offset) -> Verdict {
    match offset {
        Offset { error_ms, .. } if error_ms > MAX_ERROR_MS => Verdict::NotTried,
        Offset { ms, error_ms } if ms.abs() <= ALLOWED_MS + error_ms => Verdict::Pass,
        _ => Verdict::Fail,
    }
}

/// By the sample with the shortest round trip.
fn offset(samples: &[Timed]) -> Result<Offset, String> {
    let best = samples.iter().min_by_key(|sample| sample.took);
    let best = best.ok_or("no sample")?;
    let half_ms = millis(best.took) / 2.0;
    let caller = best.wall.duration_since(UNIX_EPOCH);
    let caller = caller.map_err(|_| "the caller's clock is before 1970")?;
    Ok(Offset {
        ms: seconds(&best.said)? * 1000.0 - millis(caller) - half_ms,
        error_ms: half_ms,
    })
}

/// Pauses a sandbox; both clocks afterwards.
pub(super) fn paused(subject: &Subject<'_>) -> [Finding; 2] {
    let why = "a jump makes every timer of every program fire at once";
    let expected = "goes on, by no more than the caller's time outside the pause";
    let about = |verdict, evidence| {
        let words = (why, expected);
        finding("monotonic-clock", Between::Pause, words, verdict, evidence)
    };
    let before = subject.timed(MONOTONIC, 1);
    let pause = subject.pause(PAUSE);
    // First, because each further command makes it later.
    let wall = wall(subject, Between::Pause);
    let after = subject.timed(MONOTONIC, 1);
    let advance = pause.and_then(|pause| advance(&before?, &after?, pause));
    let monotonic = match advance {
        Ok(advance) => about(
            advance.judge(),
            format!(
                "went on by {:.0} ms; the caller's time outside the pause was {:.0} ms",
                advance.guest_ms, advance.caller_ms
            ),
        ),
        Err(why) => return [unpaused(&wall, &why), about(Verdict::NotTried, why)],
    };
    [wall, monotonic]
}

/// A clock that was read without a pause says nothing about one.
fn unpaused(wall: &Finding, why: &str) -> Finding {
    Finding {
        verdict: Verdict::NotTried,
        evidence: vec![why.to_owned()],
        ..wall.clone()
    }
}

/// How far clocks went from the sample before a pause to the one after it.
#[derive(Clone, Copy, Debug)]
struct Advance {
    guest_ms: f64,
    /// All but the pause, round trips included.
    caller_ms: f64,
}

impl Advance {
    fn judge(self) -> Verdict {
        if self.guest_ms >= 0.0 && self.guest_ms <= self.caller_ms {
            Verdict::Pass
        } else {
            Verdict::Fail
        }
    }
}

fn advance(before: &[Timed], after: &[Timed], pause: Duration) -> Result<Advance, String> {
    let (Some(before), Some(after)) = (before.first(), after.last()) else {
        return Err("no sample".to_owned());
    };
    let whole = after.started + after.took - before.started;
    Ok(Advance {
        guest_ms: (seconds(&after.said)? - seconds(&before.said)?) * 1000.0,
        caller_ms: millis(whole.saturating_sub(pause)),
    })
}

fn finding(
    hazard: &str,
    between: Between,
    (why, expected): (&str, &str),
    verdict: Verdict,
    evidence: String,
) -> Finding {
    Finding {
        hazard: hazard.to_owned(),
        between,
        why: why.to_owned(),
        expected: expected.to_owned(),
        verdict,
        weight: Weight::Gate,
        evidence: vec![evidence],
    }
}

fn seconds(said: &str) -> Result<f64, String> {
    let number = said.trim().parse();
    number.map_err(|_| format!("no time: {}", printable(said)))
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Instant, SystemTime};

    fn sample(said: &str, wall_ms: u64, took_ms: u64) -> Timed {
        Timed {
            wall: SystemTime::UNIX_EPOCH + Duration::from_millis(wall_ms),
            started: Instant::now(),
            took: Duration::from_millis(took_ms),
            said: said.to_owned(),
        }
    }

    #[test]
    fn the_shortest_round_trip_decides() {
        let samples = [
            sample("99.000", 1_000, 400),
            sample("2.065\n", 2_000, 10),
            sample("77.000", 3_000, 30),
        ];
        let offset = offset(&samples).unwrap();
        assert!((offset.ms - 60.0).abs() < 0.01 && (offset.error_ms - 5.0).abs() < 0.01);
        assert_eq!(judge_wall(offset), Verdict::Fail);
    }

    #[test]
    fn half_a_round_trip_is_allowed_and_a_long_one_says_nothing() {
        for (ms, error_ms, wanted) in [
            (-54.0, 5.0, Verdict::Pass),
            (-56.0, 5.0, Verdict::Fail),
            (56.0, 5.0, Verdict::Fail),
            (0.0, 501.0, Verdict::NotTried),
        ] {
            assert_eq!(
                judge_wall(Offset { ms, error_ms }),
                wanted,
                "{ms} {error_ms}"
            );
        }
    }

    #[test]
    fn a_clock_that_jumps_or_runs_backwards_fails() {
        let started = Instant::now();
        let at = |said: &str, after_ms: u64| Timed {
            started: started + Duration::from_millis(after_ms),
            ..sample(said, 0, 100)
        };
        let pause = Duration::from_secs(10);
        let judged = |after: &str| {
            let (before, after) = ([at("5.00", 0)], [at(after, 11_000)]);
            advance(&before, &after, pause).unwrap().judge()
        };
        // 1.1 s outside the pause.
        assert_eq!(judged("5.90"), Verdict::Pass);
        assert_eq!(judged("4.99"), Verdict::Fail);
        assert_eq!(judged("15.90"), Verdict::Fail);
        assert!(advance(&[at("x", 0)], &[at("1", 1)], pause).is_err());
    }
}
