//! The JSON report. `docs/measure/report-format.md` documents its fields for scripts; a change that could break a
//! reader increases [`FORMAT`].

use std::collections::BTreeMap;

use model::{StartPhase, WorkingSetPrefault};
use serde::{Deserialize, Serialize};

use super::{
    View,
    cluster::ClusterDocument,
    cost::CostDocument,
    density::{self, LevelDocument},
    load::LoadDocument,
    memory::MemoryDocument,
    peers::PeersDocument,
    turns::{self, RatioDocument, TurnsDocument},
    work::{FirstWork, WorkDocument},
};
use crate::{
    gate::GateResult,
    plan::Subject,
    scenario::{Arrival, BesideKind, Quantile, TargetKind},
    summary::fold,
};
use stats::quantile::{Estimate, Samples};

/// Format of the document.
pub const FORMAT: u32 = 3;
/// Name in rows of clones that the harness starts itself, with the template in the page cache.
const CLONE_ROW: &str = "clone, page cache warm";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// [`FORMAT`].
    pub format: u32,
    /// Name of the scenario.
    pub scenario: String,
    /// Start of the run in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// `complete`, `memory_share`, `limit`, `interrupted`, `broken` or `killed`.
    pub ended: String,
    /// Exit code of the run.
    pub exit_code: u8,
    /// Why a run that ended with `limit` or `broken` did so; `null` for others.
    #[serde(default)]
    pub end_message: Option<String>,
    /// Command line that repeats the run.
    pub reproduce: String,
    pub host: HostDocument,
    /// Number of measured starts of the target, failures included.
    pub n: usize,
    /// Number of failed measured starts by cause; causes without failures are absent.
    pub failures: BTreeMap<String, u64>,
    /// Whether warm-ups of the template have run the first work of the clones. For runs recorded before this field
    /// existed, it is computed from their scenario.
    pub first_work: FirstWork,
    /// `null` unless the scenario takes its work from a file.
    #[serde(default)]
    pub work: Option<WorkDocument>,
    /// Latencies from the intended start, by phase.
    pub phases: BTreeMap<String, PhaseDocument>,
    /// The same latencies by origin of the sandbox: `warm`, `restored`, or `unanswered` for failed creates. Empty
    /// if the target does not report origins. With more than one key, `phases` mixes them.
    #[serde(default)]
    pub starts: BTreeMap<String, BTreeMap<String, PhaseDocument>>,
    /// First-exec latencies by template; absent unless the scenario has a mix of them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub templates: BTreeMap<String, PhaseDocument>,
    /// Name of the rows of `phases` if the target does not report origins: `clone, page cache warm` for clones that
    /// the harness starts itself, and `null` for a server.
    #[serde(default)]
    pub start_name: Option<String>,
    /// Latencies of the comparison rounds, by phase; `null` without such rounds.
    #[serde(default)]
    pub beside: Option<BTreeMap<String, PhaseDocument>>,
    /// Name of the comparison rounds, by their difference from the target: `direct`, `plain`, `prefault on`,
    /// `prefault off` or `host`. `null` without such rounds.
    #[serde(default)]
    pub beside_name: Option<String>,
    /// `null` without turns.
    #[serde(default)]
    pub turns: Option<TurnsDocument>,
    /// Turns of the comparison rounds; `null` without turns or without comparison rounds.
    #[serde(default)]
    pub beside_turns: Option<TurnsDocument>,
    /// Ratio of each turn to the same turn of the comparison rounds; empty without turns or without comparison
    /// rounds.
    #[serde(default)]
    pub turn_ratios: Vec<RatioDocument>,
    /// Durations of whole rounds, from the base time to the end of the last start; `n` counts rounds. `null` unless
    /// arrivals are bursts.
    #[serde(default)]
    pub round: Option<PhaseDocument>,
    /// Comparison of systems; `null` without peers.
    #[serde(default)]
    pub peers: Option<PeersDocument>,
    /// Absent unless the target is a cluster that the run started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterDocument>,
    /// First-exec latency of the baseline; `null` without a baseline.
    pub baseline: Option<PhaseDocument>,
    /// Starts of the null target, which returns at once through the same code: the overhead of the harness. `null`
    /// in runs without such rounds.
    #[serde(default)]
    pub null_target: Option<PhaseDocument>,
    /// Repetitions that other programs disturbed; `null` if the run has no interference rule.
    #[serde(default)]
    pub interference: Option<InterferenceDocument>,
    /// First-exec latency of cold starts; `null` without cold starts.
    pub cold: Option<PhaseDocument>,
    /// Rates, CPU time and memory of the pool.
    pub cost: CostDocument,
    /// Starts by rate, or by the number of warm slots; `null` if the scenario has one rate and does not watch its pool.
    #[serde(default)]
    pub load: Option<LoadDocument>,
    /// State after each measured round, if sandboxes live to the end of the run; otherwise absent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub levels: Vec<LevelDocument>,
    /// `null` if the scenario does not measure memory.
    pub memory: Option<MemoryDocument>,
    /// Times of the repeated command in held clones; failed repeats of denied exchanges count as failures. `null`
    /// without repeats.
    pub after_hold: Option<PhaseDocument>,
    /// In the order of the scenario.
    pub gates: Vec<GateResult>,
}

