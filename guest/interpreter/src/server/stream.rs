//! Responses that outlive their handler: the events of a cell, and the wait for a context.

use std::time::{Duration, Instant};

use transport::{Exchange, Gone, Key, Rest, Step, http};

use super::state::{Conn, Interpreter, Job};
use crate::event::{END, Event};

/// While a connection has at least this many unsent bytes, nothing more is read from the host that runs its cell.
pub(super) const HIGH_WATER: usize = 256 << 10;
/// Time without events after which a keepalive event is sent while a cell runs or waits. Keepalives also reveal clients
/// that have vanished silently.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// How long the first line of a response is held back, so that the response of a short cell leaves in one segment.
const CORK: Duration = Duration::from_millis(5);
/// How long a host may take to start before its requester's connection is closed.
const START_PATIENCE: Duration = Duration::from_secs(120);

/// A response made of the events of a cell.
pub(super) struct CellStream {
    context: Key,
}

/// A request that is answered once a context is ready.
pub(super) struct ContextWait {
    context: Key,
}

/// Begins a response made of events.
pub(super) fn begin(conn: &mut Conn, context: Key) {
    http::push_chunked_head(&mut conn.out, http::JSON, conn.after);
    conn.corked = true;
    conn.wake = Some(Instant::now() + CORK);
    conn.begin(CellStream { context });
}

/// Leaves the request unanswered until a notice from the context answers it. After [`START_PATIENCE`] the connection is
/// closed.
pub(super) fn wait(conn: &mut Conn, context: Key) {
    conn.wake = Some(Instant::now() + START_PATIENCE);
    conn.begin(ContextWait { context });
}

/// Appends the first line of a response, which stays corked.
pub(super) fn push_first(conn: &mut Conn, event: &Event<'_>) {
    http::push_chunk(&mut conn.out, &event.line());
}

/// Appends a line, which may be sent at once.
pub(super) fn push_line(conn: &mut Conn, line: &[u8]) {
    http::push_chunk(&mut conn.out, line);
    conn.corked = false;
    conn.wake = Some(Instant::now() + KEEPALIVE);
}

/// Appends the last line and ends the response.
pub(super) fn end(conn: &mut Conn) {
    http::push_chunk(&mut conn.out, END.as_bytes());
    conn.out.extend_from_slice(http::LAST_CHUNK);
    conn.end_request(Rest::Read);
}

impl Exchange<Interpreter> for CellStream {
    fn step(
        &mut self,
        interpreter: &mut Interpreter,
        _: Key,
        conn: &mut Conn,
    ) -> Result<Step, Gone> {
        if conn.backlog() < HIGH_WATER && interpreter.has_output(self.context) {
            interpreter.enqueue(Job::Context, self.context);
        }
        conn.wait()
    }

    fn expire(
        &mut self,
        _: &mut Interpreter,
        _: Key,
        conn: &mut Conn,
        now: Instant,
    ) -> Result<(), Gone> {
        if conn.corked {
            conn.corked = false;
            conn.wake = Some(now + KEEPALIVE);
        } else {
            push_line(conn, &Event::Keepalive.line());
        }
        Ok(())
    }

    /// The client has left: its cell is interrupted, or never begins.
    fn close(&mut self, interpreter: &mut Interpreter, key: Key) {
        if let Some(context) = interpreter.contexts.get_mut(self.context) {
            context.leave(key, Instant::now());
            interpreter.enqueue(Job::Context, self.context);
        }
    }
}

impl Exchange<Interpreter> for ContextWait {
    fn step(&mut self, _: &mut Interpreter, _: Key, conn: &mut Conn) -> Result<Step, Gone> {
        conn.wait()
    }

    fn close(&mut self, interpreter: &mut Interpreter, key: Key) {
        if let Some(context) = interpreter.contexts.get_mut(self.context) {
            context.waiting.retain(|(conn, _)| *conn != key);
        }
    }
}
