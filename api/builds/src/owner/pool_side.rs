//! The owner's interface to the executor and the pool.

use std::future::Future;

use cluster::Tagged;
use pool::{PoolError, TemplateInfo};

use crate::{
    cancel::Cancel,
    log::BuildLog,
    record::TemplateRecord,
    run::{Built, Failure, Order},
    uploads::Uploads,
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
    /// Like [`pool::Pool::name_template`].
    fn name(
        &self,
        id: &str,
        names: Vec<String>,
    ) -> impl Future<Output = Result<(), PoolError>> + Send;
    /// Like [`pool::Pool::unname_templates`], for one name.
    fn unname(&self, name: &str) -> impl Future<Output = Result<(), PoolError>> + Send;
    /// Like [`crate::run::Executor::remove`].
    fn remove(&self, id: &str) -> impl Future<Output = Result<(), PoolError>> + Send;
    /// Whether another node has the current build of a template and this one does not. `tagged` is this node's build.
    fn lacks(&self, reference: &str, tagged: Option<&Tagged>) -> impl Future<Output = bool> + Send;
    /// Tells the other nodes of a cluster about a change of a template.
    fn announce(
        &self,
        before: &TemplateRecord,
        after: Option<&TemplateRecord>,
    ) -> impl Future<Output = ()> + Send;
}
