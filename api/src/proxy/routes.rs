//! The interface through which the data plane queries the registry.

use std::future::Future;

use model::SandboxId;

use crate::registry::{Registry, Route, RouteError};

/// Resolves the ids of sandboxes to routes. Tests implement this trait without VMs.
pub trait Routes: Clone + Send + Sync + 'static {
    /// See [`Registry::route`].
    fn route(&self, id: &SandboxId) -> impl Future<Output = Result<Route, RouteError>> + Send;

    /// Notes that a request has reached the sandbox of this route; see [`Registry::renew`].
    fn reached(&self, route: &Route);

    /// See [`Registry::has`].
    fn has(&self, id: &SandboxId) -> impl Future<Output = bool> + Send;

    /// See [`Registry::find_by_signature`].
    fn find_by_signature(
        &self,
        query: &str,
        operation: &'static str,
    ) -> impl Future<Output = Option<SandboxId>> + Send;
}

impl Routes for Registry {
    async fn route(&self, id: &SandboxId) -> Result<Route, RouteError> {
        Registry::route(self, id).await
    }

    fn reached(&self, route: &Route) {
        Registry::renew(self, route);
    }

    async fn has(&self, id: &SandboxId) -> bool {
        Registry::has(self, id).await
    }

    async fn find_by_signature(&self, query: &str, operation: &'static str) -> Option<SandboxId> {
        Registry::find_by_signature(self, query, operation)
    }
}
