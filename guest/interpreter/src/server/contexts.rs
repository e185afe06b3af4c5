//! From hosts to connections: what they say, what they print, and how they end.

use std::time::Instant;

use super::{OUTPUTS, Server};
use crate::{
    conn::{HIGH_WATER, Phase},
    context::{Context, State},
    event::{Event, now as wall_clock},
    host::Stream,
    http,
    message::{Line, classify},
};

/// Pieces of output that are passed on at a cell's end: all that a pipe holds, with room to spare.
const LAST_PIECES: usize = 8;

impl Server {
    fn context(&mut self, serial: u64) -> Option<&mut Context> {
        self.contexts.iter_mut().find(|c| c.serial == serial)
    }

    /// Whether more may be read from a host: its client takes what was read before.
    pub(super) fn has_room(&self, context: &Context) -> bool {
        let conn = context.answered().and_then(|conn| self.conns.get(&conn));
        conn.is_none_or(|conn| conn.backlog() < HIGH_WATER)
    }

    /// Begins waiting cells on hosts that have nothing to do.
    pub(super) fn dispatch(&mut self, now: Instant) {
        let mut broken = Vec::new();
        for context in &mut self.contexts {
            match context.dispatch(&mut self.clone) {
                Ok(None) => {}
                Ok(Some((conn, execution_count))) => {
                    if let Some(conn) = self.conns.get_mut(&conn) {
                        conn.push_event(&Event::NumberOfExecutions { execution_count }, now);
                    }
                }
                Err(_) => broken.push(context.serial),
            }
        }
        for serial in broken {
            self.host_died(serial);
        }
    }

    pub(super) fn flush_host(&mut self, serial: u64) {
        let host = self.context(serial).and_then(|c| c.host.as_mut());
        if host.is_some_and(|host| host.flush().is_err()) {
            self.host_died(serial);
        }
    }

    /// Passes on what a host's code printed, so many pieces at most.
    pub(super) fn pass_output(&mut self, serial: u64, stream: Stream, pieces: usize) {
        let Some(context) = self.contexts.iter_mut().find(|c| c.serial == serial) else {
            return;
        };
        let answered = context.answered();
        let Some(host) = &mut context.host else {
            return;
        };
        for _ in 0..pieces {
            let Some(text) = host.read(stream, &mut self.scratch) else {
                return;
            };
            let conn = answered.and_then(|conn| self.conns.get_mut(&conn));
            // Who prints between cells prints to nobody.
            let Some(conn) = conn.filter(|_| !text.is_empty()) else {
                continue;
            };
            let (text, timestamp) = (text.as_str(), wall_clock());
            let event = match stream {
                Stream::Stdout => Event::Stdout { text, timestamp },
                Stream::Stderr => Event::Stderr { text, timestamp },
            };
            conn.push_event(&event, Instant::now());
            conn.hurry();
        }
    }

    /// Takes what a host says.
    pub(super) fn hear(&mut self, serial: u64) {
        let Some(context) = self.contexts.iter_mut().find(|c| c.serial == serial) else {
            return;
        };
        let Some(host) = &mut context.host else {
            return;
        };
        let gone = host.receive(&mut self.scratch).is_err();
        while let Some(line) = self.next_line(serial) {
            match classify(&line) {
                Line::Event => self.pass_event(serial, line),
                Line::Done => self.cell_done(serial),
                Line::Ready => self.host_ready(serial),
                Line::Unknown => {}
            }
        }
        if gone {
            self.host_died(serial);
        }
    }

    fn next_line(&mut self, serial: u64) -> Option<Vec<u8>> {
        self.context(serial)?.host.as_mut()?.next_line()
    }

    fn pass_event(&mut self, serial: u64, mut line: Vec<u8>) {
        let answered = self.context(serial).and_then(|c| c.answered());
        if let Some(conn) = answered.and_then(|conn| self.conns.get_mut(&conn)) {
            line.push(b'\n');
            conn.push_line(&line, Instant::now());
            conn.hurry();
        }
    }

    /// A cell is over: what it printed goes before the end of its answer.
    fn cell_done(&mut self, serial: u64) {
        for stream in OUTPUTS {
            self.pass_output(serial, stream, LAST_PIECES);
        }
        let Some(context) = self.context(serial) else {
            return;
        };
        let answered = context.answered();
        context.patience = None;
        if matches!(context.state, State::Running(_)) {
            context.state = State::Idle;
        }
        self.end_answer(answered);
    }

