//! Runs a build: from an order to a template in the pool, without names.

use model::Bytes;
use oci_image::registry::Credentials;
use pool::Pool;

use super::{
    cancel::Cancel,
    log::BuildLog,
    plan::{At, From, Step},
    uploads::Uploads,
};

/// What to build.
#[derive(Debug)]
pub struct Order {
    /// The template whose uploads the steps use.
    pub template_id: String,
    /// A template is named by its id in the pool if it is one of the builds.
    pub from: From,
    pub registry: Option<Credentials>,
    pub steps: Vec<Step>,
    pub start: Option<String>,
    pub ready: Option<String>,
    /// Run all steps, whatever the cache has.
    pub force: bool,
    pub vcpus: u8,
    pub memory: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// Id of the template in the pool.
    pub template: String,
}

/// Why a build failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub at: At,
    /// For the client.
    pub message: String,
}

/// Runs builds. Clones share the cache.
#[derive(Clone, Debug)]
pub struct Executor {
    _pool: Pool,
}

impl Executor {
    #[must_use]
    pub fn open(pool: Pool) -> Self {
        Self { _pool: pool }
    }

    /// Runs a build to its end.
    ///
    /// # Errors
    /// Returns [`Failure`]; also if the build is cancelled.
    #[expect(clippy::unused_async, reason = "the steps wait for the guest")]
    pub async fn run(
        &self,
        _order: &Order,
        _files: &Uploads,
        _log: &BuildLog,
        _cancel: Cancel,
    ) -> Result<Built, Failure> {
        Err(Failure {
            at: At::Base,
            message: "this server cannot run builds yet: build the template on the host with `cargo xtask`"
                .to_owned(),
        })
    }
}
