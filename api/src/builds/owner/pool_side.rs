//! The owner's interface to the executor and the pool.

use std::future::Future;

use cluster::Tagged;
use pool::{Pool, PoolError, TemplateInfo};

use crate::{
    builds::{
        cancel::Cancel,
        log::BuildLog,
        record::TemplateRecord,
        run::{Built, Executor, Failure, Order},
        uploads::Uploads,
    },
    peers::Peers,
};

/// The executor and the pool. Tests of the owner use a fake.
pub trait Machinery: Clone + Send + Sync + 'static {
    fn run(
        &self,
        order: &Order,
        files: &Uploads,
        log: &BuildLog,
        cancel: Cancel,
    ) -> impl Future<Output = Result<Built, Failure>> + Send;
    fn templates(&self) -> impl Future<Output = Vec<TemplateInfo>> + Send;
    /// Like [`Pool::name_template`].
    fn name(
        &self,
        id: &str,
        names: Vec<String>,
    ) -> impl Future<Output = Result<(), PoolError>> + Send;
    /// Like [`Pool::unname_templates`], for one name.
    fn unname(&self, name: &str) -> impl Future<Output = Result<(), PoolError>> + Send;
    /// Like [`Executor::remove`].
    fn remove(&self, id: &str) -> impl Future<Output = Result<(), PoolError>> + Send;
    /// Whether another node has the current build of a template and this one does not. `tagged` is this node's build.
    fn lacks(&self, reference: &str, tagged: Option<&Tagged>) -> impl Future<Output = bool> + Send;
    /// Like [`Peers::announce`].
    fn announce(
        &self,
        before: &TemplateRecord,
        after: Option<&TemplateRecord>,
    ) -> impl Future<Output = ()> + Send;
}

#[derive(Clone, Debug)]
pub(crate) struct Real {
    pub(crate) pool: Pool,
    pub(crate) executor: Executor,
    /// `None` on a server without a cluster.
    pub(crate) peers: Option<Peers>,
}

impl Machinery for Real {
    async fn run(
        &self,
        order: &Order,
        files: &Uploads,
        log: &BuildLog,
        cancel: Cancel,
    ) -> Result<Built, Failure> {
        self.executor.run(order, files, log, cancel).await
    }

    async fn templates(&self) -> Vec<TemplateInfo> {
        self.pool.templates().await
    }

    async fn name(&self, id: &str, names: Vec<String>) -> Result<(), PoolError> {
        self.pool.name_template(id, names).await
    }

    async fn unname(&self, name: &str) -> Result<(), PoolError> {
        self.pool.unname_templates(vec![name.to_owned()]).await
    }

    async fn remove(&self, id: &str) -> Result<(), PoolError> {
        self.executor.remove(id).await
    }

    async fn lacks(&self, reference: &str, tagged: Option<&Tagged>) -> bool {
        match (&self.peers, tagged) {
            (None, _) => false,
            (Some(peers), Some(tagged)) => peers.is_outdated(tagged),
            (Some(peers), None) => {
                !peers.nodes_with(reference).is_empty()
                    && self.pool.template(reference).await.is_none()
            }
        }
    }

    async fn announce(&self, before: &TemplateRecord, after: Option<&TemplateRecord>) {
        if let Some(peers) = &self.peers {
            peers.announce(before, after).await;
        }
    }
}
