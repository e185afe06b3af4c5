//! Delivering notices to connections.

use transport::{Key, Work, http};

use super::{
    notice::Notice,
    state::{Conn, Conns, Interpreter, Job},
    stream,
};
use crate::event::Event;

impl Interpreter {
    pub(super) fn notify(&mut self, conn: Option<Key>, notice: Notice) {
        if let Some(conn) = conn {
            self.notices.push((conn, notice));
            self.enqueue(Job::Notices, Key::default());
        }
    }

    /// Delivers all notices.
    pub(super) fn deliver(&mut self, conns: &mut Conns) {
        for (key, notice) in std::mem::take(&mut self.notices) {
            if let Some(conn) = conns.get_mut(key) {
                notice.deliver(conn);
                conn.push_out();
                // The client may have sent its next request already.
                self.io.enqueue(Work::Conn(key));
            }
        }
    }
}

impl Notice {
    fn deliver(self, conn: &mut Conn) {
        let event = match &self {
            Self::Ready(answer) => return conn.answer(200, http::JSON, answer),
            Self::NotReady(text) => return conn.error(500, text),
            Self::HostDied => Event::unexpected_end(),
            Self::Restarted => Event::restarted(),
            Self::NoHost(text) => Event::no_host(text),
        };
        stream::push_line(conn, &event.line());
        stream::end(conn);
    }
}
