//! From hosts to connections: events, standard output, and the ends of cells and hosts.

use transport::{Key, ROUNDS, Work};

use super::{
    notice::Notice,
    state::{Conns, Interpreter, Job},
    stream::{self, HIGH_WATER},
};
use crate::{
    context::State,
    event::{Event, now},
    host::Stream,
    language::Language,
    message::{Line, classify},
};

/// Reads of a pipe at a cell's end. They empty a full pipe (64 KiB by default).
const LAST_READS: usize = 8;

const OUTPUTS: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

impl Interpreter {
    /// Whether a context's host has something to read, as far as the poller has reported.
    pub(super) fn has_output(&self, key: Key) -> bool {
        let context = self.contexts.get(key);
        let host = context.and_then(|context| context.host.as_ref());
        host.is_some_and(|host| host.is_readable())
    }

    /// Whether the connection of the context's running cell has room for output. Also true if no connection
    /// receives it.
    fn has_room(&self, conns: &Conns, key: Key) -> bool {
        let answered = self.answered(key).and_then(|conn| conns.get(conn));
        answered.is_none_or(|conn| conn.backlog() < HIGH_WATER)
    }

    fn answered(&self, key: Key) -> Option<Key> {
        self.contexts.get(key).and_then(|c| c.answered())
    }

    /// Moves bytes between a context's host and the connection whose cell it runs, and begins the next cell.
    pub(super) fn pump(&mut self, conns: &mut Conns, key: Key) {
        self.flush_host(conns, key);
        let answered = self.answered(key);
        let mut rounds = 0;
        while rounds < ROUNDS && self.has_output(key) && self.has_room(conns, key) {
            self.read_control(conns, key);
            for stream in OUTPUTS {
                let host = self.contexts.get(key).and_then(|c| c.host.as_ref());
                if host.is_some_and(|host| host.has_output(stream)) {
                    self.pass_output(conns, key, stream, 1);
                }
            }
            rounds += 1;
        }
        if rounds == ROUNDS {
            self.enqueue(Job::Context, key);
        }
        self.begin_next(conns, key);
        if let Some((key, conn)) = answered.and_then(|key| Some((key, conns.get_mut(key)?))) {
            conn.push_out();
            if conn.backlog() > 0 || conn.hangup {
                self.io.enqueue(Work::Conn(key));
            }
        }
    }

    /// Begins the next waiting cell if the context is idle.
    fn begin_next(&mut self, conns: &mut Conns, key: Key) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        match context.dispatch(&mut self.clone) {
            Ok(None) => {}
            Ok(Some((conn, execution_count))) => {
                if let Some(conn) = conns.get_mut(conn) {
                    stream::push_line(conn, &Event::NumberOfExecutions { execution_count }.line());
                    conn.push_out();
                }
            }
            Err(_) => self.host_died(conns, key),
        }
    }

    fn flush_host(&mut self, conns: &mut Conns, key: Key) {
        let context = self.contexts.get_mut(key);
        let Some(host) = context.and_then(|context| context.host.as_mut()) else {
            return;
        };
        if host.flush(&self.io, key).is_err() {
            self.host_died(conns, key);
        }
    }

    /// Reads a standard stream of a host at most `reads` times.
    fn pass_output(&mut self, conns: &mut Conns, key: Key, stream: Stream, reads: usize) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        let answered = context.answered();
        let Some(host) = &mut context.host else {
            return;
        };
        for _ in 0..reads {
            let Some(text) = host.read(stream, &mut self.io.scratch) else {
                return;
            };
            // Output between cells has no recipient.
            let conn = answered.and_then(|conn| conns.get_mut(conn));
            let Some(conn) = conn.filter(|_| !text.is_empty()) else {
                continue;
            };
            let timestamp = now();
            for text in texts(&context.language, stream, &text) {
                let event = match stream {
                    Stream::Stdout => Event::Stdout { text, timestamp },
                    Stream::Stderr => Event::Stderr { text, timestamp },
                };
                stream::push_line(conn, &event.line());
            }
        }
    }

    /// Reads the control socket once and handles the complete lines.
    fn read_control(&mut self, conns: &mut Conns, key: Key) {
        let context = self.contexts.get_mut(key);
        let Some(host) = context.and_then(|context| context.host.as_mut()) else {
            return;
        };
        let gone = host.receive(&mut self.io.scratch).is_err();
        while let Some(line) = self.next_line(key) {
            match classify(&line) {
                Line::Event => self.pass_event(conns, key, line),
                Line::Done => self.cell_done(conns, key),
                Line::Ready => self.host_ready(key),
                Line::Unknown => {}
            }
        }
        if gone {
            self.host_died(conns, key);
        }
    }

    fn next_line(&mut self, key: Key) -> Option<Vec<u8>> {
        self.contexts.get_mut(key)?.host.as_mut()?.next_line()
    }

    fn pass_event(&mut self, conns: &mut Conns, key: Key, mut line: Vec<u8>) {
        if let Some(conn) = self.answered(key).and_then(|conn| conns.get_mut(conn)) {
            line.push(b'\n');
            stream::push_line(conn, &line);
        }
    }

    /// Handles the end of a cell: sends its remaining output, and then ends its response.
    fn cell_done(&mut self, conns: &mut Conns, key: Key) {
        for stream in OUTPUTS {
            self.pass_output(conns, key, stream, LAST_READS);
        }
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        let answered = context.answered();
        context.patience = None;
        if matches!(context.state, State::Running(_)) {
            context.state = State::Idle;
        }
        if let Some((key, conn)) = answered.and_then(|key| Some((key, conns.get_mut(key)?))) {
            stream::end(conn);
            // The client may have sent its next request already.
            self.io.enqueue(Work::Conn(key));
        }
    }

    fn host_ready(&mut self, key: Key) {
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        if matches!(context.state, State::Starting) {
            context.state = State::Idle;
        }
        self.answer_waiting(key);
    }

    /// Handles a host that has ended or must be replaced: its cell ends with an error, and another host takes its place
    /// unless this one never became ready.
    pub(super) fn host_died(&mut self, conns: &mut Conns, key: Key) {
        for stream in OUTPUTS {
            self.pass_output(conns, key, stream, LAST_READS);
        }
        let Some(context) = self.contexts.get_mut(key) else {
            return;
        };
        let answered = context.answered();
        let worked = !matches!(context.state, State::Starting);
        self.end_host(key);
        self.notify(answered, Notice::HostDied);
        if worked {
            self.start_host(key);
        } else {
            self.fail_waiting(key);
        }
    }
}

/// The texts of the events for an output. E2B's kernel for Java sends the end of a line by itself, and clients look
/// at the first text.
fn texts<'a>(language: &Language, stream: Stream, text: &'a str) -> impl Iterator<Item = &'a str> {
    let is_split = *language == Language::Java && stream == Stream::Stdout;
    let end = match text.strip_suffix('\n').filter(|_| is_split) {
        Some(line) => line.len(),
        None => text.len(),
    };
    let (line, end) = text.split_at(end);
    [line, end].into_iter().filter(|text| !text.is_empty())
}
