//! `cube-bench verify lifecycle`: checks that sandboxes behave as their clients were told, under any order of
//! operations.
//!
//! ```text
//! seed ─► plan ─► play: clients at once ─► Site (E2B's API) ─► history ─► judge, oracle ─► findings
//!           ▲                                                                                 │
//!           └───────────────────────────── shrink: play again with fewer steps ◄──────────────┘
//! ```
//! A run consists of *episodes*. Each has its own plan, begins without sandboxes, and ends everything that it made,
//! so a finding belongs to one plan. Only playing has effects; the plan, the judge and the oracle are pure.

mod e2b;
mod judge;
mod local;
mod oracle;
mod orders;
mod plan;
mod play;
mod shrink;
mod site;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use testbed::{api::Api, endpoint::Endpoint, exit::End, server::LocalServer, world};

pub use self::plan::Selection;
use self::{
    e2b::E2b,
    judge::{Finding, Judgement, Kind},
    local::{Before, Local},
    plan::{Kills, Step},
    play::History,
    site::{Miss, Site},
};
use crate::{
    report::{Case, Figures, Report, Suite},
    sandbox::failed,
    setup::{Setup, VerifyError, api_of, at, key_from_environment},
};

/// Version of the lines of the history.
pub const FORMAT: u32 = 1;
/// Sandboxes that the suite's server keeps ready.
const WARM: u32 = 2;
/// Timeout of a request. A request that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(60);
/// A finding may depend on chance, so a shortened plan is played this often before it counts as passing.
const PLAYS: u32 = 3;
/// Time for shrinking.
const SHRINK: Duration = Duration::from_secs(180);

/// Options of a run.
#[derive(Clone, Debug)]
pub struct LifecycleSpec {
    pub setup: Setup,
    /// URL of a running endpoint; its key is `E2B_API_KEY`. `None`: the suite starts a server, and kills it and its
    /// VMMs.
    pub target: Option<String>,
    /// Data plane of the target, with the placeholders `{id}` and `{port}`. `None`: the target's own address.
    pub sandbox_url: Option<String>,
    /// No episode begins later than this.
    pub duration: Duration,
    pub seed: u64,
    /// The only episode to play, and its steps (`None`: all). It is played until there is a finding.
    pub replay: Option<(u64, Option<Selection>)>,
    /// File for the history, one line per episode. `None`: not written.
    pub history: Option<PathBuf>,
    /// File for the server's log. `None`: the log is removed.
    pub log: Option<PathBuf>,
}

/// Why the run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    Complete,
    Interrupted,
}

/// The shortest plan found that leads to a finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counterexample {
    pub episode: u64,
    pub steps: Vec<String>,
    /// Number of steps of the whole plan.
    pub planned: usize,
    /// Number of plays of shortened plans.
    pub plays: u32,
    /// Command that plays the steps again.
    pub command: String,
}

/// The measurements of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LifecycleFigures {
    pub ended: Ended,
    pub seed: u64,
    /// Number of episodes that were played and judged.
    pub episodes: u64,
    /// Operations with a response, by name.
    pub done: BTreeMap<String, u64>,
    /// Operations that failed with an explanation.
    pub failed: u64,
    /// Operations that the server rejected for lack of resources.
    pub refused: u64,
    /// Sandboxes whose responses were compared with the model.
    pub sandboxes: u64,
    /// Sandboxes with too many possible orders.
    pub not_judged: u64,
    pub counterexample: Option<Counterexample>,
}

impl LifecycleFigures {
    fn write(&self, out: &mut String) -> fmt::Result {
        use fmt::Write;
        for (action, count) in &self.done {
            writeln!(out, "{count:>8}  {action}")?;
        }
        for (count, what) in [
            (
                self.failed,
                "requests that failed while something was killed, paused or ended",
            ),
            (self.refused, "requests rejected for lack of resources"),
            (
                self.sandboxes,
                "sandboxes whose answers were compared with the model",
            ),
            (self.not_judged, "sandboxes that were not judged"),
        ] {
            writeln!(out, "{count:>8}  {what}")?;
        }
        if let Some(example) = &self.counterexample {
            let (steps, planned) = (example.steps.len(), example.planned);
            let plays = example.plays;
            writeln!(
                out,
                "\nShortest plan with this finding ({steps} of {planned} steps, {plays} plays):"
            )?;
            for step in &example.steps {
                writeln!(out, "  {step}")?;
            }
            writeln!(out, "Play it again: {}", example.command)?;
        }
        writeln!(out, "\n{} episodes, seed {}\n", self.episodes, self.seed)
    }
}

impl Figures for LifecycleFigures {
    fn terminal(&self) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = self.write(&mut out);
        out
    }

    fn markdown(&self) -> String {
        format!("```\n{}```\n\n", self.terminal())
    }

    /// A finding before the interruption is still a finding.
    fn end(&self, of_cases: End) -> End {
        match self.ended {
            Ended::Interrupted if of_cases != End::GateFailed => End::Interrupted,
            Ended::Interrupted | Ended::Complete => of_cases,
        }
    }
}

