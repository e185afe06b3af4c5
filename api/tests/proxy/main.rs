//! Tests the data plane over real sockets, with the real listener, proxy and agent. The agent runs as a process on the
//! host, behind a socket that implements the protocol of the VMM's vsock device. A table replaces the registry.
#![expect(clippy::unwrap_used, reason = "what fails here is the report")]

mod guest;
mod hostile;
mod keys;
mod limits;
mod measure;
mod reuse;
mod routing;
mod streams;
mod tls;
mod upgrades;
mod wire;
mod world;
