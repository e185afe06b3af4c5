//! HTTP/1.1 on vsock, unix and TCP sockets: one thread, one epoll loop, no async runtime.
//!
//! Every clone of a snapshot pays for each page that its first requests touch. A request here touches one
//! connection, one scratch buffer and a few heap pages; there are no wakers, task queues, timers or second
//! stacks. All work is short, and everything that waits is a file descriptor, so a runtime would add nothing.
//!
//! ```text
//! epoll ─► ready flags (connection, descriptor of a service) ─► work queue ─┬─► connection: head ─► body ─► Service
//!                                                                           │               or Exchange::step
//!                                                                           └─► Service::work
//! ```
//! [`Server`] owns listeners, connections and the [`Service`]. The crate names no service: a program implements
//! [`Service`] (which requests are admitted, which handler answers) and one [`Exchange`] per answer that is not
//! complete when its handler returns: a stream, a download, a tunnel. A handler gets its own connection only;
//! it reaches other connections through the work queue.
//!
//! Back-pressure: a connection whose output is not yet sent is not read, and producers stop at a high-water mark
//! that they compare with [`Conn::backlog`].
//!
//! Invariants: the thread blocks only in `epoll_wait`; no service can starve another, because a connection or
//! descriptor gets at most [`ROUNDS`] steps per turn.

mod conn;
pub mod http;
mod listener;
mod reactor;
mod request;
mod server;
mod service;
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
