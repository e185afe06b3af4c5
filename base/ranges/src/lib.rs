//! Forbidden addresses. Every program that connects for a sandbox or for a client asks here first.
//!
//! ```text
//! forbidden   the ranges, the operator's exceptions and denials: a verdict for each block; pure
//! service     a protocol and a range of ports
//! local       whether the kernel would deliver to this host: connections that the host makes for a client
//! rtnetlink   one request to the kernel's routing tables
//! ```

mod forbidden;
mod local;
pub mod rtnetlink;
mod service;

pub use forbidden::{Destinations, ForbiddenAddresses, Verdict, canonical};
pub use local::{Refused, is_of_this_host};
pub use service::{Access, Protocol};
