//! Events of a process on their way to its followers, and input on its way to the process.
//!
//! Output is read only while every follower has room: see [`super::child`].

use std::time::{Duration, Instant};

use envd::{ConnectCode::DeadlineExceeded, ConnectError};
use nix::sys::{epoll::EpollFlags, signal::Signal};
use transport::{Exchange, Gone, Key, ROUNDS, Step, Work};

use super::{
    super::{
        answer,
        core::{Conn, Conns, Core, Job},
        head::Head,
    },
    child::Written,
    events, input,
};

/// No more output is read for a connection while it has at least this many unsent bytes.
pub(crate) const HIGH_WATER: usize = 64 << 10;
/// Interval of keepalive messages on a stream if the caller requests none.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(90);

/// A stream of a process's events.
struct Follow {
    process: Key,
    /// When the stream itself ends (`Connect` with a timeout).
    deadline: Option<Instant>,
    keepalive: Duration,
    next_keepalive: Instant,
}

/// Begins a stream of a process's events: the start event, then output as it is produced. If the process has ended, its
/// end event follows at once.
pub(crate) fn begin(
    core: &mut Core,
    key: Key,
    conn: &mut Conn,
    process_key: Key,
    deadline: Option<Instant>,
    head: &Head,
) {
    let Some(process) = core.processes.get_mut(process_key) else {
        return;
    };
    let keepalive = head.fields.keepalive.unwrap_or(KEEPALIVE);
    answer::begin_stream(conn);
    events::push_start(&mut conn.out, conn.call, process.pid.unsigned_abs());
    if process.is_running() {
        let follow = Follow {
            process: process_key,
            deadline,
            keepalive,
            next_keepalive: Instant::now() + keepalive,
        };
        conn.wake = Some(follow.wake());
        conn.begin(follow);
        process.followers.push(key);
    } else {
        let end = process.status.clone().unwrap_or_default();
        events::push_end(&mut conn.out, conn.call, &end);
        answer::end_stream(conn, None);
    }
}

impl Follow {
    fn wake(&self) -> Instant {
        let keepalive = self.next_keepalive;
        self.deadline
            .map_or(keepalive, |deadline| deadline.min(keepalive))
    }
}

impl Exchange<Core> for Follow {
    fn step(&mut self, core: &mut Core, _: Key, conn: &mut Conn) -> Result<Step, Gone> {
        if conn.out.len() < HIGH_WATER {
            let waiting = core.processes.get_mut(self.process);
            if waiting.is_some_and(|p| p.outputs.iter().any(|o| o.readable && o.fd.is_some())) {
                core.enqueue(Job::Process, self.process);
            }
        }
        conn.wait()
    }

    #[cold]
    #[inline(never)]
    fn expire(
        &mut self,
        core: &mut Core,
        key: Key,
        conn: &mut Conn,
        now: Instant,
    ) -> Result<(), Gone> {
        if self.deadline.is_some_and(|at| at <= now) {
            unfollow(core, key, self.process);
            expire_stream(conn);
        } else {
            self.next_keepalive = now + self.keepalive;
            conn.wake = Some(self.wake());
            if conn.out.len() < HIGH_WATER {
                events::push_keepalive(&mut conn.out, conn.call);
            }
        }
        Ok(())
    }

    fn close(&mut self, core: &mut Core, key: Key) {
        unfollow(core, key, self.process);
    }
}

/// Removes a follower. The process continues.
fn unfollow(core: &mut Core, follower: Key, process_key: Key) {
    if let Some(process) = core.processes.get_mut(process_key) {
        process.followers.retain(|other| *other != follower);
        core.enqueue(Job::Process, process_key);
    }
}

fn expire_stream(conn: &mut Conn) {
    let error = ConnectError::new(DeadlineExceeded, "context deadline exceeded");
    answer::end_stream(conn, Some(error));
}

/// Called when a process's standard input has room.
pub(crate) fn stdin_ready(core: &mut Core, key: Key) {
    if let Some(process) = core.processes.get_mut(key) {
        process.stdin.writable = true;
        core.enqueue(Job::Process, key);
    }
}

