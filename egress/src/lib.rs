//! The egress proxy. `cube-egress` is an unprivileged process on the host that handles the flows of sandboxes to ports 80
//! and 443 which were admitted by a name: it compares the names in TLS and HTTP with the names that the resolver answered,
//! and adds the headers of the sandbox's rules. The library is what its owner, `cube-api`, needs: the messages.

pub mod control;
