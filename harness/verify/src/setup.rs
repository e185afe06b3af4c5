//! The programs, templates and directories that a suite uses, and the options of the `cube-api` that it starts.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use testbed::{
    api::Api,
    artifacts::{self, ArtifactError},
    endpoint::BadUrl,
    exit::End,
    leftovers::{self, RunDir},
    server::{Door, LocalServer, ServerError, ServerSpec, Site, Tls},
    world::WorldError,
};
use vmm_control::ControlError;

use crate::sandbox::SandboxError;

/// Domain of the sandboxes' host names; never resolved.
pub(crate) const DOMAIN: &str = "cube.test";

/// Programs, template and directories that a suite uses.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Directory with `templates/` and `sdk/`.
    pub artifacts: PathBuf,
    /// Path of `cube-vmm`. `None`: from `$CUBE_BIN`, else beside this program.
    pub vmm: Option<PathBuf>,
    /// Path of `cube-api`. `None`: from `$CUBE_BIN`, else beside this program.
    pub api: Option<PathBuf>,
    /// Directory below which the suite makes a directory for its server.
    pub run_root: PathBuf,
    /// Template id or name.
    pub template: String,
}

/// A suite could not run.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// A program or template is missing.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// An embedded list of features, hazards or cases contains a mistake.
    #[error(transparent)]
    List(#[from] ListError),
    /// The server did not start.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The command line names an unknown SDK, feature, case or class.
    #[error("there is no {kind} {name:?}; there are: {known}")]
    Unknown {
        /// For example `SDK` or `feature`.
        kind: &'static str,
        /// The name as given.
        name: String,
        /// Every name that would be accepted.
        known: String,
    },
    /// The endpoint's URL is malformed.
    #[error(transparent)]
    Url(#[from] BadUrl),
    /// The endpoint did not create a sandbox or template that the suite requires.
    #[error("cannot create a sandbox or template to verify with")]
    Sandbox(#[from] SandboxError),
    /// The endpoint requires a key, but the environment has none.
    #[error("the API requires a key: set E2B_API_KEY")]
    NoKey,
    /// The network namespaces could not be created.
    #[error(transparent)]
    World(#[from] WorldError),
    /// The prover cannot listen at the address given with `--outside`.
    #[error(
        "cannot listen at the address given with --outside; it must be an address of this machine"
    )]
    Outside(#[source] io::Error),
    /// A VM for the confinement suite did not start.
    #[error("cannot start a VM to verify with")]
    Vmm(#[source] ControlError),
    #[error("cannot install handlers for SIGINT and SIGTERM")]
    Signals(#[source] io::Error),
    /// A file, directory or process cannot be used.
    #[error("cannot use {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl VerifyError {
    /// The exit status of a program that could not run a suite.
    #[must_use]
    pub fn end(&self) -> End {
        match self {
            Self::List(_) => End::Bug,
            Self::Unknown { .. } | Self::Url(_) | Self::NoKey => End::Usage,
            Self::Artifact(_) | Self::Server(_) | Self::Sandbox(_) | Self::Vmm(_) => {
                End::TargetUnreachable
            }
            Self::World(_) | Self::Outside(_) | Self::Signals(_) | Self::Io { .. } => {
                End::UnsuitableHost
            }
        }
    }
}

/// A mistake in a list of features, hazards or cases. The lists are compiled into this program, so this is a bug.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    #[error("cannot read {list}")]
    Toml {
        /// File name.
        list: &'static str,
        #[source]
        source: toml::de::Error,
    },
    /// An entry has an impossible value.
    #[error("{list}: {entry}: {fault}")]
    Entry {
        /// File name.
        list: &'static str,
        /// Name of the entry.
        entry: String,
        fault: String,
    },
}

/// Adds the path to an I/O error.
pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> VerifyError {
    let path = path.to_owned();
    move |source| VerifyError::Io { path, source }
}

/// The key for an endpoint that the suite did not start.
///
/// # Errors
/// Returns [`VerifyError::NoKey`] if `E2B_API_KEY` is not set.
pub fn key_from_environment() -> Result<String, VerifyError> {
    std::env::var("E2B_API_KEY").map_err(|_| VerifyError::NoKey)
}

impl Setup {
    /// Removes the directories of killed runs, and creates one for this run.
    pub(crate) fn run_dir(&self) -> Result<RunDir, VerifyError> {
        leftovers::sweep(&self.run_root).map_err(at(&self.run_root))?;
        RunDir::create(&self.run_root).map_err(at(&self.run_root))
    }

    /// Options of a server that requires a key, speaks plain HTTP, and keeps `warm` sandboxes of each template
    /// ready.
    pub(crate) fn server(&self, warm: u32) -> Result<ServerSpec, VerifyError> {
        let templates = self.artifacts.join("templates");
        Ok(ServerSpec {
            program: artifacts::find_api(self.api.as_deref())?,
            vmm: artifacts::find_vmm(self.vmm.as_deref())?,
            templates: templates.canonicalize().map_err(at(&templates))?,
            warm,
            domain: None,
            door: Door::Locked,
            tls: Tls::Off,
            site: Site::Loopback,
            options: Vec::new(),
            environment: Vec::new(),
        })
    }
}

/// The API of a server that a suite started, with `timeout` as the time limit of each exchange.
pub(crate) fn api_of(server: &LocalServer, timeout: Duration) -> Api {
    Api {
        control: server.endpoint().clone(),
        sandbox_url: None,
        key: server.key().to_owned(),
        timeout,
    }
}
