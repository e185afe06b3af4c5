//! Watching directories: `WatchDir`, whose caller gets changes as a stream, and `CreateWatcher`, whose
//! caller asks for them from time to time.
//!
//! ```text
//! kernel's queue ─► Tree ─► stream: a message each, as long as the connection has room
//!                       └─► watcher: collected until somebody asks, up to a bound
//! ```
//! A stream that has no room leaves changes in the kernel's queue. When that queue or a watcher's bound
//! overflows, the caller gets an error instead of an incomplete story.

mod stream;
mod tree;

use std::{
    fs, io,
    path::Path,
    time::{Duration, Instant},
};

use api_types::envd::{
    ConnectCode, ConnectError, CreateWatcherResponse, Empty, EventType, FilesystemEvent,
    GetWatcherEventsResponse, WatchDirRequest, WatcherRequest,
};
use nix::sys::{
    epoll::EpollFlags,
    statfs::{FUSE_SUPER_MAGIC, FsType, NFS_SUPER_MAGIC, SMB_SUPER_MAGIC, statfs},
};

pub(crate) use stream::{WatchStream, begin, has_news};
use tree::{Change, Reach, Tree, WatchError};

use super::{
    Core, ROUNDS, Token,
    filesystem::{self, Names, entry, explain},
    http::Head,
    rpc::error,
    slots::{Key, Slots},
};
use crate::{sys, users::UserDb};
use ConnectCode::{DataLoss, Internal, InvalidArgument, NotFound, ResourceExhausted};

/// Streams and watchers at once: each is an inotify instance, of which a user has 128.
const MAX_WATCHERS: usize = 64;
/// A watcher that nobody has asked for this long makes room for another.
const ABANDONED: Duration = Duration::from_secs(600);
/// What a watcher collects until it is asked, in bytes of memory.
const MAX_WEIGHT: usize = 4 << 20;
/// Turns in which the kernel's queue is empty for certain: it holds 16384 events by default, and a turn reads
/// 16 times 15 of the longest.
const DRAIN: usize = 128;
/// What a change weighs besides its texts.
const EVENT: usize = 128;

/// Somebody who watches.
pub(crate) struct Watcher {
    /// Absent once changes were lost.
    tree: Option<Tree>,
    detail: Detail,
    /// What the poller said, until the kernel's queue is empty.
    pub(super) readable: bool,
    sink: Sink,
}

/// Where changes go.
enum Sink {
    Stream(Key),
    Queue(Queue),
}

/// Changes that wait to be asked for.
struct Queue {
    id: String,
    events: Vec<FilesystemEvent>,
    weight: usize,
    /// Set once changes were lost; nothing is collected any more.
    failed: Option<ConnectError>,
    asked: Instant,
}

/// Whether events say what is at their path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Detail {
    Name,
    Entry,
}

/// Opens what a request asks for. From now on changes are seen.
fn open(
    core: &mut Core,
    head: &Head,
    request: &WatchDirRequest,
) -> Result<(Tree, Detail), ConnectError> {
    let (path, _) = filesystem::target(core, head, &request.path)?;
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
    let tree = Tree::open(&path, reach).map_err(|e| told(&e))?;
    Ok((tree, detail))
}

/// The words for a caller.
fn told(failed: &WatchError) -> ConnectError {
    let code = match failed {
        WatchError::Overflow => DataLoss,
        WatchError::TooLarge => InvalidArgument,
        WatchError::NoWatches => ResourceExhausted,
        WatchError::System { .. } => Internal,
    };
    ConnectError::new(code, format!("watcher error: {}", model::chain(failed)))
}

fn is_on_network(path: &Path) -> Result<bool, ConnectError> {
    let found = statfs(path).map_err(|errno| explain(path, &errno.into()))?;
    Ok(is_network(found.filesystem_type()))
}

/// Those that envd refuses: NFS, SMB in its three generations, FUSE (linux/magic.h).
fn is_network(kind: FsType) -> bool {
    const CIFS: FsType = FsType(0xff53_4d42);
    const SMB2: FsType = FsType(0xfe53_4d42);
    [
        NFS_SUPER_MAGIC,
        SMB_SUPER_MAGIC,
        CIFS,
        SMB2,
        FUSE_SUPER_MAGIC,
    ]
    .contains(&kind)
}

/// Makes sure that another watcher fits.
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

