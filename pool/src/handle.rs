//! The handle through which callers reach the driver.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

use model::SandboxId;
use netisolation::{Counters, Policy};
use tokio::sync::mpsc;

use crate::{
    answer::{Answer, Reply},
    claim::{Claim, GivesBase, PauseNeeds},
    error::PoolError,
    host,
    message::{Request, SandboxRequest},
    sandbox::{Connected, CreateSpec, LifeEvent, OnClose, Sandbox, TimeoutChange, Usage},
    slot::Wake,
    state::PauseMode,
    stats::PoolStats,
    work,
};

/// A handle to a pool. Clones refer to the same pool. When the last handle is dropped, VMs keep running, and the next
/// [`Pool::open`] adopts them. [`Pool::close`] can end them. Once the pool is closed, each method that returns a
/// [`PoolError`] returns [`PoolError::Draining`].
#[derive(Clone, Debug)]
pub struct Pool {
    pub(crate) requests: mpsc::Sender<Request>,
    pub(crate) background: Option<Arc<Path>>,
}

impl Pool {
    /// The file `cgroup.procs` of a cgroup whose processes run only when sandboxes do not need the CPU, for background
    /// programs of the caller. It exists until the pool is closed. `None` if the host cannot limit CPU time.
    #[must_use]
    pub fn background(&self) -> Option<&Path> {
        self.background.as_deref()
    }

    /// Makes a sandbox from a warm slot of the template if there is one, otherwise from a new clone. When this returns,
    /// the agent has applied the sandbox's identity and settings. If the caller drops the future, the sandbox is ended.
    ///
    /// # Errors
    /// Returns [`PoolError::NoTemplate`], [`PoolError::NoteTooLong`], [`PoolError::Full`] or [`PoolError::NoSpace`] if
    /// it is not admitted, [`PoolError::Draining`] after [`Pool::drain`], and [`PoolError::Failed`] or
    /// [`PoolError::AgentSilent`] if the start fails.
    pub async fn create(&self, spec: CreateSpec) -> Result<Sandbox, PoolError> {
        let accepted_ns = host::monotonic_ns();
        let spec = Box::new(spec);
        let created = self.ask(|answer| Request::Create {
            spec,
            accepted_ns,
            answer,
        });
        Ok(created.await?.claim())
    }

    /// Ensures that a sandbox runs for at least `timeout_s` more seconds. A paused sandbox is resumed, and a running
    /// one keeps a later deadline. Without a timeout, a running sandbox keeps its deadline and a paused one gets
    /// [`Lifetime::resume_timeout_s`]. A new deadline is on disk when this returns.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`, `ColdBoot`, `AlreadyRunning` or `Crowded`, and the errors of
    /// [`Pool::create`] if a resume is not admitted or fails. The sandbox then stays paused.
    pub async fn connect(
        &self,
        id: &SandboxId,
        timeout_s: Option<u32>,
        wake: Wake,
    ) -> Result<Connected, PoolError> {
        let accepted_ns = host::monotonic_ns();
        self.sandbox(id, |answer| SandboxRequest::Connect {
            timeout_s,
            wake,
            accepted_ns,
            answer,
        })
        .await
    }

    /// Returns the sandbox for traffic to one of its ports. If the sandbox is paused with its memory and has
    /// auto-resume, it is resumed first. Anyone may cause such resumes, so they hold at most half of the places for
    /// starts, and after a failed resume traffic must wait before it can cause another.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound` (also for a sandbox whose deadline has passed), `BackingOff` or
    /// `Crowded`, and the errors of a resume as for [`Pool::connect`].
    pub async fn reach(&self, id: &SandboxId) -> Result<Sandbox, PoolError> {
        let accepted_ns = host::monotonic_ns();
        self.sandbox(id, |answer| SandboxRequest::Reach {
            accepted_ns,
            answer,
        })
        .await
    }

