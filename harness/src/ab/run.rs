//! Runs the blocks of a comparison. Each block is a separate recorded run.

use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use model::clock::unix_ms;

use super::{
    Side,
    builds::{self, Build, BuildError},
    compare::{self, LEVEL},
    metrics::Metric,
    order,
    record::{self, AbPlan, FORMAT, ReadError},
    report::AbReport,
    sequential,
};
use crate::{
    event::EndReason,
    record::{RecordError, read},
    scenario::{Arrival, Quantile, Scenario, TargetKind},
    session::{self, SessionError, Settings},
    summary::fold::{self, Summary},
};
use stats::{paired, quantile::Estimate};

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct AbSettings {
    /// Directories of the builds.
    pub a: PathBuf,
    pub b: PathBuf,
    /// Scenario of B, to compare two configurations; `None` uses the same for both.
    pub scenario_b: Option<Scenario>,
    /// Blocks of each build.
    pub blocks: u32,
    /// Starts in a block; `None` uses the number of the scenario.
    pub starts: Option<u32>,
    /// Seed of arrivals and bootstrap; `None` uses the seed of the scenario.
    pub seed: Option<u64>,
    /// Smallest change that counts, as a share.
    pub tolerance: f64,
    /// Names of the primary metrics; empty for the default.
    pub primary: Vec<String>,
    /// Largest accepted slowdown as a share; `None` requires no proof that B stays within it.
    pub margin: Option<f64>,
    /// Directory of the results; must not contain a plan yet.
    pub results: PathBuf,
    /// Directory for sockets, logs and server state.
    pub run_root: PathBuf,
    /// Command line that repeats the comparison.
    pub reproduce: String,
}

/// A comparison that could not be run to its end. The records of completed blocks are kept.
#[derive(Debug, thiserror::Error)]
pub enum AbError {
    #[error("scenario {scenario} cannot be compared: {why}")]
    Scenario { scenario: String, why: &'static str },
    #[error("{name:?} is not a metric of the comparison, the nearest one is `{nearest}`")]
    Metric { name: String, nearest: String },
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error("cannot write the plan to {dir}: give --results an empty or new directory")]
    Results {
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("block {index} ({side}) stopped: {message}")]
    Block {
        index: usize,
        side: char,
        message: String,
    },
    #[error(
        "build {side} changed before block {index}: {what} was replaced; do not build in {dir} during a comparison"
    )]
    Changed {
        index: usize,
        side: char,
        what: String,
        dir: PathBuf,
    },
}

/// Measures both builds and leaves a directory that [`record::read`] reads.
///
/// # Errors
/// Returns [`AbError`] if the scenario cannot be compared, a build is incomplete, the plan cannot be written, or a
/// block cannot start, cannot be recorded or fails. After SIGINT or SIGTERM, returns `Ok` and keeps the blocks that
/// were completed.
pub fn run(scenario: &Scenario, settings: &AbSettings) -> Result<(), AbError> {
    let other = settings.scenario_b.as_ref().unwrap_or(scenario);
    let scenario = block_scenario(scenario, settings, &settings.a)?;
    let of_b = block_scenario(other, settings, &settings.b)?;
    check_primary(&scenario, &settings.primary)?;
    let plan = AbPlan {
        format: FORMAT,
        primary: settings.primary.clone(),
        looks: sequential::looks(settings.blocks),
        a: Build::find(&settings.a, &scenario)?,
        b: Build::find(&settings.b, &of_b)?,
        scenario_b: (of_b != scenario).then_some(of_b),
        blocks: settings.blocks,
        seed: scenario.seed,
        tolerance: settings.tolerance,
        margin: settings.margin,
        reproduce: settings.reproduce.clone(),
        started_unix_ms: unix_ms(),
        scenario,
    };
    record::create(&settings.results, &plan).map_err(|source| AbError::Results {
        dir: settings.results.clone(),
        source,
    })?;
    if paired::least_p(settings.blocks as usize) > LEVEL {
        eprintln!(
            "cube-bench: {} blocks of each build are too few for any verdict but failures: use --blocks 12",
            settings.blocks
        );
    }
    let interrupted = session::watch_signals()?;
    let order = order(plan.blocks);
    for (index, side) in order.iter().copied().enumerate() {
        refuse_changed(&plan, index, side)?;
        let dir = record::block_dir(&settings.results, index, side);
        let block = block_settings(&plan, side, &dir, &settings.run_root);
        session::run_until(plan.scenario_of(side), &block, &interrupted)?;
        let summary = fold::fold(&read(&dir)?);
        eprintln!(
            "cube-bench: block {} of {} ({}): {}",
            index + 1,
            order.len(),
            side.letter(),
            describe(&summary)
        );
        if interrupted.load(Ordering::Relaxed) {
            return Ok(());
        }
        if summary.ended == Some(EndReason::MemoryShare) {
            eprintln!(
                "cube-bench: block {} did not measure, because memory.stop_at_share of the host's memory is in use; its \
                 pair is left out",
                index + 1
            );
        }
        let pairs = u32::try_from(index.div_ceil(2)).unwrap_or(u32::MAX);
        if !index.is_multiple_of(2) && plan.looks.contains(&pairs) && pairs < plan.blocks {
            let (report, _) = AbReport::new(&record::read(&settings.results)?);
            if report.decided_after.is_some() {
                eprintln!("cube-bench: decided after {pairs} of {} pairs", plan.blocks);
                return Ok(());
            }
        }
        if let Some(EndReason::Broken { message }) = summary.ended {
            let side = side.letter();
            return Err(AbError::Block {
                index: index + 1,
                side,
                message,
            });
        }
    }
    Ok(())
}

