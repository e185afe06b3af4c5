//! The event loop, and the table of connections.

use std::time::{Duration, Instant};

use nix::{
    errno::Errno,
    sys::epoll::{EpollEvent, EpollFlags, EpollTimeout},
};

use crate::{
    conn::{Conn, Conns, Gone, Phase},
    listener::Listener,
    reactor::{CONN_EVENTS, Token, Work},
    request,
    service::Service,
    slots::{Key, Slots},
};

/// Largest number of events taken from the poller at once.
const EVENTS: usize = 32;

/// The server cannot start or continue.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}")]
pub struct ServerError {
    action: &'static str,
    #[source]
    source: Errno,
}

impl ServerError {
    /// An error of the form "cannot `action`", for `map_err`.
    pub fn cannot(action: &'static str) -> impl FnOnce(Errno) -> Self {
        move |source| Self { action, source }
    }
}

/// Listeners, connections and a service.
pub struct Server<S: Service> {
    listeners: Vec<Listener>,
    conns: Conns<S>,
    service: S,
}

impl<S: Service> Server<S> {
    /// Creates a server and adds its listeners to the poller. There must be at most 256 of them.
    ///
    /// # Errors
    /// Returns an error if a listener cannot be polled.
    pub fn new(listeners: Vec<Listener>, mut service: S) -> Result<Self, ServerError> {
        for (index, listener) in (0..).zip(&listeners) {
            let watched = service
                .reactor()
                .watch_level(listener.fd(), Token::Listener(index));
            watched.map_err(ServerError::cannot("watch a listener"))?;
        }
        Ok(Self {
            listeners,
            conns: Slots::new(),
            service,
        })
    }

    pub fn service(&mut self) -> &mut S {
        &mut self.service
    }

    /// Serves until [`Service::is_ending`] returns true.
    ///
    /// # Errors
    /// Returns an error if `epoll_wait` fails.
    pub fn run(&mut self) -> Result<(), ServerError> {
        let mut events = [EpollEvent::empty(); EVENTS];
        while !self.service.is_ending() {
            let timeout = self.timeout();
            let count = match self.service.reactor().wait(&mut events, timeout) {
                Ok(count) => count,
                Err(Errno::EINTR) => 0,
                Err(source) => return Err(ServerError::cannot("wait for events")(source)),
            };
            for event in events.iter().take(count) {
                self.mark(Token::from_bits(event.data()), event.events());
            }
            if timeout != EpollTimeout::NONE {
                self.fire_deadlines(Instant::now());
            }
            for _ in 0..self.service.reactor().pending() {
                match self.service.reactor().next() {
                    Some(Work::Conn(key)) => self.pump(key),
                    Some(Work::Service(kind, key)) => {
                        self.service.work(&mut self.conns, kind, key);
                    }
                    None => break,
                }
            }
        }
        Ok(())
    }

    /// How long the poller may wait: until the next deadline but at most a day, not at all if work is queued, and
    /// without limit if there is no deadline.
    fn timeout(&mut self) -> EpollTimeout {
        if self.service.reactor().pending() > 0 {
            return EpollTimeout::ZERO;
        }
        let conns = self.conns.iter().filter_map(|(_, conn)| conn.wake);
        let Some(next) = conns.chain(self.service.deadline()).min() else {
            return EpollTimeout::NONE;
        };
        // Rounded up, so that the deadline has passed when the poller returns.
        let left = next.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        let day = Duration::from_secs(86_400);
        EpollTimeout::try_from(left.min(day)).unwrap_or(EpollTimeout::ZERO)
    }

    /// Handles one event: accepts a connection, or records that a descriptor is ready and queues the work of its
    /// connection.
    fn mark(&mut self, token: Token, flags: EpollFlags) {
        match token {
            Token::Listener(index) => self.accept(index),
            Token::Conn(key) => {
                if let Some(conn) = self.conns.get_mut(key) {
                    conn.mark(flags);
                    self.service.reactor().enqueue(Work::Conn(key));
                }
            }
            Token::Exchange(key) => {
                if let Some(conn) = self.conns.get_mut(key) {
                    if let Phase::Exchange(Some(exchange)) = &mut conn.phase {
                        exchange.ready(flags);
                    }
                    self.service.reactor().enqueue(Work::Conn(key));
                }
            }
            Token::Service(source, key) => self.service.ready(source, key, flags),
        }
    }

    /// Accepts one connection. If more are pending, the level-triggered poller reports the listener again. Calling
    /// `accept` until it fails would cost each client up to 4 ms: with nothing pending, Linux 6.1's vsock sleeps until
    /// the next tick even on a non-blocking socket (`vsock_accept` calls `schedule_timeout(0)`).
    fn accept(&mut self, listener: u8) {
        let listener = self.listeners.get(usize::from(listener));
        let Some(socket) = listener.and_then(Listener::accept) else {
            return;
        };
        if self.conns.len() >= S::MAX_CONNS && !self.close_most_idle() {
            // Every connection is busy: the new one is closed.
            return;
        }
        let token = Token::Conn(self.conns.next_key());
        let reactor = self.service.reactor();
        if reactor.watch(&socket, token, CONN_EVENTS).is_ok() {
            let key = self.conns.insert(Conn::new(socket));
            reactor.enqueue(Work::Conn(key));
        }
    }

    #[cold]
    #[inline(never)]
    fn close_most_idle(&mut self) -> bool {
        let idle = self.conns.iter().filter(|(_, conn)| conn.is_idle());
        let oldest = idle.min_by_key(|(_, conn)| conn.used).map(|(key, _)| key);
        oldest.is_some_and(|key| self.conns.remove(key).is_some())
    }

    fn pump(&mut self, key: Key) {
        let Some(conn) = self.conns.get_mut(key) else {
            return;
        };
        if request::pump(&mut self.service, key, conn).is_err() {
            self.close(key);
        }
    }

    fn close(&mut self, key: Key) {
        let Some(conn) = self.conns.remove(key) else {
            return;
        };
        if let Phase::Exchange(Some(mut exchange)) = conn.phase {
            exchange.close(&mut self.service, key);
        }
    }

    fn fire_deadlines(&mut self, now: Instant) {
        self.service.expire(&mut self.conns, now);
        let due = self.conns.iter();
        let due = due.filter(|(_, conn)| conn.wake.is_some_and(|at| at <= now));
        let due: Vec<Key> = due.map(|(key, _)| key).collect();
        for key in due {
            if self.wake(key, now).is_err() {
                self.close(key);
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn wake(&mut self, key: Key, now: Instant) -> Result<(), Gone> {
        let Some(conn) = self.conns.get_mut(key) else {
            return Ok(());
        };
        conn.wake = None;
        match &mut conn.phase {
            Phase::Head | Phase::Collect { .. } | Phase::Receive { .. } => {
                conn.refuse(408, "the request did not arrive in time");
            }
            Phase::Exchange(exchange) => {
                let Some(mut exchange) = exchange.take() else {
                    return Err(Gone);
                };
                let expired = exchange.expire(&mut self.service, key, conn, now);
                conn.put_back(exchange);
                expired?;
            }
            Phase::Closing(_) | Phase::Draining { .. } => return Err(Gone),
        }
        self.service.reactor().enqueue(Work::Conn(key));
        Ok(())
    }
}
