//! A log of sandboxes' events: the most recent ones of each sandbox in memory, and all events in a file.
//!
//! One thread owns both. Events reach it through a bounded queue. If the queue is full, the sender does not wait: the
//! event is lost and counted.

use std::{
    collections::{HashMap, VecDeque},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::SystemTime,
};

use model::SandboxId;
use tokio::sync::oneshot;

use crate::file::LogFile;

/// Maximum number of events in memory per sandbox. The oldest are dropped first.
const KEPT: usize = 256;
/// Maximum number of sandboxes with events in memory. The sandbox whose last event is the oldest is dropped first.
const MAX_SANDBOXES: usize = 1024;
/// Maximum number of messages in the thread's queue.
const QUEUE: usize = 4096;

/// How a log treats its events.
#[derive(Debug)]
pub struct EventForm<E> {
    /// The event as a line of the file, without a newline. An event that cannot be encoded is counted as lost.
    pub line: fn(&SandboxId, &E) -> io::Result<Vec<u8>>,
    /// Whether the event is kept in memory.
    pub is_kept: fn(&E) -> bool,
    /// Whether the event is too old to be shown.
    pub is_expired: fn(&E, SystemTime) -> bool,
}

/// Called on the log's thread for every event.
pub type Subscriber<E> = dyn FnMut(&SandboxId, &E) + Send;

/// A cloneable handle. The log's thread ends when the last handle is dropped.
#[derive(Debug)]
pub struct EventLog<E> {
    queue: SyncSender<Message<E>>,
    lost: Arc<AtomicU64>,
}

// Derived, it would require that events can be cloned.
impl<E> Clone for EventLog<E> {
    fn clone(&self) -> Self {
        Self {
            queue: self.queue.clone(),
            lost: Arc::clone(&self.lost),
        }
    }
}

#[derive(Debug)]
enum Message<E> {
    /// Boxed, because the queue has room for its maximum from the start.
    Record(Box<(SandboxId, E)>),
    Query(SandboxId, oneshot::Sender<Vec<E>>),
    Forget(SandboxId),
}

#[derive(Debug, thiserror::Error)]
pub enum EventLogError {
    #[error("cannot open the log {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot start the thread {name} for a log")]
    Thread {
        name: String,
        #[source]
        source: io::Error,
    },
}

impl<E: Clone + Send + 'static> EventLog<E> {
    /// Opens a log and starts its thread, which appends to `file`, if given, with mode 0600. A full file is renamed
    /// to `file.1`, which replaces an older one.
    ///
    /// # Errors
    /// Returns [`EventLogError`].
    pub fn open(
        thread: &str,
        file: Option<&Path>,
        form: EventForm<E>,
        subscriber: Box<Subscriber<E>>,
    ) -> Result<Self, EventLogError> {
        let file = file.map(|path| {
            LogFile::open(path).map_err(|source| EventLogError::Open {
                path: path.into(),
                source,
            })
        });
        let (queue, messages) = sync_channel(QUEUE);
        let lost = Arc::new(AtomicU64::new(0));
        let log = Log {
            file: file.transpose()?,
            form,
            subscriber,
            rings: Rings::default(),
            lost: Arc::clone(&lost),
        };
        thread::Builder::new()
            .name(thread.into())
            .spawn(move || log.run(&messages))
            .map_err(|source| EventLogError::Thread {
                name: thread.into(),
                source,
            })?;
        Ok(Self { queue, lost })
    }

    /// Queues an event, or counts it as lost if the queue is full.
    pub fn record(&self, sandbox: SandboxId, event: E) {
        let message = Message::Record(Box::new((sandbox, event)));
        if self.queue.try_send(message).is_err() {
            self.count_lost(1);
        }
    }

    /// Counts events that were lost on their way to the log.
    pub fn count_lost(&self, events: u64) {
        self.lost.fetch_add(events, Ordering::Relaxed);
    }

    /// The most recent events of a sandbox, oldest first. Empty if no events of the sandbox are in memory, the queue is
    /// full, or the log's thread has ended.
    pub async fn events_of(&self, sandbox: &SandboxId) -> Vec<E> {
        let (answer, events) = oneshot::channel();
        match self.queue.try_send(Message::Query(sandbox.clone(), answer)) {
            Ok(()) => events.await.unwrap_or_default(),
            Err(_) => Vec::new(),
        }
    }

    /// Drops the events in memory of a sandbox that has ended. Its events in the file remain.
    pub fn forget(&self, sandbox: &SandboxId) {
        // If the queue is full, the events stay until events of more recent sandboxes displace them.
        let _dropped_later = self.queue.try_send(Message::Forget(sandbox.clone()));
    }

    /// Number of events that found the queue full or could not be written to the file.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

/// The state of the log's thread.
struct Log<E> {
    file: Option<LogFile>,
    form: EventForm<E>,
    subscriber: Box<Subscriber<E>>,
    rings: Rings<E>,
    lost: Arc<AtomicU64>,
}

impl<E: Clone> Log<E> {
    fn run(mut self, messages: &Receiver<Message<E>>) {
        for message in messages {
            match message {
                Message::Record(record) => self.record(record.0, record.1),
                Message::Forget(sandbox) => drop(self.rings.rings.remove(&sandbox)),
                Message::Query(sandbox, answer) => {
                    let now = SystemTime::now();
                    let is_current = |event: &E| !(self.form.is_expired)(event, now);
                    let _caller_gone = answer.send(self.rings.of(&sandbox, is_current));
                }
            }
        }
    }

