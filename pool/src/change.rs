//! Reports of what has happened to sandboxes.

use model::SandboxId;

use crate::{lifetime::UnixMs, sandbox::Sandbox};

/// Sandboxes that the state directory held when the pool was opened.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Running sandboxes whose VMM process exists, and paused ones. A running one that cannot be adopted ends later;
    /// [`Ended`] reports why.
    pub alive: Vec<Sandbox>,
    /// Leased sandboxes that are gone, with the reason.
    pub lost: Vec<(SandboxId, String)>,
    /// The lost sandboxes whose records could be read, in their recorded state.
    pub former: Vec<Sandbox>,
}

/// Reports that a sandbox has ended. Its files and processes are already removed.
#[derive(Clone, Debug)]
pub struct Ended {
    pub id: SandboxId,
    /// Why it ended on its own, for example the last line of the VMM's standard error, or why it could not be adopted
    /// from a previous server. `None` if a caller or the deadline ended it.
    pub why: Option<String>,
}

/// A change of a sandbox, reported after it was written to the sandbox's record.
#[derive(Clone, Debug)]
pub struct Change {
    pub at: UnixMs,
    pub id: SandboxId,
    pub kind: ChangeKind,
    /// The sandbox after the change. `None` after its end.
    pub sandbox: Option<Sandbox>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    Created,
    /// Its deadline or its network options.
    Updated,
    Paused,
    Resumed,
    /// A snapshot of it was made into a template.
    Snapshotted,
    /// It was taken over from another server, paused.
    Arrived,
    /// Another server has it now.
    Left,
    /// See [`Ended::why`].
    Ended(Option<String>),
}
