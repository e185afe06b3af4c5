//! The owner of builds: a task that queues, starts, cancels and records them. [`Builds`] is its handle.
//!
//! ```text
//! create ─► Waiting ─► start ─► queue ─► a task runs the executor, closes the log and writes it
//!                                             │
//!            names in the pool ◄── owner ◄────┘
//!            record written: the build is ready, and its tags refer to it
//!            catalog replaced: clients see it
//! ```
//! The record is authoritative: the pool's names follow it, even after a crash between the two updates. A template in
//! the pool that no build needs any more is removed. While a sandbox or a snapshot uses it, the removal is retried.

mod change;
mod follow;
mod pool_side;
mod redo;
mod running;
mod task;
#[cfg(test)]
pub(crate) mod tests;

use std::{collections::BTreeSet, io, sync::Arc};

use pool::PoolError;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};

use super::{
    catalog::Catalog,
    grant::Authority,
    log::BuildLog,
    record::Home,
    request::{NewBuildSpec, StartSpec},
    store::{Contents, KeptOrder, Store},
    uploads::Uploads,
};
pub use follow::{Copied, Made};
pub use pool_side::Machinery;
pub use redo::RedoSpec;
use task::Owner;
use tasks::{blocking, boxed};

const REQUESTS: usize = 64;

/// Why a request about builds failed.
#[derive(Debug, thiserror::Error)]
pub enum BuildsError {
    #[error("template {0:?} was not found")]
    NoTemplate(String),
    #[error("build {0:?} was not found")]
    NoBuild(String),
    #[error("build is not in waiting state")]
    NotWaiting,
    /// The name belongs to an installed template.
    #[error(
        "the template {0:?} is installed on this server and cannot be changed by clients: use another name"
    )]
    Installed(String),
    /// Deletion of an installed template.
    #[error(
        "the template {0:?} is installed on this server and cannot be deleted by clients: the operator removes it \
         from the directory of --templates"
    )]
    Kept(String),
    #[error("{0:?} is the name or the id of a snapshot or of another template: use another name")]
    Taken(String),
    /// Name and tag.
    #[error("template {0:?} has no ready build to repeat: build it first, or name another tag")]
    NotReady(String),
    /// Name and tag.
    #[error("a build of the template {0:?} is queued or runs: wait until it has ended")]
    Busy(String),
    #[error(
        "the steps of the template {0:?} are unknown, because an older server has built it: build it once from its \
         source"
    )]
    NoOrder(String),
    /// Name, and why.
    #[error(
        "the server does not keep the request of this build of the template {0:?}, because {1}: build it from its \
         source, or name the tag of a ready build"
    )]
    OrderGone(String, &'static str),
    /// Name, and number of the step.
    #[error(
        "the files of step {1} of the template {0:?} are no longer on this server (builds.uploads): build it from its \
         source, which uploads them again"
    )]
    NoFiles(String, usize),
    #[error(
        "the image {0:?} was pulled with credentials, which the server does not keep: send them as fromImageRegistry"
    )]
    NoCredentials(String),
    /// Rebuild of an installed template.
    #[error(
        "the template {0:?} is installed on this server: rebuild it on the host, with `cargo xtask prepare` (base) or \
         `cargo xtask template {0}`"
    )]
    OnHost(String),
    #[error(
        "{0:?} is a snapshot of a sandbox, which has no steps to repeat: make another snapshot"
    )]
    OfSandbox(String),
    /// An installed template or a snapshot.
    #[error(
        "the template {0:?} was not made by a build, so there is no request: it is installed on this server, or a \
         snapshot of a sandbox"
    )]
    NotBuilt(String),
    #[error("too many builds: {0}; wait until some have ended")]
    TooMany(String),
    #[error("cannot record the change of builds")]
    Store(#[source] io::Error),
    #[error("cannot create an id: the kernel provides no random numbers")]
    Random(#[source] getrandom::Error),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("the server is stopping and starts no builds")]
    Closed,
}

/// Identity of a requested build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requested {
    pub template_id: String,
    pub build_id: String,
}

type Answer<T> = oneshot::Sender<Result<T, BuildsError>>;

#[derive(Debug)]
enum Request {
    Create(NewBuildSpec, Answer<Requested>),
    Start(Requested, Box<StartSpec>, Answer<()>),
    Redo(Box<RedoSpec>, Answer<Requested>),
    /// Template, tag that names the build, and its new tags.
    Assign(String, String, BTreeSet<String>, Answer<String>),
    Unassign(String, BTreeSet<String>, Answer<()>),
    Publish(String, bool, Answer<()>),
    Remove(String, Answer<()>),
    Follow(Box<Copied>, Answer<()>),
    TakeOver(String, Home, Answer<()>),
    Stop(Answer<()>),
    Continue(Answer<()>),
}

/// A handle to the owner of builds.
#[derive(Clone, Debug)]
pub struct Builds {
    requests: mpsc::Sender<Request>,
    catalog: watch::Receiver<Arc<Catalog>>,
    store: Store,
    pub uploads: Uploads,
    pub authority: Arc<Authority>,
}

impl Builds {
    /// Starts the owner on `tasks`. Ends builds that the previous server left unfinished, and brings the pool's names
    /// and templates in line with the records.
    pub fn open<M: Machinery>(
        (store, contents): (Store, Contents),
        uploads: Uploads,
        authority: Authority,
        machinery: M,
        running: usize,
        tasks: &mut JoinSet<()>,
    ) -> Self {
        let (requests, inbox) = mpsc::channel(REQUESTS);
        let (catalog, seen) = watch::channel(Arc::default());
        let owner = Owner::new(
            machinery,
            store.clone(),
            uploads.clone(),
            running,
            contents,
            catalog,
        );
        owner.show();
        tasks.spawn(boxed(owner.run(inbox)));
        Self {
            requests,
            catalog: seen,
            store,
            uploads,
            authority: Arc::new(authority),
        }
    }