    /// Sets the deadline of a running sandbox to `timeout_s` seconds from now. With [`TimeoutChange::Extend`], only if
    /// this is later than the current deadline. The deadline is on disk when this returns.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`, `NotRunning` or `Crowded`, and [`PoolError::Failed`] if the
    /// record cannot be written.
    pub async fn set_timeout(
        &self,
        id: &SandboxId,
        change: TimeoutChange,
        timeout_s: u32,
    ) -> Result<(), PoolError> {
        self.sandbox(id, |answer| {
            SandboxRequest::SetTimeout(change, timeout_s, answer)
        })
        .await
    }

    /// Replaces the network policy and the note of a running sandbox. The policy applies at once: open connections that
    /// it denies are cut. On hosts without sandbox networks it is only recorded. Policy and note are on disk when this
    /// returns.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`, `NotRunning` or `Crowded`, [`PoolError::NoteTooLong`], and
    /// [`PoolError::NoSpace`] or [`PoolError::Failed`] if the record cannot be written or the policy cannot be put in
    /// force. The previous policy and note then remain.
    pub async fn set_policy(
        &self,
        id: &SandboxId,
        policy: Policy,
        note: String,
    ) -> Result<(), PoolError> {
        self.sandbox(id, |answer| SandboxRequest::SetPolicy {
            policy,
            note,
            answer,
        })
        .await
    }

    /// Ends a sandbox, running or paused. When this returns, its process is gone and its files are removed; a file that
    /// cannot be removed is logged, and the next server tries again.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound` or `Crowded`.
    pub async fn kill(&self, id: &SandboxId) -> Result<(), PoolError> {
        self.sandbox(id, SandboxRequest::Kill).await
    }

    /// Writes a running sandbox to disk and ends its VM.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`, `AlreadyPaused` or `Crowded`, [`PoolError::NoSpace`],
    /// [`PoolError::TooManySaved`], and [`PoolError::Failed`] or [`PoolError::AgentSilent`] if the pause fails. The
    /// sandbox then keeps running if its VM can be resumed, and ends otherwise.
    pub async fn pause(&self, id: &SandboxId, mode: PauseMode) -> Result<(), PoolError> {
        self.sandbox(id, |answer| SandboxRequest::Pause(mode, answer))
            .await
    }

    /// Sets or removes the claim of a running or paused sandbox. The claim is on disk when this returns. For a paused
    /// sandbox it survives a crash of the host.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound` or `Crowded`, and [`PoolError::NoSpace`] or [`PoolError::Failed`] if
    /// the record cannot be written. The previous claim then remains.
    pub async fn set_claim(&self, id: &SandboxId, claim: Option<Claim>) -> Result<(), PoolError> {
        self.sandbox(id, |answer| SandboxRequest::SetClaim(claim, answer))
            .await
    }

    /// Removes a sandbox that another server has now. No claim forbids this. The sandbox is reported as
    /// [`ChangeKind::Left`], not as ended.
    ///
    /// # Errors
    /// Returns the errors of [`Pool::kill`].
    pub async fn discard(&self, id: &SandboxId) -> Result<(), PoolError> {
        self.sandbox(id, SandboxRequest::Discard).await
    }

    /// The files that a running or paused sandbox needs on another server.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`, and [`PoolError::Failed`] if it can only be used on this server.
    pub async fn pause_needs(&self, id: &SandboxId) -> Result<PauseNeeds, PoolError> {
        self.ask(|answer| Request::PauseNeeds(id.clone(), answer))
            .await
    }

    /// The directory with the files of a paused sandbox whose claim is not open. The files do not change until the
    /// claim is opened.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound` or `AlreadyRunning`.
    pub async fn pause_files(&self, id: &SandboxId) -> Result<PathBuf, PoolError> {
        self.ask(|answer| Request::PauseFiles(id.clone(), answer))
            .await
    }

