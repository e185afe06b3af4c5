//! Watching directories: `WatchDir` streams changes to its caller, `CreateWatcher` collects them until its caller
//! fetches them.
//!
//! ```text
//! kernel's queue ─► Tree ─► stream: one message each, as long as the connection has room
//!                       └─► watcher: collected until they are fetched, up to a limit
//! ```
//! While a stream has no room, changes stay in the kernel's queue. If that queue overflows or a watcher exceeds its
//! limit, the caller gets an error instead of an incomplete list.

mod network;
pub(crate) mod stream;
mod tree;
pub(crate) mod watcher;

use std::{
    fs, io,
    time::{Duration, Instant},
};

use envd::{
    ConnectCode::{Internal, InvalidArgument, NotFound, ResourceExhausted},
    ConnectError, CreateWatcherResponse, Empty, GetWatcherEventsResponse, WatchDirRequest,
    WatcherRequest,
};
use nix::sys::epoll::EpollFlags;
use transport::{Key, Slots};

use super::{
    core::{Core, Job, Source},
    filesystem::{failure::explain, target::target},
    head::Head,
    message::error,
};
use crate::sys;
use network::is_on_network;
use tree::{Reach, Tree};
use watcher::{Detail, Queue, Sink, Watcher, failure};

/// Largest number of streams and watchers together. Each needs an inotify instance, of which a user may have 128 by
/// default.
const MAX_WATCHERS: usize = 64;
/// A watcher whose changes were not fetched for this long may be removed to make room for another.
const ABANDONED: Duration = Duration::from_secs(600);
/// Number of turns that is certain to empty the kernel's queue. It holds 16384 events by default; a turn makes up to 16
/// reads ([`transport::ROUNDS`]), and a read gets at least 15 events while the queue has them.
const DRAIN: usize = 128;

/// Called when the kernel's queue of a watcher has changes.
pub(crate) fn ready(core: &mut Core, key: Key) {
    if let Some(watcher) = core.watchers.get_mut(key) {
        watcher.readable = true;
        core.enqueue(Job::Watch, key);
    }
}

/// Opens the tree of a request. Changes from now on are recorded.
fn open(
    core: &mut Core,
    head: &Head,
    request: &WatchDirRequest,
) -> Result<(Tree, Detail), ConnectError> {
    let (path, _) = target(core, head, &request.path)?;
    let shown = path.display();
    match fs::metadata(&path) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return error(InvalidArgument, format!("path {shown} not a directory")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return error(NotFound, format!("path {shown} not found"));
        }
        Err(e) => return Err(explain(&path, &e)),
    }
    if !request.allow_network_mounts && is_on_network(&path)? {
        let message = format!("cannot watch path on network filesystem: {shown}");
        return error(InvalidArgument, message);
    }
    make_room(core, Instant::now())?;
    let reach = if request.recursive {
        Reach::Everything
    } else {
        Reach::Directory
    };
    let detail = if request.include_entry {
        Detail::Entry
    } else {
        Detail::Name
    };
    let tree = Tree::open(&path, reach).map_err(|e| failure(&e))?;
    Ok((tree, detail))
}

/// Makes room for another watcher, if necessary by removing an abandoned one.
fn make_room(core: &mut Core, now: Instant) -> Result<(), ConnectError> {
    if core.watchers.len() < MAX_WATCHERS {
        return Ok(());
    }
    let asked = core
        .watchers
        .iter()
        .filter_map(|(key, watcher)| match &watcher.sink {
            Sink::Queue(queue) => Some((key, queue.asked)),
            Sink::Stream(_) => None,
        });
    match abandoned(asked, now) {
        Some(key) => {
            core.watchers.remove(key);
            Ok(())
        }
        None => error(
            ResourceExhausted,
            format!("there are {MAX_WATCHERS} watchers"),
        ),
    }
}

/// The watcher whose changes were fetched longest ago, if that was at least [`ABANDONED`] ago.
fn abandoned(asked: impl Iterator<Item = (Key, Instant)>, now: Instant) -> Option<Key> {
    let (key, at) = asked.min_by_key(|(_, at)| *at)?;
    (now.saturating_duration_since(at) >= ABANDONED).then_some(key)
}

/// Adds a watcher to the table and the poller.
fn insert(core: &mut Core, watcher: Watcher) -> Result<Key, ConnectError> {
    let token = Source::Watch.token(core.watchers.next_key());
    let watched = match &watcher.tree {
        Some(tree) => core.io.watch(tree.fd(), token, EpollFlags::EPOLLIN),
        None => Ok(()),
    };
    watched.or_else(|errno| error(Internal, format!("cannot poll the watcher: {errno}")))?;
    Ok(core.watchers.insert(watcher))
}

/// `CreateWatcher`.
pub(crate) fn create(
    core: &mut Core,
    head: &Head,
    request: &WatchDirRequest,
) -> Result<CreateWatcherResponse, ConnectError> {
    let (tree, detail) = open(core, head, request)?;
    let random = sys::random_bytes().or_else(|e| error(Internal, format!("no random: {e}")))?;
    let id = format!("w{:032x}", u128::from_ne_bytes(random));
    let queue = Queue {
        id: id.clone(),
        events: Vec::new(),
        weight: 0,
        failed: None,
        asked: Instant::now(),
    };
    let sink = Sink::Queue(queue);
    insert(
        core,
        Watcher {
            tree: Some(tree),
            detail,
            readable: false,
            sink,
        },
    )?;
    Ok(CreateWatcherResponse { watcher_id: id })
}

fn find(watchers: &Slots<Watcher>, id: &str) -> Result<Key, ConnectError> {
    let mut all = watchers.iter();
    let found = all.find(|(_, w)| matches!(&w.sink, Sink::Queue(queue) if queue.id == id));
    match found {
        Some((key, _)) => Ok(key),
        None => error(NotFound, format!("watcher with id {id:.64} not found")),
    }
}

/// `GetWatcherEvents`: the changes since they were last fetched.
pub(crate) fn events(
    core: &mut Core,
    request: &WatcherRequest,
) -> Result<GetWatcherEventsResponse, ConnectError> {
    let key = find(&core.watchers, &request.watcher_id)?;
    // The poller may not have reported the latest changes yet: read as many as the kernel can hold.
    if let Some(watcher) = core.watchers.get_mut(key) {
        watcher.readable = true;
        (0..DRAIN).any(|_| !watcher.collect(&mut core.users));
    }
    let Some(Sink::Queue(queue)) = core.watchers.get_mut(key).map(|w| &mut w.sink) else {
        return error(Internal, "the watcher is gone");
    };
    queue.asked = Instant::now();
    queue.weight = 0;
    match &queue.failed {
        Some(error) => Err(error.clone()),
        None => Ok(GetWatcherEventsResponse {
            events: std::mem::take(&mut queue.events),
        }),
    }
}

/// `RemoveWatcher`.
pub(crate) fn remove(core: &mut Core, request: &WatcherRequest) -> Result<Empty, ConnectError> {
    let key = find(&core.watchers, &request.watcher_id)?;
    core.watchers.remove(key);
    Ok(Empty {})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watcher_fetched_longest_ago_makes_room() {
        let start = Instant::now();
        let key = Key::from_bits;
        let asked = [
            (key(1), start + ABANDONED),
            (key(2), start),
            (key(3), start + ABANDONED),
        ];
        let abandoned = |now| abandoned(asked.into_iter(), now);
        assert_eq!(abandoned(start + ABANDONED), Some(key(2)));
        assert_eq!(abandoned(start + ABANDONED / 2), None);
        assert_eq!(super::abandoned(std::iter::empty(), start), None);
    }
}
