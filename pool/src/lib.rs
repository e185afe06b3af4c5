//! Sandboxes from snapshot clones: templates on disk, warm slots, leases, pause, fork, limits, reaping.
//!
//! One task, the driver, owns every slot; [`Pool`] is a handle that sends it messages. The pool starts a
//! `cube-vmm` process for each slot and talks to its control socket: it never links the VMM, and a VMM that
//! dies takes nothing with it. Every slot has a directory below the state directory, named by its id, with
//! its record, sockets and logs; the record is replaced atomically at each step, so that after SIGKILL of
//! this process the next [`Pool::open`] finds every VM, adopts the running ones and sweeps what is left of the dead.
//!
//! ```text
//!            ┌──────── one template in huge pages, mapped privately ────────┐
//!  stock     [warm] [warm] [warm] [fill]      low ─ high: how many are kept │
//!               │ lease: resume, POST /init                                 │
//!  leased    [running] [running] [cold] ◄── no warm slot: a VM of its own ──┘
//!               │ pause  ▲ resume             │ fork: a diff, restored n times
//!  on disk   [pause/]  [pause/]               └► [running] [running] …
//! ```
//! A slot serves one lease in its life: its id *is* the sandbox's id. There is no way back into the stock.
//!
//! A clean (warm) slot: its VM is paused; its id, machine id and random pool are its own; it has run only what the
//! template ran and what warms it up; its agent is open, and nobody else has known its sockets; its
//! record says that it is nobody's, so that it ends with this process.

mod cgroup;
mod driver;
mod error;
mod host;
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
pub use spec::{
    CreateSpec, Ended, Found, Init, MissingLimits, PauseMode, PoolConfig, PoolStats, Recovered,
    Sandbox, SandboxLimits, SandboxState, TemplateInfo, Usage, WarmMarks,
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
    message::Ask,
    policy::StartFor,
    record::private_dir,
    store::Store,
    templates::Templates,
};

/// Places below the state directory.
pub(crate) const SANDBOXES: &str = "sandboxes";
pub(crate) const TEMPLATES: &str = "templates";
pub(crate) const FORKS: &str = "forks";
const LOCK: &str = "lock";
/// Requests that wait for the driver; more make their callers wait.
const ASKS: usize = 1024;
/// Longest state directory: below it are unix sockets, whose paths hold 107 bytes.
const MAX_STATE: usize = 60;

/// A handle; clones reach the same pool. When the last one is dropped, VMs go on running: the next
/// [`Pool::open`] adopts them. To end them, see [`Pool::close`].
#[derive(Clone, Debug)]
pub struct Pool {
    asks: mpsc::Sender<Ask>,
}

/// The answer to a create. A caller who leaves when the answer is there and was not taken never learns the
/// sandbox's name: it is ended.
struct Created<'a> {
    asks: &'a mpsc::Sender<Ask>,
    answered: oneshot::Receiver<Result<Sandbox, PoolError>>,
}

impl Drop for Created<'_> {
    fn drop(&mut self) {
        self.answered.close();
        if let Ok(Ok(sandbox)) = self.answered.try_recv() {
            let (answer, _) = oneshot::channel();
            // With a full queue it lives on, as after a crash: listed, and its lessee's to end.
            let _ = self.asks.try_send(Ask::Kill(sandbox.id, answer));
        }
    }
}