/// The one that was not asked for longest, if that is long enough.
fn abandoned(asked: impl Iterator<Item = (Key, Instant)>, now: Instant) -> Option<Key> {
    let (key, at) = asked.min_by_key(|(_, at)| *at)?;
    (now.saturating_duration_since(at) >= ABANDONED).then_some(key)
}

/// Puts a watcher into the table and the poller.
fn insert(core: &mut Core, watcher: Watcher) -> Result<Key, ConnectError> {
    let token = Token::Watch(core.watchers.next_key());
    let watched = match &watcher.tree {
        Some(tree) => core.watch(tree.fd(), token, EpollFlags::EPOLLIN),
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

/// `GetWatcherEvents`: what happened until now.
pub(crate) fn events(
    core: &mut Core,
    request: &WatcherRequest,
) -> Result<GetWatcherEventsResponse, ConnectError> {
    let key = find(&core.watchers, &request.watcher_id)?;
    // Also what the poller has not told of yet: as much as the kernel can hold.
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

impl Watcher {
    /// Moves changes from the kernel's queue to the watcher's own; whether there may be more at once.
    fn collect(&mut self, users: &mut UserDb) -> bool {
        for _ in 0..ROUNDS {
            let (Some(tree), Sink::Queue(queue)) = (&mut self.tree, &mut self.sink) else {
                return false;
            };
            let mut changes = Vec::new();
            let read = tree.read(&mut changes);
            for event in describe(tree, self.detail, changes, users) {
                queue.push(event);
            }
            match read {
                Ok(more) => self.readable = more,
                Err(error) => queue.fail(told(&error)),
            }
            if queue.failed.is_some() {
                // Nobody wants to know any more.
                self.tree = None;
                self.readable = false;
            }
            if !self.readable {
                return false;
            }
        }
        true
    }
}

/// Changes in the words of the service.
fn describe(
    tree: &Tree,
    detail: Detail,
    changes: Vec<Change>,
    users: &mut UserDb,
) -> Vec<FilesystemEvent> {
    use EventType::{Chmod, Create, Write};
    let mut names = Names::default();
    let mut describe = |change: Change| {
        let here = matches!(change.kind, Create | Write | Chmod);
        let entry = (here && detail == Detail::Entry).then(|| {
            let path = tree.path_of(&change.path);
            // Gone by now: then there is none.
            entry(&path, &path, &mut names, users).ok().map(|(e, _)| e)
        });
        FilesystemEvent {
            name: if change.path.as_os_str().is_empty() {
                ".".to_owned()
            } else {
                change.path.to_string_lossy().into_owned()
            },
            kind: change.kind,
            entry: entry.flatten(),
        }
    };
    changes.into_iter().map(&mut describe).collect()
}

impl Queue {
    fn push(&mut self, event: FilesystemEvent) {
        let entry = event.entry.as_ref();
        self.weight += EVENT + event.name.len() + entry.map_or(0, filesystem::weight);
        match self.weight {
            0..=MAX_WEIGHT if self.failed.is_none() => self.events.push(event),
            _ => self.fail(ConnectError::new(
                DataLoss,
                "watcher error: too many changes since they were last asked for, some are lost",
            )),
        }
    }

    fn fail(&mut self, error: ConnectError) {
        self.events = Vec::new();
        self.failed.get_or_insert(error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_known() {
        for magic in [0x6969, 0xff53_4d42, 0x517b, 0xfe53_4d42, 0x6573_5546] {
            assert!(is_network(FsType(magic)), "{magic:x}");
        }
        // ext4, overlay, tmpfs.
        for magic in [0xef53, 0x794c_7630, 0x0102_1994] {
            assert!(!is_network(FsType(magic)), "{magic:x}");
        }
    }

    #[test]
    fn who_was_not_asked_longest_makes_room() {
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

    #[test]
    fn a_queue_that_overflows_says_so_and_holds_nothing() {
        let mut queue = Queue {
            id: String::new(),
            events: Vec::new(),
            weight: 0,
            failed: None,
            asked: Instant::now(),
        };
        let event = FilesystemEvent {
            name: "n".repeat(1000),
            ..FilesystemEvent::default()
        };
        for _ in 0..10_000 {
            queue.push(event.clone());
        }
        assert_eq!(queue.failed.map(|e| e.code), Some(DataLoss));
        assert!(queue.events.is_empty());
    }
}
