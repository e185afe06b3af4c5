//! Memory in reports: cost per clone, fixed cost, and owners.

use serde::{Deserialize, Serialize};

use super::{View, section::Section, units::mb};
use crate::{
    event::MemoryPoint,
    memory::{CPU_LISTS_FREE, DAMON_BYTES, SCANNED, STOLEN},
    summary::fold::{Summary, available, available_of},
};

/// Numbers of clones for which reports state the total.
const TOTALS: [u32; 6] = [50, 200, 500, 1000, 2000, 4000];
/// Largest share of the residue that is reported without a remark.
const RESIDUE: f64 = 0.05;

/// Memory measurements of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryDocument {
    /// Decrease of available memory per additional clone.
    pub slope_bytes_per_clone: Option<f64>,
    /// 95 % confidence interval of the slope.
    pub slope_ci95: Option<[f64; 2]>,
    /// Number of samples.
    pub points: usize,
    /// Largest number of clones that were alive at the same time.
    pub most_clones: u32,
    pub ledger: LedgerDocument,
    /// Share of the slope that no owner accounts for, 0 to 1; negative if the owners account for more.
    #[serde(default)]
    pub residue_share: Option<f64>,
    /// Decrease of available memory from before the run's preparation to the sample without clones: the loaded
    /// template, the server with its pool, and the harness.
    #[serde(default)]
    pub fixed_bytes: Option<f64>,
    /// Fixed cost plus the cost of all clones, divided by the number of clones.
    #[serde(default)]
    pub totals: Vec<TotalDocument>,
    /// CPU milliseconds per second of one idle clone; `null` unless clones idle for some time.
    #[serde(default)]
    pub idle_cpu_ms_per_s: Option<f64>,
    /// Activity of the kernel between the first and the last sample.
    #[serde(default)]
    pub reclaim: ReclaimDocument,
}

/// Memory of one clone, including its part of the fixed cost, if this number of clones is alive.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TotalDocument {
    pub clones: u32,
    pub bytes_per_clone: f64,
}

/// Reclaim between the first and the last sample; `null` if it could not be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReclaimDocument {
    pub scanned_pages: Option<u64>,
    pub reclaimed_pages: Option<u64>,
    /// Bytes to which DAMON schemes were applied, as last updated by the owner of the scheme.
    pub damon_bytes: Option<u64>,
}

/// Memory of one clone by owner: means over clones in bytes, `null` if a value could not be read. The first eight
/// fields and `residue_bytes` add up to the slope; a field that is `null` counts as nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LedgerDocument {
    /// Guest memory that the clone has written.
    pub guest_private_bytes: Option<f64>,
    /// Private pages of the VMM process outside guest memory.
    pub vmm_private_bytes: Option<f64>,
    /// Slope of PageTables in /proc/meminfo.
    pub page_tables_bytes: Option<f64>,
    /// Slope of SecPageTables: KVM's shadow or nested page tables.
    pub shadow_page_tables_bytes: Option<f64>,
    /// Sum of the slopes of SUnreclaim and Percpu, and of the larger of the slopes of KernelStack and VmallocUsed.
    /// VmallocUsed can include kernel stacks, so they are not added.
    pub kernel_objects_bytes: Option<f64>,
    /// Slope of Shmem: files of the clone in /run and shared memory of the VMM.
    pub run_files_bytes: Option<f64>,
    /// Slope of AnonPages minus the private pages above: other processes, such as the server and the harness.
    #[serde(default)]
    pub other_processes_bytes: Option<f64>,
    /// Slope of the pages in use that no counter of /proc/meminfo includes: pages that the kernel allocated
    /// directly.
    #[serde(default)]
    pub uncounted_bytes: Option<f64>,
    /// Slope of available memory minus all fields above.
    pub residue_bytes: Option<f64>,
    /// Pages of the template that all clones share: the largest resident amount of one clone. Not part of the sum.
    pub shared_once_bytes: Option<f64>,
    /// Resident set size of one VMM, for comparison with other projects. Not part of the sum.
    pub rss_bytes: Option<f64>,
    /// Proportional set size of one VMM, for comparison with other projects. Not part of the sum.
    pub pss_bytes: Option<f64>,
}

