//! The directory of a comparison.
//!
//! ```text
//! ab.json                 the plan: builds with their hashes, scenario, order, seed
//! blocks/003-A/           one recorded run: events.jsonl, environment.json
//! report.json             written by every report
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{Side, builds::Build};
use crate::{
    event::EndReason,
    host::facts::{HostFacts, TemplateFacts},
    record::{self, RecordError},
    scenario::Scenario,
    session::{self, SessionError},
    summary::fold::{self, Summary},
};

/// Format of `ab.json`.
pub const FORMAT: u32 = 1;
/// Name of the plan in the directory.
pub const PLAN_FILE: &str = "ab.json";

/// The plan of a comparison, written before the first block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AbPlan {
    /// [`FORMAT`].
    pub format: u32,
    /// The scenario of each block, or only of A's blocks if B has its own.
    pub scenario: Scenario,
    /// The scenario of B's blocks, if two configurations are compared.
    #[serde(default)]
    pub scenario_b: Option<Scenario>,
    pub a: Build,
    pub b: Build,
    /// Blocks of each build.
    pub blocks: u32,
    /// Seed of arrivals and bootstrap.
    pub seed: u64,
    /// Smallest change that counts, as a share.
    pub tolerance: f64,
    /// Names of the primary metrics, as declared; empty for the default.
    #[serde(default)]
    pub primary: Vec<String>,
    /// Numbers of pairs after which the comparison is evaluated; empty for the end only.
    #[serde(default)]
    pub looks: Vec<u32>,
    /// Largest accepted slowdown as a share. B must be shown to stay within it; `None` requires no such proof.
    #[serde(default)]
    pub margin: Option<f64>,
    /// Command line that repeats the comparison.
    pub reproduce: String,
    /// Wall clock in milliseconds since 1970.
    pub started_unix_ms: u64,
}

/// One recorded block.
#[derive(Clone, Debug)]
pub struct Block {
    pub side: Side,
    /// Number of the pair, from 0. Two consecutive blocks form a pair.
    pub pair: usize,
    pub summary: Summary,
}

/// The recorded data from which a report is computed.
#[derive(Clone, Debug)]
pub struct Recorded {
    pub plan: AbPlan,
    /// Completed blocks, in order; fewer than planned if a block did not complete.
    pub blocks: Vec<Block>,
    /// Pairs excluded because one of their blocks did not measure (too much of the host's memory was in use) or was
    /// disturbed by other programs.
    pub left_out: usize,
    /// Excluded pairs with a disturbed block.
    pub disturbed: usize,
    /// Facts about the host before the first block; `None` if no block was completed.
    pub host: Option<HostFacts>,
}

/// A directory that does not contain a readable comparison.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("cannot read the plan {path} of an A/B run")]
    Plan {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} has format {found}, this program reads format {FORMAT}")]
    Format { path: PathBuf, found: u32 },
    #[error(transparent)]
    Events(#[from] RecordError),
    #[error(transparent)]
    Environment(#[from] SessionError),
    #[error(
        "block {block} did not run with the files of build {side} in the plan: {what} changed during the run"
    )]
    Changed {
        block: PathBuf,
        side: char,
        /// The program or the file of the template.
        what: String,
    },
}

/// Directory of a block.
#[must_use]
pub fn block_dir(dir: &Path, index: usize, side: Side) -> PathBuf {
    dir.join("blocks")
        .join(format!("{index:03}-{}", side.letter()))
}

/// Creates the directory and writes the plan.
///
/// # Errors
/// Returns an error if the directory already contains a plan, or if the plan cannot be written.
pub fn create(dir: &Path, plan: &AbPlan) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let text = serde_json::to_vec_pretty(plan)?;
    let mut file = fs::File::create_new(dir.join(PLAN_FILE))?;
    io::Write::write_all(&mut file, &text)
}

/// Reads a recorded comparison. A missing or interrupted block and all blocks after it are ignored. If a block did
/// not measure because of the host's memory, only its pair is ignored.
///
/// # Errors
/// Returns [`ReadError`] if the plan is missing or has a different format, if a file of a block cannot be
/// read or parsed, or if the programs or the template of a block differ from the plan.
pub fn read(dir: &Path) -> Result<Recorded, ReadError> {
    let plan = read_plan(dir)?;
    let mut blocks: Vec<Block> = Vec::new();
    let (mut left_out, mut disturbed) = (BTreeSet::new(), BTreeSet::new());
    let mut host: Option<HostFacts> = None;
    for (index, side) in super::order(plan.blocks).into_iter().enumerate() {
        let path = block_dir(dir, index, side);
        if record::events_file(&path).is_none() {
            break;
        }
        let summary = fold::fold(&record::read(&path)?);
        let pair = index / 2;
        match summary.ended {
            Some(EndReason::Complete) if summary.interference.left_out.is_empty() => {}
            Some(EndReason::Complete) => {
                disturbed.insert(pair);
            }
            Some(EndReason::MemoryShare | EndReason::Limit { .. }) => {
                left_out.insert(pair);
            }
            Some(EndReason::Interrupted | EndReason::Broken { .. }) | None => break,
        }
        let facts = session::read_environment(&path)?;
        check_unchanged(&plan, side, &path, &facts)?;
        host.get_or_insert(facts);
        blocks.push(Block {
            side,
            pair,
            summary,
        });
    }
    left_out.extend(&disturbed);
    blocks.retain(|block| !left_out.contains(&block.pair));
    Ok(Recorded {
        plan,
        blocks,
        left_out: left_out.len(),
        disturbed: disturbed.len(),
        host,
    })
}

fn read_plan(dir: &Path) -> Result<AbPlan, ReadError> {
    let path = dir.join(PLAN_FILE);
    let failed = |source| ReadError::Plan {
        path: path.clone(),
        source,
    };
    let text = fs::read(&path).map_err(failed)?;
    let format = |source: serde_json::Error| failed(source.into());
    let value: serde_json::Value = serde_json::from_slice(&text).map_err(format)?;
    // Check the format first: a plan of a different format may have different fields.
    let found = value["format"].as_u64().unwrap_or(0);
    if found != u64::from(FORMAT) {
        let found = u32::try_from(found).unwrap_or(u32::MAX);
        return Err(ReadError::Format { path, found });
    }
    serde_json::from_value(value).map_err(format)
}

fn check_unchanged(
    plan: &AbPlan,
    side: Side,
    block: &Path,
    facts: &HostFacts,
) -> Result<(), ReadError> {
    let template = facts.template.as_ref();
    let template = template.map_or_else(BTreeMap::new, TemplateFacts::sums);
    match plan.build(side).changed_file(&facts.binaries, &template) {
        None => Ok(()),
        Some(what) => Err(ReadError::Changed {
            block: block.to_owned(),
            side: side.letter(),
            what,
        }),
    }
}

impl AbPlan {
    /// The scenario of a side's blocks.
    #[must_use]
    pub fn scenario_of(&self, side: Side) -> &Scenario {
        match (side, &self.scenario_b) {
            (Side::B, Some(scenario)) => scenario,
            (Side::A | Side::B, _) => &self.scenario,
        }
    }

    #[must_use]
    pub fn build(&self, side: Side) -> &Build {
        match side {
            Side::A => &self.a,
            Side::B => &self.b,
        }
    }
}
