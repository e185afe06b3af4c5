//! The state that all handlers share.

use std::{path::PathBuf, sync::Arc};

use ::builds::{
    catalog::{Catalog, Resolved},
    owner::Builds,
};
use ::egress::control::Call;
use cluster::NodeId;
use model::{Bytes, SandboxId};
use netisolation::NetEvent;
use pool::Pool;

use super::error::ApiError;
use crate::{
    auth::Authenticator,
    egress::Egress,
    events::Events,
    network::{EgressConfig, Network},
    node::OwnNode,
    peers::{Peers, moves::Moves},
    registry::Registry,
    secrets::Secrets,
    telemetry::Telemetry,
};

#[derive(Debug)]
pub struct Control {
    pub registry: Registry,
    /// For templates and metrics; handlers change sandboxes only through the registry.
    pub pool: Pool,
    pub builds: Builds,
    pub secrets: Secrets,
    pub events: Events,
    /// `None`: requests of sandboxes pass no proxy.
    pub egress: Option<Egress>,
    pub authenticator: Arc<Authenticator>,
    pub telemetry: Arc<Telemetry>,
    pub node: OwnNode,
    /// `None`: this server is alone.
    pub peers: Option<Peers>,
    pub(crate) moves: Option<Moves>,
    pub state_dir: PathBuf,
    /// Directory of benchmark runs. `None`: there is none.
    pub reports: Option<PathBuf>,
    /// Value of `domain` in answers. `None`: the domain below which the client reached this server, or one that does not
    /// exist.
    pub domain: Option<String>,
    /// `None`: sandboxes have no network.
    pub network: Option<Network>,
    /// Maximum timeout of a sandbox in seconds.
    pub max_timeout_s: u32,
    /// Limit of a sandbox's writes to its disk; `None`: the disk's size is the limit.
    pub disk_limit: Option<Bytes>,
    /// Whether clients use TLS, unless a proxy terminates it.
    pub is_tls: bool,
}

impl Control {
    /// The operator's configuration of outbound traffic. `None`: sandboxes have no network.
    pub(super) fn egress_config(&self) -> Option<&EgressConfig> {
        self.network.as_ref().map(|network| &network.egress)
    }

    /// Refuses new sandboxes on a node that is not ready.
    pub(super) fn check_open(&self) -> Result<(), ApiError> {
        if self.node.is_open() {
            Ok(())
        } else {
            let name = self.node.name().to_owned();
            Err(ApiError::NodeClosed(name, self.node.chosen().status))
        }
    }

    /// Waits while a sandbox of this node moves.
    pub(super) async fn settled(&self, id: &SandboxId) {
        if let Some(moves) = &self.moves {
            moves.settled(id).await;
        }
    }

    /// Whether a template or a build of this id or name, with or without a tag, is on this node.
    pub(crate) async fn has_template(&self, reference: &str) -> bool {
        self.builds.catalog().find_untagged(reference).is_some()
            || self.pool.template(reference).await.is_some()
    }

    /// The other node that builds and changes a template of which this one has a copy.
    pub(crate) fn home_elsewhere(&self, reference: &str) -> Option<NodeId> {
        let catalog = self.builds.catalog();
        let template = catalog.find_untagged(reference)?;
        let (home, peers) = template.home.as_ref().zip(self.peers.as_ref())?;
        (home.node != *peers.this()).then(|| home.node.clone())
    }

    /// Whether a template's home has another build under this id or name than the copy on this node.
    pub(super) fn is_outdated(&self, catalog: &Catalog, reference: &str) -> bool {
        let Some(peers) = &self.peers else {
            return false;
        };
        let found = catalog.tagged(reference);
        found.is_some_and(|(tagged, _)| peers.is_outdated(&tagged))
    }

    /// Whether creates can use what this node has under this id or name.
    pub(super) async fn can_clone(&self, reference: &str) -> bool {
        match self.pool_reference(reference.to_owned()) {
            Ok(found) => self.pool.template(&found).await.is_some(),
            Err(_) => false,
        }
    }

    /// The reference with which the pool finds a template: of a build, its id in the pool.
    pub(super) fn pool_reference(&self, reference: String) -> Result<String, ApiError> {
        let catalog = self.builds.catalog();
        match catalog.resolve(&reference) {
            // As if it were not here: the home has it, or no node.
            Resolved::Ready(_) if self.is_outdated(&catalog, &reference) => {
                Err(ApiError::no_template(&reference))
            }
            Resolved::Ready(pool_id) => Ok(pool_id),
            Resolved::Foreign => Ok(reference),
            Resolved::NotReady => Err(ApiError::no_template(&reference)),
        }
    }

    /// Ends what sandboxes have open through the proxy.
    pub(super) fn cut(&self, id: &SandboxId) {
        if let Some(egress) = &self.egress {
            egress.cut(id);
        }
    }

    /// The ruled and refused calls of a sandbox through the proxy, oldest first.
    pub(super) async fn calls(&self, id: &SandboxId) -> Vec<Call> {
        match &self.egress {
            Some(egress) => egress.calls.log.events_of(id).await,
            None => Vec::new(),
        }
    }

    /// The packets of a sandbox that its policy refused, oldest first.
    pub(super) async fn refused(&self, id: &SandboxId) -> Vec<NetEvent> {
        match &self.network {
            Some(network) => network.log.events_of(id).await,
            None => Vec::new(),
        }
    }
}

pub type App = Arc<Control>;

/// Runs work that waits for the disk on a thread.
///
/// # Errors
/// Returns [`ApiError::Interrupted`] if it has panicked.
pub(super) async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let done = tasks::on_thread(work).await;
    done.map_err(|why| ApiError::Interrupted(why.to_string()))
}
