//! Resource usage of sandboxes over time.

use std::{collections::VecDeque, time::Duration};

use envd::Timestamp;
use pool::{Sandbox, SandboxState, TemplateInfo, UnixMs, Usage};
use rest::SandboxMetric;

use super::{Registry, note::now};

/// Interval of the samples.
const EVERY: Duration = Duration::from_secs(5);
/// Maximum number of samples kept per sandbox: half an hour.
const MAX_SAMPLES: usize = 360;

/// The usage of a sandbox at one time, seen from the host, and its CPU usage since the previous sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    pub at: UnixMs,
    pub usage: Usage,
    /// CPU usage since the previous sample, in percent of all vCPUs. Zero for the first sample of a VM.
    pub cpu_used_pct: f64,
}

impl Sample {
    /// Makes a sample. `before` is the previous sample of the same VM.
    #[must_use]
    pub fn after(before: Option<&Self>, at: UnixMs, usage: Usage, vcpus: u8) -> Self {
        let cpu_used_pct = before.map_or(0.0, |before| {
            let wall_ms = to_f64(at.saturating_sub(before.at)).max(1.0);
            let used_ms = to_f64(usage.cpu_ns.saturating_sub(before.usage.cpu_ns)) / 1e6;
            (used_ms / (wall_ms * f64::from(vcpus.max(1))) * 100.0).clamp(0.0, 100.0)
        });
        Self {
            at,
            usage,
            cpu_used_pct,
        }
    }

    #[must_use]
    pub fn to_wire(self, template: &TemplateInfo) -> SandboxMetric {
        SandboxMetric {
            timestamp: Timestamp::from_unix_ms(self.at),
            timestamp_unix: self.at / 1000,
            cpu_count: template.vcpus,
            cpu_used_pct: self.cpu_used_pct,
            mem_used: self.usage.memory,
            mem_total: template.memory.0,
            mem_cache: 0,
            disk_used: self.usage.disk,
            disk_total: template.disk.0,
        }
    }
}

/// Takes samples of all running sandboxes, without involving the guests, until the pool is closed.
pub async fn sample_all(registry: Registry) {
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Ok(views) = registry.list().await else {
            return;
        };
        for view in views {
            let sandbox = view.sandbox;
            // If the sandbox was paused or ended in the meantime, `usage` returns an error.
            if sandbox.state == SandboxState::Running
                && let Ok(usage) = registry.pool.usage(&sandbox.id).await
            {
                registry.add_sample(&sandbox, usage);
            }
        }
    }
}

impl Registry {
    fn add_sample(&self, sandbox: &Sandbox, usage: Usage) {
        let mut known = self.known();
        let Some(known) = known.get_mut(&sandbox.id) else {
            return;
        };
        let before = known.samples.back();
        let before = before.filter(|sample| sample.at >= sandbox.vm_since);
        let sample = Sample::after(before, now(), usage, sandbox.template.vcpus);
        push(&mut known.samples, sample);
    }
}

/// Adds a sample. Removes the oldest one if there are too many.
fn push(samples: &mut VecDeque<Sample>, sample: Sample) {
    if samples.len() == MAX_SAMPLES {
        samples.pop_front();
    }
    samples.push_back(sample);
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a share in percent needs no more than 53 bits"
)]
fn to_f64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_sample_gives_way() {
        let mut samples = VecDeque::new();
        for at in 0..1000 {
            push(&mut samples, Sample::after(None, at, Usage::default(), 1));
        }
        assert_eq!(samples.len(), MAX_SAMPLES);
        assert_eq!(samples.back().map(|sample| sample.at), Some(999));
    }

    #[test]
    fn the_cpu_share_is_of_all_vcpus_and_between_0_and_100_percent() {
        let usage = |cpu_ms: u64| Usage {
            cpu_ns: cpu_ms * 1_000_000,
            ..Usage::default()
        };
        let first = Sample::after(None, 1000, usage(50), 2);
        assert!(first.cpu_used_pct.abs() < f64::EPSILON);
        let second = Sample::after(Some(&first), 2000, usage(1050), 2);
        assert!((second.cpu_used_pct - 50.0).abs() < 1e-9);
        let resumed = Sample::after(Some(&second), 2000, usage(0), 2);
        assert!(resumed.cpu_used_pct.abs() < f64::EPSILON);
    }
}