/// Repetitions that other programs disturbed, and the rule for them, fixed before the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InterferenceDocument {
    /// The rule as a sentence.
    pub rule: String,
    /// Number of measured repetitions that began.
    pub repetitions: usize,
    /// Number of repetitions excluded from all results.
    pub left_out: usize,
    /// Number of disturbed repetitions that were kept because a start failed in them.
    pub kept_with_failures: usize,
    /// Distinct reasons.
    pub reasons: Vec<String>,
    /// Mean share of the host's CPU time that other programs used during measured rounds, excluded rounds included;
    /// `null` if it could not be measured. Includes kernel threads if their own share is `null`.
    pub foreign_cpu_share: Option<f64>,
    /// Mean share of kernel threads during the measured rounds of the target. They work for all programs, so no rule
    /// judges it. `null` if it could not be measured, and in older runs.
    #[serde(default)]
    pub kernel_cpu_share: Option<f64>,
    /// The same during the rounds of host processes.
    #[serde(default)]
    pub kernel_cpu_share_baseline: Option<f64>,
}

impl InterferenceDocument {
    fn new(view: &View<'_>) -> Option<Self> {
        let found = &view.summary.interference;
        let mut reasons: Vec<String> = found.left_out.values().cloned().collect();
        reasons.sort();
        reasons.dedup();
        Some(Self {
            rule: view.scenario.interference?.describe(),
            repetitions: found.repetitions(),
            left_out: found.repetitions_left_out,
            kept_with_failures: found.kept_with_failures,
            reasons,
            foreign_cpu_share: found.programs_share(),
            kernel_cpu_share: found.kernel_share(Subject::Clone),
            kernel_cpu_share_baseline: found.kernel_share(Subject::HostProcess),
        })
    }

    /// The sentences of a report.
    #[must_use]
    pub fn sentences(&self) -> Vec<String> {
        let mut sentences = vec![match self.foreign_cpu_share {
            None => "interference: not measured".to_owned(),
            Some(share) => format!(
                "interference: other programs used {:.1} % of the CPU time; {} of {} repetitions are left out",
                share * 100.0,
                self.left_out,
                self.repetitions
            ),
        }];
        sentences.extend(self.kernel_threads());
        sentences.push(format!(
            "rule, fixed before the run: a repetition is left out if {}",
            self.rule
        ));
        if self.kept_with_failures > 0 {
            let kept = self.kept_with_failures;
            sentences.push(format!(
                "{kept} disturbed repetitions are kept because starts failed in them"
            ));
        }
        sentences.extend(
            self.reasons
                .iter()
                .map(|reason| format!("left out: {reason}")),
        );
        sentences
    }

