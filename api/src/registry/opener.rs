//! How the registry resumes sandboxes of a cluster. It does not depend on `peers`.

use std::{fmt, sync::Arc};

use model::SandboxId;
use tasks::Task;

/// Resumes a sandbox that another node may own, after its owner is decided. Returns why it cannot.
#[derive(Clone)]
pub(crate) struct Opener(
    pub(crate) Arc<dyn Fn(SandboxId) -> Task<Result<(), String>> + Send + Sync>,
);

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opener")
    }
}
