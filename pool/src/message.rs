//! Messages to the driver: requests of callers, and reports of the jobs and watchers that the driver started.

use std::{fs::File, os::fd::OwnedFd, path::PathBuf, sync::Arc};

use library::{
    TakenNames,
    diff::Stored,
    error::LibraryError,
    info::{DiskSpec, TemplateDefaults, TemplateInfo},
    template::Origin,
};
use model::{Bytes, SandboxId};
use netisolation::{Counters, Policy};
use tokio::sync::{mpsc, oneshot};
use vmm_control::template::LoadedTemplate;

use crate::{
    answer::{Answer, Reply},
    cgroup::FormerServers,
    claim::{Claim, GivesBase, PauseNeeds},
    error::PoolError,
    record::Record,
    sandbox::{Connected, CreateSpec, LifeEvent, OnClose, Sandbox, TimeoutChange, Usage},
    slot::{Operation, Wake},
    state::PauseMode,
    stats::PoolStats,
    work::{
        WorkError,
        base::Held,
        lease::Served,
        needs::Needed,
        rebuild::Outcome,
        save::{ForkSnapshot, PauseOutcome, SnapshotFailed},
        start::Started,
    },
};

/// A new sandbox that has not reached its caller yet. If the caller disconnects before it claims the sandbox, this
/// value is dropped. The drop ends the sandbox, because no caller could ever learn its id.
#[derive(Debug)]
pub(crate) struct Unclaimed {
    sandbox: Sandbox,
    /// `None` once the sandbox is claimed.
    end: Option<mpsc::UnboundedSender<Report>>,
}

impl Unclaimed {
    pub(crate) fn new(sandbox: Sandbox, reporter: mpsc::UnboundedSender<Report>) -> Self {
        Self {
            sandbox,
            end: Some(reporter),
        }
    }

    pub(crate) fn claim(mut self) -> Sandbox {
        self.end = None;
        self.sandbox.clone()
    }
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if let Some(reporter) = self.end.take() {
            // If the driver has ended, the sandbox keeps running, as after a crash, and the next server lists it.
            let _ = reporter.send(Report::Unclaimed(self.sandbox.id.clone()));
        }
    }
}

/// The pending responses of a fork, one for each new sandbox.
pub(crate) type ForkAnswers = Vec<oneshot::Receiver<Result<Unclaimed, PoolError>>>;

/// Requests of callers. `accepted_ns` is the time of the call in CLOCK_MONOTONIC.
#[derive(Debug)]
pub(crate) enum Request {
    Create {
        spec: Box<CreateSpec>,
        accepted_ns: u64,
        answer: Answer<Unclaimed>,
    },
    /// Decided by [`crate::slot::decide`].
    Sandbox(SandboxId, SandboxRequest),
    Get(SandboxId, Answer<Sandbox>),
    List(Reply<Vec<Sandbox>>),
    History(SandboxId, Answer<(Sandbox, Vec<LifeEvent>)>),
    Usage(SandboxId, Answer<Usage>),
    Counters(SandboxId, Answer<Counters>),
    VerifyNetwork(SandboxId, Answer<()>),
    Templates(Reply<Vec<TemplateInfo>>),
    Template(String, Reply<Option<TemplateInfo>>),
    AddTemplate(PathBuf, Vec<String>, Answer<TemplateInfo>),
    AddDisk(DiskSpec, Answer<TemplateInfo>),
    /// With the guests' memory and disk size. `None` keeps the sizes of the template.
    DiskOf(String, Option<(Bytes, Bytes)>, Answer<TemplateInfo>),
    /// The files from which [`Request::DiskOf`] would make a disk template.
    DiskFiles(String, Answer<DiskSpec>),
    CopyOf(String, Answer<TemplateInfo>),
    RecordWorkingSet(SandboxId, Answer<()>),
    RecipeDir(String, Answer<PathBuf>),
    GiveNames(String, Vec<String>, Answer<()>),
    TakeNames(Vec<String>, Answer<()>),
    RemoveTemplate(String, Answer<()>),
    PauseFiles(SandboxId, Answer<PathBuf>),
    PauseNeeds(SandboxId, Answer<PauseNeeds>),
    /// The open files of the base of a paused sandbox.
    BaseFiles(SandboxId, Answer<Vec<(String, File)>>),
    CanTake(PauseNeeds, GivesBase, Answer<()>),
    /// Holds the files that a sandbox in `incoming/ID` needs. Responds whether its base is here.
    Hold {
        id: SandboxId,
        incoming: PathBuf,
        needs: PauseNeeds,
        fetched: Option<PathBuf>,
        answer: Answer<bool>,
    },
    RootImages(Reply<Vec<PathBuf>>),
    /// Takes over a paused sandbox in `incoming/ID`. Without a claim, only checks its files.
    Take {
        id: SandboxId,
        incoming: PathBuf,
        /// `None` if an older release wrote the request.
        needs: Option<PauseNeeds>,
        claim: Option<Claim>,
        answer: Answer<()>,
    },
    Stats(Reply<PoolStats>),
    Drain(Reply<()>),
    Settle(Reply<()>),
    Close(OnClose, Reply<()>),
}

