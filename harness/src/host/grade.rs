//! Grades a host by rules over its facts and its activity during the run, each with a reason.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::facts::HostFacts;
use crate::{event::NoiseSample, scenario::Place};

/// How far measurements on a host can be trusted, from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
    /// Absolute times may be published.
    Publishable,
    /// Ratios within one run are valid; absolute times are not.
    Indicative,
    /// Neither absolute times nor ratios are valid.
    Unfit,
}

impl Grade {
    /// Name in JSON and reports.
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

/// A grade and the rules that lowered it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Graded {
    /// The worst grade of all rules that apply; publishable if no rule applies.
    pub grade: Grade,
    /// A sentence for each rule that applies.
    pub reasons: Vec<String>,
}

impl Graded {
    /// Adds a reason that is not a property of the host.
    pub fn lower_to(&mut self, grade: Grade, reason: String) {
        self.grade = self.grade.max(grade);
        self.reasons.push(reason);
    }
}

/// Mean activity of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NoiseLevel {
    /// Mean share of CPU time that the hypervisor gave to other VMs, 0 to 1.
    pub steal_share: Option<f64>,
    /// Mean share of CPU time that was not idle, 0 to 1. Includes the run itself.
    pub busy_share: Option<f64>,
}

impl NoiseLevel {
    /// Means over the samples that have a value.
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
    if let Some(reason) = &facts.kvm_missing
        && facts.sandboxes == Place::OwnVms
    {
        why.push(format!("cannot open /dev/kvm: {reason}"));
    }
    if facts.debug_build {
        why.push("cube-bench is a debug build, which is many times slower".to_owned());
    }
    if let Some(steal) = noise.steal_share.filter(|s| *s > 0.25) {
        why.push(format!(
            "{:.0} % of the CPU time was stolen by the hypervisor, limit 25 %",
            steal * 100.0
        ));
    }
    why
}

fn indicative(facts: &HostFacts, noise: NoiseLevel) -> Vec<String> {
    let mut why = of_client(facts, noise);
    if facts.sandboxes != Place::Elsewhere {
        why.extend(of_sandbox_host(facts));
    }
    why
}

/// Rules for the host of the harness, wherever the sandboxes run.
fn of_client(facts: &HostFacts, noise: NoiseLevel) -> Vec<String> {
    let mut why = Vec::new();
    if let Some(steal) = noise.steal_share.filter(|s| (0.01..=0.25).contains(s)) {
        why.push(format!(
            "{:.1} % of the CPU time was stolen by the hypervisor, limit 1 %",
            steal * 100.0
        ));
    }
    let load_limit = facts.cores as f64 * 0.25;
    if let Some(load) = facts.load_1min.filter(|l| *l > load_limit) {
        why.push(format!(
            "the load average was {load:.2} before the run, limit {load_limit:.2}"
        ));
    }
    if let Some(cores) = facts.cgroup_cpu_cores {
        why.push(format!(
            "the cgroup is limited to {cores} cores, and throttling delays single clones"
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
        why.push(format!("the clock source {source:?} is slow to read"));
    }
    why
}

/// Rules for a host that also runs the sandboxes.
fn of_sandbox_host(facts: &HostFacts) -> Vec<String> {
    let mut why = Vec::new();
    if facts.virtual_machine == Some(true) {
        why.push(
            "the host is a virtual machine, which shares caches and cores with other VMs"
                .to_owned(),
        );
    }
    if facts.cores < 4 {
        why.push(format!(
            "the host has {} cores, at least 4 are needed for harness, VMMs and kernel threads",
            facts.cores
        ));
    }
    if let Some(governor) = facts.governor.as_ref().filter(|g| *g != "performance") {
        why.push(format!(
            "the cpufreq governor is {governor:?}, expected \"performance\""
        ));
    }
    if facts.ksm_runs == Some(true) {
        why.push("KSM is active, so memory per clone depends on its progress".to_owned());
    }
    if facts.dirty_tree != Some(false) {
        why.push(
            "the source tree has uncommitted changes or no commit, so the build cannot be reproduced"
                .to_owned(),
        );
    }
    if facts.damon_actions.iter().any(|action| action != "stat") {
        why.push(format!(
            "DAMON schemes are active ({}), so memory of idle clones depends on their progress",
            facts.damon_actions.join(", ")
        ));
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
        assert_eq!(graded(|f| f.ksm_runs = Some(true), 0.0), Grade::Indicative);
    }

    #[test]
    fn only_what_the_sandboxes_need_is_judged() {
        let without_kvm = |place| {
            graded(
                |f| (f.kvm_missing, f.sandboxes) = (Some("no".into()), place),
                0.0,
            )
        };
        assert_eq!(without_kvm(Place::HostKernel), Grade::Publishable);
        assert_eq!(without_kvm(Place::Elsewhere), Grade::Publishable);
        let virtual_client = |place| {
            graded(
                |f| (f.virtual_machine, f.cores, f.sandboxes) = (Some(true), 2, place),
                0.0,
            )
        };
        assert_eq!(virtual_client(Place::HostKernel), Grade::Indicative);
        assert_eq!(virtual_client(Place::Elsewhere), Grade::Publishable);
        let without_tree = graded(
            |f| (f.dirty_tree, f.sandboxes) = (None, Place::Elsewhere),
            0.0,
        );
        assert_eq!(without_tree, Grade::Publishable, "the tree is not measured");
        // A busy client disturbs its own measurements, wherever the sandboxes run.
        let elsewhere = |f: &mut HostFacts| {
            (f.sandboxes, f.load_1min) = (Place::Elsewhere, Some(40.0));
        };
        assert_eq!(graded(elsewhere, 0.0), Grade::Indicative);
        assert_eq!(graded(elsewhere, 0.5), Grade::Unfit);
    }
}
