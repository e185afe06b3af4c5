//! A watched tree and the destination of its changes.

use std::time::Instant;

use envd::{
    ConnectCode::{DataLoss, Internal, InvalidArgument, ResourceExhausted},
    ConnectError, EventType, FilesystemEvent,
};
use transport::{Key, ROUNDS};

use super::{
    super::filesystem::{
        entry::{Names, entry},
        list::weight,
    },
    tree::{Change, Tree, WatchError},
};
use crate::users::UserDb;

/// Largest estimated memory of collected changes in bytes.
const MAX_WEIGHT: usize = 4 << 20;
/// Bytes of memory of a change without its texts.
const EVENT: usize = 128;

/// A watched tree.
pub(crate) struct Watcher {
    /// `None` after watching has failed or changes were lost.
    pub(super) tree: Option<Tree>,
    pub(super) detail: Detail,
    /// The kernel's queue may have changes.
    pub(super) readable: bool,
    pub(super) sink: Sink,
}

/// The destination of changes.
pub(super) enum Sink {
    /// A connection.
    Stream(Key),
    Queue(Queue),
}

/// Changes that `GetWatcherEvents` has not fetched yet.
pub(super) struct Queue {
    pub(super) id: String,
    pub(super) events: Vec<FilesystemEvent>,
    /// Memory of `events` in bytes.
    pub(super) weight: usize,
    /// Set after watching has failed or changes were lost; nothing more is collected.
    pub(super) failed: Option<ConnectError>,
    /// When the changes were last fetched, or else when the watcher was created.
    pub(super) asked: Instant,
}

/// The content of an event.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Detail {
    /// Name and kind.
    Name,
    /// Also a description of the entry, if it still exists.
    Entry,
}

/// Converts a failed watch to the response.
pub(super) fn failure(failed: &WatchError) -> ConnectError {
    let code = match failed {
        WatchError::Overflow => DataLoss,
        WatchError::TooLarge => InvalidArgument,
        WatchError::NoWatches => ResourceExhausted,
        WatchError::System { .. } => Internal,
    };
    ConnectError::new(code, format!("watcher error: {}", model::chain(failed)))
}

impl Watcher {
    /// Moves changes from the kernel's queue to the watcher's own. Returns true if the kernel's queue may have more.
    pub(super) fn collect(&mut self, users: &mut UserDb) -> bool {
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
                Err(error) => queue.fail(failure(&error)),
            }
            if queue.failed.is_some() {
                // The queue accepts no more changes.
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

/// Converts changes to events.
pub(super) fn describe(
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
            // An entry that has been removed since has no description.
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
        self.weight += EVENT + event.name.len() + entry.map_or(0, weight);
        match self.weight {
            0..=MAX_WEIGHT if self.failed.is_none() => self.events.push(event),
            _ => self.fail(ConnectError::new(
                DataLoss,
                "watcher error: too many changes since they were last fetched, some are lost",
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
    fn an_overflowing_queue_fails_and_holds_nothing() {
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
