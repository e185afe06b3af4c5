//! `cube-egress` as started by its owner, with a stand-in for `cube-api` at the other end of the control socket,
//! servers with their own certificate authority, and clients that trust the proxy's authority.

#![expect(
    clippy::unwrap_used,
    reason = "a test ends at the first unexpected error"
)]

mod bodies;
mod client;
mod desync;
mod frames;
mod life;
mod names;
mod origin;
mod plain;
mod requests;
mod speed;
mod way;
mod websocket;
mod world;