impl LedgerDocument {
    /// The lines of the ledger with their names in reports: first the parts of the sum, and then, with names in
    /// parentheses, the values that are not part of it.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, Option<f64>); 12] {
        [
            ("guest private pages", self.guest_private_bytes),
            ("VMM private pages", self.vmm_private_bytes),
            ("page tables", self.page_tables_bytes),
            ("shadow page tables", self.shadow_page_tables_bytes),
            ("kernel objects", self.kernel_objects_bytes),
            ("files in /run, shared memory", self.run_files_bytes),
            (
                "private pages of other processes",
                self.other_processes_bytes,
            ),
            ("kernel pages without a counter", self.uncounted_bytes),
            ("unexplained residue", self.residue_bytes),
            ("(shared once by all)", self.shared_once_bytes),
            ("(RSS of one VMM)", self.rss_bytes),
            ("(PSS of one VMM)", self.pss_bytes),
        ]
    }
}

impl MemoryDocument {
    pub(super) fn new(view: &View<'_>) -> Self {
        let summary = view.summary;
        let slope = summary.memory_slope();
        let ledger = ledger(summary);
        let residue = ledger.residue_bytes.zip(slope);
        let before = available_of(&view.facts.meminfo);
        Self {
            slope_bytes_per_clone: slope.map(|s| s.value),
            slope_ci95: slope
                .and_then(|s| s.interval95)
                .map(|(low, high)| [low, high]),
            points: summary.memory.len(),
            most_clones: summary.memory.iter().map(|p| p.alive).max().unwrap_or(0),
            residue_share: residue.map(|(residue, slope)| residue / slope.value),
            ledger,
            fixed_bytes: before
                .zip(mean_available(summary, 0))
                .map(|(before, after)| before - after),
            totals: before
                .map(|before| totals(summary, before))
                .unwrap_or_default(),
            idle_cpu_ms_per_s: idle_cpu_ms_per_s(summary),
            reclaim: ReclaimDocument::new(summary),
        }
    }

    /// The slope with its ledger, and other values.
    pub(super) fn section(&self) -> Section {
        let interval = self.slope_ci95.map_or("n/a".to_owned(), |[low, high]| {
            format!("{} to {}", mb(Some(low)), mb(Some(high)))
        });
        let title = format!(
            "memory of one more clone: {} (95 % {interval}; {} points, up to {} clones)",
            mb(self.slope_bytes_per_clone),
            self.points,
            self.most_clones,
        );
        let parts = self.ledger.parts().into_iter();
        let parts = parts.map(|(name, bytes)| (name.to_owned(), mb(bytes)));
        Section::list(&title, parts.chain(self.rows()))
    }

    /// Name and value, in addition to the slope and its ledger.
    fn rows(&self) -> Vec<(String, String)> {
        let mut rows = Vec::new();
        let mut add = |name: &str, value: Option<String>| {
            rows.extend(value.map(|value| (name.to_owned(), value)));
        };
        let residue = self.residue_share.map(|share| {
            let incomplete = if share.abs() > RESIDUE {
                ": more than 5 %, the ledger is not complete"
            } else {
                ""
            };
            format!("{:.1} % of the slope{incomplete}", share * 100.0)
        });
        add("residue", residue);
        add(
            "fixed cost before the first clone",
            self.fixed_bytes.map(|bytes| mb(Some(bytes))),
        );
        for total in &self.totals {
            add(
                &format!("per clone with fixed cost, {} clones", total.clones),
                Some(mb(Some(total.bytes_per_clone))),
            );
        }
        let idle = self.idle_cpu_ms_per_s;
        add(
            "CPU of an idle clone",
            idle.map(|ms| format!("{ms:.2} ms per second")),
        );
        add("reclaim between the samples", self.reclaim.render());
        rows
    }
}