/// Requests whose outcome depends on the sandbox's state.
#[derive(Debug)]
pub(crate) enum SandboxRequest {
    Connect {
        timeout_s: Option<u32>,
        wake: Wake,
        accepted_ns: u64,
        answer: Answer<Connected>,
    },
    Reach {
        accepted_ns: u64,
        answer: Answer<Sandbox>,
    },
    SetTimeout(TimeoutChange, u32, Answer<()>),
    SetPolicy {
        policy: Policy,
        note: String,
        answer: Answer<()>,
    },
    Pause(PauseMode, Answer<()>),
    Kill(Answer<()>),
    SetClaim(Option<Claim>, Answer<()>),
    Discard(Answer<()>),
    Snapshot(Vec<String>, Answer<TemplateInfo>),
    SaveDisk(Answer<TemplateInfo>),
    Publish(Vec<String>, TemplateDefaults, Answer<TemplateInfo>),
    Fork {
        specs: Vec<CreateSpec>,
        accepted_ns: u64,
        answer: Answer<ForkAnswers>,
    },
}

impl SandboxRequest {
    pub(crate) fn operation(&self) -> Operation {
        match self {
            Self::Connect { wake, .. } => Operation::Connect(*wake),
            Self::Reach { .. } => Operation::Reach,
            Self::SetTimeout(..) => Operation::SetTimeout,
            Self::SetPolicy { .. } => Operation::SetPolicy,
            Self::Pause(mode, _) => Operation::Pause(*mode),
            Self::Kill(_) => Operation::Kill,
            Self::SetClaim(..) => Operation::SetClaim,
            Self::Discard(_) => Operation::Discard,
            Self::Snapshot(..) => Operation::Snapshot,
            Self::SaveDisk(_) | Self::Publish(..) => Operation::MakeTemplate,
            Self::Fork { .. } => Operation::Fork,
        }
    }

    pub(crate) fn refuse(self, error: PoolError) {
        match self {
            Self::Connect { answer, .. } => answer.send(Err(error)),
            Self::Reach { answer, .. } => answer.send(Err(error)),
            Self::SetTimeout(_, _, answer)
            | Self::SetPolicy { answer, .. }
            | Self::Pause(_, answer)
            | Self::SetClaim(_, answer)
            | Self::Discard(answer)
            | Self::Kill(answer) => answer.send(Err(error)),
            Self::Snapshot(_, answer) | Self::SaveDisk(answer) | Self::Publish(_, _, answer) => {
                answer.send(Err(error));
            }
            Self::Fork { answer, .. } => answer.send(Err(error)),
        }
    }
}

/// Reports of jobs and watchers.
#[derive(Debug)]
pub(crate) enum Report {
    /// A fill, a cold start or a resume ended.
    Made(SandboxId, Result<Box<Started>, WorkError>),
    /// The lease of a warm slot ended.
    Leased(SandboxId, Result<Box<Served>, WorkError>),
    Paused(SandboxId, Box<PauseOutcome>),
    Snapshotted(SandboxId, SnapshotFor, Result<(), SnapshotFailed>),
    /// The record of a paused sandbox was written with another claim, or could not be written.
    Claimed(SandboxId, Option<Claim>, std::io::Result<()>),
    /// The search for the files that a sandbox needs on another server ended.
    Needs(Result<Box<Needed>, PoolError>, Answer<PauseNeeds>),
    /// The files of a base were opened.
    BaseOpened(
        Result<Vec<(String, File)>, PoolError>,
        Answer<Vec<(String, File)>>,
    ),
    /// The files are held that a paused sandbox of another server needs, or they are not here. The path is the
    /// sandbox's directory.
    Held(PathBuf, Result<Option<Held>, PoolError>, Answer<bool>),
    /// The files of a paused sandbox were checked and, with a record, taken over.
    Taken(
        SandboxId,
        Result<Option<Box<Record>>, PoolError>,
        Answer<()>,
    ),
    /// The record was written, or could not be written.
    Written(SandboxId, std::io::Result<()>),
    /// The job that wrote the record ended, after it removed the pause from which the sandbox was resumed.
    WriteEnded(SandboxId, std::io::Result<()>),
    /// The VM process of the slot exited.
    VmExited(SandboxId),
    /// The slot's directory and cgroup were removed, or a failure to remove them was logged. An error means that its
    /// record could not be removed.
    Cleaned(SandboxId, std::io::Result<()>),
    /// A template was written to disk, or writing it failed.
    Published(Published),
    /// The files of a template are in its directory, or an error tells why not.
    FilesAdded(FilesAdded),
    /// The names of templates were written to disk, or writing them failed.
    Renamed(Renamed),
    /// A TAP was released; these are its last counters.
    Released(Counters),
    /// Loading the memory of a template into huge pages ended. The path has its files. The result is the size of the
    /// copy, or the reason for the failure.
    Loaded(
        String,
        PathBuf,
        CopySize,
        Result<Arc<LoadedTemplate>, LoadFailed>,
    ),
    /// The memory of the template with this id was stored as a diff, or `None` if it stays whole.
    Stored(String, std::io::Result<Option<Stored>>),
    /// The adoption of a running sandbox waits for its VMM, and will not change anything.
    Asking(SandboxId),
    Adopted(SandboxId, Result<Option<u64>, String>),
    /// The VM process of the rebuild under way.
    Rebuilding(Arc<OwnedFd>),
    /// The examination or the rebuild of the template with this id ended.
    Rebuilt(String, Result<Outcome, String>),
    /// All leftovers of the previous server were removed, or a failure was logged.
    Swept,
    /// The state of the cgroups of previous servers.
    ServersLeft(FormerServers),
    /// The caller of a create or fork disconnected.
    Unclaimed(SandboxId),
}

