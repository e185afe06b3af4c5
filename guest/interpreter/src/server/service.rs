//! The interpreter as a service of [`transport`]: events of its hosts, deadlines, and the format of errors.

use std::time::Instant;

use envd::Framing;
use nix::sys::epoll::EpollFlags;
use transport::{Admission, After, Head, Key, Reactor, Service, http};

use super::state::{Conn, Conns, Interpreter, Job};
use crate::host::Source;

const TEXT: &str = "text/plain; charset=utf-8";

impl Service for Interpreter {
    type Fields = ();
    type Call = ();

    const MAX_CONNS: usize = 256;
    /// Large, because code may contain data.
    const MAX_BODY: usize = 32 << 20;

    #[inline]
    fn reactor(&mut self) -> &mut Reactor {
        &mut self.io
    }

    fn admit(&mut self, _: Key, _: &mut Conn, _: &Head<()>, _: &Framing) -> Admission<Self> {
        Admission::Handle
    }

    fn handle(&mut self, key: Key, conn: &mut Conn, head: &Head<()>, body: &[u8]) {
        self.route(key, conn, head, body);
    }

    /// Plain text, as the official server sends it.
    fn push_error(out: &mut Vec<u8>, status: u16, message: &str, after: After) {
        http::push_answer(out, status, TEXT, message.as_bytes(), after);
    }

    fn ready(&mut self, source: u8, key: Key, flags: EpollFlags) {
        let host = self.contexts.get_mut(key).and_then(|c| c.host.as_mut());
        if let (Some(host), Some(source)) = (host, Source::find(source)) {
            host.mark(source, flags);
            self.enqueue(Job::Context, key);
        }
    }

    fn work(&mut self, conns: &mut Conns, kind: u8, key: Key) {
        if kind == Job::Context as u8 {
            self.pump(conns, key);
        }
        self.deliver(conns);
    }

    fn deadline(&self) -> Option<Instant> {
        let contexts = self.contexts.iter();
        let contexts = contexts.filter_map(|(_, context)| context.patience);
        contexts.chain(self.reap_at).min()
    }

    fn expire(&mut self, conns: &mut Conns, now: Instant) {
        let contexts = self.contexts.iter();
        let due = contexts.filter(|(_, context)| context.patience.is_some_and(|at| at <= now));
        let due: Vec<Key> = due.map(|(key, _)| key).collect();
        for key in due {
            let context = self.contexts.get_mut(key);
            if context.is_some_and(|context| context.lose_patience(now)) {
                self.host_died(conns, key);
            }
            // Sends the interrupt if the socket was full.
            self.enqueue(Job::Context, key);
        }
        if self.reap_at.is_some_and(|at| at <= now) {
            self.reap(now);
        }
        self.deliver(conns);
    }
}