/// What opening finds and makes, on a thread of its own.
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
                "its path has more than {MAX_STATE} bytes, which unix sockets below it need"
            )));
        }
        if !config.vmm.is_file() {
            return Err(io::Error::other(format!(
                "there is no VMM at {}",
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
        // Names the directory, however its path is written.
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
        )?;
        // Not before: half-made VMs of the server before were in the group that is replaced.
        if let Some(memory) = config.server_memory {
            groups.enter_as_server(memory.0)?;
        }
        // Not before: a VMM that was writing its snapshot there has finished when it has answered.
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

/// Where VMMs keep what guests write to their disks.
pub(crate) const SCRATCH: &str = "/var/tmp";

/// A server that was killed while it started a program is survived for a moment by the child that is to become that,
/// which has its descriptors, and so its lock.
const LAST_CHILD: Duration = Duration::from_secs(1);

/// One server for a state directory: the lock goes with the process, however that ends.
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
                return Err(io::Error::other("another server uses this state directory"));
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
    /// Opens the pool: takes the lock of the state directory, adopts what runs, sweeps what does not, and
    /// starts to fill warm slots. The second value says what became of every sandbox that the state
    /// directory knew; the third tells of sandboxes that end without having been asked to.
    ///
    /// # Errors
    /// The state directory is locked by another server or cannot be written; no `cube-vmm`; limits that the host
    /// does not have, unless [`PoolConfig::missing_limits`] allows that.
    pub async fn open(
        config: PoolConfig,
    ) -> Result<(Self, Recovered, mpsc::Receiver<Ended>), PoolError> {
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
        let (asks, hear) = mpsc::channel(ASKS);
        let (ended, ends) = mpsc::channel(ASKS);
        let driver = Driver::new(Setup {
            config,
            host_boot_id: opened.host_boot_id,
            groups: Arc::new(opened.groups),
            templates: opened.templates,
            found: opened.found,
            asks: hear,
            ended,
            lock: opened.lock,
        });
        tokio::spawn(driver.run());
        Ok((Self { asks }, opened.recovered, ends))
    }

    /// A sandbox from a warm slot of the template if there is one, else from a new clone. On success the
    /// agent has taken identity and settings.
    ///
    /// # Errors
    /// [`PoolError::NoTemplate`], [`PoolError::Full`] (with the time after which to try again), a failed start.
    pub async fn create(&self, spec: CreateSpec) -> Result<Sandbox, PoolError> {
        let at = host::monotonic_ns();
        let (answer, answered) = oneshot::channel();
        let ask = Ask::Create(Box::new(spec), at, answer);
        self.asks.send(ask).await.map_err(|_| PoolError::Closing)?;
        let mut created = Created {
            asks: &self.asks,
            answered,
        };
        (&mut created.answered)
            .await
            .unwrap_or(Err(PoolError::Closing))
    }

    /// Ends a sandbox, paused or not, and removes everything of it. When this returns nothing is left.
    ///
    /// # Errors
    /// [`PoolError::NoSandbox`].
    pub async fn kill(&self, id: &SandboxId) -> Result<(), PoolError> {
        self.ask(|answer| Ask::Kill(id.clone(), answer)).await
    }

    /// Writes the sandbox to disk and ends its VM.
    ///
    /// # Errors
    /// [`PoolError::NoSandbox`], [`PoolError::WrongState`] (already paused), [`PoolError::NoSpace`]: the sandbox then goes on running.
    pub async fn pause(&self, id: &SandboxId, mode: PauseMode) -> Result<(), PoolError> {
        self.ask(|answer| Ask::Pause(id.clone(), mode, answer))
            .await
    }

    /// Brings a paused sandbox back under its id: from memory, or by a cold boot on its disk. For callers who may
    /// start sandboxes; see [`Pool::wake`].
    ///
    /// # Errors
    /// [`PoolError::NoSandbox`], [`PoolError::WrongState`] (it runs), [`PoolError::Full`].
    pub async fn resume(&self, id: &SandboxId, init: Init) -> Result<Sandbox, PoolError> {
        self.resume_for(StartFor::Resume, id, init).await
    }

    /// The same because of traffic, which may come from anywhere: such starts wait for a place while half of all
    /// places are theirs.
    ///
    /// # Errors
    /// As [`Pool::resume`].
    pub async fn wake(&self, id: &SandboxId, init: Init) -> Result<Sandbox, PoolError> {
        self.resume_for(StartFor::Wake, id, init).await
    }

    async fn resume_for(
        &self,
        start: StartFor,
        id: &SandboxId,
        init: Init,
    ) -> Result<Sandbox, PoolError> {
        let at = host::monotonic_ns();
        self.ask(|answer| Ask::Resume(id.clone(), init, start, at, answer))
            .await
    }

    /// Makes a template of a running or paused sandbox, which stays as it is.
    ///
    /// # Errors
    /// As [`Pool::pause`].
    pub async fn snapshot(
        &self,
        id: &SandboxId,
        names: Vec<String>,
    ) -> Result<TemplateInfo, PoolError> {
        self.ask(|answer| Ask::Snapshot(id.clone(), names, answer))
            .await
    }

    /// New sandboxes that continue where a running one is now; the source goes on. One result for each spec
    /// (whose template is ignored).
    ///
    /// # Errors
    /// The source cannot be snapshotted; each fork's own failure is in the list.
    pub async fn fork(
        &self,
        id: &SandboxId,
        specs: Vec<CreateSpec>,
    ) -> Result<Vec<Result<Sandbox, PoolError>>, PoolError> {
        let at = host::monotonic_ns();
        let started = self
            .ask(|answer| Ask::Fork(id.clone(), specs, at, answer))
            .await?;
        let mut forks = Vec::with_capacity(started.len());
        for fork in started {
            forks.push(fork.await.unwrap_or(Err(PoolError::Closing)));
        }
        Ok(forks)
    }

    /// Replaces the caller's own note in the sandbox's record. It is on disk (of a crashed process, not of
    /// a crashed host, unless the sandbox is paused) when this returns.
    ///
    /// # Errors
    /// [`PoolError::NoSandbox`], the disk's.
    pub async fn annotate(&self, id: &SandboxId, note: String) -> Result<(), PoolError> {
        self.ask(|answer| Ask::Annotate(id.clone(), note, answer))
            .await
    }

    /// What a running sandbox uses now, seen from the host.
    ///
    /// # Errors
    /// [`PoolError::NoSandbox`], [`PoolError::WrongState`] (paused).
    pub async fn usage(&self, id: &SandboxId) -> Result<Usage, PoolError> {
        self.ask(|answer| Ask::Usage(id.clone(), answer)).await
    }

    /// Replaces what a running sandbox may reach, at once: open connections to what is denied now are cut. Where
    /// sandboxes have no network it is kept for when they have one.
    ///
    /// # Errors
    /// [`PoolError::NoSandbox`], [`PoolError::WrongState`] (paused), [`PoolError::Failed`]: then what held before
    /// holds on.
    pub async fn set_policy(&self, id: &SandboxId, policy: Policy) -> Result<(), PoolError> {
        self.ask(|answer| Ask::SetPolicy(id.clone(), policy, answer))
            .await
    }

    /// What passed the TAP of a running sandbox and what did not, since it was started or resumed; zeros without
    /// network.
    ///
    /// # Errors
    /// [`PoolError::NoSandbox`], [`PoolError::WrongState`] (paused), [`PoolError::Failed`].
    pub async fn counters(&self, id: &SandboxId) -> Result<Counters, PoolError> {
        self.ask(|answer| Ask::Counters(id.clone(), answer)).await
    }

    /// Reads back whether the TAP of a running sandbox enforces its policy.
    ///
    /// # Errors
    /// [`PoolError::NoSandbox`], [`PoolError::WrongState`] (paused), [`PoolError::Failed`]: it does not, or there is
    /// no network.
    pub async fn verify_network(&self, id: &SandboxId) -> Result<(), PoolError> {
        self.ask(|answer| Ask::VerifyNetwork(id.clone(), answer))
            .await
    }

    /// All templates, by name order.
    pub async fn templates(&self) -> Vec<TemplateInfo> {
        self.look(Ask::Templates).await.unwrap_or_default()
    }

    /// The template that an id, name, `name:tag` or snapshot id means.
    pub async fn template(&self, reference: &str) -> Option<TemplateInfo> {
        let name = reference.to_owned();
        self.look(|answer| Ask::Template(name, answer))
            .await
            .flatten()
    }

    /// Adds a template directory made elsewhere, under these names, by reference: its files stay where they are.
    ///
    /// # Errors
    /// It is no template of this host, or a name is taken.
    pub async fn add_template(
        &self,
        dir: &Path,
        names: Vec<String>,
    ) -> Result<TemplateInfo, PoolError> {
        let dir = dir.to_owned();
        self.ask(|answer| Ask::AddTemplate(dir, names, answer))
            .await
    }

    /// Removes a template; running clones of it go on. Its warm slots end.
    ///
    /// # Errors
    /// [`PoolError::NoTemplate`]; [`PoolError::InUse`] if a paused sandbox or another template builds on it.
    pub async fn remove_template(&self, reference: &str) -> Result<(), PoolError> {
        let name = reference.to_owned();
        self.ask(|answer| Ask::RemoveTemplate(name, answer)).await
    }

    /// Counters and gauges.
    pub async fn stats(&self) -> PoolStats {
        self.look(Ask::Stats).await.unwrap_or_default()
    }

    /// Ends warm slots and the driver; running sandboxes stay for the next server, or are killed.
    pub async fn close(self, kill_sandboxes: bool) {
        // Gone already: then it is closed.
        let _ = self.look(|done| Ask::Close(kill_sandboxes, done)).await;
    }

    /// Asks the driver for something that can fail.
    async fn ask<T>(
        &self,
        ask: impl FnOnce(oneshot::Sender<Result<T, PoolError>>) -> Ask,
    ) -> Result<T, PoolError> {
        self.look(ask).await.unwrap_or(Err(PoolError::Closing))
    }

    /// Asks the driver; absent if it is gone.
    async fn look<T>(&self, ask: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        self.asks.send(ask(answer)).await.ok()?;
        answered.await.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn sandbox() -> Sandbox {
        Sandbox {
            id: SandboxId::from_random([7; 19]),
            template: TemplateInfo {
                id: String::new(),
                names: Vec::new(),
                memory: model::Bytes::mib(1),
                vcpus: 1,
                disk: model::Bytes::mib(1),
                created_unix_s: 0,
                is_snapshot: false,
                source: None,
                spawned: 0,
                warm: 0,
            },
            vsock: PathBuf::new(),
            console: PathBuf::new(),
            pid: 1,
            timeline: model::Timeline::default(),
            warm: false,
        }
    }

    /// What is asked of the driver when a create is dropped after `act` on it and the way of its answer.
    fn asked(
        act: impl FnOnce(&mut Created<'_>, oneshot::Sender<Result<Sandbox, PoolError>>),
    ) -> Option<Ask> {
        let (asks, mut heard) = mpsc::channel(1);
        let (answer, answered) = oneshot::channel();
        let mut created = Created {
            asks: &asks,
            answered,
        };
        act(&mut created, answer);
        drop(created);
        heard.try_recv().ok()
    }

    #[test]
    fn a_lock_that_is_let_go_of_is_waited_for() {
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

    #[test]
    fn a_sandbox_that_nobody_took_is_ended() {
        let asked = asked(|_, answer| answer.send(Ok(sandbox())).unwrap());
        assert!(matches!(asked, Some(Ask::Kill(id, _)) if id == sandbox().id));
    }

    #[test]
    fn a_sandbox_that_was_taken_lives() {
        let asked = asked(|created, answer| {
            answer.send(Ok(sandbox())).unwrap();
            created.answered.try_recv().unwrap().unwrap();
        });
        assert!(asked.is_none());
    }

    #[test]
    fn without_a_sandbox_there_is_nothing_to_end() {
        let refused = asked(|_, answer| answer.send(Err(PoolError::Closing)).unwrap());
        assert!(refused.is_none());
        let mut late = None;
        assert!(asked(|_, answer| late = Some(answer)).is_none());
        // The driver is told that nobody waits any more, and ends the sandbox itself.
        assert!(late.unwrap().send(Ok(sandbox())).is_err());
    }

    #[test]
    fn a_driver_with_too_much_to_do_is_not_waited_for() {
        let (asks, mut heard) = mpsc::channel(1);
        let (full, _) = oneshot::channel();
        asks.try_send(Ask::Stats(full)).unwrap();
        let (answer, answered) = oneshot::channel();
        answer.send(Ok(sandbox())).unwrap();
        drop(Created {
            asks: &asks,
            answered,
        });
        assert!(matches!(heard.try_recv(), Ok(Ask::Stats(_))));
        assert!(heard.try_recv().is_err());
    }
}
