//! The environment of the cases.

use testbed::server::LocalServer;

use super::{sandbox::Customer, world::World};

/// A server, its environment, and a client.
#[derive(Debug)]
pub(super) struct Stage {
    /// Declared first so that it is dropped first: its VMs use the world's network.
    pub(super) server: LocalServer,
    pub(super) world: World,
    pub(super) customer: Customer,
}