/// Checks that the primary metrics can be measured with the scenario.
fn check_primary(scenario: &Scenario, primary: &[String]) -> Result<(), AbError> {
    let all = Metric::all(scenario);
    let unknown = |name: &&String| !all.iter().any(|metric| compare::names(name, &metric.name));
    let Some(name) = primary.iter().find(unknown) else {
        return Ok(());
    };
    let nearest = all
        .iter()
        .min_by_key(|metric| strsim::damerau_levenshtein(&metric.name, name));
    Err(AbError::Metric {
        name: name.clone(),
        nearest: nearest.map_or_else(String::new, |metric| metric.name.clone()),
    })
}

/// Compares the files of a build with the plan before each block, so that a replaced template or program is found
/// early and not after the last block.
fn refuse_changed(plan: &AbPlan, index: usize, side: Side) -> Result<(), AbError> {
    let planned = plan.build(side);
    let now = Build::find(&planned.path, plan.scenario_of(side))?;
    let Some(what) = planned.changed_file(&now.binaries, &now.template) else {
        return Ok(());
    };
    Err(AbError::Changed {
        index: index + 1,
        side: side.letter(),
        what,
        dir: planned.path.clone(),
    })
}

/// The scenario of one block: warm-up and one round of clones, without cold rounds, comparison rounds, baseline and
/// gates. `place` is the side's directory or URL.
fn block_scenario(
    scenario: &Scenario,
    settings: &AbSettings,
    place: &Path,
) -> Result<Scenario, AbError> {
    let refuse = |why| {
        Err(AbError::Scenario {
            scenario: scenario.name.clone(),
            why,
        })
    };
    if scenario.steady.is_some() {
        return refuse("its rounds have different rates");
    }
    if scenario.trace().is_some() {
        return refuse("its starts come from a trace");
    }
    if scenario.network.is_some() {
        return refuse("`ab` does not run scenarios with a [network] yet");
    }
    let url = builds::url_of(place);
    match (scenario.target.kind, &scenario.target.api_url, url) {
        (TargetKind::E2b, Some(_), _) => {
            return refuse("target.api_url names one server for both sides; give A and B as URLs");
        }
        (TargetKind::VmmDirect, _, Some(_)) => {
            return refuse("A or B is the URL of an API, which needs target.kind \"e2b\"");
        }
        (TargetKind::E2b, None, Some(_)) if scenario.target.warm > 0 => {
            return refuse("the pool of a running API is its own: remove target.warm");
        }
        (TargetKind::E2b, None, _) | (TargetKind::VmmDirect, _, None) => {}
        _ => {
            return refuse("its target is not one of a build: use kind \"vmm-direct\" or \"e2b\"");
        }
    }
    let mut block = scenario.clone();
    block.target.api_url = url.map(str::to_owned);
    block.seed = settings.seed.unwrap_or(scenario.seed);
    block.rounds = 1;
    block.cold_rounds = 0;
    block.mode = scenario.mode.target_only();
    block.baseline = None;
    block.gates.clear();
    if let Some(wanted) = settings.starts {
        block.target.warm = scaled(block.target.warm, wanted, block.arrival.starts());
        match &mut block.arrival {
            Arrival::Burst { starts }
            | Arrival::Closed { starts, .. }
            | Arrival::Open { starts, .. } => *starts = wanted,
        }
    }
    Ok(block)
}

