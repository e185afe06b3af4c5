//! The task that owns the builds.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    io,
    sync::Arc,
    time::Duration,
};

use model::clock::unix_ms;
use pool::TemplateKind;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::MissedTickBehavior,
};
use tracing::{error, info};

use super::{Answer, BuildsError, Machinery, Request, Requested};
use crate::{
    auth::random_hex,
    builds::{
        cancel::{Canceller, cancellation},
        catalog::{Catalog, Resolved, resolve},
        log::BuildLog,
        plan::{At, From},
        record::{BuildRecord, BuildState, RESTARTED, Reason, SUPERSEDED, TemplateRecord},
        request::{NewBuildSpec, StartSpec},
        run::{Built, Failure, Order},
        store::{Contents, Store},
        uploads::Uploads,
    },
};

/// Builds in the queue, beside those that run.
pub(super) const MAX_QUEUED: usize = 32;
/// Builds that wait, are queued, or run.
pub(super) const MAX_OPEN: usize = 100;
const MAX_TEMPLATES: usize = 10_000;
/// Logs of ended builds that stay in memory.
const RECENT_LOGS: usize = 8;
/// How long a requested build may wait for its start.
pub(super) const WAIT: Duration = Duration::from_secs(24 * 3600);
/// How often overdue builds are ended, and failed removals are tried again.
const TICK: Duration = Duration::from_secs(60);
const DELETED: &str = "the template was deleted during the build";

struct Queued {
    build: Requested,
    spec: StartSpec,
    log: BuildLog,
}

struct Running {
    canceller: Canceller,
    /// Why it was cancelled: the reason of its end, whatever the executor returns.
    cancelled: Option<&'static str>,
}

/// The end of a build's task. Its log is closed and on disk.
struct Ended {
    build: Requested,
    outcome: Result<Built, Failure>,
}

pub(super) struct Owner<M> {
    pub(super) machinery: M,
    pub(super) store: Store,
    uploads: Uploads,
    most_running: usize,
    /// Shared with the catalogs that readers have.
    pub(super) templates: BTreeMap<String, Arc<TemplateRecord>>,
    /// No template of the pool is removed, because a record that may need it could not be read.
    pub(super) keeps_all: bool,
    /// By build.
    logs: HashMap<String, BuildLog>,
    /// Builds that have ended and whose logs are in memory, oldest first.
    recent: VecDeque<String>,
    queue: VecDeque<Queued>,
    /// By build.
    running: HashMap<String, Running>,
    tasks: JoinSet<Ended>,
    /// Templates of the pool that are to be removed.
    pub(super) unneeded: BTreeSet<String>,
    stopping: Option<Vec<Answer<()>>>,
    catalog: watch::Sender<Arc<Catalog>>,
}

impl<M: Machinery> Owner<M> {
    pub(super) fn new(
        machinery: M,
        store: Store,
        uploads: Uploads,
        running: usize,
        contents: Contents,
        catalog: watch::Sender<Arc<Catalog>>,
    ) -> Self {
        Self {
            machinery,
            store,
            uploads,
            most_running: running.max(1),
            templates: contents
                .templates
                .into_iter()
                .map(|(id, template)| (id, Arc::new(template)))
                .collect(),
            keeps_all: contents.is_partial,
            logs: HashMap::new(),
            recent: VecDeque::new(),
            queue: VecDeque::new(),
            running: HashMap::new(),
            tasks: JoinSet::new(),
            unneeded: BTreeSet::new(),
            stopping: None,
            catalog,
        }
    }