    /// The open files of the base of such a sandbox, which remain readable even if they are removed. Another server
    /// passes them to [`Pool::hold`] under the same names.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound` or `AlreadyRunning`, and [`PoolError::NoSpace`] or
    /// [`PoolError::Failed`] if a file is missing or the base's memory cannot be made.
    pub async fn base_files(&self, id: &SandboxId) -> Result<Vec<(String, File)>, PoolError> {
        self.ask(|answer| Request::BaseFiles(id.clone(), answer))
            .await
    }

    /// Checks that this server can take a paused sandbox with these needs.
    ///
    /// # Errors
    /// Returns [`PoolError::TooManySaved`], [`PoolError::Draining`], or [`PoolError::Failed`], which names the missing
    /// files.
    pub async fn can_take(&self, needs: PauseNeeds, gives: GivesBase) -> Result<(), PoolError> {
        self.ask(|answer| Request::CanTake(needs, gives, answer))
            .await
    }

    /// Holds the base and the VMM that a paused sandbox of another server needs, by links in `incoming/ID`, until
    /// [`Pool::take`] takes the sandbox over or the directory is removed. `fetched` is a directory below `incoming`
    /// with the files of the base, which are checked and moved. Returns whether the base is here.
    ///
    /// # Errors
    /// Returns [`PoolError::NoSpace`] or [`PoolError::Failed`] if `fetched` is not the base, or files cannot be linked.
    pub async fn hold(
        &self,
        incoming: &Path,
        id: &SandboxId,
        needs: PauseNeeds,
        fetched: Option<PathBuf>,
    ) -> Result<bool, PoolError> {
        let incoming = incoming.to_owned();
        self.ask(|answer| Request::Hold {
            id: id.clone(),
            incoming,
            needs,
            fetched,
            answer,
        })
        .await
    }

    /// The root images of this server's templates, without duplicates.
    pub async fn root_images(&self) -> Vec<PathBuf> {
        self.look(Request::RootImages).await.unwrap_or_default()
    }

    /// Whether a base can have a file of this name.
    #[must_use]
    pub fn is_file_of_base(name: &str) -> bool {
        work::base::is_file_of_base(name)
    }

    /// Checks the files of a paused sandbox in `incoming/ID/pause`, which another server has written. With a claim,
    /// also takes the sandbox over: moves the directory `incoming/ID`, so that all its files survive a crash of the
    /// host. Recreates a base or VMM of `needs` that was removed since [`Pool::hold`].
    ///
    /// # Errors
    /// Returns the errors of [`Pool::can_take`], and [`PoolError::NoSpace`] or [`PoolError::Failed`] if the files are
    /// not a pause that this server can resume, or cannot be moved. The files then remain.
    pub async fn take(
        &self,
        incoming: &Path,
        id: &SandboxId,
        needs: Option<PauseNeeds>,
        claim: Option<Claim>,
    ) -> Result<(), PoolError> {
        let incoming = incoming.to_owned();
        self.ask(|answer| Request::Take {
            id: id.clone(),
            incoming,
            needs,
            claim,
            answer,
        })
        .await
    }