    fn end_answer(&mut self, answered: Option<u64>) {
        let Some(serial) = answered else { return };
        if let Some(conn) = self.conns.get_mut(&serial) {
            conn.end_stream();
            // The client may have sent its next request already.
            self.go_on(serial);
        }
    }

    fn host_ready(&mut self, serial: u64) {
        let Some(context) = self.context(serial) else {
            return;
        };
        if matches!(context.state, State::Starting) {
            context.state = State::Idle;
        }
        self.answer_waiting(serial);
    }

    /// A host is gone: its cell is told so, and another one takes its place, unless it never worked.
    pub(super) fn host_died(&mut self, serial: u64) {
        for stream in OUTPUTS {
            self.pass_output(serial, stream, LAST_PIECES);
        }
        let Some(context) = self.context(serial) else {
            return;
        };
        let (answered, worked) = (
            context.answered(),
            !matches!(context.state, State::Starting),
        );
        self.end_host(serial);
        self.tell(answered, &Event::unexpected_end());
        self.end_answer(answered);
        if worked {
            self.revive(serial)
        } else {
            self.fail_waiting(serial)
        }
    }

    /// Takes the host away, however busy it is.
    fn end_host(&mut self, serial: u64) {
        let Some(context) = self.context(serial) else {
            return;
        };
        context.state = State::Failed;
        if let Some(host) = context.host.take() {
            self.graves.extend(host.kill());
        }
    }

    fn tell(&mut self, answered: Option<u64>, event: &Event<'_>) {
        if let Some(conn) = answered.and_then(|conn| self.conns.get_mut(&conn)) {
            conn.push_event(event, Instant::now());
        }
    }

    /// Starts a host where there is none.
    pub(super) fn revive(&mut self, serial: u64) {
        let Some(context) = self.contexts.iter_mut().find(|c| c.serial == serial) else {
            return;
        };
        if !matches!(context.state, State::Failed) {
            return;
        }
        let (hosts, clone, zygote) = (&self.config.hosts, &mut self.clone, &mut self.zygote);
        if context.start(hosts, clone, zygote).is_err() {
            self.fail_waiting(serial);
        }
    }

    /// No host can be started: everybody who waits for one is told.
    fn fail_waiting(&mut self, serial: u64) {
        let Some(context) = self.context(serial) else {
            return;
        };
        let language = context.language.name().to_owned();
        let jobs = std::mem::take(&mut context.queue);
        let text = format!("Failed to create context: the host of {language} does not start");
        for job in jobs {
            let event = Event::Error {
                name: "UnexpectedEndOfExecution",
                value: &text,
                traceback: "",
            };
            self.tell(Some(job.conn), &event);
            self.end_answer(Some(job.conn));
        }
        for conn in self.awaiting(serial) {
            self.error(conn, 500, &text);
        }
    }

    fn awaiting(&self, serial: u64) -> Vec<u64> {
        let waits =
            |phase: &Phase| matches!(phase, Phase::Await { context, .. } if *context == serial);
        let conns = self.conns.iter().filter(|(_, conn)| waits(&conn.phase));
        conns.map(|(serial, _)| *serial).collect()
    }

    /// Answers those who waited for a context, once it is ready.
    pub(super) fn answer_waiting(&mut self, serial: u64) {
        if self
            .context(serial)
            .is_none_or(|context| !context.is_ready())
        {
            return;
        }
        for conn in self.awaiting(serial) {
            let Some(conn) = self.conns.get_mut(&conn) else {
                continue;
            };
            if let Phase::Await { answer, .. } = std::mem::replace(&mut conn.phase, Phase::Head) {
                conn.answer(200, http::JSON, &answer);
            }
        }
    }

    /// Ends the running cell with the host; those that wait run on the new one.
    pub(super) fn restart_context(&mut self, serial: u64) {
        let answered = self.context(serial).and_then(|c| c.answered());
        self.end_host(serial);
        self.tell(answered, &Event::restarted());
        self.end_answer(answered);
        self.revive(serial);
    }

    /// Ends the context and all that waits for it.
    pub(super) fn remove_context(&mut self, serial: u64) {
        let Some(context) = self.context(serial) else {
            return;
        };
        let queue = std::mem::take(&mut context.queue);
        let waiting = queue.into_iter().map(|job| job.conn);
        let everybody: Vec<u64> = context.answered().into_iter().chain(waiting).collect();
        self.end_host(serial);
        self.contexts.retain(|context| context.serial != serial);
        for conn in everybody {
            self.tell(Some(conn), &Event::unexpected_end());
            self.end_answer(Some(conn));
        }
        for conn in self.awaiting(serial) {
            self.error(conn, 500, "the context was removed");
        }
    }
}