    /// Sentence on kernel threads; `None` if other programs were not measured either.
    fn kernel_threads(&self) -> Option<String> {
        self.foreign_cpu_share?;
        let Some(share) = self.kernel_cpu_share else {
            return Some(
                "kernel threads are among the other programs: their CPU time is unknown".to_owned(),
            );
        };
        let percent = share * 100.0;
        let baseline = self
            .kernel_cpu_share_baseline
            .map(|share| format!(", and {:.1} % in those of host processes", share * 100.0));
        Some(format!(
            "kernel threads, which work for the run too and are not judged, used {percent:.1} % of the CPU time in rounds of the target{}",
            baseline.unwrap_or_default()
        ))
    }
}

/// The host of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostDocument {
    /// `ring3` or `hvm`; `null` when unknown.
    pub platform: Option<String>,
    /// `publishable`, `indicative` or `unfit`.
    pub grade: String,
    /// Rules that lowered the grade.
    pub grade_reasons: Vec<String>,
    /// Number of CPUs that the harness may use.
    pub cores: usize,
    pub cpu_model: Option<String>,
    /// Kernel release.
    pub kernel: Option<String>,
    /// MemTotal.
    pub memory_bytes: Option<u64>,
    /// Mean share of stolen CPU time, 0 to 1.
    pub steal_share: Option<f64>,
    /// Load average over one minute before the run.
    #[serde(default)]
    pub load_1min: Option<f64>,
    /// SHA-256 of the measured programs.
    #[serde(default)]
    pub binaries: BTreeMap<String, String>,
    /// Commit from which each of these programs was built; absent if it is not known for this hash.
    #[serde(default)]
    pub built_from: BTreeMap<String, String>,
    /// Commit of the source tree.
    pub commit: Option<String>,
    /// Whether tracked files differed from the commit.
    pub dirty_tree: Option<bool>,
}

/// Quantiles of the latencies of a phase, or of the times of a turn, a round or a repeated command. A quantile is
/// `null` with too few samples, or if it lies among the failures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseDocument {
    /// Samples, failures included.
    pub n: usize,
    /// Failures among the samples, for example starts that did not reach the phase.
    pub failed: usize,
    pub p50_ms: Option<f64>,
    pub p95_ms: Option<f64>,
    pub p99_ms: Option<f64>,
    pub max_ms: Option<f64>,
    /// 95 % confidence interval, by bootstrap over rounds; `null` with too few samples or rounds, or if its upper bound
    /// lies among the failures.
    pub p50_ci95_ms: Option<[f64; 2]>,
    pub p95_ci95_ms: Option<[f64; 2]>,
    pub p99_ci95_ms: Option<[f64; 2]>,
}

