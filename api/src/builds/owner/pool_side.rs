//! What the owner needs of the executor and of the pool.

use std::future::Future;

use pool::{Pool, PoolError, TemplateInfo};

use crate::builds::{
    cancel::Cancel,
    log::BuildLog,
    run::{Built, Executor, Failure, Order},
    uploads::Uploads,
};

/// The executor and the pool. Tests of the owner use another one.
pub trait Machinery: Clone + Send + Sync + 'static {
    fn run(
        &self,
        order: &Order,
        files: &Uploads,
        log: &BuildLog,
        cancel: Cancel,
    ) -> impl Future<Output = Result<Built, Failure>> + Send;
    fn templates(&self) -> impl Future<Output = Vec<TemplateInfo>> + Send;
    /// As [`Pool::name_template`].
    fn name(
        &self,
        id: &str,
        names: Vec<String>,
    ) -> impl Future<Output = Result<(), PoolError>> + Send;
    /// As [`Pool::unname_templates`], for one name.
    fn unname(&self, name: &str) -> impl Future<Output = Result<(), PoolError>> + Send;
    /// As [`Executor::remove`].
    fn remove(&self, id: &str) -> impl Future<Output = Result<(), PoolError>> + Send;
}

#[derive(Clone, Debug)]
pub(crate) struct Real {
    pub(crate) pool: Pool,
    pub(crate) executor: Executor,
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
}