/// Called when a process's output can be read or has ended.
pub(crate) fn output_ready(core: &mut Core, key: Key, place: usize, flags: EpollFlags) {
    let Some(process) = core.processes.get_mut(key) else {
        return;
    };
    if let Some(output) = process.outputs.get_mut(place) {
        output.readable = true;
        let gone = EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR;
        if flags.intersects(gone) && !flags.contains(EpollFlags::EPOLLIN) {
            // The pipe is empty and has no writer left.
            output.fd = None;
        }
    }
    core.enqueue(Job::Process, key);
}

/// Moves bytes between a process, its followers and the connections that send it input.
pub(crate) fn pump(core: &mut Core, conns: &mut Conns, key: Key) {
    pump_stdin(core, conns, key);
    let Some(process) = core.processes.get_mut(key) else {
        return;
    };
    if !process.is_running() {
        return;
    }
    let mut rounds = 0;
    while rounds < ROUNDS && has_room(conns, &process.followers) {
        let Some((pipe, len)) = process.read(&mut core.io.scratch) else {
            break;
        };
        let bytes = core.io.scratch.get(..len).unwrap_or_default();
        for follower in &process.followers {
            if let Some(conn) = conns.get_mut(*follower) {
                events::push_data(&mut conn.out, conn.call, pipe, bytes);
                conn.push_out();
            }
        }
        rounds += 1;
    }
    if rounds == ROUNDS && process.cut && process.status.is_some() {
        // So much output can only come from a descendant that survived the kill and still writes. It is not part of
        // the response.
        process
            .outputs
            .iter_mut()
            .for_each(|output| output.fd = None);
    }
    let followers = process.followers.clone();
    if process.is_over() {
        finish(core, conns, key);
    } else if rounds == ROUNDS {
        core.enqueue(Job::Process, key);
    }
    for follower in followers {
        core.io.enqueue(Work::Conn(follower));
    }
}

fn has_room(conns: &Conns, followers: &[Key]) -> bool {
    let mut conns = followers.iter().filter_map(|key| conns.get(*key));
    conns.all(|conn| conn.backlog() < HIGH_WATER)
}

fn pump_stdin(core: &mut Core, conns: &mut Conns, key: Key) {
    loop {
        let Some(process) = core.processes.get_mut(key) else {
            return;
        };
        let Some(written) = process.stdin.write() else {
            return;
        };
        let (Written::Done(waiting) | Written::Broken(waiting)) = written;
        let Some(conn) = conns.get_mut(waiting) else {
            continue;
        };
        match written {
            Written::Done(_) => input::written(conn),
            Written::Broken(_) => input::unread(conn),
        }
        core.io.enqueue(Work::Conn(waiting));
    }
}

/// Sends the end of a process to its followers and frees everything but its status.
fn finish(core: &mut Core, conns: &mut Conns, key: Key) {
    let Some(process) = core.processes.get_mut(key) else {
        return;
    };
    let end = process.status.clone().unwrap_or_default();
    let followers = std::mem::take(&mut process.followers);
    process.end(Instant::now());
    for follower in followers {
        if let Some(conn) = conns.get_mut(follower) {
            events::push_end(&mut conn.out, conn.call, &end);
            answer::end_stream(conn, None);
            conn.push_out();
        }
    }
    // Answers the requests whose input will never be read.
    pump_stdin(core, conns, key);
}

/// Kills the processes whose deadline has passed.
pub(crate) fn expire(core: &mut Core, conns: &mut Conns, now: Instant) {
    let all = core.processes.iter();
    let due = all.filter(|(_, process)| process.deadline.is_some_and(|at| at <= now));
    let due: Vec<Key> = due.map(|(key, _)| key).collect();
    for key in due {
        kill_expired(core, conns, key);
    }
}

#[cold]
#[inline(never)]
fn kill_expired(core: &mut Core, conns: &mut Conns, key: Key) {
    let Some(process) = core.processes.get_mut(key) else {
        return;
    };
    process.deadline = None;
    // Fails only if the process has just ended; it is reaped in this turn.
    let _ = process.signal(Signal::SIGKILL);
    let starter = process.starter;
    if process.followers.contains(&starter) {
        unfollow(core, starter, key);
        if let Some(conn) = conns.get_mut(starter) {
            expire_stream(conn);
        }
        core.io.enqueue(Work::Conn(starter));
    }
    core.enqueue(Job::Process, key);
}
