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
use tracing::error;

use super::{
    Answer, BuildsError, Machinery, Request, Requested,
    running::{Ended, Queued, Running},
};
use crate::{
    catalog::Catalog,
    log::BuildLog,
    random::random_hex,
    record::{BuildRecord, BuildState, RESTARTED, Reason, SUPERSEDED, TemplateRecord},
    request::{NewBuildSpec, StartSpec},
    store::{Contents, Store},
    uploads::Uploads,
};

/// Maximum number of builds that wait, are queued, or run.
pub(super) const MAX_OPEN: usize = 100;
const MAX_TEMPLATES: usize = 10_000;
/// How long a requested build may wait for its start.
pub(super) const WAIT: Duration = Duration::from_secs(24 * 3600);
/// How often overdue builds are ended and failed removals are retried.
const TICK: Duration = Duration::from_secs(60);
const DELETED: &str = "the template was deleted during the build";

pub(super) struct Owner<M> {
    pub(super) machinery: M,
    pub(super) store: Store,
    pub(super) uploads: Uploads,
    pub(super) most_running: usize,
    /// Shared with the catalogs that readers have.
    pub(super) templates: BTreeMap<String, Arc<TemplateRecord>>,
    /// No template in the pool is removed, because a record that may need it could not be read.
    pub(super) keeps_all: bool,
    /// By build id.
    pub(super) logs: HashMap<String, BuildLog>,
    /// Builds that have ended and whose logs are in memory, oldest first.
    pub(super) recent: VecDeque<String>,
    pub(super) queue: VecDeque<Queued>,
    /// Number of builds started so far.
    pub(super) starts: u64,
    /// The last start of each API key that has builds here.
    pub(super) started_last: HashMap<Option<String>, u64>,
    /// By build id.
    pub(super) running: HashMap<String, Running>,
    pub(super) tasks: JoinSet<Ended>,
    /// Templates in the pool that should be removed.
    pub(super) unneeded: BTreeSet<String>,
    pub(super) stopping: Option<Vec<Answer<()>>>,
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
            starts: 0,
            started_last: HashMap::new(),
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
                    Err(error) => self.end_lost(&error).await,
                },
                _ = tick.tick() => self.tick().await,
            }
            self.fill().await;
            self.show();
            self.answer_stop();
        }
    }

    async fn act(&mut self, request: Request) {
        // A caller that is gone needs no response.
        match request {
            Request::Create(spec, answer) => drop(answer.send(self.create(spec).await)),
            Request::Start(build, spec, answer) => {
                drop(answer.send(self.start(build, *spec).await));
            }
            Request::Redo(spec, answer) => {
                let queued = self.redo(*spec).await;
                // The client will poll the state of the build.
                self.show();
                drop(answer.send(queued));
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
            Request::Follow(copied, answer) => {
                let followed = self.follow(*copied).await;
                self.show();
                drop(answer.send(followed));
            }
            Request::TakeOver(id, home, answer) => {
                let taken = self.change(&id, |t| t.home = Some(home)).await;
                drop(answer.send(taken));
            }
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
        self.check_open()?;
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
            min_free_disk: spec.min_free_disk,
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

    pub(super) fn check_open(&self) -> Result<(), BuildsError> {
        let all = self.templates.values().flat_map(|t| &t.builds);
        if all.filter(|build| !build.state.is_final()).count() >= MAX_OPEN {
            return Err(BuildsError::TooMany(format!("{MAX_OPEN} are in progress")));
        }
        Ok(())
    }

    /// Adds a template in memory only. Its first build writes it to disk.
    async fn add(&mut self, name: &str) -> Result<String, BuildsError> {
        if self.templates.len() >= MAX_TEMPLATES {
            let why = format!("{MAX_TEMPLATES} templates have builds: delete some");
            return Err(BuildsError::TooMany(why));
        }
        self.check_name(name).await?;
        let id = random_hex::<10>().map_err(BuildsError::Random)?;
        let template = TemplateRecord::new(id.clone(), name.to_owned(), unix_ms());
        self.templates.insert(id.clone(), Arc::new(template));
        Ok(id)
    }

    /// Whether a new template may have this name.
    pub(super) async fn check_name(&self, name: &str) -> Result<(), BuildsError> {
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
        Ok(())
    }

    async fn start(&mut self, build: Requested, spec: StartSpec) -> Result<(), BuildsError> {
        self.check_queue()?;
        let (id, number) = (&build.template_id, &build.build_id);
        let template = self.templates.get(id);
        let template = template.ok_or_else(|| BuildsError::NoTemplate(id.clone()))?;
        let missing = || BuildsError::NoBuild(number.clone());
        if template.build(number).ok_or_else(missing)?.state != BuildState::Waiting {
            return Err(BuildsError::NotWaiting);
        }
        self.keep_order(&build, &spec).await?;
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
        self.enqueue(build, spec, None);
        Ok(())
    }

    pub(super) async fn remove(&mut self, id: &str) -> Result<(), BuildsError> {
        let missing = || BuildsError::NoTemplate(id.to_owned());
        let template = self.templates.get(id).ok_or_else(missing)?.clone();
        let (store, of) = (self.store.clone(), id.to_owned());
        blocking(move || store.remove(&of)).await?;
        self.machinery.announce(&template, None).await;
        self.templates.remove(id);
        self.show();
        self.queue.retain(|queued| queued.build.template_id != id);
        for build in &template.builds {
            self.cancel(&build.id, DELETED);
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

    /// Cancels a running build.
    pub(super) fn cancel(&mut self, build: &str, why: &'static str) {
        if let Some(running) = self.running.get_mut(build) {
            running.cancelled.get_or_insert(why);
            running.canceller.cancel();
        }
    }

    fn answer_stop(&mut self) {
        if self.running.is_empty() {
            for answer in self
                .stopping
                .iter_mut()
                .flat_map(|waiting| waiting.drain(..))
            {
                // A caller that is gone needs no response.
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
    let done = tasks::blocking(work).await;
    done.map_err(BuildsError::Store)
}

/// A random UUID (RFC 9562, version 4).
pub(super) fn uuid() -> Result<String, BuildsError> {
    let hex = random_hex::<16>().map_err(BuildsError::Random)?;
    let (a, b, c, d) = (&hex[..8], &hex[8..12], &hex[13..16], &hex[17..20]);
    Ok(format!("{a}-{b}-4{c}-a{d}-{}", &hex[20..]))
}
