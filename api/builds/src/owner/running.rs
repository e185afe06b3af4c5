//! Queued and running builds.

use std::{collections::VecDeque, io, time::Duration};

use model::clock::unix_ms;
use tasks::boxed;
use tokio::{
    task::{Id, JoinError},
    time::Instant,
};
use tracing::{error, info};

use super::{
    BuildsError, Machinery, Requested,
    task::{Owner, blocking},
};
use crate::{
    cancel::{Canceller, cancellation},
    catalog::{Resolved, resolve, tagged},
    log::BuildLog,
    plan::{At, From},
    record::{Reason, TemplateRecord},
    request::StartSpec,
    run::{Built, Failure, Order},
    store::Store,
};

/// Maximum length of the queue, not counting running builds.
pub(super) const MAX_QUEUED: usize = 32;
/// How long a build waits for its base template.
const BASE: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 60 });
/// Number of logs of ended builds kept in memory.
const RECENT_LOGS: usize = 8;

pub(super) struct Queued {
    pub(super) build: Requested,
    spec: StartSpec,
    log: BuildLog,
    /// Id of the build that this one repeats.
    redo_of: Option<String>,
    since: Instant,
}

pub(super) struct Running {
    build: Requested,
    redo_of: Option<String>,
    owner: Option<String>,
    task: Id,
    pub(super) canceller: Canceller,
    /// Why it was cancelled. This becomes the recorded reason, whatever the executor returns.
    pub(super) cancelled: Option<&'static str>,
}

/// The end of a build's task. The build's log is closed and on disk.
pub(super) struct Ended {
    build: Requested,
    outcome: Result<Built, Failure>,
}

impl<M: Machinery> Owner<M> {
    /// Whether the queue has room for a build.
    pub(super) fn check_queue(&self) -> Result<(), BuildsError> {
        if self.stopping.is_some() {
            return Err(BuildsError::Closed);
        }
        let waits = self.running.len() >= self.most_running;
        if waits && self.queue.len() >= MAX_QUEUED {
            return Err(BuildsError::TooMany(format!(
                "{MAX_QUEUED} are in the queue"
            )));
        }
        Ok(())
    }

    pub(super) fn enqueue(&mut self, build: Requested, spec: StartSpec, redo_of: Option<String>) {
        let log = BuildLog::default();
        self.logs.insert(build.build_id.clone(), log.clone());
        self.queue.push_back(Queued {
            build,
            spec,
            log,
            redo_of,
            since: Instant::now(),
        });
    }

    /// Starts queued builds while there is room. A build whose base is still being copied from another node waits for
    /// it.
    pub(super) async fn fill(&mut self) {
        let mut waiting = VecDeque::new();
        while self.running.len() < self.most_running
            && let Some(queued) = self.next_queued()
        {
            if let Some(base) = self.lacked_base(&queued).await {
                if queued.since.elapsed() < BASE {
                    waiting.push_back(queued);
                } else {
                    let why = format!(
                        "this node does not have the current build of the template '{base}' yet: try again"
                    );
                    self.fail(&queued.build, Reason::new(why)).await;
                }
            } else if let Some(order) = self.order(&queued) {
                self.starts += 1;
                self.started_last
                    .insert(queued.spec.owner.clone(), self.starts);
                self.run_build(queued, order);
            }
        }
        waiting.append(&mut self.queue);
        self.queue = waiting;
    }

    /// Takes the next build from the queue: from the API key with the fewest running builds, and among equals from the
    /// one that started its last build the longest ago.
    fn next_queued(&mut self) -> Option<Queued> {
        let Self {
            queue,
            running,
            started_last,
            ..
        } = self;
        started_last.retain(|owner, _| {
            let mut queued = queue.iter().map(|queued| &queued.spec.owner);
            queued.any(|of| of == owner) || running.values().any(|running| running.owner == *owner)
        });
        let place = |queued: &Queued| {
            let owner = &queued.spec.owner;
            let running = running.values().filter(|running| running.owner == *owner);
            (running.count(), started_last.get(owner).copied())
        };
        // The first of several.
        let (index, _) = queue.iter().enumerate().min_by_key(|(_, q)| place(q))?;
        queue.remove(index)
    }

    async fn lacked_base(&self, queued: &Queued) -> Option<String> {
        let From::Template(reference) = &queued.spec.from else {
            return None;
        };
        let found = tagged(&self.templates, reference);
        let found = found.as_ref().map(|(tagged, _)| tagged);
        let lacks = self.machinery.lacks(reference, found).await;
        lacks.then(|| reference.clone())
    }