/// `count` times `wanted` / `planned`, rounded up, so that a warm pool that is at least as large as a round stays
/// so.
fn scaled(count: u32, wanted: u32, planned: u32) -> u32 {
    let scaled = (u64::from(count) * u64::from(wanted)).div_ceil(u64::from(planned.max(1)));
    u32::try_from(scaled).unwrap_or(u32::MAX)
}

fn block_settings(plan: &AbPlan, side: Side, dir: &Path, run_root: &Path) -> Settings {
    let build = plan.build(side);
    Settings {
        artifacts: build.artifacts.clone(),
        // A running API needs no programs on this host.
        vmm: build.endpoint.is_none().then(|| build.vmm()),
        api: build.endpoint.is_none().then(|| build.api()),
        probe: None,
        etcd: None,
        results: Some(dir.to_owned()),
        server_pid: None,
        run_root: run_root.to_owned(),
        reproduce: plan.reproduce.clone(),
    }
}

/// Result of one block as text for the progress output.
fn describe(summary: &Summary) -> String {
    let failed: u64 = summary.failures().values().sum();
    let first_exec = summary.phase(model::StartPhase::FirstExec);
    let median = match first_exec.quantile(Quantile::P50) {
        Estimate::Value(ns) => format!(", first_exec P50 {:.2} ms", ns as f64 / 1e6),
        Estimate::Infinite | Estimate::TooFew { .. } => String::new(),
    };
    format!("{} starts, {failed} failed{median}", summary.clones.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(starts: Option<u32>) -> AbSettings {
        AbSettings {
            a: "a".into(),
            b: "b".into(),
            scenario_b: None,
            blocks: 1,
            starts,
            seed: Some(9),
            tolerance: 0.02,
            primary: Vec::new(),
            margin: None,
            results: "r".into(),
            run_root: "run".into(),
            reproduce: String::new(),
        }
    }

    #[test]
    fn a_block_is_one_round_of_clones_with_a_pool_to_match() {
        let text = "rounds = 10\ncold_rounds = 2\n[target]\nkind = \"e2b\"\nwarm = 55\n\
                    [mode]\nkind = \"beside\"\nwith = \"vmm-direct\"\n[arrival]\nkind = \"closed\"\nstarts = 50";
        let scenario = crate::scenario::parse("t", text).unwrap();
        let place = Path::new("a");
        let block = block_scenario(&scenario, &settings(Some(6)), place).unwrap();
        assert_eq!((block.rounds, block.cold_rounds, block.seed), (1, 0, 9));
        assert_eq!((block.arrival.starts(), block.target.warm), (6, 7));
        assert!(block.beside().is_none() && block.baseline.is_none());
        let block = block_scenario(&scenario, &settings(None), place).unwrap();
        assert_eq!((block.arrival.starts(), block.target.warm), (50, 55));
    }

    #[test]
    fn one_server_for_both_builds_is_refused() {
        let text = "[target]\nkind = \"e2b\"\napi_url = \"http://127.0.0.1:1\"";
        let scenario = crate::scenario::parse("t", text).unwrap();
        let refused = |scenario: &Scenario, place: &str| {
            let found = block_scenario(scenario, &settings(None), Path::new(place));
            found.unwrap_err().to_string()
        };
        assert!(refused(&scenario, "a").contains("api_url"));
        let direct = crate::scenario::parse("t", "").unwrap();
        assert!(refused(&direct, "http://127.0.0.1:1").contains("kind \"e2b\""));
        let pooled = "[target]\nkind = \"e2b\"\nwarm = 2";
        let pooled = crate::scenario::parse("t", pooled).unwrap();
        assert!(refused(&pooled, "http://127.0.0.1:1").contains("target.warm"));
    }

    #[test]
    fn a_url_in_place_of_a_build_is_the_endpoint_of_its_side() {
        let scenario = crate::scenario::parse("t", "[target]\nkind = \"e2b\"").unwrap();
        let url = "http://127.0.0.1:1";
        let block = block_scenario(&scenario, &settings(None), Path::new(url)).unwrap();
        assert_eq!(block.target.api_url.as_deref(), Some(url));
        let build = Build::find(Path::new(url), &block).unwrap();
        assert_eq!(build.endpoint.as_deref(), Some(url));
    }

    #[test]
    fn an_unknown_primary_metric_names_the_nearest() {
        let scenario = crate::scenario::parse("t", "").unwrap();
        let check = |name: &str| check_primary(&scenario, &[name.to_owned()]);
        check("first_exec.p95").unwrap();
        check("memory.slope").unwrap();
        let refused = check("first_exec.p96").unwrap_err().to_string();
        assert!(
            refused.contains("the nearest one is `first_exec.p95`"),
            "{refused}"
        );
        check("first_exec").unwrap();
    }
}
