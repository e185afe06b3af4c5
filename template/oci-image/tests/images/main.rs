//! Images from layers to mounted file systems.
//!
//! Tests with the prefix `image_` need root, and Debian's packages `umoci` and `docker-registry`.

#![expect(
    clippy::unwrap_used,
    reason = "a test ends at the first unexpected error"
)]

mod archive;
mod cases;
mod listing;
mod model;
mod mounted;
mod provision;
mod pulls;
mod real_registry;
mod registry;
mod server;
mod unpacked;
mod worker;
