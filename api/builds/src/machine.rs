//! The VM of a build: a low-priority sandbox that is visible only to its build. Its only deadline is [`MOST_TIME`]. It
//! does not outlive its server, because the registry kills sandboxes with its note.

use std::time::{Duration, Instant};

use model::{SandboxId, clock::unix_ms};
use netisolation::Policy;
use pool::{CreateSpec, Init, Lifetime, Pool, PoolError, Priority, Sandbox};
use tokio::runtime::Handle;
use tracing::warn;

use super::{
    cancel::Cancel,
    command::Command,
    guest::{CommandError, Guest},
    settings::Settings,
};

/// Note that marks sandboxes of builds.
pub const NOTE: &str = "build";
/// Maximum lifetime of a build VM in seconds.
const MOST_TIME_S: u32 = 24 * 3600;
/// How long a build waits for room for its VM.
const ROOM: Duration = Duration::from_secs(600);
/// Kills every process except the agent (PID 1) and itself.
const END_PROCESSES: &str = "kill -KILL -- -1; true";
/// Prints how often the guest ran out of memory, and the number of disk blocks still available to programs.
const EXAMINE: &str = r#"while read -r name value; do
    if [ "$name" = oom_kill ]; then echo "$value"; fi
done </proc/vmstat
stat -f -c %a /"#;
/// A disk with fewer free blocks (4 KiB each) is full.
const FEW_BLOCKS: u64 = 256;

/// Why a build could not get a VM.
#[derive(Debug, thiserror::Error)]
pub(super) enum MachineError {
    #[error("build was cancelled")]
    Cancelled,
    #[error("cannot start the virtual machine of the build: {}", model::chain(.0))]
    Start(#[source] PoolError),
}

#[derive(Debug)]
pub(super) struct Machine {
    pool: Pool,
    pub(super) id: SandboxId,
    pub(super) guest: Guest,
    sandbox: Sandbox,
    /// `false` once the sandbox has been killed.
    runs: bool,
}

impl Machine {
    /// Starts a VM from a template. Waits while the host has no room for it. Calls `waits` when the wait begins.
    pub(super) async fn start(
        pool: &Pool,
        template: &str,
        policy: &Policy,
        cancel: &Cancel,
        waits: impl FnOnce(&str),
    ) -> Result<Self, MachineError> {
        let mut waits = Some(waits);
        let begun = Instant::now();
        loop {
            let retry_after = match Self::start_at_once(pool, template, policy, cancel).await {
                Err(MachineError::Start(PoolError::Full { why, retry_after }))
                    if begun.elapsed() < ROOM =>
                {
                    if let Some(waits) = waits.take() {
                        waits(&why);
                    }
                    retry_after
                }
                started => return started,
            };
            let mut cancelled = cancel.clone();
            tokio::select! {
                () = cancelled.cancelled() => return Err(MachineError::Cancelled),
                () = tokio::time::sleep(retry_after) => {}
            }
        }
    }

    /// Starts a VM from a template if the host has room for it.
    pub(super) async fn start_at_once(
        pool: &Pool,
        template: &str,
        policy: &Policy,
        cancel: &Cancel,
    ) -> Result<Self, MachineError> {
        let mut cancelled = cancel.clone();
        // If its create is dropped, the pool kills the sandbox.
        tokio::select! {
            biased;
            () = cancelled.cancelled() => Err(MachineError::Cancelled),
            created = pool.create(spec(template, policy)) => match created {
                Ok(sandbox) => Ok(Self::of(pool, sandbox, cancel)),
                Err(why) => Err(MachineError::Start(why)),
            },
        }
    }

    fn of(pool: &Pool, sandbox: Sandbox, cancel: &Cancel) -> Self {
        Self {
            pool: pool.clone(),
            id: sandbox.id.clone(),
            guest: Guest::new(&sandbox.vsock, cancel.clone()),
            sandbox,
            runs: true,
        }
    }

    /// Kills processes left by a step, so that the disk at rest is the step's result.
    pub(super) async fn end_processes(&self) -> Result<(), CommandError> {
        let command = Command::of_root(END_PROCESSES, &[], &Settings::default());
        let (_, ended) = self.guest.capture(&command).await?;
        ended
    }

    /// A likely reason for a failed command: the guest's memory or disk was too small, or the VM has ended.
    pub(super) async fn why_failed(&self) -> Option<String> {
        if self.pool.get(&self.id).await.is_err() {
            return Some("the virtual machine of the build has ended unexpectedly".to_owned());
        }
        let command = Command {
            limit: Some(Duration::from_secs(10)),
            ..Command::of_root(EXAMINE, &[], &Settings::default())
        };
        let (output, _) = self.guest.capture(&command).await.ok()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let mut numbers = text.lines().map(|line| line.parse::<u64>().ok());
        if numbers.next().flatten().is_some_and(|kills| kills > 0) {
            let memory = self.sandbox.template.memory;
            return Some(format!(
                "the build ran out of memory: it has {memory}; request more with memoryMB"
            ));
        }
        let is_full = numbers.next().flatten()? < FEW_BLOCKS;
        let size = self.sandbox.template.disk;
        is_full.then(|| {
            format!("the disk of the build is full: it has {size}; request more with minFreeDiskMb")
        })
    }

    /// Kills the VM and waits until it is removed completely.
    pub(super) async fn end(mut self) {
        self.runs = false;
        end(&self.pool, &self.id).await;
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Without a runtime, the server is exiting. The next one kills the VM.
        if self.runs && Handle::try_current().is_ok() {
            let (pool, id) = (self.pool.clone(), self.id.clone());
            tasks::spawn(async move { end(&pool, &id).await });
        }
    }
}

async fn end(pool: &Pool, id: &SandboxId) {
    match pool.kill(id).await {
        Ok(()) => {}
        Err(why) if why.is_not_found() => {}
        Err(why) => {
            warn!(sandbox = %id, why = %model::chain(&why), "cannot kill the VM of a build: the next server will kill it");
        }
    }
}

fn spec(template: &str, policy: &Policy) -> CreateSpec {
    let mut lifetime = Lifetime::default();
    lifetime.set(unix_ms(), MOST_TIME_S);
    CreateSpec {
        template: template.to_owned(),
        init: Init::default(),
        note: NOTE.to_owned(),
        lifetime,
        policy: policy.clone(),
        priority: Priority::Background,
    }
}
