//! `cube-bench verify e2b`: does an endpoint do what the official SDKs expect?
//!
//! ```text
//! features ─┬─► plan: SDK × feature ─► suite (one process per SDK, bounded) ─► cells ─► report
//! sdk ──────┘
//! ```
//! The cases are the SDKs' own programs, below `harness/verify/conformance`; here they are only started, bounded and
//! counted. A case that does not answer in time is not waited for, and one that was not run is no pass.

pub mod features;
pub mod report;
pub mod sdk;
mod suite;

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Mutex,
    thread,
};

use serde::{Deserialize, Serialize};

use features::{Area, Feature, FeatureError};
use sdk::Sdk;
use testbed::{
    artifacts::{self, ArtifactError},
    endpoint::BadUrl,
    exit::End,
    leftovers::{self, RunDir},
    server::{Door, LocalServer, ServerError, ServerSpec, Tls},
};

/// Domain of the sandboxes' host names; never looked up.
const DOMAIN: &str = "cube.test";
/// Sandboxes that the server of the suite's own keeps ready.
const WARM: u32 = 4;

/// What a server of the suite's own is made of.
#[derive(Clone, Debug)]
pub struct Programs {
    /// Directory with `templates/` and `sdk/`.
    pub artifacts: PathBuf,
    /// The VMM, if given.
    pub vmm: Option<PathBuf>,
    /// The server, if given.
    pub api: Option<PathBuf>,
}

/// What is verified, and with what.
#[derive(Clone, Debug)]
pub struct VerifySpec {
    /// For a server of the suite's own, and the SDKs.
    pub programs: Programs,
    /// An endpoint that is there already; its key is E2B_API_KEY.
    pub api_url: Option<String>,
    /// Where the directory of a server of the suite's own is made.
    pub run_root: PathBuf,
    /// Template id or name.
    pub template: String,
    /// Names of SDKs; empty: all.
    pub sdks: Vec<String>,
    /// The area whose features are verified, unless some are named.
    pub area: Area,
    /// Names of features; empty: all of the area.
    pub features: Vec<String>,
    /// SDKs at work at the same time.
    pub jobs: usize,
}

/// Why nothing was verified.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// Program or template.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The list of features.
    #[error(transparent)]
    Features(#[from] FeatureError),
    /// The server of the suite's own.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// A name that means nothing.
    #[error("there is no {what} {name:?}; there are: {known}")]
    Unknown {
        /// `SDK` or `feature`.
        what: &'static str,
        /// As typed.
        name: String,
        /// All names.
        known: String,
    },
    /// An endpoint that is none.
    #[error(transparent)]
    Url(#[from] BadUrl),
    /// The endpoint gives no sandbox.
    #[error("there is no sandbox to verify with: {0}")]
    Target(String),
    /// No key for an endpoint.
    #[error("the API wants a key: set E2B_API_KEY")]
    NoKey,
    /// A directory.
    #[error("cannot use {path}")]
    Io {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// What became of one feature with one SDK.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The case passed.
    Pass,
    /// The SDK cannot do it, as the list of features says.
    Absent,
    /// The case failed.
    Fail,
    /// It gave no answer in time; its process was killed.
    TimedOut,
    /// It was not run: no SDK, no such case, or a suite that ended.
    NotRun,
}

impl Verdict {
    /// Whether nothing is missing.
    #[must_use]
    pub fn is_green(self) -> bool {
        match self {
            Self::Pass | Self::Absent => true,
            Self::Fail | Self::TimedOut | Self::NotRun => false,
        }
    }

    /// The name in JSON and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Absent => "absent",
            Self::Fail => "fail",
            Self::TimedOut => "timed_out",
            Self::NotRun => "not_run",
        }
    }
}

/// One cell of the matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Name of the feature.
    pub feature: String,
    /// Name of the SDK with its version.
    pub sdk: String,
    /// Whether the suite fails without it.
    pub must: bool,
    /// See [`Verdict`].
    pub verdict: Verdict,
    /// Why it is not green; empty when it is.
    pub why: String,
    /// Time of the case; absent when it was not run.
    pub seconds: Option<f64>,
}

/// Everything that was found out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Matrix {
    /// [`report::FORMAT`].
    pub format: u32,
    /// The endpoint, or what server it was.
    pub endpoint: String,
    /// SDKs in the order of columns.
    pub sdks: Vec<String>,
    /// Features in the order of rows, with the reason for each.
    pub features: Vec<(String, String)>,
    /// Cells in the order of rows, then columns. An SDK without the case has no cell.
    pub cells: Vec<Cell>,
}

impl Matrix {
    /// The cell, if there is one.
    #[must_use]
    pub fn cell(&self, feature: &str, sdk: &str) -> Option<&Cell> {
        self.cells
            .iter()
            .find(|cell| cell.feature == feature && cell.sdk == sdk)
    }

    /// Pass only when every cell that must be green is, and there is one.
    #[must_use]
    pub fn end(&self) -> End {
        let holds = |cell: &Cell| cell.verdict.is_green() || !cell.must;
        if !self.cells.is_empty() && self.cells.iter().all(holds) {
            End::Pass
        } else {
            End::GateFailed
        }
    }
}

/// Where cases find the API.
#[derive(Clone, Debug)]
struct Address {
    url: String,
    key: String,
    template: String,
    secure: Option<SecureAddress>,
}

