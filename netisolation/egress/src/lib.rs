//! The egress proxy. `cube-egress` is an unprivileged process on the host that handles the flows of sandboxes to ports
//! 80 and 443 which were allowed by a name. It compares the names in TLS and HTTP with the names that the resolver
//! resolved, and adds the headers of the sandbox's rules.
//!
//! The library contains the messages between the proxy and its owner, `cube-api`, and the pure readers of a guest's bytes,
//! which fuzz targets call. The proxy itself is the program.

pub mod control;
pub mod framing;
pub mod hello;
pub mod name;
