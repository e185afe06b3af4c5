//! `WatchDir`: changes as messages of a stream, until its connection closes.

use std::time::{Duration, Instant};

use envd::{ConnectCode::DeadlineExceeded, ConnectError, Empty, FilesystemEvent, WatchDirResponse};
use transport::{Exchange, Gone, Key, ROUNDS, Step, Work};

use super::{
    super::{
        answer, call,
        core::{Conn, Conns, Core, Job},
        envelope,
        head::Head,
        message,
        process::follow::{HIGH_WATER, KEEPALIVE},
    },
    insert, open,
    watcher::{Sink, Watcher, describe, failure},
};

/// A stream of changes.
struct WatchStream {
    watcher: Key,
    /// When the stream ends (`Connect-Timeout-Ms`).
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
    envelope::push_json(&mut conn.out, conn.call, &json);
}

/// Handles `WatchDir`.
#[cold]
#[inline(never)]
pub(crate) fn begin(core: &mut Core, key: Key, conn: &mut Conn, head: &Head, body: &[u8]) {
    let Some(body) = call::begin_stream(conn, head, body) else {
        return;
    };
    let opened = message::read(&body).and_then(|request| open(core, head, &request));
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
        Err(error) => return answer::refuse_stream(conn, error),
    };
    let now = Instant::now();
    let keepalive = head.fields.keepalive.unwrap_or(KEEPALIVE);
    let timeout = head.fields.timeout;
    let stream = WatchStream {
        watcher,
        deadline: timeout.and_then(|timeout| now.checked_add(timeout)),
        keepalive,
        next_keepalive: now + keepalive,
    };
    answer::begin_stream(conn);
    let start = Some(Empty {});
    push(
        conn,
        &WatchDirResponse {
            start,
            ..WatchDirResponse::default()
        },
    );
    conn.wake = Some(stream.wake());
    conn.begin(stream);
}

impl Exchange<Core> for WatchStream {
    #[cold]
    fn step(&mut self, core: &mut Core, _: Key, conn: &mut Conn) -> Result<Step, Gone> {
        let watcher = core.watchers.get_mut(self.watcher);
        if conn.out.len() < HIGH_WATER && watcher.is_some_and(|watcher| watcher.readable) {
            core.enqueue(Job::Watch, self.watcher);
        }
        conn.wait()
    }

    /// Sends a keepalive, or ends the stream at its deadline.
    #[cold]
    fn expire(
        &mut self,
        core: &mut Core,
        key: Key,
        conn: &mut Conn,
        now: Instant,
    ) -> Result<(), Gone> {
        if self.deadline.is_some_and(|at| at <= now) {
            self.close(core, key);
            let error = ConnectError::new(DeadlineExceeded, "context deadline exceeded");
            answer::end_stream(conn, Some(error));
            return Ok(());
        }
        conn.wake = Some(self.delay_keepalive(now));
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
        Ok(())
    }

    fn close(&mut self, core: &mut Core, _: Key) {
        core.watchers.remove(self.watcher);
    }
}

/// Moves changes from a watcher's kernel queue to its connection or its list.
#[cold]
#[inline(never)]
pub(crate) fn pump(core: &mut Core, conns: &mut Conns, key: Key) {
    let Some(watcher) = core.watchers.get_mut(key) else {
        return;
    };
    let conn_key = match &watcher.sink {
        Sink::Stream(conn) => *conn,
        Sink::Queue(_) => {
            if watcher.collect(&mut core.users) {
                core.enqueue(Job::Watch, key);
            }
            return;
        }
    };
    let Some(conn) = conns.get_mut(conn_key) else {
        core.watchers.remove(key);
        return;
    };
    let Some(tree) = &mut watcher.tree else {
        return;
    };
    let mut rounds = 0;
    let mut failed = None;
    while watcher.readable && conn.backlog() < HIGH_WATER && rounds < ROUNDS {
        let mut changes = Vec::new();
        let read = tree.read(&mut changes);
        for event in describe(tree, watcher.detail, changes, &mut core.users) {
            push_change(conn, event);
        }
        match read {
            Ok(more) => watcher.readable = more,
            Err(error) => {
                failed = Some(failure(&error));
                break;
            }
        }
        conn.push_out();
        rounds += 1;
    }
    if let Some(error) = failed {
        core.watchers.remove(key);
        answer::end_stream(conn, Some(error));
    } else if rounds == ROUNDS {
        core.enqueue(Job::Watch, key);
    }
    core.io.enqueue(Work::Conn(conn_key));
}

fn push_change(conn: &mut Conn, event: FilesystemEvent) {
    push(
        conn,
        &WatchDirResponse {
            filesystem: Some(event),
            ..WatchDirResponse::default()
        },
    );
    if let Some(stream) = conn.exchange::<WatchStream>() {
        conn.wake = Some(stream.delay_keepalive(Instant::now()));
    }
}