/// The same templates behind HTTPS.
#[derive(Clone, Debug)]
struct SecureAddress {
    url: String,
    key: String,
    authority: PathBuf,
}

impl SecureAddress {
    fn of(server: &LocalServer) -> Self {
        Self {
            url: server.endpoint().to_string(),
            key: server.key().to_owned(),
            authority: server.authority(),
        }
    }
}

/// Runs the suite.
///
/// # Errors
/// See [`VerifyError`]; what a case finds is a cell, not an error.
pub fn run(spec: &VerifySpec) -> Result<Matrix, VerifyError> {
    let features = features::load()?;
    let mut features = chosen("feature", features, &spec.features, |f| f.name.clone())?;
    features.retain(|feature| spec.api_url.is_none() || !feature.own_server);
    features.retain(|feature| !spec.features.is_empty() || feature.area == spec.area);
    let sdks = chosen("SDK", Sdk::all(), &spec.sdks, Sdk::name)?;
    leftovers::sweep(&spec.run_root).map_err(at(&spec.run_root))?;
    let run_dir = RunDir::create(&spec.run_root).map_err(at(&spec.run_root))?;
    let (server, mut address) = endpoint(spec, &run_dir)?;
    let secure = if features.iter().any(|feature| feature.own_server) {
        let dir = run_dir.path().join("secure");
        Some(own_server(&spec.programs, &dir, Tls::PrivateAuthority, 0)?)
    } else {
        None
    };
    address.secure = secure.as_ref().map(SecureAddress::of);
    let cells = run_all(spec, &sdks, &features, &address, run_dir.path());
    Ok(Matrix {
        format: report::FORMAT,
        endpoint: match &server {
            Some(_) => "cube-api of the suite's own".to_owned(),
            None => address.url,
        },
        sdks: sdks.iter().map(Sdk::name).collect(),
        features: features
            .iter()
            .map(|f| (f.name.clone(), f.why.clone()))
            .collect(),
        cells: in_order(&features, &sdks, cells),
    })
}

/// Those of `all` that are named; all if none is.
fn chosen<T>(
    what: &'static str,
    all: Vec<T>,
    names: &[String],
    name_of: impl Fn(&T) -> String,
) -> Result<Vec<T>, VerifyError> {
    let known: Vec<String> = all.iter().map(&name_of).collect();
    if let Some(name) = names.iter().find(|name| !known.contains(name)) {
        return Err(VerifyError::Unknown {
            what,
            name: name.clone(),
            known: known.join(", "),
        });
    }
    let wanted = |thing: &T| names.is_empty() || names.contains(&name_of(thing));
    Ok(all.into_iter().filter(wanted).collect())
}

fn endpoint(
    spec: &VerifySpec,
    run_dir: &RunDir,
) -> Result<(Option<LocalServer>, Address), VerifyError> {
    let template = spec.template.clone();
    if let Some(url) = &spec.api_url {
        let address = Address {
            url: url.trim_end_matches('/').to_owned(),
            key: std::env::var("E2B_API_KEY").map_err(|_| VerifyError::NoKey)?,
            template,
            secure: None,
        };
        return Ok((None, address));
    }
    let server = own_server(&spec.programs, run_dir.path(), Tls::Off, WARM)?;
    let address = Address {
        url: server.endpoint().to_string(),
        key: server.key().to_owned(),
        template,
        secure: None,
    };
    Ok((Some(server), address))
}

pub(crate) fn own_server(
    programs: &Programs,
    dir: &Path,
    tls: Tls,
    warm: u32,
) -> Result<LocalServer, VerifyError> {
    fs::create_dir_all(dir).map_err(at(dir))?;
    let templates = programs.artifacts.join("templates");
    let spec = ServerSpec {
        program: artifacts::find_api(programs.api.as_deref())?,
        vmm: artifacts::find_vmm(programs.vmm.as_deref())?,
        templates: templates.canonicalize().map_err(at(&templates))?,
        warm,
        domain: Some(DOMAIN.to_owned()),
        door: Door::Locked,
        tls,
        options: Vec::new(),
    };
    Ok(LocalServer::start(dir, spec)?)
}

pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> VerifyError {
    let path = path.to_owned();
    move |source| VerifyError::Io { path, source }
}

/// A few SDKs at a time; each has one process of its own for all its cases.
fn run_all(
    spec: &VerifySpec,
    sdks: &[Sdk],
    features: &[Feature],
    address: &Address,
    home: &Path,
) -> Vec<Cell> {
    let waiting = Mutex::new(sdks.iter());
    let work = || {
        let mut cells = Vec::new();
        loop {
            let next = waiting.lock().ok().and_then(|mut sdks| sdks.next());
            let Some(sdk) = next else { return cells };
            let dir = spec.programs.artifacts.join("sdk");
            cells.extend(suite::run(sdk, &dir, features, address, home));
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..spec.jobs.max(1)).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .flat_map(|worker| match worker.join() {
                Ok(cells) => cells,
                Err(panic) => std::panic::resume_unwind(panic),
            })
            .collect()
    })
}

fn in_order(features: &[Feature], sdks: &[Sdk], mut cells: Vec<Cell>) -> Vec<Cell> {
    let place = |cell: &Cell| {
        (
            features.iter().position(|f| f.name == cell.feature),
            sdks.iter().position(|s| s.name() == cell.sdk),
        )
    };
    cells.sort_by_key(place);
    cells
}
