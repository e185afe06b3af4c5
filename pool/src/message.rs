//! What the driver hears: from callers, and from the jobs and watchers that it started.

use std::{path::PathBuf, sync::Arc};

use model::SandboxId;
use netisolation::{Counters, Policy};
use tokio::sync::oneshot;
use vmm_control::template::LoadedTemplate;

use crate::{
    CreateSpec, Init, PauseMode, PoolError, PoolStats, Sandbox, TemplateInfo, Usage,
    policy::StartFor,
    work::{WorkError, lease::Served, save::Paused, start::Started},
};

/// Where an answer goes. A caller who does not wait any more is no error.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, PoolError>>;

/// Of callers.
#[derive(Debug)]
pub(crate) enum Ask {
    Create(Box<CreateSpec>, u64, Answer<Sandbox>),
    Kill(SandboxId, Answer<()>),
    Pause(SandboxId, PauseMode, Answer<()>),
    Resume(SandboxId, Init, StartFor, u64, Answer<Sandbox>),
    Snapshot(SandboxId, Vec<String>, Answer<TemplateInfo>),
    Fork(
        SandboxId,
        Vec<CreateSpec>,
        u64,
        Answer<Vec<oneshot::Receiver<Result<Sandbox, PoolError>>>>,
    ),
    Annotate(SandboxId, String, Answer<()>),
    Usage(SandboxId, Answer<Usage>),
    SetPolicy(SandboxId, Policy, Answer<()>),
    Counters(SandboxId, Answer<Counters>),
    VerifyNetwork(SandboxId, Answer<()>),
    Templates(oneshot::Sender<Vec<TemplateInfo>>),
    Template(String, oneshot::Sender<Option<TemplateInfo>>),
    AddTemplate(PathBuf, Vec<String>, Answer<TemplateInfo>),
    RemoveTemplate(String, Answer<()>),
    Stats(oneshot::Sender<PoolStats>),
    Close(bool, oneshot::Sender<()>),
}

/// Of jobs and watchers.
#[derive(Debug)]
pub(crate) enum Report {
    /// A fill, a cold start or a resume ended.
    Made(SandboxId, Result<Box<Started>, WorkError>),
    /// A lease on a warm slot was told, or not.
    Told(SandboxId, Result<Box<Served>, WorkError>),
    /// A pause ended.
    Paused(SandboxId, Box<Paused>),
    /// A copy of a running or paused sandbox ended; `true`: its VM cannot go on.
    Copied(SandboxId, Result<(), (WorkError, bool)>),
    /// A note was written.
    Noted(SandboxId, std::io::Result<()>),
    /// The VM process of the slot is gone.
    Gone(SandboxId),
    /// What was left of a slot is removed.
    Cleaned(SandboxId),
    /// A TAP was taken back; what its figures were.
    Released(Counters),
    /// A template's memory is in huge pages, or cannot be.
    Loaded(String, Result<Arc<LoadedTemplate>, String>),
}
