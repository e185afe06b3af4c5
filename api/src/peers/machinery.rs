//! The parts of this node that the owner of builds uses: executor, pool and peer nodes.

use cluster::Tagged;
use pool::{Pool, PoolError, TemplateInfo};

use super::Peers;
use builds::{
    cancel::Cancel,
    log::BuildLog,
    owner::Machinery,
    record::TemplateRecord,
    run::{Built, Executor, Failure, Order},
    uploads::Uploads,
};

#[derive(Clone, Debug)]
pub(crate) struct NodeMachinery {
    pub(crate) pool: Pool,
    pub(crate) executor: Executor,
    /// `None` on a server without a cluster.
    pub(crate) peers: Option<Peers>,
}

impl Machinery for NodeMachinery {
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
