//! `WatchDir`: changes as messages of a stream, for as long as its connection lasts.

use std::time::{Duration, Instant};

use api_types::envd::{ConnectCode, ConnectError, Empty, FilesystemEvent, WatchDirResponse};

use super::{
    super::{
        Core, ROUNDS, Server, Work,
        conn::{Conn, HIGH_WATER, Phase, Rest},
        events,
        http::{self, Head},
        rpc,
        slots::Key,
    },
    Sink, Watcher, describe, insert, open, told,
};

/// A connection that gets changes.
pub(crate) struct WatchStream {
    pub(crate) watcher: Key,
    /// When it ends: the caller said so.
    deadline: Option<Instant>,
    keepalive: Duration,
    next_keepalive: Instant,
}

impl WatchStream {
    fn wake(&self) -> Instant {
        let keepalive = self.next_keepalive;
        self.deadline
            .map_or(keepalive, |deadline| deadline.min(keepalive))
    }

    fn delay_keepalive(&mut self, now: Instant) -> Instant {
        self.next_keepalive = now + self.keepalive;
        self.wake()
    }
}

fn push(conn: &mut Conn, message: &WatchDirResponse) {
    let json = serde_json::to_vec(message).unwrap_or_default();
    events::push_json(&mut conn.out, conn.codec, &json);
}

/// Answers with a stream.
#[cold]
#[inline(never)]
pub(crate) fn begin(core: &mut Core, key: Key, conn: &mut Conn, head: &Head, body: &[u8]) {
    let opened = rpc::message(body).and_then(|request| open(core, head, &request));
    let watcher = opened.and_then(|(tree, detail)| {
        let watcher = Watcher {
            tree: Some(tree),
            detail,
            readable: false,
            sink: Sink::Stream(key),
        };
        insert(core, watcher)
    });
    let watcher = match watcher {
        Ok(watcher) => watcher,
        Err(error) => return conn.refuse_stream(error),
    };
    let now = Instant::now();
    let keepalive = head.keepalive.unwrap_or(rpc::KEEPALIVE);
    let stream = WatchStream {
        watcher,
        deadline: head.timeout.and_then(|timeout| now.checked_add(timeout)),
        keepalive,
        next_keepalive: now + keepalive,
    };
    let content_type = conn.codec.stream_type();
    http::push_chunked_head(&mut conn.out, content_type, conn.after);
    let start = Some(Empty {});
    push(
        conn,
        &WatchDirResponse {
            start,
            ..WatchDirResponse::default()
        },
    );
    conn.wake = Some(stream.wake());
    conn.phase = Phase::Watch(Box::new(stream));
}

/// Whether changes wait for a connection that has room again.
pub(crate) fn has_news(core: &mut Core, watcher: Key) -> bool {
    let watcher = core.watchers.get_mut(watcher);
    watcher.is_some_and(|watcher| watcher.readable)
}

impl Server {
    /// Moves changes to whom they are for.
    #[cold]
    #[inline(never)]
    pub(in super::super) fn pump_watch(&mut self, key: Key) {
        let Some(watcher) = self.core.watchers.get_mut(key) else {
            return;
        };
        let conn_key = match &watcher.sink {
            Sink::Stream(conn) => *conn,
            Sink::Queue(_) => {
                if watcher.collect(&mut self.core.users) {
                    self.core.enqueue(Work::Watch(key));
                }
                return;
            }
        };
        let Some(conn) = self.conns.get_mut(conn_key) else {
            self.core.watchers.remove(key);
            return;
        };
        let Some(tree) = &mut watcher.tree else {
            return;
        };
        let mut rounds = 0;
        while watcher.readable && conn.backlog() < HIGH_WATER && rounds < ROUNDS {
            let mut changes = Vec::new();
            let read = tree.read(&mut changes);
            for event in describe(tree, watcher.detail, changes, &mut self.core.users) {
                push_change(conn, event);
            }
            match read {
                Ok(more) => watcher.readable = more,
                Err(error) => return self.end_watch(conn_key, told(&error)),
            }
            conn.hangup |= conn.flush().is_err();
            rounds += 1;
        }
        if rounds == ROUNDS {
            self.core.enqueue(Work::Watch(key));
        }
        self.core.enqueue(Work::Conn(conn_key));
    }

    /// A keepalive, or the end.
    #[cold]
    #[inline(never)]
    pub(in super::super) fn wake_watch(&mut self, key: Key, now: Instant) {
        let Some(conn) = self.conns.get_mut(key) else {
            return;
        };
        let Phase::Watch(stream) = &mut conn.phase else {
            return;
        };
        if stream.deadline.is_some_and(|at| at <= now) {
            let error =
                ConnectError::new(ConnectCode::DeadlineExceeded, "context deadline exceeded");
            return self.end_watch(key, error);
        }
        conn.wake = Some(stream.delay_keepalive(now));
        if conn.out.len() < HIGH_WATER {
            let keepalive = Some(Empty {});
            push(
                conn,
                &WatchDirResponse {
                    keepalive,
                    ..WatchDirResponse::default()
                },
            );
        }
        self.core.enqueue(Work::Conn(key));
    }

    fn end_watch(&mut self, key: Key, error: ConnectError) {
        let Some(conn) = self.conns.get_mut(key) else {
            return;
        };
        if let Phase::Watch(stream) = &conn.phase {
            self.core.watchers.remove(stream.watcher);
        }
        events::push_end_stream(&mut conn.out, Some(error));
        conn.end_request(Rest::Read);
        self.core.enqueue(Work::Conn(key));
    }
}

fn push_change(conn: &mut Conn, event: FilesystemEvent) {
    push(
        conn,
        &WatchDirResponse {
            filesystem: Some(event),
            ..WatchDirResponse::default()
        },
    );
    if let Phase::Watch(stream) = &mut conn.phase {
        conn.wake = Some(stream.delay_keepalive(Instant::now()));
    }
}
