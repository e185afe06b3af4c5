//! What numbers of this host are worth: rules over facts and noise, each with its reason.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::facts::HostFacts;
use crate::event::NoiseSample;

/// From best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
    /// Absolute numbers may be quoted.
    Publishable,
    /// Ratios within one run hold; absolute times do not.
    Indicative,
    /// Not even ratios hold.
    Unfit,
}

impl Grade {
    /// The name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Publishable => "publishable",
            Self::Indicative => "indicative",
            Self::Unfit => "unfit",
        }
    }
}

impl fmt::Display for Grade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A grade and every rule that kept it from being better.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Graded {
    /// The worst of the rules; publishable when none applies.
    pub grade: Grade,
    /// Why, one sentence for each rule that applies.
    pub reasons: Vec<String>,
}

/// Means of a run's noise samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NoiseLevel {
    /// Mean share of CPU time stolen by the hypervisor, 0 to 1.
    pub steal_share: Option<f64>,
    /// Mean share of CPU time that was not idle, our own work included, 0 to 1.
    pub busy_share: Option<f64>,
}

impl NoiseLevel {
    /// Means of what could be read.
    #[must_use]
    pub fn of(samples: &[NoiseSample]) -> Self {
        let mean = |field: fn(&NoiseSample) -> Option<f64>| {
            let read: Vec<f64> = samples.iter().filter_map(field).collect();
            (!read.is_empty()).then(|| read.iter().sum::<f64>() / read.len() as f64)
        };
        Self {
            steal_share: mean(|s| s.steal_share),
            busy_share: mean(|s| s.busy_share),
        }
    }
}

/// Applies all rules.
#[must_use]
pub fn grade(facts: &HostFacts, noise: NoiseLevel) -> Graded {
    let findings: Vec<(Grade, String)> = unfit(facts, noise)
        .into_iter()
        .map(|why| (Grade::Unfit, why))
        .chain(
            indicative(facts, noise)
                .into_iter()
                .map(|why| (Grade::Indicative, why)),
        )
        .collect();
    Graded {
        grade: findings
            .iter()
            .map(|(grade, _)| *grade)
            .max()
            .unwrap_or(Grade::Publishable),
        reasons: findings.into_iter().map(|(_, why)| why).collect(),
    }
}

fn unfit(facts: &HostFacts, noise: NoiseLevel) -> Vec<String> {
    let mut why = Vec::new();
    if let Some(reason) = &facts.kvm_missing {
        why.push(format!("/dev/kvm cannot be used: {reason}"));
    }
    if facts.debug_build {
        why.push("the harness is a debug build: its own work is many times slower".to_owned());
    }
    if let Some(steal) = noise.steal_share.filter(|s| *s > 0.25) {
        why.push(format!(
            "the hypervisor gave {:.0} % of the CPU time to others; above 25 % a slow round says nothing",
            steal * 100.0
        ));
    }
    why
}

fn indicative(facts: &HostFacts, noise: NoiseLevel) -> Vec<String> {
    let mut why = Vec::new();
    if facts.virtual_machine == Some(true) {
        why.push("the host is a virtual machine: neighbours share its caches and cores".to_owned());
    }
    if facts.cores < 4 {
        why.push(format!(
            "{} cores: harness, VMMs and kernel threads compete; at least 4 are needed",
            facts.cores
        ));
    }
    if let Some(steal) = noise.steal_share.filter(|s| (0.01..=0.25).contains(s)) {
        why.push(format!(
            "{:.1} % of the CPU time was stolen, limit 1 %",
            steal * 100.0
        ));
    }
    let load_limit = facts.cores as f64 * 0.25;
    if let Some(load) = facts.load_1min.filter(|l| *l > load_limit) {
        why.push(format!(
            "load was {load:.2} before the run, limit {load_limit:.2}"
        ));
    }
    if let Some(governor) = facts.governor.as_ref().filter(|g| *g != "performance") {
        why.push(format!(
            "cpufreq governor is {governor:?}, not \"performance\""
        ));
    }
    if facts.ksm_runs == Some(true) {
        why.push("KSM merges pages: memory per clone depends on its progress".to_owned());
    }
    if facts.damon_actions.iter().any(|action| action != "stat") {
        why.push(format!(
            "DAMON changes memory on its own ({}): what an idle clone keeps depends on its progress",
            facts.damon_actions.join(", ")
        ));
    }
    if let Some(cores) = facts.cgroup_cpu_cores {
        why.push(format!(
            "our cgroup is limited to {cores} cores: throttling falls on single clones"
        ));
    }
    let monotonic = [
        "tsc",
        "kvm-clock",
        "hyperv_clocksource_tsc_page",
        "arch_sys_counter",
    ];
    if let Some(source) = facts
        .clock_source
        .as_ref()
        .filter(|s| !monotonic.contains(&s.as_str()))
    {
        why.push(format!("clock source {source:?} is slow to read"));
    }
    if facts.dirty_tree != Some(false) {
        why.push(
            "the source tree differs from its commit or has none: nobody can build this again"
                .to_owned(),
        );
    }
    why
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn good() -> HostFacts {
        let mut facts = super::super::facts::read(Path::new("/no/such"));
        facts.kvm_missing = None;
        facts.debug_build = false;
        facts.virtual_machine = Some(false);
        facts.cores = 64;
        facts.load_1min = Some(0.1);
        facts.governor = Some("performance".into());
        facts.ksm_runs = Some(false);
        facts.damon_actions.clear();
        facts.cgroup_cpu_cores = None;
        facts.clock_source = Some("tsc".into());
        facts.dirty_tree = Some(false);
        facts
    }

    fn graded(change: impl FnOnce(&mut HostFacts), steal: f64) -> Grade {
        let mut facts = good();
        change(&mut facts);
        let noise = NoiseLevel {
            steal_share: Some(steal),
            busy_share: None,
        };
        grade(&facts, noise).grade
    }

    #[test]
    fn each_rule_lowers_the_grade() {
        assert_eq!(graded(|_| {}, 0.0), Grade::Publishable);
        assert_eq!(graded(|_| {}, 0.05), Grade::Indicative);
        assert_eq!(graded(|_| {}, 0.5), Grade::Unfit);
        assert_eq!(graded(|f| f.cores = 2, 0.0), Grade::Indicative);
        assert_eq!(
            graded(|f| f.virtual_machine = Some(true), 0.0),
            Grade::Indicative
        );
        assert_eq!(graded(|f| f.load_1min = Some(20.0), 0.0), Grade::Indicative);
        assert_eq!(graded(|f| f.dirty_tree = None, 0.0), Grade::Indicative);
        assert_eq!(
            graded(|f| f.kvm_missing = Some("no".into()), 0.0),
            Grade::Unfit
        );
    }
}