impl HostDocument {
    /// The measured programs with the first digits of their hashes and commits.
    #[must_use]
    pub fn programs(&self) -> String {
        let short = |text: &str| text.chars().take(8).collect::<String>();
        let one = |(name, sum): (&String, &String)| match self.built_from.get(name) {
            None => format!("{name} {}", short(sum)),
            Some(commit) if commit.ends_with(')') => {
                format!("{name} {} from {} (modified)", short(sum), short(commit))
            }
            Some(commit) => format!("{name} {} from {}", short(sum), short(commit)),
        };
        self.binaries.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

impl Document {
    #[must_use]
    pub fn new(view: &View<'_>) -> Self {
        let summary = view.summary;
        let started = summary.started.as_ref();
        Self {
            format: FORMAT,
            scenario: view.scenario.name.clone(),
            started_unix_ms: started.map_or(0, |s| s.started_unix_ms),
            ended: ended(view).to_owned(),
            exit_code: view.end().code(),
            end_message: end_message(view),
            reproduce: view.reproduce.to_owned(),
            host: host(view),
            n: summary.clones.len(),
            failures: summary
                .failures()
                .into_iter()
                .map(|(cause, n)| (cause.name().to_owned(), n))
                .collect(),
            first_work: FirstWork::of(view),
            work: WorkDocument::new(view),
            phases: by_name(summary.phases()),
            starts: summary
                .by_start()
                .into_iter()
                .map(|(kind, clones)| {
                    (
                        fold::start_name(kind).to_owned(),
                        by_name(fold::ladder(&clones)),
                    )
                })
                .collect(),
            templates: by_template(view),
            start_name: (view.scenario.target.kind == TargetKind::VmmDirect)
                .then(|| CLONE_ROW.to_owned()),
            beside: (!summary.beside.is_empty())
                .then(|| by_name(fold::ladder(&summary.beside.iter().collect::<Vec<_>>()))),
            beside_name: beside_name(view),
            turns: TurnsDocument::new(&view.scenario.turns, &summary.clones),
            beside_turns: TurnsDocument::new(&view.scenario.turns, &summary.beside),
            turn_ratios: RatioDocument::all(&view.scenario.turns, summary),
            round: match view.scenario.arrival {
                Arrival::Burst { .. } => present(&summary.round_samples()),
                Arrival::Closed { .. } | Arrival::Open { .. } => None,
            },
            peers: PeersDocument::new(view),
            cluster: ClusterDocument::new(view),
            baseline: present(&summary.baseline_samples()),
            null_target: present(&summary.null_samples()),
            interference: InterferenceDocument::new(view),
            cold: present(&summary.cold_samples()),
            cost: CostDocument::new(summary),
            load: LoadDocument::new(summary),
            levels: density::levels(summary),
            memory: view.scenario.memory.map(|_| MemoryDocument::new(view)),
            after_hold: present(&Samples::new(summary.after_hold_ns.clone())),
            gates: view.gates.clone(),
        }
    }

    /// Latencies to first exec for each origin, with the origin and a space as prefix. A single entry with an empty
    /// prefix if the target does not report origins.
    #[must_use]
    pub fn first_execs(&self) -> Vec<(String, &PhaseDocument)> {
        let name = StartPhase::FirstExec.name();
        if self.starts.is_empty() {
            let only = self.phases.get(name);
            return only.map(|p| (String::new(), p)).into_iter().collect();
        }
        let kinds = self.starts.iter();
        kinds
            .filter_map(|(kind, phases)| Some((format!("{kind} "), phases.get(name)?)))
            .collect()
    }

    /// All rows of latencies with their names in reports. The rows of phases are separate for each origin.
    #[must_use]
    pub fn rows(&self) -> Vec<(String, &PhaseDocument)> {
        let mut rows = Vec::new();
        let beside_name = self.beside_row().unwrap_or_default();
        rows.extend(self.load.iter().flat_map(LoadDocument::latencies));
        if self.has_rates() {
            // With several rates, these rows would mix them.
            return rows;
        }
        if self.starts.is_empty() {
            let name = self.start_name.as_ref();
            let prefix = name.map_or(String::new(), |name| format!("{name}: "));
            self.ladder_rows(&mut rows, &prefix, &self.phases);
        }
        for (kind, phases) in &self.starts {
            self.ladder_rows(&mut rows, &format!("{}: ", start_row(kind)), phases);
        }
        if let Some(phases) = &self.beside {
            self.ladder_rows(&mut rows, &format!("{beside_name}: "), phases);
        }
        let templates = self.templates.iter();
        rows.extend(templates.map(|(name, row)| (format!("template {name}: first_exec"), row)));
        rows.extend(self.work.iter().flat_map(|work| work.rows(beside_name)));
        rows.extend(self.turns.iter().flat_map(TurnsDocument::rows));
        for (name, row) in self.beside_turns.iter().flat_map(TurnsDocument::rows) {
            rows.push((format!("{beside_name}: {name}"), row));
        }
        for (name, row) in [
            ("whole round", &self.round),
            ("host process", &self.baseline),
            ("null target (harness alone)", &self.null_target),
            ("clone, page cache dropped: first_exec", &self.cold),
            ("repeated command", &self.after_hold),
        ] {
            rows.extend(row.as_ref().map(|row| (name.to_owned(), row)));
        }
        rows.extend(self.cluster.iter().flat_map(ClusterDocument::latencies));
        rows
    }

    fn has_rates(&self) -> bool {
        self.load
            .as_ref()
            .is_some_and(|load| !load.rates.is_empty())
    }

    /// Rows of costs for people: name and value.
    pub(super) fn cost_rows(&self) -> Vec<(String, String)> {
        let mut rows = self
            .load
            .as_ref()
            .map(LoadDocument::costs)
            .unwrap_or_default();
        let cluster = self.cluster.iter();
        rows.extend(cluster.flat_map(|cluster| cluster.costs(self.host.cores)));
        rows.extend(
            self.cost
                .rows(self.beside_row().unwrap_or_default(), self.has_rates()),
        );
        rows
    }

    /// Appends the rows of all phases in order. The last row carries the label of the first work.
    fn ladder_rows<'a>(
        &self,
        rows: &mut Vec<(String, &'a PhaseDocument)>,
        prefix: &str,
        phases: &'a BTreeMap<String, PhaseDocument>,
    ) {
        for phase in StartPhase::ALL {
            if let Some(row) = phases.get(phase.name()) {
                let label = match phase {
                    StartPhase::FirstExec => format!(" ({})", self.first_work.words()),
                    _ => String::new(),
                };
                rows.push((format!("{prefix}{}{label}", phase.name()), row));
            }
        }
    }

    /// Name of the comparison rounds in rows. Those without a server are new clones whose template is in the page
    /// cache.
    fn beside_row(&self) -> Option<&str> {
        match self.beside_name.as_deref()? {
            "direct" => Some(CLONE_ROW),
            other => Some(other),
        }
    }

    /// Rows with the mean page faults of one VMM: name, value of the target, and value of the comparison rounds.
    #[must_use]
    pub fn fault_rows(&self) -> Vec<(String, String, String)> {
        turns::fault_rows(self.turns.as_ref(), self.beside_turns.as_ref())
    }

    /// Column titles of [`Self::ratio_rows`]; `None` without ratios.
    #[must_use]
    pub fn ratio_columns(&self) -> Option<[String; 5]> {
        let pairs = self.turn_ratios.first()?.pairs;
        let beside = self.beside_name.as_deref().unwrap_or_default();
        Some([
            format!("over {beside}, {pairs} pairs of rounds"),
            "ratio".to_owned(),
            "95 %".to_owned(),
            "MB/s".to_owned(),
            format!("MB/s {beside}"),
        ])
    }

    /// A row for each turn: name, ratio, confidence interval, and the throughput of the target and of the
    /// comparison rounds.
    #[must_use]
    pub fn ratio_rows(&self) -> Vec<[String; 5]> {
        let speed = |turns: &Option<TurnsDocument>, index: usize| {
            let turn = turns.as_ref().and_then(|t| t.turns.get(index));
            let rate = turn.and_then(|t| t.bytes_per_s);
            rate.map_or(String::new(), |rate| format!("{:.1}", rate / 1e6))
        };
        let row = |(index, of): (usize, &RatioDocument)| {
            [
                format!("turn {}", of.turn),
                of.ratio.map_or("n/a".to_owned(), |r| format!("{r:.3}")),
                of.ratio_ci95.map_or("n/a".to_owned(), |[low, high]| {
                    format!("{low:.3}–{high:.3}")
                }),
                speed(&self.turns, index),
                speed(&self.beside_turns, index),
            ]
        };
        self.turn_ratios.iter().enumerate().map(row).collect()
    }

    /// Pretty-printed JSON with a final newline.
    #[must_use]
    pub fn render(&self) -> String {
        // Serializing plain values does not fail.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }
}

fn by_name(phases: Vec<(StartPhase, Samples)>) -> BTreeMap<String, PhaseDocument> {
    phases
        .into_iter()
        .map(|(phase, samples)| (phase.name().to_owned(), PhaseDocument::new(&samples)))
        .collect()
}

fn by_template(view: &View<'_>) -> BTreeMap<String, PhaseDocument> {
    let mut templates = BTreeMap::new();
    for (n, of) in (0..).zip(&view.scenario.mix) {
        let clones = view.summary.clones.iter();
        let of_template = clones.filter(|clone| clone.template == Some(n));
        let samples = fold::latencies(of_template, StartPhase::FirstExec);
        templates.insert(of.template.clone(), PhaseDocument::new(&samples));
    }
    templates
}

/// Name of an origin in rows. A sandbox from the pool is not a cold start: it was restored before the request
/// arrived.
fn start_row(kind: &str) -> &str {
    match kind {
        "warm" => "warm slot",
        "restored" => "clone by the server",
        other => other,
    }
}

fn beside_name(view: &View<'_>) -> Option<String> {
    if view.scenario.beside? == BesideKind::HostProcess {
        return Some("host".to_owned());
    }
    let name = match (view.scenario.beside_prefault, &view.scenario.network) {
        (Some(WorkingSetPrefault::On), _) => "prefault on",
        (Some(WorkingSetPrefault::Off), _) => "prefault off",
        (None, Some(_)) => "plain",
        (None, None) => "direct",
    };
    Some(name.to_owned())
}

fn ended(view: &View<'_>) -> &'static str {
    use crate::event::EndReason;
    match &view.summary.ended {
        None => "killed",
        Some(EndReason::Complete) => "complete",
        Some(EndReason::MemoryShare) => "memory_share",
        Some(EndReason::Limit { .. }) => "limit",
        Some(EndReason::Interrupted) => "interrupted",
        Some(EndReason::Broken { .. }) => "broken",
    }
}

fn end_message(view: &View<'_>) -> Option<String> {
    use crate::event::EndReason;
    match view.summary.ended.as_ref()? {
        EndReason::Limit { message } | EndReason::Broken { message } => Some(message.clone()),
        EndReason::Complete | EndReason::MemoryShare | EndReason::Interrupted => None,
    }
}

fn host(view: &View<'_>) -> HostDocument {
    let facts = view.facts;
    HostDocument {
        platform: facts.probe.platform.map(|p| p.name().to_owned()),
        grade: view.graded.grade.name().to_owned(),
        grade_reasons: view.graded.reasons.clone(),
        cores: facts.cores,
        cpu_model: facts.cpu_model.clone(),
        kernel: facts.kernel.clone(),
        memory_bytes: facts.meminfo.get("MemTotal").copied(),
        steal_share: view.noise.steal_share,
        load_1min: facts.load_1min,
        binaries: facts.binaries.clone(),
        built_from: facts
            .builds
            .iter()
            .filter_map(|(name, build)| {
                let mut commit = build.commit.clone()?;
                if build.dirty_tree != Some(false) {
                    commit.push_str(" (modified)");
                }
                Some((name.clone(), commit))
            })
            .collect(),
        commit: facts.commit.clone(),
        dirty_tree: facts.dirty_tree,
    }
}

fn present(samples: &Samples) -> Option<PhaseDocument> {
    (samples.n() > 0).then(|| PhaseDocument::new(samples))
}

impl PhaseDocument {
    /// Computes quantiles and intervals of the samples.
    #[must_use]
    pub fn new(samples: &Samples) -> Self {
        let ms = |quantile| match samples.quantile(quantile) {
            Estimate::Value(ns) => Some(ns as f64 / 1e6),
            Estimate::Infinite | Estimate::TooFew { .. } => None,
        };
        let interval = |quantile| {
            let (low, high) = samples.interval95(quantile)?;
            high.is_finite().then_some([low / 1e6, high / 1e6])
        };
        Self {
            n: samples.n(),
            failed: samples.failed(),
            p50_ms: ms(Quantile::P50),
            p95_ms: ms(Quantile::P95),
            p99_ms: ms(Quantile::P99),
            max_ms: ms(Quantile::Max),
            p50_ci95_ms: interval(Quantile::P50),
            p95_ci95_ms: interval(Quantile::P95),
            p99_ci95_ms: interval(Quantile::P99),
        }
    }
}
