//! Runs a build, from an order to an unnamed template in the pool.
//!
//! ```text
//! origin ─► cached steps are skipped ─► VM: run step, kill its processes, save disk │ next step …
//! last disk ─► another VM: boot, start command, ready command, wait until quiet, publish
//! ```
//! Steps that are not cached run one after the other in one VM, because a boot takes as long as most steps. After each
//! step that changes the disk, all its remaining processes are killed, as at the end of a container's RUN, and the disk
//! is kept for later builds. Memory is captured once, after the last disk has been booted afresh, so that a template
//! contains no processes except its start command's. Steps in one VM share mounts and files in /run and /dev/shm. A
//! build that continues from the cache does not see them.
//!
//! However a build ends, its VMs are ended first, and every disk that is not in the cache is removed when its [`Layer`]
//! is dropped.

mod finish;
mod origin;
mod room;
mod stages;
mod travel;

use std::{path::PathBuf, time::Duration};

use model::Bytes;
use netisolation::{DefaultEgress, Policy};
use oci_image::registry::Credentials;
use pool::{Pool, PoolError};
use rest::{ImageConfig, LogLevel};

pub use super::command::COMMAND_LIMIT;
use super::{
    bases::Bases,
    cancel::Cancel,
    key::Key,
    layers::{HeldTemplate, Layer, Layers},
    log::BuildLog,
    machine::Machine,
    plan::{At, From, Step},
    steps::{self, Disk, Place, StepError},
    text::{MAX_MESSAGE, plain},
    uploads::Uploads,
};
use stages::{Reached, Stage};
pub use travel::{Arrived, Described, Finished};

/// Maximum length of a step's arguments in the log, in bytes.
const SHOWN: usize = 200;
const CANCELLED: &str = "build was cancelled";

/// A build order.
#[derive(Clone, Debug)]
pub struct Order {
    /// The template whose uploads the steps use.
    pub template_id: String,
    /// Built templates are referred to by their ids in the pool.
    pub from: From,
    pub registry: Option<Credentials>,
    pub steps: Vec<Step>,
    pub start: Option<String>,
    pub ready: Option<String>,
    pub image_config: Option<ImageConfig>,
    /// Run all steps, ignoring the cache.
    pub force: bool,
    /// Not used: a guest has the CPUs of the template or image that the build starts from.
    pub vcpus: u8,
    pub memory: Bytes,
    /// Minimum free disk space of sandboxes.
    pub min_free_disk: Bytes,
}

#[derive(Debug)]
pub struct Built {
    /// Id of the template in the pool. An earlier build of the same template may have made it.
    pub template: String,
    /// Prevents [`Executor::remove`] from removing a reused template until this build is recorded.
    #[expect(dead_code, reason = "it acts when it is dropped")]
    pub(super) held: Option<HeldTemplate>,
}

/// Why a build failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub at: At,
    /// For the client.
    pub message: String,
}

impl Failure {
    /// Cleans and truncates the message, parts of which come from guests, registries and images.
    fn bounded(self) -> Self {
        let message = plain(&self.message.replace('\n', " "), MAX_MESSAGE);
        Self { message, ..self }
    }
}

/// Settings of an [`Executor`].
#[derive(Clone, Debug)]
pub struct ExecutorSpec {
    /// The cache directory.
    pub dir: PathBuf,
    /// Space for all disks in the cache.
    pub quota: Bytes,
    /// Network access of the steps.
    pub egress: DefaultEgress,
    /// Time limit of a RUN command.
    pub run_limit: Duration,
}

/// Runs builds. Clones share the cache.
#[derive(Clone, Debug)]
pub struct Executor {
    pool: Pool,
    bases: Bases,
    layers: Layers,
    /// Network access of the steps.
    policy: Policy,
    run_limit: Duration,
}

impl Executor {
    /// Opens the cache.
    pub async fn open(pool: Pool, bases: Bases, spec: ExecutorSpec) -> Self {
        let (others, quota) = (bases.templates(), spec.quota.0);
        Self {
            layers: Layers::open(pool.clone(), spec.dir, quota, &others).await,
            pool,
            bases,
            policy: Policy::of_lists(spec.egress, &[], &[]),
            run_limit: spec.run_limit,
        }
    }

    /// Removes the template of a finished build from the pool.
    ///
    /// # Errors
    /// Returns [`PoolError::InUse`] while a build is about to use it, and the errors of [`Pool::remove_template`].
    pub async fn remove(&self, template: &str) -> Result<(), PoolError> {
        self.layers.remove_built(template).await
    }

    /// Runs a build to completion.
    ///
    /// # Errors
    /// Returns [`Failure`], even if the build is cancelled.
    pub async fn run(
        &self,
        order: &Order,
        files: &Uploads,
        log: &BuildLog,
        cancel: Cancel,
    ) -> Result<Built, Failure> {
        let build = Build {
            executor: self,
            order,
            files,
            log,
            cancel,
        };
        let built = build.run().await.map_err(Failure::bounded);
        if let Err(failure) = &built {
            let text = format!("Build failed: {}", failure.message);
            log.push(LogLevel::Error, failure.at, &text);
        }
        built
    }
}

/// A running build.
struct Build<'a> {
    executor: &'a Executor,
    order: &'a Order,
    files: &'a Uploads,
    log: &'a BuildLog,
    cancel: Cancel,
}