    /// Makes new sandboxes that continue from the current state of a running sandbox, which keeps running. Returns one
    /// result for each spec. The template and policy of a spec are ignored. Its timeout counts from now. If the caller
    /// drops the future, the forks are ended.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`, `NotRunning` or `Crowded`, [`PoolError::NoteTooLong`] if any
    /// spec's note is too long, and [`PoolError::NoSpace`] or [`PoolError::Failed`] if the snapshot of the source
    /// cannot be written. Each result has the errors of [`Pool::create`].
    pub async fn fork(
        &self,
        id: &SandboxId,
        specs: Vec<CreateSpec>,
    ) -> Result<Vec<Result<Sandbox, PoolError>>, PoolError> {
        let accepted_ns = host::monotonic_ns();
        let started = self.sandbox(id, |answer| SandboxRequest::Fork {
            specs,
            accepted_ns,
            answer,
        });
        let mut forks = Vec::new();
        for fork in started.await? {
            forks.push(fork.await.unwrap_or(Err(PoolError::Draining)));
        }
        // Claims all forks at once: a caller that drops the future earlier has claimed none, and all are ended.
        let claimed = forks.into_iter().map(|fork| fork.map(|f| f.claim()));
        Ok(claimed.collect())
    }

    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`.
    pub async fn get(&self, id: &SandboxId) -> Result<Sandbox, PoolError> {
        self.ask(|answer| Request::Get(id.clone(), answer)).await
    }

    /// All sandboxes, in no particular order.
    ///
    /// # Errors
    /// Returns [`PoolError::Draining`] if the pool is closed.
    pub async fn list(&self) -> Result<Vec<Sandbox>, PoolError> {
        self.look(Request::List).await.ok_or(PoolError::Draining)
    }

    /// A sandbox and its latest life events since this pool was opened, oldest first.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`.
    pub async fn history(&self, id: &SandboxId) -> Result<(Sandbox, Vec<LifeEvent>), PoolError> {
        self.ask(|answer| Request::History(id.clone(), answer))
            .await
    }

    /// The current resource usage of a running sandbox, seen from the host.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound` or `NotRunning`.
    pub async fn usage(&self, id: &SandboxId) -> Result<Usage, PoolError> {
        self.ask(|answer| Request::Usage(id.clone(), answer)).await
    }

    /// Packets that passed a running sandbox's TAP, and packets that were refused, since its start or last resume. All
    /// zero if the sandbox has no network.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound` or `NotRunning`, and [`PoolError::Failed`].
    pub async fn counters(&self, id: &SandboxId) -> Result<Counters, PoolError> {
        self.ask(|answer| Request::Counters(id.clone(), answer))
            .await
    }

    /// Verifies that the TAP of a running sandbox enforces its policy.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound` or `NotRunning`, and [`PoolError::Failed`] if the policy is not
    /// enforced or the sandbox has no network.
    pub async fn verify_network(&self, id: &SandboxId) -> Result<(), PoolError> {
        self.ask(|answer| Request::VerifyNetwork(id.clone(), answer))
            .await
    }

    /// Counters and gauges. All zero once the pool is closed.
    pub async fn stats(&self) -> PoolStats {
        self.look(Request::Stats).await.unwrap_or_default()
    }

    /// Refuses creates from now on. Returns once no start is queued and no sandbox is being changed.
    pub async fn drain(&self) {
        // If the driver has ended, nothing is under way.
        let _ = self.look(Request::Drain).await;
    }

    /// Returns once no start is queued and no sandbox is being changed. Unlike [`Pool::drain`], refuses nothing, so new
    /// requests may delay it.
    pub async fn settle(&self) {
        // If the driver has ended, nothing is under way.
        let _ = self.look(Request::Settle).await;
    }

    /// Ends the warm slots and the driver. [`OnClose`] decides whether sandboxes are kept for the next server.
    pub async fn close(self, on_close: OnClose) {
        // If the driver has ended, the pool is already closed.
        let _ = self.look(|closed| Request::Close(on_close, closed)).await;
    }

    pub(crate) async fn sandbox<T>(
        &self,
        id: &SandboxId,
        request: impl FnOnce(Answer<T>) -> SandboxRequest,
    ) -> Result<T, PoolError> {
        self.ask(|answer| Request::Sandbox(id.clone(), request(answer)))
            .await
    }

    pub(crate) async fn ask<T>(
        &self,
        request: impl FnOnce(Answer<T>) -> Request,
    ) -> Result<T, PoolError> {
        self.look(request).await.unwrap_or(Err(PoolError::Draining))
    }

    /// Sends a request to the driver and waits for the response. `None` if the driver has ended.
    pub(crate) async fn look<T>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Option<T> {
        let (answer, answered) = Reply::new();
        self.requests.send(request(answer)).await.ok()?;
        answered.await.ok()
    }
}
