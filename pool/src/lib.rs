//! The owner of sandboxes: templates, warm slots, leases, deadlines, pause, resume, snapshot, fork and limits.
//!
//! One task, the driver, owns every slot; [`Pool`] is a handle that sends it requests. The pool starts a `cube-vmm`
//! process for each slot and uses its control socket. It never links the VMM, so a VMM that crashes affects nothing
//! else. Every slot has a directory below the state directory, named by its id, with its record, sockets and logs. The
//! record is replaced atomically at each step: after SIGKILL of this process the next [`Pool::open`] finds every VM,
//! adopts those that run and removes the rest.
//!
//! ```text
//!            ┌──────── one template in huge pages, mapped privately ────────┐
//!  stock     [warm] [warm] [warm] [fill]      low ─ high: how many are kept │
//!               │ lease: resume, POST /init                                 │
//!  leased    [running] [running] [cold] ◄── no warm slot: a VM is made ─────┘
//!               │ pause  ▲ resume             │ fork: a diff, restored n times
//!  on disk   [pause/]  [pause/]               └► [running] [running] …
//! ```
//! A slot serves one lease: its id *is* the sandbox's id. A used slot never returns to the stock.
//!
//! A warm slot is clean: its VM is paused; no other VM has its id, machine id or random pool; it has run only the
//! template's programs and the warm-up; its agent is open, but only the pool has had its sockets; and its record says
//! that it has no owner, so that it ends with this process.

mod cgroup;
mod driver;
mod error;
mod host;
mod lifetime;
mod message;
mod network;
mod policy;
mod record;
mod recover;
mod slot;
mod spec;
mod store;
mod templates;
mod vm;
mod work;

pub use error::PoolError;
pub use lifetime::{Lifetime, OnTimeout, UnixMs};
pub use slot::{Refusal, Wake};
pub use spec::{
    Connected, CreateSpec, Ended, Init, LifeEvent, MAX_NOTE, MissingLimits, OnClose, PauseMode,
    PoolConfig, PoolStats, Recovered, Sandbox, SandboxLimits, SandboxState, TemplateInfo,
    TimeoutChange, Usage, WarmMarks,
};