    fn record(&mut self, sandbox: SandboxId, event: E) {
        if let Some(file) = &mut self.file {
            let line = (self.form.line)(&sandbox, &event);
            if line.and_then(|line| file.append(&sandbox, line)).is_err() {
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
        (self.subscriber)(&sandbox, &event);
        if (self.form.is_kept)(&event) {
            self.rings.push(sandbox, event);
        }
    }
}

/// The most recent events by sandbox.
struct Rings<E> {
    rings: HashMap<SandboxId, Ring<E>>,
    /// Events pushed so far, for all sandboxes.
    pushed: u64,
}

struct Ring<E> {
    events: VecDeque<E>,
    /// Value of `Rings::pushed` at the last event.
    last: u64,
}

impl<E> Default for Rings<E> {
    fn default() -> Self {
        Self {
            rings: HashMap::new(),
            pushed: 0,
        }
    }
}

impl<E: Clone> Rings<E> {
    fn push(&mut self, sandbox: SandboxId, event: E) {
        self.pushed += 1;
        if !self.rings.contains_key(&sandbox) && self.rings.len() >= MAX_SANDBOXES {
            let oldest = self.rings.iter().min_by_key(|(_, ring)| ring.last);
            if let Some(oldest) = oldest.map(|(sandbox, _)| sandbox.clone()) {
                self.rings.remove(&oldest);
            }
        }
        let ring = self.rings.entry(sandbox).or_insert_with(|| Ring {
            events: VecDeque::new(),
            last: 0,
        });
        ring.last = self.pushed;
        ring.events.push_back(event);
        if ring.events.len() > KEPT {
            ring.events.pop_front();
        }
    }

    fn of(&mut self, sandbox: &SandboxId, is_current: impl FnMut(&E) -> bool) -> Vec<E> {
        let Some(ring) = self.rings.get_mut(sandbox) else {
            return Vec::new();
        };
        ring.events.retain(is_current);
        ring.events.iter().cloned().collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        fs,
        os::unix::fs::PermissionsExt,
        sync::mpsc::channel,
        time::{Duration, UNIX_EPOCH},
    };

    use super::*;

    /// An event at this second since 1970. Events at odd seconds are kept for an hour.
    #[derive(Clone, Debug, PartialEq)]
    struct Numbered(u64);

    const FORM: EventForm<Numbered> = EventForm {
        line: |_, event| Ok(event.0.to_string().into_bytes()),
        is_kept: |event| event.0 % 2 == 1,
        is_expired: |event, now| UNIX_EPOCH + Duration::from_secs(event.0 + 3600) < now,
    };

    pub(crate) fn sandbox(n: u16) -> SandboxId {
        let [high, low] = n.to_be_bytes();
        let mut id = [0; 19];
        // Hexadecimal digits, so that each number gives a different id.
        id[..4].copy_from_slice(&[high / 16, high % 16, low / 16, low % 16]);
        SandboxId::from_random(id)
    }

    fn now_s() -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        since.as_secs() / 2 * 2
    }

    #[tokio::test]
    async fn events_are_kept_per_sandbox_written_and_passed_to_the_subscriber() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let (passed, received) = channel();
        let subscriber = Box::new(move |_: &SandboxId, event: &Numbered| {
            passed.send(event.clone()).unwrap();
        });
        let log = EventLog::open("log", Some(&path), FORM, subscriber).unwrap();
        let now = now_s();
        for n in 0..600 {
            log.record(sandbox(1), Numbered(now + n));
        }
        for n in 0..600 {
            assert_eq!(received.recv().unwrap(), Numbered(now + n));
        }
        log.record(sandbox(2), Numbered(now + 1));
        log.record(sandbox(3), Numbered(1));
        let kept = log.events_of(&sandbox(1)).await;
        let expected: Vec<_> = (44..300).map(|n| Numbered(now + 2 * n + 1)).collect();
        assert_eq!(kept, expected);
        assert_eq!(log.events_of(&sandbox(2)).await, [Numbered(now + 1)]);
        assert!(log.events_of(&sandbox(3)).await.is_empty(), "expired");
        log.forget(&sandbox(1));
        assert!(log.events_of(&sandbox(1)).await.is_empty());
        let lines = fs::read_to_string(&path).unwrap();
        assert_eq!((lines.lines().count(), log.lost()), (602, 0));
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn events_beyond_the_queue_are_counted_as_lost_without_blocking() {
        let (go, gate) = channel::<()>();
        let (done, ended) = channel();
        let subscriber = Box::new(move |_: &SandboxId, _: &Numbered| {
            // Returns at once after the sender is dropped.
            let _ = gate.recv();
            done.send(()).unwrap();
        });
        let log = EventLog::open("log", None, FORM, subscriber).unwrap();
        for n in 0..6000 {
            log.record(sandbox(1), Numbered(n));
        }
        drop(go);
        let lost = usize::try_from(log.lost()).unwrap();
        assert!((6000 - QUEUE - 1..=6000 - QUEUE).contains(&lost), "{lost}");
        (0..6000 - lost).for_each(|_| ended.recv().unwrap());
    }

    #[test]
    fn sandboxes_that_were_never_forgotten_are_dropped_when_others_need_room() {
        let mut rings = Rings::default();
        for n in 0..2000 {
            rings.push(sandbox(n), Numbered(1));
            rings.push(sandbox(0), Numbered(1));
        }
        assert_eq!(rings.rings.len(), MAX_SANDBOXES);
        assert_eq!(rings.of(&sandbox(0), |_| true).len(), KEPT);
        assert!(rings.of(&sandbox(1), |_| true).is_empty());
        assert_eq!(rings.of(&sandbox(1999), |_| true).len(), 1);
    }
}
