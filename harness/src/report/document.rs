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
    interference::InterferenceDocument,
    load::LoadDocument,
    memory::MemoryDocument,
    peers::PeersDocument,
    phase::PhaseDocument,
    turns::{RatioDocument, TurnsDocument},
    work::{FirstWork, WorkDocument},
};
use crate::{
    gate::GateResult,
    scenario::{Arrival, BesideSpec, Place, TargetKind},
    summary::fold,
};
use stats::quantile::Samples;

/// Format of the document.
pub const FORMAT: u32 = 3;
/// Name in rows of clones that the harness starts itself, with the template in the page cache.
pub(super) const CLONE_ROW: &str = "clone, page cache warm";

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
    /// SHA-256 of the uncompressed events; `null` in reports of older versions.
    #[serde(default)]
    pub record_sha256: Option<String>,
    /// `null` if the sandboxes ran on `host`.
    #[serde(default)]
    pub target: Option<TargetDocument>,
    /// The host of the sandboxes, or only of the client if `target` is given.
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

/// A target whose sandboxes ran elsewhere than on the host of the harness.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetDocument {
    /// `e2b`, `cubesandbox` or `adapter`.
    pub kind: String,
    /// `null` for adapters.
    pub url: Option<String>,
    pub template: String,
    /// Software that it reports; `null` if it reports none.
    pub software: Option<String>,
}

impl TargetDocument {
    /// `None` if the sandboxes ran on the host of the harness.
    fn new(view: &View<'_>) -> Option<Self> {
        let spec = &view.scenario.target;
        (view.facts.sandboxes == Place::Elsewhere).then(|| Self {
            kind: spec.kind.name().to_owned(),
            url: view.facts.endpoint.clone(),
            template: spec.template.clone(),
            software: view.facts.software.clone(),
        })
    }

    fn describe(&self) -> String {
        let url = self.url.as_ref();
        let url = url.map_or(String::new(), |url| format!(" at {url}"));
        let software = self.software.as_deref().unwrap_or("unknown");
        format!(
            "target {}{url}, template {}, software {software}",
            self.kind, self.template
        )
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

impl HostDocument {
    fn machine(&self) -> String {
        format!(
            "{} cores, {}, Linux {}",
            self.cores,
            self.cpu_model.as_deref().unwrap_or("unknown CPU"),
            self.kernel.as_deref().unwrap_or("unknown"),
        )
    }

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
            record_sha256: view.record.map(str::to_owned),
            target: TargetDocument::new(view),
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
                Arrival::Burst { .. } => PhaseDocument::present(&summary.round_samples()),
                Arrival::Closed { .. } | Arrival::Open { .. } => None,
            },
            peers: PeersDocument::new(view),
            cluster: ClusterDocument::new(view),
            baseline: PhaseDocument::present(&summary.baseline_samples()),
            null_target: PhaseDocument::present(&summary.null_samples()),
            interference: InterferenceDocument::new(view),
            cold: PhaseDocument::present(&summary.cold_samples()),
            cost: CostDocument::new(summary),
            load: LoadDocument::new(summary),
            levels: density::levels(summary),
            memory: view.scenario.memory.map(|_| MemoryDocument::new(view)),
            after_hold: PhaseDocument::present(&Samples::new(summary.after_hold_ns.clone())),
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

    /// The class of the host, or the remote target and the class of the client. Runs at different places have
    /// different absolute times.
    #[must_use]
    pub fn place(&self) -> String {
        let machine = self.host.machine();
        match &self.target {
            Some(target) => format!("{}; client: {machine}", target.describe()),
            None => {
                let platform = self.host.platform.as_deref().unwrap_or("unknown");
                format!("platform {platform}, {machine}")
            }
        }
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
    for (n, of) in (0..).zip(view.scenario.templates()) {
        let clones = view.summary.clones.iter();
        let of_template = clones.filter(|clone| clone.template == Some(n));
        let samples = fold::latencies(of_template, StartPhase::FirstExec);
        templates.insert(of.template.clone(), PhaseDocument::new(&samples));
    }
    templates
}

fn beside_name(view: &View<'_>) -> Option<String> {
    let name = match view.scenario.beside()? {
        BesideSpec::HostProcess => "host",
        BesideSpec::VmmDirect { prefault } => match (prefault, &view.scenario.network) {
            (Some(WorkingSetPrefault::On), _) => "prefault on",
            (Some(WorkingSetPrefault::Off), _) => "prefault off",
            (None, Some(_)) => "plain",
            (None, None) => "direct",
        },
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
    // The client's VMM is not the target's, but comparison rounds may have used it.
    let uses_vmm = facts.sandboxes != Place::Elsewhere
        || matches!(view.scenario.beside(), Some(BesideSpec::VmmDirect { .. }));
    let is_used = |name: &str| uses_vmm || name != "cube-vmm";
    let platform = facts.probe.platform.filter(|_| uses_vmm);
    HostDocument {
        platform: platform.map(|p| p.name().to_owned()),
        grade: view.graded.grade.name().to_owned(),
        grade_reasons: view.graded.reasons.clone(),
        cores: facts.cores,
        cpu_model: facts.cpu_model.clone(),
        kernel: facts.kernel.clone(),
        memory_bytes: facts.meminfo.get("MemTotal").copied(),
        steal_share: view.noise.steal_share,
        load_1min: facts.load_1min,
        binaries: facts
            .binaries
            .clone()
            .into_iter()
            .filter(|(name, _)| is_used(name))
            .collect(),
        built_from: facts
            .builds
            .iter()
            .filter(|(name, _)| is_used(name))
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