    fn run_build(&mut self, queued: Queued, order: Order) {
        let Queued {
            build,
            log,
            redo_of,
            spec,
            ..
        } = queued;
        info!(
            template = build.template_id,
            build = build.build_id,
            "building a template"
        );
        let (canceller, cancel) = cancellation();
        let (machinery, store) = (self.machinery.clone(), self.store.clone());
        let (uploads, of) = (self.uploads.clone(), build.clone());
        let task = self.tasks.spawn(boxed(async move {
            let outcome = machinery.run(&order, &uploads, &log, cancel).await;
            end_log(store, &of, log).await;
            Ended { build: of, outcome }
        }));
        let running = Running {
            build: build.clone(),
            redo_of,
            owner: spec.owner,
            task: task.id(),
            canceller,
            cancelled: None,
        };
        self.running.insert(build.build_id, running);
    }

    fn order(&self, queued: &Queued) -> Option<Order> {
        let template = self.templates.get(&queued.build.template_id)?;
        let build = template.build(&queued.build.build_id)?;
        let spec = queued.spec.clone();
        let from = match spec.from {
            From::Template(reference) => match resolve(&self.templates, &reference) {
                Resolved::Ready(pool_id) => From::Template(pool_id),
                Resolved::Foreign | Resolved::NotReady => From::Template(reference),
            },
            from @ From::Image(_) => from,
        };
        Some(Order {
            template_id: template.id.clone(),
            from,
            registry: spec.credentials,
            steps: spec.steps,
            start: spec.start,
            ready: spec.ready,
            image_config: spec.image_config,
            force: spec.force,
            vcpus: build.vcpus,
            memory: build.memory,
            min_free_disk: build.min_free_disk,
        })
    }

    /// Ends a build whose task has panicked, so that it does not occupy its place for ever.
    pub(super) async fn end_lost(&mut self, error: &JoinError) {
        let lost = self.running.values().find(|r| r.task == error.id());
        let Some(build) = lost.map(|running| running.build.clone()) else {
            error!(%error, "the task of an unknown build failed");
            return;
        };
        if let Some(log) = self.logs.get(&build.build_id) {
            end_log(self.store.clone(), &build, log.clone()).await;
        }
        let outcome = Err(Failure {
            at: At::Base,
            message: format!("internal error of the server: {error}"),
        });
        self.end(Ended { build, outcome }).await;
    }

    pub(super) async fn end(&mut self, ended: Ended) {
        let Ended { build, outcome } = ended;
        let running = self.running.remove(&build.build_id);
        let (cancelled, former) = running.map_or((None, None), |r| (r.cancelled, r.redo_of));
        let reason = match (outcome, cancelled) {
            (Ok(built), None) => self.succeed(&build, former, built.template).await.err(),
            (Ok(built), Some(why)) => {
                self.unneeded.insert(built.template);
                Some(Reason::new(why))
            }
            (Err(_), Some(why)) => Some(Reason::new(why)),
            (Err(failure), None) => Some(Reason {
                message: failure.message,
                step: Some(failure.at.to_string()),
            }),
        };
        if let Some(reason) = reason {
            info!(
                build = build.build_id,
                why = reason.message,
                "a build failed"
            );
            self.fail(&build, reason).await;
        }
        self.remove_unneeded().await;
        self.recent.push_back(build.build_id);
        while self.recent.len() > RECENT_LOGS
            && let Some(oldest) = self.recent.pop_front()
        {
            self.logs.remove(&oldest);
        }
    }

    /// Records the template of a build and gives it the names.
    async fn succeed(
        &mut self,
        build: &Requested,
        former: Option<String>,
        pool_id: String,
    ) -> Result<(), Reason> {
        let finish = |t: &mut TemplateRecord| match former {
            Some(former) => t.finish_redo(&build.build_id, &former, pool_id.clone(), unix_ms()),
            None => t.finish(&build.build_id, Ok(pool_id.clone()), unix_ms()),
        };
        let done = self.change(&build.template_id, finish).await;
        // Removed unless it is needed: its names may already belong to another build.
        self.unneeded.insert(pool_id);
        done.map_err(|why| Reason::new(model::chain(&why)))
    }
}

/// Closes the log of a build and writes it.
async fn end_log(store: Store, build: &Requested, log: BuildLog) {
    log.close();
    let (id, number) = (build.template_id.clone(), build.build_id.clone());
    match blocking(move || store.write_log(&id, &number, &log)).await {
        // The template was deleted.
        Err(BuildsError::Store(why)) if why.kind() == io::ErrorKind::NotFound => {}
        Err(why) => {
            error!(build = build.build_id, why = %model::chain(&why), "cannot write the log of a build");
        }
        Ok(()) => {}
    }
}