/// Measurements and findings of a run.
struct Played {
    figures: LifecycleFigures,
    findings: Vec<Finding>,
}

impl Played {
    fn report(self, spec: &LifecycleSpec, begun: Instant) -> Report<LifecycleFigures> {
        let Self { figures, findings } = self;
        let mut cases: Vec<Case> = findings.iter().map(Finding::case).collect();
        if cases.is_empty() {
            let doubt = match (figures.sandboxes, figures.not_judged) {
                (0, _) => Some("no sandbox was judged"),
                (_, 0) => None,
                (_, _) => Some("some sandboxes have too many possible orders"),
            };
            cases.push(Case::promise(
                "lifecycle",
                "all answers fit the model",
                doubt,
            ));
        }
        Report::new(Suite::Lifecycle, spec.target.clone(), cases, begun, figures)
    }
}

/// Plays episodes. Without a target, the process moves into new network namespaces and stays there, so the caller
/// must not have started any thread. Setting `interrupted` ends the run after the current episode.
///
/// # Errors
/// Returns a [`VerifyError`] if the suite cannot start or cannot write the history. Any later failure is a
/// finding.
pub fn run(
    spec: &LifecycleSpec,
    interrupted: &AtomicBool,
) -> Result<Report<LifecycleFigures>, VerifyError> {
    let begun = Instant::now();
    let played = match &spec.target {
        Some(url) => {
            let api = Api {
                control: Endpoint::parse(url)?,
                sandbox_url: spec.sandbox_url.clone(),
                key: key_from_environment()?,
                timeout: TIMEOUT,
            };
            let site = site(spec, api, None);
            if let Err(miss) = site.list() {
                return Err(failed("list the sandboxes", format!("{miss:?}")).into());
            }
            Run::new(spec, &site, Kills::Nothing, interrupted).play()
        }
        None => run_local(spec, interrupted),
    }?;
    Ok(played.report(spec, begun))
}

fn run_local(spec: &LifecycleSpec, interrupted: &AtomicBool) -> Result<Played, VerifyError> {
    let _outside = world::enter([])?;
    let run_dir = spec.setup.run_dir()?;
    let mut options = spec.setup.server(WARM)?;
    options.options = ["--uplink", world::UPLINK].map(str::to_owned).to_vec();
    let before = Before::read();
    let server = LocalServer::start(run_dir.path(), options)?;
    let api = api_of(&server, TIMEOUT);
    let site = site(spec, api, Some(Local::new(server, spec.seed)));
    let played = Run::new(spec, &site, Kills::ServerAndVmms, interrupted).play();
    let local = site.local.and_then(|local| local.into_inner().ok());
    let Some(local) = local else {
        return played;
    };
    if let Some(copy) = &spec.log
        && let Err(error) = std::fs::copy(local.log(), copy)
    {
        eprintln!("cube-bench: cannot keep {}: {error}", local.log().display());
    }
    let left = local.end(run_dir.path(), &before);
    let mut played = played?;
    let kind = Kind::Leak;
    let left = left.into_iter().map(|text| Finding { kind, text });
    played.findings.extend(left);
    Ok(played)
}

fn site(spec: &LifecycleSpec, api: Api, local: Option<Local>) -> E2b {
    E2b {
        api,
        template: spec.setup.template.clone(),
        label: format!(
            "{:x}-{:x}",
            std::process::id(),
            model::clock::monotonic_ns()
        ),
        local: local.map(Mutex::new),
    }
}

struct Run<'a> {
    spec: &'a LifecycleSpec,
    site: &'a dyn Site,
    kills: Kills,
    interrupted: &'a AtomicBool,
    begun: Instant,
    figures: LifecycleFigures,
    findings: Vec<Finding>,
}

impl<'a> Run<'a> {
    fn new(
        spec: &'a LifecycleSpec,
        site: &'a dyn Site,
        kills: Kills,
        interrupted: &'a AtomicBool,
    ) -> Self {
        Self {
            spec,
            site,
            kills,
            interrupted,
            begun: Instant::now(),
            findings: Vec::new(),
            figures: LifecycleFigures {
                ended: Ended::Complete,
                seed: spec.seed,
                episodes: 0,
                done: BTreeMap::new(),
                failed: 0,
                refused: 0,
                sandboxes: 0,
                not_judged: 0,
                counterexample: None,
            },
        }
    }

