//! The output of `cube-bench doctor`.

use serde::{Deserialize, Serialize};

use super::{section::Section, terminal};
use crate::host::{
    facts::HostFacts,
    grade::{Graded, NoiseLevel},
};

/// Format of the JSON document.
pub const FORMAT: u32 = 1;

/// Facts about the host with their grade.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// [`FORMAT`].
    pub format: u32,
    pub graded: Graded,
    /// Activity of the host during one idle second.
    pub noise: NoiseLevel,
    /// The facts that a run would record.
    pub facts: HostFacts,
}

impl Diagnosis {
    /// The diagnosis as text for a terminal.
    #[must_use]
    pub fn render(&self) -> String {
        let title = format!("host graded {}", self.graded.grade);
        let head = Section::remarks(&title, self.graded.reasons.clone());
        terminal::section(&head) + &terminal::section(&self.facts())
    }

    fn facts(&self) -> Section {
        let f = &self.facts;
        let text = |t: &Option<String>| t.clone().unwrap_or_else(|| "n/a".to_owned());
        let platform = f.probe.platform.map_or("unknown", |p| p.name());
        let missing = f.kvm_missing.clone();
        let numa = f.numa_nodes.map(|n| n.to_string());
        let ksm = f
            .ksm_runs
            .map(|runs| if runs { "on" } else { "off" }.to_owned());
        let limit = f.cgroup_cpu_cores.map(|cores| cores.to_string());
        let noise = [self.noise.steal_share, self.noise.busy_share].map(percent);
        let dirty = match f.dirty_tree {
            Some(true) => " (dirty tree)",
            Some(false) | None => "",
        };
        let rows = [
            ("platform", format!("{platform}: {}", f.probe.why)),
            ("/dev/kvm", missing.unwrap_or_else(|| "usable".to_owned())),
            (
                "cpu",
                format!("{}, microcode {}", text(&f.cpu_model), text(&f.microcode)),
            ),
            ("cores", f.cores.to_string()),
            ("numa nodes", text(&numa)),
            ("kernel", text(&f.kernel)),
            ("clock source", text(&f.clock_source)),
            ("governor", text(&f.governor)),
            ("huge pages", text(&f.transparent_huge_pages)),
            ("ksm", text(&ksm)),
            (
                "cgroup cores",
                limit.unwrap_or_else(|| "no limit".to_owned()),
            ),
            ("memory", memory(f)),
            ("steal, busy", noise.join(", ")),
            ("load", text(&f.load_1min.map(|load| format!("{load:.2}")))),
            ("commit", format!("{}{dirty}", text(&f.commit))),
        ];
        let rows = rows
            .map(|(name, value)| (name.to_owned(), value))
            .into_iter();
        let programs = f.binaries.iter();
        let programs = programs.map(|(name, sum)| (name.clone(), format!("sha256 {sum}")));
        let mitigations = f.mitigations.iter();
        let mitigations = mitigations.map(|(name, state)| (name.clone(), state.clone()));
        Section::list("facts", rows.chain(programs).chain(mitigations))
    }
}

fn memory(facts: &HostFacts) -> String {
    let gib = |line: &str| {
        facts.meminfo.get(line).map_or("n/a".to_owned(), |b| {
            format!("{:.1} GiB", *b as f64 / f64::from(1 << 30))
        })
    };
    format!("{} of {} available", gib("MemAvailable"), gib("MemTotal"))
}

fn percent(share: Option<f64>) -> String {
    share.map_or("n/a".to_owned(), |s| format!("{:.1} %", s * 100.0))
}