use std::{
    fs::{File, TryLockError},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use model::SandboxId;
use netisolation::{Counters, Policy};
use tokio::sync::{mpsc, oneshot};

use crate::{
    cgroup::Groups,
    driver::{Driver, Entry, Setup},
    message::{Answer, Request, SandboxRequest},
    record::private_dir,
    store::Store,
    templates::Templates,
};

/// Directories below the state directory.
pub(crate) const SANDBOXES: &str = "sandboxes";
pub(crate) const TEMPLATES: &str = "templates";
pub(crate) const FORKS: &str = "forks";
const LOCK: &str = "lock";
/// Requests in the driver's queue; when it is full, callers wait.
const REQUESTS: usize = 1024;
/// Longest path of the state directory in bytes. The paths of unix sockets below it have at most 107 bytes.
const MAX_STATE: usize = 60;

/// A handle; clones reach the same pool. When the last one is dropped, VMs go on running: the next [`Pool::open`]
/// adopts them. [`Pool::close`] can end them.
#[derive(Clone, Debug)]
pub struct Pool {
    requests: mpsc::Sender<Request>,
}

/// The parts of a pool that are opened on a blocking thread.
struct Opened {
    lock: File,
    host_boot_id: String,
    groups: Groups,
    templates: Templates,
    found: Vec<(SandboxId, Entry)>,
    recovered: Recovered,
}

impl Opened {
    fn new(config: &PoolConfig) -> io::Result<Self> {
        if config.state.as_os_str().len() > MAX_STATE {
            return Err(io::Error::other(format!(
                "the path is longer than {MAX_STATE} bytes, so the paths of unix sockets below it would be too long"
            )));
        }
        if !config.vmm.is_file() {
            return Err(io::Error::other(format!(
                "no VMM at {}",
                config.vmm.display()
            )));
        }
        let state = &config.state;
        for dir in ["", SANDBOXES, TEMPLATES] {
            private_dir(&state.join(dir))?;
        }
        let lock = lock(&state.join(LOCK))?;
        let host_boot_id = host::boot_id()?;
        let total = host::meminfo("MemTotal");
        let memory = total.map(|bytes| bytes.saturating_sub(config.memory_reserve.0));
        // Identifies the directory, whatever path leads to it.
        let tag = format!("{:x}-{:x}", lock.metadata()?.dev(), lock.metadata()?.ino());
        let scratch = Path::new(SCRATCH);
        let groups = Groups::open(
            &tag,
            config.limits.clone(),
            config.missing_limits,
            memory,
            scratch,
        )?;
        let installed = config.installed_templates.as_deref();
        let templates = state.join(TEMPLATES);
        let images = config.images.iter().map(PathBuf::as_path);
        let store = Store::new(images.chain(installed).chain([templates.as_path()]))?;
        let templates = Templates::open(templates, installed, store)?;
        let network = config.network.as_ref();
        let (found, recovered) = recover::recover(
            &state.join(SANDBOXES),
            &host_boot_id,
            &groups,
            network,
            config.start_timeout,
            config.lifetime_of_note,
        )?;
        // After the recovery: VMMs that the former server was starting may be in the group that this replaces.
        if let Some(memory) = config.server_memory {
            groups.enter_as_server(memory.0)?;
        }
        // After the recovery: a VMM that was writing a snapshot there has finished when it has answered.
        remove_if_there(&state.join(FORKS))?;
        private_dir(&state.join(FORKS))?;
        Ok(Self {
            lock,
            host_boot_id,
            groups,
            templates,
            found,
            recovered,
        })
    }
}

/// Directory in which VMMs keep the writable layers of their guests.
pub(crate) const SCRATCH: &str = "/var/tmp";

/// How long the lock may outlive a killed server: a child between fork and exec still has its descriptors.
const LAST_CHILD: Duration = Duration::from_secs(1);

/// Takes the lock that keeps other servers away from the state directory. The kernel releases it when the process exits.
fn lock(path: &Path) -> io::Result<File> {
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    let deadline = Instant::now() + LAST_CHILD;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::sleep(LAST_CHILD / 100);
            }
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::other("another server uses the state directory"));
            }
            Err(TryLockError::Error(e)) => return Err(e),
        }
    }
}