/// A new template whose record was written, or could not be written.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) template: TemplateInfo,
    /// The names that it took from other templates.
    pub(crate) taken: TakenNames,
    pub(crate) written: std::io::Result<()>,
    pub(crate) answer: Answer<TemplateInfo>,
}

/// The size of a copy, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopySize {
    /// Upper bound of its memory: holes of the file may be filled.
    pub(crate) length: u64,
    /// Memory that it uses now.
    pub(crate) taken: u64,
}

/// Reason why a template's memory was not loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoadFailed {
    /// The memory file could not be made from its diff, because the disk was full. A later attempt may succeed.
    NoSpace(String),
    Other(String),
}

#[derive(Debug)]
pub(crate) struct FilesAdded {
    /// The id of the template.
    pub(crate) id: String,
    pub(crate) added: Result<Origin, LibraryError>,
    pub(crate) answer: Answer<TemplateInfo>,
}

/// A change of names that was written, or could not be written.
#[derive(Debug)]
pub(crate) struct Renamed {
    /// The names before the change.
    pub(crate) former: TakenNames,
    pub(crate) written: std::io::Result<()>,
    pub(crate) answer: Answer<()>,
}

/// The purpose of a snapshot.
#[derive(Debug)]
pub(crate) enum SnapshotFor {
    /// It becomes the template with this id.
    Template(String),
    Forks(Arc<ForkSnapshot>),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unclaimed() -> (Unclaimed, mpsc::UnboundedReceiver<Report>) {
        let template = library::fixtures::info();
        let sandbox = Sandbox {
            id: SandboxId::from_random([7; 19]),
            template: Arc::new(template),
            state: crate::state::SandboxState::Running,
            lifetime: crate::lifetime::Lifetime::default(),
            note: Arc::from(""),
            vsock: PathBuf::new(),
            console: PathBuf::new(),
            pid: 1,
            timeline: model::Timeline::default(),
            warm: false,
            generation: 0,
            vm_since: 0,
            claim: None,
        };
        let (reporter, reports) = mpsc::unbounded_channel();
        (Unclaimed::new(sandbox, reporter), reports)
    }

    #[test]
    fn a_claimed_sandbox_lives() {
        let (unclaimed, mut reports) = unclaimed();
        let (answer, mut answered) = oneshot::channel();
        answer.send(unclaimed).unwrap();
        answered.try_recv().unwrap().claim();
        assert!(reports.try_recv().is_err());
    }

    #[test]
    fn a_sandbox_whose_caller_left_before_the_answer_is_ended() {
        let (unclaimed, mut reports) = unclaimed();
        let (answer, answered) = oneshot::channel();
        drop(answered);
        assert!(answer.send(unclaimed).is_err());
        assert!(matches!(reports.try_recv(), Ok(Report::Unclaimed(_))));
    }

    #[test]
    fn a_sandbox_whose_caller_left_without_taking_the_answer_is_ended() {
        let (unclaimed, mut reports) = unclaimed();
        let (answer, answered) = oneshot::channel();
        answer.send(unclaimed).unwrap();
        assert!(reports.try_recv().is_err());
        drop(answered);
        assert!(matches!(reports.try_recv(), Ok(Report::Unclaimed(_))));
    }
}