    /// The current state, as an immutable snapshot.
    #[must_use]
    pub fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.catalog.borrow())
    }

    /// Requests a build.
    ///
    /// # Errors
    /// Returns [`BuildsError::Installed`] and [`BuildsError::Taken`] if the name is in use elsewhere, and
    /// [`BuildsError::TooMany`].
    pub async fn create(&self, spec: NewBuildSpec) -> Result<Requested, BuildsError> {
        self.ask(|answer| Request::Create(spec, answer)).await
    }

    /// Queues a requested build. Cancels builds in progress that have one of its tags.
    ///
    /// # Errors
    /// Returns [`BuildsError::NoTemplate`], [`BuildsError::NoBuild`], [`BuildsError::NotWaiting`], and
    /// [`BuildsError::TooMany`], after which the build keeps waiting.
    pub async fn start(&self, build: Requested, spec: StartSpec) -> Result<(), BuildsError> {
        let spec = Box::new(spec);
        self.ask(|answer| Request::Start(build, spec, answer)).await
    }

    /// Queues a build with the order of an earlier one.
    ///
    /// # Errors
    /// Returns [`BuildsError::NoTemplate`], [`BuildsError::NotReady`], [`BuildsError::Busy`] and
    /// [`BuildsError::TooMany`]. If data is no longer available: [`BuildsError::NoOrder`], [`BuildsError::NoFiles`] or
    /// [`BuildsError::NoCredentials`].
    pub async fn redo(&self, spec: RedoSpec) -> Result<Requested, BuildsError> {
        let spec = Box::new(spec);
        self.ask(|answer| Request::Redo(spec, answer)).await
    }

    /// Assigns tags to the build that `tag` refers to, and returns the build's id.
    ///
    /// # Errors
    /// Returns [`BuildsError::NoTemplate`] if there is no such template or tag.
    pub async fn assign(
        &self,
        template: String,
        tag: String,
        tags: BTreeSet<String>,
    ) -> Result<String, BuildsError> {
        self.ask(|answer| Request::Assign(template, tag, tags, answer))
            .await
    }

    /// Removes tags. Unknown tags are ignored.
    ///
    /// # Errors
    /// Returns [`BuildsError::NoTemplate`].
    pub async fn unassign(
        &self,
        template: String,
        tags: BTreeSet<String>,
    ) -> Result<(), BuildsError> {
        self.ask(|answer| Request::Unassign(template, tags, answer))
            .await
    }

    /// Records whether a template is public.
    ///
    /// # Errors
    /// Returns [`BuildsError::NoTemplate`].
    pub async fn publish(&self, template: String, public: bool) -> Result<(), BuildsError> {
        self.ask(|answer| Request::Publish(template, public, answer))
            .await
    }

    /// Removes a template with its builds. Cancels running builds.
    ///
    /// # Errors
    /// Returns [`BuildsError::NoTemplate`].
    pub async fn remove(&self, template: String) -> Result<(), BuildsError> {
        self.ask(|answer| Request::Remove(template, answer)).await
    }

    /// Records a template of another node in its home's current version, with the builds that this node has. Removes a
    /// template without remaining builds.
    ///
    /// # Errors
    /// Returns [`BuildsError::Installed`] and [`BuildsError::Taken`] if another template on this node has the name.
    pub async fn follow(&self, copied: Copied) -> Result<(), BuildsError> {
        let copied = Box::new(copied);
        self.ask(|answer| Request::Follow(copied, answer)).await
    }

    /// Makes this node the home of a template.
    ///
    /// # Errors
    /// Returns [`BuildsError::NoTemplate`].
    pub async fn take_over(&self, template: String, home: Home) -> Result<(), BuildsError> {
        self.ask(|answer| Request::TakeOver(template, home, answer))
            .await
    }

    /// Cancels all queued and running builds and waits until they have ended. Later builds are refused.
    pub async fn stop(&self) {
        // An error means that the owner has ended.
        let _ended = self.ask(Request::Stop).await;
    }

    /// Allows builds again after [`Builds::stop`].
    pub async fn go_on(&self) {
        // An error means that the owner has ended.
        let _ended = self.ask(Request::Continue).await;
    }

    /// The log of a build. Empty before its start.
    ///
    /// # Errors
    /// Returns an error if it cannot be read from disk.
    pub async fn log(&self, catalog: &Catalog, build: &Requested) -> io::Result<BuildLog> {
        if let Some(log) = catalog.logs.get(&build.build_id) {
            return Ok(log.clone());
        }
        let (store, build) = (self.store.clone(), build.clone());
        let read = move || store.read_log(&build.template_id, &build.build_id);
        blocking(read).await
    }

    /// The order that a build was started with. `None`: the build was not started, has failed, or was built by an older
    /// server.
    ///
    /// # Errors
    /// Returns an error if it cannot be read from disk.
    pub async fn order(&self, build: &Requested) -> io::Result<Option<KeptOrder>> {
        let (store, build) = (self.store.clone(), build.clone());
        let read = move || store.read_order(&build.template_id, &build.build_id);
        blocking(read).await
    }

    async fn ask<T>(&self, request: impl FnOnce(Answer<T>) -> Request) -> Result<T, BuildsError> {
        let (answer, answered) = oneshot::channel();
        let sent = self.requests.send(request(answer)).await;
        sent.map_err(|_| BuildsError::Closed)?;
        answered.await.map_err(|_| BuildsError::Closed)?
    }
}