fn remove_if_there(dir: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

impl Pool {
    /// Opens the pool: takes the lock of the state directory, adopts what runs, sweeps what does not, and starts to fill
    /// warm slots. Deadlines that passed while no server ran are acted upon at once. The receiver reports every
    /// sandbox that ends.
    ///
    /// # Errors
    /// Returns [`PoolError::Failed`] if the state directory is locked by another server or cannot be written, if there
    /// is no `cube-vmm`, or if the host lacks limits that [`PoolConfig::missing_limits`] requires.
    pub async fn open(
        config: PoolConfig,
    ) -> Result<(Self, Recovered, mpsc::UnboundedReceiver<Ended>), PoolError> {
        let state = config.state.clone();
        let failed = |why: String| PoolError::Failed {
            what: "open the pool",
            why: format!("{}: {why}", state.display()),
        };
        let (config, opened) = tokio::task::spawn_blocking(move || {
            let opened = Opened::new(&config);
            (config, opened)
        })
        .await
        .map_err(|e| failed(e.to_string()))?;
        let opened = opened.map_err(|e| failed(e.to_string()))?;
        let (requests, inbox) = mpsc::channel(REQUESTS);
        let (ended, ends) = mpsc::unbounded_channel();
        let driver = Driver::new(Setup {
            config,
            host_boot_id: opened.host_boot_id,
            groups: Arc::new(opened.groups),
            templates: opened.templates,
            found: opened.found,
            requests: inbox,
            ended,
            lock: opened.lock,
        });
        tokio::spawn(driver.run());
        Ok((Self { requests }, opened.recovered, ends))
    }

    /// Makes a sandbox from a warm slot of the template if there is one, else from a new clone. When this returns, the
    /// agent has taken identity and settings. If the caller drops the future, the sandbox is ended.
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

    /// Makes sure that a sandbox runs, for `timeout_s` seconds from now at least: a paused one is resumed. Never
    /// shortens a sandbox's life. Without a timeout a running sandbox keeps its deadline and a paused one gets
    /// [`Lifetime::resume_timeout_s`]. A new deadline is on disk when this returns.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`, `ColdBoot`, `AlreadyRunning` or `Crowded`, and the errors of
    /// [`Pool::create`] for a resume that is not admitted or fails; the sandbox is paused as before then.
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

    /// Returns the sandbox for traffic to one of its ports. One that is paused with its memory is resumed first if it
    /// has auto-resume. Anybody may cause such resumes, so they hold at most half of the places for starts, and each
    /// that fails delays the next.
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

    /// Sets the deadline of a running sandbox to `timeout_s` seconds from now. On disk when this returns.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`, `NotRunning` or `Crowded`, and [`PoolError::Failed`] if the record
    /// cannot be written.
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

    /// Replaces the network policy of a running sandbox, at once: open connections that the new one denies are cut. The
    /// note is replaced with it. On hosts without sandbox networks the policy is kept for later. Both are on disk when
    /// this returns.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`, `NotRunning` or `Crowded`, [`PoolError::NoteTooLong`], and
    /// [`PoolError::Failed`] if the policy cannot be written or put in force; the one before holds then.
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

    /// Ends a sandbox, running or paused, and removes everything of it. When this returns nothing is left.
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
    /// [`PoolError::TooManySaved`], and [`PoolError::Failed`]: the sandbox goes on running if its VM can.
    pub async fn pause(&self, id: &SandboxId, mode: PauseMode) -> Result<(), PoolError> {
        self.sandbox(id, |answer| SandboxRequest::Pause(mode, answer))
            .await
    }

    /// Makes a template of a running sandbox, or of one paused with its memory. The sandbox stays as it is.
    ///
    /// # Errors
    /// As [`Pool::pause`]; also [`PoolError::BadName`], and [`PoolError::Refused`] with `NoMemory`.
    pub async fn snapshot(
        &self,
        id: &SandboxId,
        names: Vec<String>,
    ) -> Result<TemplateInfo, PoolError> {
        self.sandbox(id, |answer| SandboxRequest::Snapshot(names, answer))
            .await
    }

    /// Makes new sandboxes that continue where a running one is now; the source goes on. Returns one result for each
    /// spec, whose template and policy are ignored and whose timeout counts from now. If the caller drops the future,
    /// the forks are ended.
    ///
    /// # Errors
    /// Returns the errors of [`Pool::pause`] for the source, and `NotRunning` for a paused one. Each result has the
    /// errors of [`Pool::create`].
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
        // All at once: a caller that goes away before has claimed none.
        let claimed = forks.into_iter().map(|fork| fork.map(|f| f.claim()));
        Ok(claimed.collect())
    }

    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`.
    pub async fn get(&self, id: &SandboxId) -> Result<Sandbox, PoolError> {
        self.ask(|answer| Request::Get(id.clone(), answer)).await
    }

    /// All sandboxes, in no order.
    ///
    /// # Errors
    /// Returns [`PoolError::Draining`] if the pool is closed.
    pub async fn list(&self) -> Result<Vec<Sandbox>, PoolError> {
        self.look(Request::List).await.ok_or(PoolError::Draining)
    }

    /// A sandbox and what happened to it since this pool was opened, oldest first.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound`.
    pub async fn history(&self, id: &SandboxId) -> Result<(Sandbox, Vec<LifeEvent>), PoolError> {
        self.ask(|answer| Request::History(id.clone(), answer))
            .await
    }

    /// The present resource usage of a running sandbox, seen from the host.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound` or `NotRunning`.
    pub async fn usage(&self, id: &SandboxId) -> Result<Usage, PoolError> {
        self.ask(|answer| Request::Usage(id.clone(), answer)).await
    }

    /// Packets that passed the TAP of a running sandbox, and packets that were refused, since its start or last resume.
    /// Zeros without a network.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound` or `NotRunning`, and [`PoolError::Failed`].
    pub async fn counters(&self, id: &SandboxId) -> Result<Counters, PoolError> {
        self.ask(|answer| Request::Counters(id.clone(), answer))
            .await
    }

    /// Reads back whether the TAP of a running sandbox enforces its policy.
    ///
    /// # Errors
    /// Returns [`PoolError::Refused`] with `NotFound` or `NotRunning`, and [`PoolError::Failed`] if the policy is not
    /// enforced or the sandbox has no network.
    pub async fn verify_network(&self, id: &SandboxId) -> Result<(), PoolError> {
        self.ask(|answer| Request::VerifyNetwork(id.clone(), answer))
            .await
    }

    /// All templates, by name.
    pub async fn templates(&self) -> Vec<TemplateInfo> {
        self.look(Request::Templates).await.unwrap_or_default()
    }

    /// The template that an id, name, `name:tag` or snapshot id means.
    pub async fn template(&self, reference: &str) -> Option<TemplateInfo> {
        let name = reference.to_owned();
        self.look(|answer| Request::Template(name, answer))
            .await
            .flatten()
    }

    /// Adds a template directory made elsewhere, under these names, by reference: its files stay where they are.
    ///
    /// # Errors
    /// Returns [`PoolError::BadName`] for a malformed or ambiguous name, and [`PoolError::Failed`] if the directory is
    /// no template of this host.
    pub async fn add_template(
        &self,
        dir: &Path,
        names: Vec<String>,
    ) -> Result<TemplateInfo, PoolError> {
        let dir = dir.to_owned();
        self.ask(|answer| Request::AddTemplate(dir, names, answer))
            .await
    }

    /// Removes a template and its warm slots. Sandboxes made from it go on.
    ///
    /// # Errors
    /// Returns [`PoolError::NoTemplate`], and [`PoolError::InUse`] if a paused sandbox or another template builds on it.
    pub async fn remove_template(&self, reference: &str) -> Result<(), PoolError> {
        let name = reference.to_owned();
        self.ask(|answer| Request::RemoveTemplate(name, answer))
            .await
    }

    /// Counters and gauges; all zero once the pool is closed.
    pub async fn stats(&self) -> PoolStats {
        self.look(Request::Stats).await.unwrap_or_default()
    }

    /// Refuses creates from now on. Returns when no change of a sandbox is under way.
    pub async fn drain(&self) {
        // Without a driver nothing is under way.
        let _ = self.look(Request::Drain).await;
    }

    /// Ends warm slots and the driver; running sandboxes are kept for the next server or killed.
    pub async fn close(self, on_close: OnClose) {
        // Without a driver it is closed.
        let _ = self.look(|closed| Request::Close(on_close, closed)).await;
    }

    async fn sandbox<T>(
        &self,
        id: &SandboxId,
        request: impl FnOnce(Answer<T>) -> SandboxRequest,
    ) -> Result<T, PoolError> {
        self.ask(|answer| Request::Sandbox(id.clone(), request(answer)))
            .await
    }

    async fn ask<T>(&self, request: impl FnOnce(Answer<T>) -> Request) -> Result<T, PoolError> {
        self.look(request).await.unwrap_or(Err(PoolError::Draining))
    }

    /// Sends a request to the driver and waits for the answer; `None` if the driver has ended.
    async fn look<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        self.requests.send(request(answer)).await.ok()?;
        answered.await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_awaited_until_its_last_holder_exits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = lock(&path).unwrap();
        assert!(lock(&path).is_err(), "two have it");
        let last_child = std::thread::spawn(move || {
            std::thread::sleep(LAST_CHILD / 5);
            drop(first);
        });
        assert!(lock(&path).is_ok(), "it was not waited for");
        last_child.join().unwrap();
    }
}