    pub(super) async fn run(mut self, mut inbox: mpsc::Receiver<Request>) {
        self.recover().await;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                request = inbox.recv() => match request {
                    Some(request) => self.act(request).await,
                    None => return,
                },
                Some(ended) = self.tasks.join_next() => match ended {
                    Ok(ended) => self.end(ended).await,
                    Err(error) => error!(%error, "the task of a build failed"),
                },
                _ = tick.tick() => self.tick().await,
            }
            self.fill();
            self.show();
            self.answer_stop();
        }
    }

    async fn act(&mut self, request: Request) {
        // A caller that is gone needs no answer.
        match request {
            Request::Create(spec, answer) => drop(answer.send(self.create(spec).await)),
            Request::Start(build, spec, answer) => {
                drop(answer.send(self.start(build, *spec).await));
            }
            Request::Assign(id, tag, tags, answer) => {
                let assigned = self.change(&id, |t| t.assign(&tag, tags, unix_ms())).await;
                let missing = || BuildsError::NoTemplate(format!("{id}:{tag}"));
                drop(answer.send(assigned.and_then(|build| build.ok_or_else(missing))));
            }
            Request::Unassign(id, tags, answer) => {
                drop(answer.send(self.change(&id, |t| t.unassign(&tags)).await));
            }
            Request::Publish(id, public, answer) => {
                drop(answer.send(self.change(&id, |t| t.public = public).await));
            }
            Request::Remove(id, answer) => drop(answer.send(self.remove(&id).await)),
            Request::Continue(answer) => {
                self.stopping = None;
                drop(answer.send(Ok(())));
            }
            Request::Stop(answer) => {
                self.stopping.get_or_insert_default().push(answer);
                while let Some(queued) = self.queue.pop_front() {
                    self.fail(&queued.build, Reason::new(RESTARTED)).await;
                }
                for running in self.running.values_mut() {
                    running.cancelled.get_or_insert(RESTARTED);
                    running.canceller.cancel();
                }
            }
        }
    }

    async fn create(&mut self, spec: NewBuildSpec) -> Result<Requested, BuildsError> {
        let all = self.templates.values().flat_map(|t| &t.builds);
        if all.filter(|build| !build.state.is_final()).count() >= MAX_OPEN {
            return Err(BuildsError::TooMany(format!("{MAX_OPEN} are under way")));
        }
        let found = self.templates.values().find(|t| t.name == spec.name);
        let id = match found {
            Some(template) => template.id.clone(),
            None => self.add(&spec.name).await?,
        };
        let now_ms = unix_ms();
        let build = BuildRecord {
            id: uuid()?,
            wanted: spec.tags,
            vcpus: spec.vcpus,
            memory: spec.memory,
            created_unix_ms: now_ms,
            changed_unix_ms: now_ms,
            state: BuildState::Waiting,
        };
        let requested = Requested {
            template_id: id.clone(),
            build_id: build.id.clone(),
        };
        let written = self.change(&id, |t| t.request(build)).await;
        if written.is_err() && self.templates.get(&id).is_some_and(|t| t.builds.is_empty()) {
            self.templates.remove(&id);
        }
        written.map(|()| requested)
    }

    /// Adds a template, in memory only: its first build writes it.
    async fn add(&mut self, name: &str) -> Result<String, BuildsError> {
        if self.templates.len() >= MAX_TEMPLATES {
            let why = format!("{MAX_TEMPLATES} templates have builds: delete some");
            return Err(BuildsError::TooMany(why));
        }
        for template in self.machinery.templates().await {
            let mut names = template.names.iter();
            let is_named = names.any(|n| n.split(':').next() == Some(name));
            if is_named && template.kind == TemplateKind::Installed {
                return Err(BuildsError::Installed(name.to_owned()));
            }
            if is_named || template.id == name {
                return Err(BuildsError::Taken(name.to_owned()));
            }
        }
        if self.templates.contains_key(name) {
            return Err(BuildsError::Taken(name.to_owned()));
        }
        let id = random_hex::<10>().map_err(BuildsError::Random)?;
        let template = TemplateRecord::new(id.clone(), name.to_owned(), unix_ms());
        self.templates.insert(id.clone(), Arc::new(template));
        Ok(id)
    }

    async fn start(&mut self, build: Requested, spec: StartSpec) -> Result<(), BuildsError> {
        if self.stopping.is_some() {
            return Err(BuildsError::Closed);
        }
        let (id, number) = (&build.template_id, &build.build_id);
        let template = self.templates.get(id);
        let template = template.ok_or_else(|| BuildsError::NoTemplate(id.clone()))?;
        if template.build(number).is_none() {
            return Err(BuildsError::NoBuild(number.clone()));
        }
        let waits = self.running.len() >= self.most_running;
        if waits && self.queue.len() >= MAX_QUEUED {
            return Err(BuildsError::TooMany(format!(
                "{MAX_QUEUED} are in the queue"
            )));
        }
        let superseded = self.change(id, |t| t.start(number, unix_ms())).await?;
        for older in superseded.ok_or(BuildsError::NotWaiting)? {
            if let Some(running) = self.running.get_mut(&older) {
                running.cancelled.get_or_insert(SUPERSEDED);
                running.canceller.cancel();
            } else {
                self.queue.retain(|queued| queued.build.build_id != older);
                let older = Requested {
                    build_id: older,
                    ..build.clone()
                };
                self.fail(&older, Reason::new(SUPERSEDED)).await;
            }
        }
        let log = BuildLog::default();
        self.logs.insert(number.clone(), log.clone());
        self.queue.push_back(Queued { build, spec, log });
        Ok(())
    }

    /// Starts builds of the queue while there is room.
    fn fill(&mut self) {
        while self.running.len() < self.most_running
            && let Some(queued) = self.queue.pop_front()
        {
            let Some(order) = self.order(&queued) else {
                continue;
            };
            let Queued { build, log, .. } = queued;
            info!(
                template = build.template_id,
                build = build.build_id,
                "building a template"
            );
            let (canceller, cancel) = cancellation();
            let running = Running {
                canceller,
                cancelled: None,
            };
            self.running.insert(build.build_id.clone(), running);
            let (machinery, store) = (self.machinery.clone(), self.store.clone());
            let uploads = self.uploads.clone();
            self.tasks.spawn(async move {
                let copy = log.clone();
                let work = async move { machinery.run(&order, &uploads, &copy, cancel).await };
                // A task of its own, so that a panic ends one build.
                let outcome = tokio::spawn(work).await.unwrap_or_else(|error| {
                    Err(Failure {
                        at: At::Base,
                        message: format!("internal error of the server: {error}"),
                    })
                });
                log.close();
                let (id, number) = (build.template_id.clone(), build.build_id.clone());
                let write = move || store.write_log(&id, &number, &log);
                match blocking(write).await {
                    // Not found: the template was deleted.
                    Err(BuildsError::Store(why)) if why.kind() == io::ErrorKind::NotFound => {}
                    Err(why) => {
                        error!(build = build.build_id, why = %model::chain(&why), "cannot write the log of a build");
                    }
                    Ok(()) => {}
                }
                Ended { build, outcome }
            });
        }
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
            force: spec.force,
            vcpus: build.vcpus,
            memory: build.memory,
        })
    }

    async fn end(&mut self, ended: Ended) {
        let Ended { build, outcome } = ended;
        let running = self.running.remove(&build.build_id);
        let cancelled = running.and_then(|running| running.cancelled);
        let reason = match (outcome, cancelled) {
            (Ok(built), None) => {
                let pool_id = built.template;
                let number = &build.build_id;
                let done = self.change(&build.template_id, |t| {
                    t.finish(number, Ok(pool_id.clone()), unix_ms());
                });
                match done.await {
                    Ok(()) => None,
                    Err(why) => {
                        self.unneeded.insert(pool_id);
                        Some(Reason::new(model::chain(&why)))
                    }
                }
            }
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

    async fn remove(&mut self, id: &str) -> Result<(), BuildsError> {
        let missing = || BuildsError::NoTemplate(id.to_owned());
        let template = self.templates.get(id).ok_or_else(missing)?.clone();
        let (store, of) = (self.store.clone(), id.to_owned());
        blocking(move || store.remove(&of)).await?;
        self.templates.remove(id);
        self.queue.retain(|queued| queued.build.template_id != id);
        for build in &template.builds {
            if let Some(running) = self.running.get_mut(&build.id) {
                running.cancelled.get_or_insert(DELETED);
                running.canceller.cancel();
            }
            self.logs.remove(&build.id);
        }
        self.take_names(template.pool_names().keys()).await;
        self.unneeded.extend(template.pool_ids());
        self.remove_unneeded().await;
        if let Err(error) = self.uploads.forget(id).await {
            error!(template = id, %error, "cannot remove the uploads of a deleted template");
        }
        Ok(())
    }

    fn answer_stop(&mut self) {
        if self.running.is_empty() {
            for answer in self
                .stopping
                .iter_mut()
                .flat_map(|waiting| waiting.drain(..))
            {
                // A caller that is gone needs no answer.
                drop(answer.send(Ok(())));
            }
        }
    }

    fn view(&self) -> Catalog {
        let of = |t: &Arc<TemplateRecord>| {
            let id = t.id.clone();
            t.pool_ids()
                .into_iter()
                .map(move |pool_id| (pool_id, id.clone()))
        };
        Catalog {
            by_pool: self.templates.values().flat_map(of).collect(),
            templates: self.templates.clone(),
            logs: self.logs.clone(),
        }
    }

    pub(super) fn show(&self) {
        self.catalog.send_replace(Arc::new(self.view()));
    }
}

pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, BuildsError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(io::Error::from)
        .flatten()
        .map_err(BuildsError::Store)
}

/// A random UUID (RFC 9562, version 4).
fn uuid() -> Result<String, BuildsError> {
    let hex = random_hex::<16>().map_err(BuildsError::Random)?;
    let (a, b, c, d) = (&hex[..8], &hex[8..12], &hex[13..16], &hex[17..20]);
    Ok(format!("{a}-{b}-4{c}-a{d}-{}", &hex[20..]))
}