impl Build<'_> {
    async fn run(&self) -> Result<Built, Failure> {
        let origin = self.origin().await?;
        let stages = self.stages(&origin);
        let mut reached = self.cached(&origin, &stages).await;
        let is_cached = reached.stages == stages.len() && !self.order.force;
        let last = stages.last().map_or(At::Base, |stage| stage.at);
        let start_up = self.start_up(&origin);
        if is_cached && let Some(built) = self.find_built(&reached, &start_up).await {
            return Ok(built);
        }
        if reached.layer.is_none() {
            let layer = self.disk_of(&origin).await;
            reached.layer = Some(layer.map_err(failed(At::Base))?);
        }
        let reached = self.perform_all(reached, &stages).await?;
        self.check_cancel(last)?;
        self.finish(&reached, start_up).await
    }

    /// Runs the remaining stages in one VM.
    async fn perform_all(&self, reached: Reached, stages: &[Stage]) -> Result<Reached, Failure> {
        let rest = &stages[reached.stages..];
        let Some(first) = rest.first() else {
            return Ok(reached);
        };
        let machine = self.machine(&reached, first.at).await?;
        let done = self.perform(&machine, reached, rest).await;
        machine.end().await;
        done
    }

    async fn perform(
        &self,
        machine: &Machine,
        mut reached: Reached,
        stages: &[Stage],
    ) -> Result<Reached, Failure> {
        for stage in stages {
            let key = self.key(reached.result, stage);
            self.note(stage.at, &line(&stage.prefix, &text(&stage.step), key));
            let done = steps::perform(&stage.step, &self.place(machine, &reached, stage)).await;
            let done = match done {
                Ok(done) => done,
                Err(error) => return Err(self.explain(machine, stage.at, error).await),
            };
            if done.disk == Disk::Changed {
                reached.layer = Some(self.save(machine, stage.at).await?);
            }
            reached.settings = done.settings;
            reached.stages += 1;
            if let Some(layer) = &reached.layer {
                let layers = &self.executor.layers;
                reached.result = layers.keep(key, layer, &reached.settings).await;
            }
            self.check_cancel(stage.at)?;
        }
        Ok(reached)
    }

    fn place<'a>(
        &'a self,
        machine: &'a Machine,
        reached: &'a Reached,
        stage: &'a Stage,
    ) -> Place<'a> {
        let id = &self.order.template_id;
        let hash = stage.step.files.as_deref();
        let hash = hash.filter(|hash| self.files.has(id, hash));
        Place {
            guest: &machine.guest,
            settings: &reached.settings,
            log: self.log,
            at: stage.at,
            prefix: &stage.prefix,
            archive: hash.map(|hash| self.files.path(id, hash)),
            run_limit: self.executor.run_limit,
        }
    }

    /// Keeps the disk in the state after a step.
    async fn save(&self, machine: &Machine, at: At) -> Result<Layer, Failure> {
        let ended = machine.end_processes().await;
        ended.map_err(|why| Failure {
            at,
            message: format!("cannot kill the processes that the step left running: {why}"),
        })?;
        let saved = self.executor.pool.save_disk(&machine.id).await;
        let saved = saved.map_err(|why| Failure {
            at,
            message: format!("cannot save the disk of the build: {}", model::chain(&why)),
        })?;
        Ok(self.executor.layers.hold(saved.id))
    }

    /// Boots the disk that the build has reached, with the requested memory and disk space.
    async fn machine(&self, reached: &Reached, at: At) -> Result<Machine, Failure> {
        let Executor {
            pool,
            layers,
            policy,
            ..
        } = self.executor;
        let disk = reached.layer.as_ref().map_or("", Layer::id);
        let failed = failed(at);
        let missing = || failed("the disk of the build was removed".to_owned());
        let present = pool.template(disk).await.ok_or_else(missing)?;
        let size = room::size(&present, self.order.min_free_disk);
        let memory = self.order.memory;
        let sized = if (present.memory, present.disk) == (memory, size) {
            None
        } else {
            let sized = pool.disk_of_size(disk, memory, size).await;
            let sized = sized.map_err(|why| failed(model::chain(&why)))?;
            Some(layers.hold(sized.id))
        };
        let disk = sized.as_ref().map_or(disk, Layer::id);
        let waits = |why: &str| {
            let text = format!("waiting for room for the build's virtual machine: {why}");
            self.log.push(LogLevel::Warn, at, &text);
        };
        let machine = Machine::start(pool, disk, policy, &self.cancel, waits).await;
        machine.map_err(|why| failed(why.to_string()))
    }

    /// The failure of a step, with a likely reason if its own text does not contain it.
    async fn explain(&self, machine: &Machine, at: At, error: StepError) -> Failure {
        let message = match error {
            StepError::Cancelled => CANCELLED.to_owned(),
            StepError::Failed(text) => match machine.why_failed().await {
                Some(why) => format!("{text} ({why})"),
                None => text,
            },
        };
        Failure { at, message }
    }

    fn check_cancel(&self, at: At) -> Result<(), Failure> {
        if self.cancel.is_cancelled() {
            return Err(failed(at)(CANCELLED.to_owned()));
        }
        Ok(())
    }

    fn note(&self, at: At, text: &str) {
        self.log.push(LogLevel::Info, at, text);
    }
}

fn failed(at: At) -> impl Fn(String) -> Failure {
    move |message| Failure { at, message }
}

fn text(step: &Step) -> String {
    let text = format!("{} {}", step.kind.name(), step.args.join(" "));
    plain(text.trim_end(), SHOWN)
}

fn line(prefix: &str, text: &str, key: Key) -> String {
    format!("[{prefix}] {text} [{key}]")
}

fn cached_line(prefix: &str, text: &str, key: Key) -> String {
    format!("CACHED {}", line(prefix, text, key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_failures_are_plain_and_bounded() {
        let message = format!("\x1b[31mred\n{}", "x".repeat(2 * MAX_MESSAGE));
        let failure = failed(At::Base)(message).bounded();
        assert!(failure.message.starts_with("red x"));
        assert!(failure.message.len() <= MAX_MESSAGE + '…'.len_utf8());
        assert_eq!(failure.at, At::Base);
    }
}