    /// Plays episodes until the time is over or one has a finding, which is then shrunk.
    fn play(mut self) -> Result<Played, VerifyError> {
        let mut log = self.spec.history.as_deref().map(Log::create).transpose()?;
        for number in 0.. {
            if self.interrupted.load(Ordering::Relaxed) {
                self.figures.ended = Ended::Interrupted;
            }
            let is_over = self.begun.elapsed() >= self.spec.duration && number > 0;
            if is_over || self.figures.ended == Ended::Interrupted {
                break;
            }
            let (episode, steps) = self.steps(number);
            let history = play::play(self.site, &steps);
            if let Some(log) = &mut log {
                log.write(episode, &steps, &history)?;
            }
            let judgement = judge::judge(&history);
            self.count(&history, &judgement);
            if let Some(finding) = judgement.findings.first() {
                self.figures.counterexample = Some(self.shrink(episode, steps, finding.kind));
                self.findings = judgement.findings;
                break;
            }
        }
        Ok(Played {
            figures: self.figures,
            findings: self.findings,
        })
    }

    fn steps(&self, number: u64) -> (u64, Vec<Step>) {
        match &self.spec.replay {
            None => (number, plan::episode(self.spec.seed, number, self.kills)),
            Some((episode, selection)) => {
                let steps = plan::episode(self.spec.seed, *episode, self.kills);
                let steps = match selection {
                    Some(selection) => selection.of(steps),
                    None => steps,
                };
                (*episode, steps)
            }
        }
    }

    fn count(&mut self, history: &History, judgement: &Judgement) {
        let figures = &mut self.figures;
        figures.episodes += 1;
        let calls = history.calls.iter();
        let calls = calls.map(|call| (name(&call.action), call.outcome.as_ref().err()));
        let births = history.births.iter();
        let births = births.filter(|birth| !matches!(birth.from, play::Origin::Fork(_)));
        let births = births.map(|birth| ("create".to_owned(), birth.outcome.as_ref().err()));
        for (name, miss) in calls.chain(births) {
            match miss {
                None => *figures.done.entry(name).or_default() += 1,
                Some(Miss::Busy(_)) => figures.refused += 1,
                Some(_) => figures.failed += 1,
            }
        }
        let outages = u64::try_from(history.outages.len()).unwrap_or(u64::MAX);
        if outages > 0 {
            *figures.done.entry("kill_server".to_owned()).or_default() += outages;
        }
        let made = history.births.iter().filter(|birth| birth.outcome.is_ok());
        let given_up = u64::try_from(judgement.not_judged).unwrap_or(u64::MAX);
        figures.sandboxes += u64::try_from(made.count()).unwrap_or(u64::MAX) - given_up;
        figures.not_judged += given_up;
        if figures.episodes.is_multiple_of(10) {
            eprintln!(
                "cube-bench: {} episodes, {} sandboxes, {:.0} s",
                figures.episodes,
                figures.sandboxes,
                self.begun.elapsed().as_secs_f64()
            );
        }
    }

    fn shrink(&self, episode: u64, steps: Vec<Step>, kind: Kind) -> Counterexample {
        eprintln!("cube-bench: episode {episode} has a finding: playing it with fewer steps");
        let planned = steps.len();
        let mut plays = 0;
        let deadline = Instant::now() + SHRINK;
        let fails = |steps: &[Step]| {
            (0..PLAYS).any(|_| {
                if self.interrupted.load(Ordering::Relaxed) || Instant::now() > deadline {
                    return false;
                }
                plays += 1;
                let judgement = judge::judge(&play::play(self.site, steps));
                judgement
                    .findings
                    .iter()
                    .any(|finding| finding.kind == kind)
            })
        };
        let shortest = shrink::shrink(steps, deadline, fails);
        let target = self.spec.target.as_ref();
        let target = target.map_or(String::new(), |url| format!(" --target {url}"));
        Counterexample {
            episode,
            planned,
            plays,
            command: format!(
                "cube-bench verify lifecycle{target} --seed {} --episode {episode} --steps {}",
                self.spec.seed,
                plan::numbers(&shortest)
            ),
            steps: shortest.iter().map(ToString::to_string).collect(),
        }
    }
}

/// The name of an action without its arguments.
fn name(action: &plan::Action) -> String {
    match serde_json::to_value(action) {
        Ok(serde_json::Value::String(name)) => name,
        Ok(serde_json::Value::Object(object)) => object.keys().next().cloned().unwrap_or_default(),
        _ => String::new(),
    }
}

/// The file of the history.
struct Log {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Log {
    fn create(path: &Path) -> Result<Self, VerifyError> {
        let file = File::create(path).map_err(at(path))?;
        Ok(Self {
            path: path.to_owned(),
            file: BufWriter::new(file),
        })
    }

    /// Writes one line.
    fn write(
        &mut self,
        episode: u64,
        steps: &[Step],
        history: &History,
    ) -> Result<(), VerifyError> {
        #[derive(Serialize)]
        struct Line<'a> {
            format: u32,
            episode: u64,
            steps: &'a [Step],
            history: &'a History,
        }
        let line = Line {
            format: FORMAT,
            episode,
            steps,
            history,
        };
        let written = serde_json::to_writer(&mut self.file, &line).map_err(io::Error::other);
        written
            .and_then(|()| self.file.write_all(b"\n"))
            .and_then(|()| self.file.flush())
            .map_err(at(&self.path))
    }
}
