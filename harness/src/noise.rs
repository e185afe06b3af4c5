//! Samples the activity of the host during a run, every 100 ms, from one thread.

use std::{
    fs,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::Sender,
    },
    time::Duration,
};

use crate::{
    clock,
    event::{NoiseSample, RunEvent},
    memory,
};

const PERIOD: Duration = Duration::from_millis(100);

/// Clock ticks of all CPUs since boot, from the first line of /proc/stat. `idle` includes iowait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ticks {
    all: u64,
    idle: u64,
    steal: u64,
}

/// Sends samples until `stop` is set or the receiver is gone.
pub fn watch(stop: &AtomicBool, events: &Sender<RunEvent>) {
    let mut last = ticks();
    while !stop.load(Ordering::Relaxed) {
        clock::sleep_until(clock::monotonic_ns() + clock::nanoseconds(PERIOD));
        let now = ticks();
        let sample = sample(last, now);
        last = now;
        if events.send(RunEvent::Noise(sample)).is_err() {
            return;
        }
    }
}

/// Takes one sample over `period`, and blocks for this time.
#[must_use]
pub fn look(period: Duration) -> NoiseSample {
    let before = ticks();
    clock::sleep_until(clock::monotonic_ns() + clock::nanoseconds(period));
    sample(before, ticks())
}

fn sample(last: Option<Ticks>, now: Option<Ticks>) -> NoiseSample {
    NoiseSample {
        at_ns: clock::monotonic_ns(),
        steal_share: share(last, now, |t| t.steal),
        busy_share: share(last, now, |t| t.all - t.idle),
        load_1min: load_1min(),
        available_bytes: memory::available_bytes(),
    }
}

fn share(last: Option<Ticks>, now: Option<Ticks>, part: impl Fn(Ticks) -> u64) -> Option<f64> {
    let (last, now) = (last?, now?);
    let all = now.all.checked_sub(last.all).filter(|n| *n > 0)?;
    Some(part(now).saturating_sub(part(last)) as f64 / all as f64)
}

fn ticks() -> Option<Ticks> {
    parse_ticks(fs::read_to_string("/proc/stat").ok()?.lines().next()?)
}

/// Parses `cpu user nice system idle iowait irq softirq steal …` (proc(5)). The guest times that follow are already
/// included in user and nice.
fn parse_ticks(line: &str) -> Option<Ticks> {
    let fields: Vec<u64> = line
        .strip_prefix("cpu ")?
        .split_ascii_whitespace()
        .map(|n| n.parse().ok())
        .collect::<Option<_>>()?;
    Some(Ticks {
        all: fields.get(..8)?.iter().sum(),
        idle: fields[3] + fields[4],
        steal: fields[7],
    })
}

/// Load average over one minute.
#[must_use]
pub fn load_1min() -> Option<f64> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    text.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_refer_to_the_time_between_two_samples() {
        let a = parse_ticks("cpu  100 0 100 700 100 0 0 0 0 0");
        let b = parse_ticks("cpu  150 0 120 720 100 0 0 10 50 0");
        assert_eq!(share(a, b, |t| t.steal), Some(0.1));
        assert_eq!(share(a, b, |t| t.all - t.idle), Some(0.8));
        assert_eq!(share(a, a, |t| t.steal), None);
        assert_eq!(parse_ticks("cpu0 1 2"), None);
    }
}
