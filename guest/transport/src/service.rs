//! The traits that a program implements: [`Service`], and [`Exchange`] and [`Sink`] for its requests.

use std::{any::Any, time::Instant};

use envd::Framing;
use nix::sys::epoll::EpollFlags;

use crate::{
    conn::{Conn, Conns, Gone},
    http::{After, Fields, Head},
    reactor::Reactor,
    slots::Key,
};

/// A program's requests and the state that they share.
pub trait Service: Sized + 'static {
    /// Headers that the program reads.
    type Fields: Fields;
    /// The program's state for the current request, kept with the connection and reset to the default when the request
    /// ends.
    type Call: Copy + Default;

    /// Largest number of connections. A further connection replaces the one that has been idle longest, or is closed if
    /// none is idle.
    const MAX_CONNS: usize;
    /// Largest body in bytes for [`Service::handle`]. A larger one is refused with 413.
    const MAX_BODY: usize;

    fn reactor(&mut self) -> &mut Reactor;

    /// Decides how to handle a request whose head has arrived. Its body has not been read yet.
    fn admit(
        &mut self,
        key: Key,
        conn: &mut Conn<Self>,
        head: &Head<Self::Fields>,
        body: &Framing,
    ) -> Admission<Self>;

    /// Answers an admitted request, or begins an exchange that will answer it.
    fn handle(&mut self, key: Key, conn: &mut Conn<Self>, head: &Head<Self::Fields>, body: &[u8]);

    /// Appends a complete error response in the program's format to `out`.
    fn push_error(out: &mut Vec<u8>, status: u16, message: &str, after: After);

    /// Records that a descriptor with [`crate::Token::Service`] is ready. This should only queue work, which
    /// [`Service::work`] then does.
    fn ready(&mut self, source: u8, key: Key, flags: EpollFlags);

    /// Takes a step that was queued as [`crate::Work::Service`].
    fn work(&mut self, conns: &mut Conns<Self>, kind: u8, key: Key);

    /// When [`Service::expire`] must be called next; `None` if nothing is due.
    fn deadline(&self) -> Option<Instant>;

    /// Handles those of the service's deadlines that have passed at `now`. There may be none.
    fn expire(&mut self, conns: &mut Conns<Self>, now: Instant);

    /// Whether [`crate::Server::run`] should return.
    fn is_ending(&self) -> bool {
        false
    }
}

/// How to handle a request.
pub enum Admission<S: Service> {
    /// [`Service::handle`] gets the head and the whole body.
    Handle,
    /// The body goes to a sink as it arrives.
    Receive(Box<dyn Sink<S>>),
    /// [`Service::admit`] has answered the request, or has begun an exchange that reads the body itself.
    Begun,
    Refuse(Refusal),
}

/// An error response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub status: u16,
    pub message: String,
}

/// Whether there is more to do without waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Again,
    /// Nothing can be done before the next event or deadline.
    Wait,
}

/// A response that continues after its handler has returned. It must end with [`Conn::end_request`], after which it
/// is dropped.
pub trait Exchange<S: Service>: Any {
    /// Does what can be done without waiting.
    ///
    /// # Errors
    /// Returns [`Gone`] if the connection must be closed.
    fn step(&mut self, service: &mut S, key: Key, conn: &mut Conn<S>) -> Result<Step, Gone>;

    /// Called when [`Conn::wake`] has passed.
    ///
    /// # Errors
    /// Returns [`Gone`] if the connection must be closed. The default implementation always does.
    fn expire(
        &mut self,
        _service: &mut S,
        _key: Key,
        _conn: &mut Conn<S>,
        _now: Instant,
    ) -> Result<(), Gone> {
        Err(Gone)
    }

    /// Records that a descriptor with [`crate::Token::Exchange`] is ready. [`Exchange::step`] is called afterwards.
    fn ready(&mut self, _flags: EpollFlags) {}

    /// Called when the connection is closed before the request has ended.
    fn close(&mut self, _service: &mut S, _key: Key) {}
}

/// A consumer of a request's body.
pub trait Sink<S: Service> {
    /// Takes the next bytes.
    ///
    /// # Errors
    /// Returns the error response if the bytes cannot be taken. The sink then gets no more of the body, and the
    /// connection is closed after the response.
    fn write(&mut self, bytes: &[u8]) -> Result<(), Refusal>;

    /// Answers the request after the last byte of its body.
    fn finish(self: Box<Self>, service: &mut S, conn: &mut Conn<S>);
}