impl ReclaimDocument {
    fn new(summary: &Summary) -> Self {
        let ends = summary.memory.first().zip(summary.memory.last());
        let between = |name: &str| {
            let (first, last) = ends?;
            last.reclaim
                .get(name)?
                .checked_sub(*first.reclaim.get(name)?)
        };
        Self {
            scanned_pages: between(SCANNED),
            reclaimed_pages: between(STOLEN),
            damon_bytes: between(DAMON_BYTES),
        }
    }

    fn render(self) -> Option<String> {
        let (scanned, reclaimed) = (self.scanned_pages?, self.reclaimed_pages?);
        let damon = match self.damon_bytes {
            None => "no DAMON schemes".to_owned(),
            Some(0) => "DAMON schemes exist, their statistics did not change".to_owned(),
            Some(bytes) => format!("DAMON schemes on {}", mb(Some(bytes as f64))),
        };
        Some(format!(
            "{scanned} pages scanned, {reclaimed} reclaimed; {damon}"
        ))
    }
}

/// Mean of available memory over the samples with this number of clones.
fn mean_available(summary: &Summary, alive: u32) -> Option<f64> {
    let samples = summary.memory.iter().filter(|point| point.alive == alive);
    let read: Vec<f64> = samples.filter_map(available).collect();
    (!read.is_empty()).then(|| read.iter().sum::<f64>() / read.len() as f64)
}

fn totals(summary: &Summary, before: f64) -> Vec<TotalDocument> {
    let total = |clones| {
        let after = mean_available(summary, clones)?;
        let bytes_per_clone = (before - after) / f64::from(clones);
        Some(TotalDocument {
            clones,
            bytes_per_clone,
        })
    };
    TOTALS.into_iter().filter_map(total).collect()
}

fn idle_cpu_ms_per_s(summary: &Summary) -> Option<f64> {
    let idle = || summary.idle.iter();
    let cpu: f64 = idle().map(|s| s.cpu_ns as f64).sum();
    let window: f64 = idle()
        .map(|s| f64::from(s.clones) * s.window_ns as f64)
        .sum();
    (window > 0.0).then(|| cpu / window * 1000.0)
}

/// Bytes in use that no line of /proc/meminfo includes; `None` if a line is missing.
fn uncounted(point: &MemoryPoint) -> Option<f64> {
    let line = |name: &str| point.meminfo.get(name).map(|bytes| *bytes as f64);
    let counted = [
        "Cached",
        "Buffers",
        "AnonPages",
        "Slab",
        "PageTables",
        "SecPageTables",
        "Percpu",
    ];
    let counted: Option<f64> = counted.into_iter().map(line).sum();
    // VmallocUsed can include kernel stacks.
    let stacks = line("KernelStack")?.max(line("VmallocUsed")?);
    let lists = line(CPU_LISTS_FREE).unwrap_or(0.0);
    Some(line("MemTotal")? - line("MemFree")? - lists - counted? - stacks)
}

fn ledger(summary: &Summary) -> LedgerDocument {
    let line = |name| summary.meminfo_slope(name).map(|slope| slope.value);
    let guest_private = summary.mean_of(|l| l.guest_private_bytes);
    let vmm_private = summary.mean_of(|l| l.vmm_private_bytes);
    let page_tables = line("PageTables");
    let shadow = line("SecPageTables");
    let stacks = match (line("KernelStack"), line("VmallocUsed")) {
        (Some(stack), Some(vmalloc)) => Some(stack.max(vmalloc)),
        (one, other) => one.or(other),
    };
    let kernel_objects = sum(&[line("SUnreclaim"), line("Percpu"), stacks]);
    let run_files = line("Shmem");
    let anonymous = line("AnonPages");
    let other_processes = anonymous.zip(guest_private.zip(vmm_private));
    let other_processes = other_processes.map(|(all, (guest, vmm))| all - guest - vmm);
    let uncounted = summary.slope_of(uncounted).map(|slope| slope.value);
    let parts = [
        guest_private,
        vmm_private,
        page_tables,
        shadow,
        kernel_objects,
        run_files,
    ];
    // Older recorded runs do not have these lines.
    let named = other_processes.unwrap_or(0.0) + uncounted.unwrap_or(0.0);
    LedgerDocument {
        guest_private_bytes: guest_private,
        vmm_private_bytes: vmm_private,
        page_tables_bytes: page_tables,
        shadow_page_tables_bytes: shadow,
        kernel_objects_bytes: kernel_objects,
        run_files_bytes: run_files,
        other_processes_bytes: other_processes,
        uncounted_bytes: uncounted,
        residue_bytes: summary
            .memory_slope()
            .and_then(|slope| Some(slope.value - sum(&parts)? - named)),
        shared_once_bytes: summary
            .ledgers
            .iter()
            .filter_map(|l| l.guest_shared_bytes)
            .max()
            .map(|bytes| bytes as f64),
        rss_bytes: summary.mean_of(|l| l.rss_bytes),
        pss_bytes: summary.mean_of(|l| l.pss_bytes),
    }
}

