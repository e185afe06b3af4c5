//! HTTP/1.1 on vsock, unix and TCP sockets: one thread, one epoll loop, no async runtime.
//!
//! Every clone of a snapshot pays for each page that its first requests touch. A request here touches one connection,
//! one scratch buffer and a few heap pages; there are no wakers, task queues, timers or second stacks. Every step is
//! short, and every wait is for a file descriptor or a deadline, so a runtime would add nothing.
//!
//! ```text
//! epoll ─► ready flags (connection, descriptor of a service) ─► work queue ─┬─► connection: head ─► body ─► Service
//!                                                                           │               or Exchange::step
//!                                                                           └─► Service::work
//! ```
//! [`Server`] owns listeners, connections and the [`Service`]. The crate contains no service: a program implements
//! [`Service`], which admits and serves requests, and an [`Exchange`] for each kind of response that continues
//! after its handler has returned: a stream, a download, a tunnel. A handler gets only its own connection; it
//! reaches other connections through the work queue.
//!
//! Back-pressure: no request is read from a connection that has unsent output, and exchanges stop producing output when
//! [`Conn::backlog`] reaches their high-water mark.
//!
//! Invariants: the thread blocks only in `epoll_wait`; no connection can starve the others, because it queues behind
//! them after a limited number of steps ([`ROUNDS`]). Services must limit the work on their own descriptors in the same
//! way.

mod server;
mod service;

mod listener;
mod reactor;

mod conn;
mod request;

pub mod http;
mod slots;
mod sys;

pub use conn::{Conn, Conns, Gone, Received, Rest};
pub use http::{After, Fields, Head};
pub use listener::{ListenError, Listener, Peers};
pub use reactor::{Reactor, Token, Work};
pub use request::ROUNDS;
pub use server::{Server, ServerError};
pub use service::{Admission, Exchange, Refusal, Service, Sink, Step};
pub use slots::{Key, Slots};
