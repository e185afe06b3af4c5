//! Figures of a sandbox over time.

use std::time::Duration;

use api_types::{envd::Timestamp, rest::SandboxMetric};
use pool::{Pool, TemplateInfo, Usage};

use super::{Registry, lifecycle::Rest, note::UnixMs};

/// Between two samples of a sandbox.
const EVERY: Duration = Duration::from_secs(5);

/// What a sandbox used at a moment, seen from the host, and its share of its vCPUs since the moment before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// When.
    pub at: UnixMs,
    /// As the pool measured it.
    pub usage: Usage,
    /// In per cent of all its vCPUs; zero for the first sample of a VM.
    pub cpu_used_pct: f64,
}

impl Sample {
    /// A sample after `before`, which is of the same VM.
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

    /// As clients read it.
    #[must_use]
    pub fn to_wire(self, template: &TemplateInfo) -> SandboxMetric {
        SandboxMetric {
            timestamp: timestamp(self.at),
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

/// Takes samples of all that run, for as long as the registry answers. The guests notice nothing of it.
pub async fn sample_all(registry: Registry, pool: Pool) {
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Ok(views) = registry.list().await else {
            return;
        };
        let mut taken = Vec::new();
        for view in views.into_iter().filter(|v| v.rest == Rest::Running) {
            // One that was paused or ended meanwhile has none.
            if let Ok(usage) = pool.usage(&view.id).await {
                taken.push((view.id, usage));
            }
        }
        registry.record(super::driver::now(), taken).await;
    }
}

/// Wall time on the wire.
#[must_use]
pub fn timestamp(at: UnixMs) -> Timestamp {
    Timestamp::from_unix_ns(at.saturating_mul(1_000_000))
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a share in per cent needs no more than 53 bits"
)]
fn to_f64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_of_all_vcpus_and_never_wild() {
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