/// The sum of all parts; `None` if a part could not be read.
fn sum(parts: &[Option<f64>]) -> Option<f64> {
    parts.iter().copied().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::IdleSample;

    /// Available memory and a number of reclaimed pages, with `alive` clones.
    fn point(alive: u32, available: u64, reclaimed: u64) -> MemoryPoint {
        MemoryPoint {
            group: 0,
            alive,
            at_ns: 0,
            meminfo: [("MemAvailable".to_owned(), available)].into(),
            reclaim: [
                (SCANNED.to_owned(), 2 * reclaimed),
                (STOLEN.to_owned(), reclaimed),
            ]
            .into(),
        }
    }

    fn idle(clones: u32, cpu_ns: u64) -> IdleSample {
        IdleSample {
            round: 0,
            clones,
            window_ns: 1_000_000,
            cpu_ns,
        }
    }

    fn summary() -> Summary {
        Summary {
            memory: vec![
                point(0, 900, 7),
                point(50, 650, 9),
                point(60, 600, 10),
                point(50, 550, 12),
            ],
            idle: vec![idle(10, 5_000), idle(30, 15_000)],
            ..Summary::default()
        }
    }

    #[test]
    fn totals_contain_the_fixed_cost_and_only_measured_numbers_of_clones() {
        let found = totals(&summary(), 1000.0);
        assert_eq!(
            found,
            [TotalDocument {
                clones: 50,
                bytes_per_clone: 8.0
            }]
        );
        assert_eq!(mean_available(&summary(), 0), Some(900.0));
    }

    #[test]
    fn idle_time_is_weighted_by_clones() {
        assert_eq!(idle_cpu_ms_per_s(&summary()), Some(0.5));
        assert_eq!(idle_cpu_ms_per_s(&Summary::default()), None);
    }

    #[test]
    fn reclaim_counts_from_the_first_sample() {
        let reclaim = ReclaimDocument::new(&summary());
        assert_eq!(
            (reclaim.scanned_pages, reclaim.reclaimed_pages),
            (Some(10), Some(5))
        );
        assert_eq!(
            reclaim.render().unwrap(),
            "10 pages scanned, 5 reclaimed; no DAMON schemes"
        );
        assert_eq!(ReclaimDocument::new(&Summary::default()).render(), None);
    }

    #[test]
    fn pages_without_a_counter_are_those_in_use_that_no_line_contains() {
        let mut point = point(1, 0, 0);
        assert_eq!(uncounted(&point), None);
        let used = [
            "Cached",
            "Buffers",
            "AnonPages",
            "Slab",
            "PageTables",
            "SecPageTables",
            "Percpu",
            "KernelStack",
        ];
        for name in used.into_iter().chain(["MemFree"]) {
            point.meminfo.insert(name.to_owned(), 10);
        }
        point.meminfo.insert("VmallocUsed".to_owned(), 15);
        point.meminfo.insert("MemTotal".to_owned(), 100);
        assert_eq!(uncounted(&point), Some(5.0));
    }
}
