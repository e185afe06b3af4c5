//! The output of `cube-bench doctor`.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

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
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let f = &self.facts;
        let text = |t: &Option<String>| t.clone().unwrap_or_else(|| "n/a".to_owned());
        writeln!(out, "host graded {}", self.graded.grade)?;
        for reason in &self.graded.reasons {
            writeln!(out, "  - {reason}")?;
        }
        let platform = f.probe.platform.map_or("unknown", |p| p.name());
        let rows = [
            ("platform", format!("{platform}: {}", f.probe.why)),
            (
                "/dev/kvm",
                f.kvm_missing.clone().unwrap_or_else(|| "usable".to_owned()),
            ),
            (
                "cpu",
                format!("{}, microcode {}", text(&f.cpu_model), text(&f.microcode)),
            ),
            ("cores", f.cores.to_string()),
            (
                "numa nodes",
                f.numa_nodes.map_or("n/a".to_owned(), |n| n.to_string()),
            ),
            ("kernel", text(&f.kernel)),
            ("clock source", text(&f.clock_source)),
            ("governor", text(&f.governor)),
            ("huge pages", text(&f.transparent_huge_pages)),
            (
                "ksm",
                f.ksm_runs.map_or("n/a".to_owned(), |r| {
                    if r { "on" } else { "off" }.to_owned()
                }),
            ),
            (
                "cgroup cores",
                f.cgroup_cpu_cores
                    .map_or("no limit".to_owned(), |c| c.to_string()),
            ),
            ("memory", memory(f)),
            (
                "steal, busy",
                format!(
                    "{}, {}",
                    percent(self.noise.steal_share),
                    percent(self.noise.busy_share)
                ),
            ),
            (
                "load",
                f.load_1min.map_or("n/a".to_owned(), |l| format!("{l:.2}")),
            ),
            (
                "commit",
                format!(
                    "{}{}",
                    text(&f.commit),
                    if f.dirty_tree == Some(true) {
                        " (dirty tree)"
                    } else {
                        ""
                    }
                ),
            ),
        ];
        for (name, value) in rows {
            writeln!(out, "{name:<14}{value}")?;
        }
        for (name, sum) in &f.binaries {
            writeln!(out, "{name:<14}sha256 {sum}")?;
        }
        for (name, state) in &f.mitigations {
            writeln!(out, "  {name}: {state}")?;
        }
        Ok(())
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
