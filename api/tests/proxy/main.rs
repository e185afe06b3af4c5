//! The data plane over real sockets: the real listener and proxy, and the real agent as a process on the
//! host behind a socket that speaks as the VMM's vsock device does. Only the registry is a table.
#![expect(clippy::unwrap_used, reason = "what fails here is the report")]

mod guest;
mod hostile;
mod limits;
mod measure;
mod routing;
mod streams;
mod tls;
mod upgrades;
mod wire;
mod world;
