//! The log of refusal events: the most recent events of each sandbox in memory, and all events in a file.
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
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
};

use model::SandboxId;
use tokio::sync::oneshot;

pub use self::file::LogFile;
use crate::events::event::NetEvent;

mod file;

/// Maximum number of events in memory per sandbox. The oldest are dropped first.
const KEPT: usize = 256;
/// Maximum number of sandboxes with events in memory. The sandbox whose last event is the oldest is dropped first.
const MAX_SANDBOXES: usize = 1024;
/// Maximum number of messages in the thread's queue.
const QUEUE: usize = 4096;

/// A cloneable handle. The log's thread ends when the last handle is dropped, including those that
/// [`EventLog::follow`] holds.
#[derive(Clone, Debug)]
pub struct EventLog {
    queue: SyncSender<Message>,
    lost: Arc<AtomicU64>,
}

#[derive(Debug)]
enum Message {
    Record(NetEvent),
    Query(SandboxId, oneshot::Sender<Vec<NetEvent>>),
    Forget(SandboxId),
}

/// Called on the log's thread for every event.
pub type Subscriber = dyn FnMut(&NetEvent) + Send;

#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("cannot open the log of refused traffic {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot start a thread for the log of refused traffic")]
    Thread(#[source] io::Error),
}

impl EventLog {
    /// Opens a log that appends to `path`, with mode 0600. A full file is renamed to `path.1`, which replaces an older
    /// one.
    ///
    /// # Errors
    /// Returns [`LogError::Open`] if the file cannot be opened, or [`LogError::Thread`] if the thread cannot be
    /// started.
    pub fn open(path: &Path, subscriber: Box<Subscriber>) -> Result<Self, LogError> {
        let file = LogFile::open(path).map_err(|source| LogError::Open {
            path: path.into(),
            source,
        })?;
        let (queue, messages) = sync_channel(QUEUE);
        let lost = Arc::new(AtomicU64::new(0));
        let state = Log {
            file,
            subscriber,
            rings: Rings::default(),
            lost: Arc::clone(&lost),
        };
        thread::Builder::new()
            .name("net-events".into())
            .spawn(move || state.run(&messages))
            .map_err(LogError::Thread)?;
        Ok(Self { queue, lost })
    }

    /// Starts a thread that logs the events of [`crate::Isolation::open`] until their sender is dropped.
    ///
    /// # Errors
    /// Returns [`LogError::Thread`] if the thread cannot be started.
    pub fn follow(&self, events: Receiver<NetEvent>) -> Result<(), LogError> {
        let log = self.clone();
        let log_all = move || events.iter().for_each(|event| log.record(event));
        thread::Builder::new()
            .name("net-events-in".into())
            .spawn(log_all)
            .map(drop)
            .map_err(LogError::Thread)
    }

    /// Queues an event, or counts it as lost if the queue is full.
    pub fn record(&self, event: NetEvent) {
        if self.queue.try_send(Message::Record(event)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The most recent events of a sandbox, oldest first. Empty if no events of the sandbox are in memory, the queue is
    /// full, or the log's thread has ended.
    pub async fn events_of(&self, sandbox: &SandboxId) -> Vec<NetEvent> {
        let (answer, events) = oneshot::channel();
        match self.queue.try_send(Message::Query(sandbox.clone(), answer)) {
            Ok(()) => events.await.unwrap_or_default(),
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => Vec::new(),
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
struct Log {
    file: LogFile,
    subscriber: Box<Subscriber>,
    rings: Rings,
    lost: Arc<AtomicU64>,
}

impl Log {
    fn run(mut self, messages: &Receiver<Message>) {
        for message in messages {
            match message {
                Message::Record(event) => self.record(event),
                Message::Forget(sandbox) => self.rings.forget(&sandbox),
                Message::Query(sandbox, answer) => {
                    let _caller_gone = answer.send(self.rings.of(&sandbox));
                }
            }
        }
    }

    fn record(&mut self, event: NetEvent) {
        let line = file::line(&event);
        let appended = line.and_then(|line| self.file.append(&event.sandbox, line));
        if appended.is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        (self.subscriber)(&event);
        self.rings.push(event);
    }
}

/// The most recent events by sandbox.
#[derive(Default)]
struct Rings {
    rings: HashMap<SandboxId, Ring>,
    /// Events pushed so far, for all sandboxes.
    pushed: u64,
}

#[derive(Default)]
struct Ring {
    events: VecDeque<NetEvent>,
    /// Value of `Rings::pushed` at the last event.
    last: u64,
}

impl Rings {
    fn push(&mut self, event: NetEvent) {
        self.pushed += 1;
        if !self.rings.contains_key(&event.sandbox) && self.rings.len() >= MAX_SANDBOXES {
            self.drop_oldest();
        }
        let ring = self.rings.entry(event.sandbox.clone()).or_default();
        ring.last = self.pushed;
        ring.events.push_back(event);
        if ring.events.len() > KEPT {
            ring.events.pop_front();
        }
    }

    fn drop_oldest(&mut self) {
        let oldest = self.rings.iter().min_by_key(|(_, ring)| ring.last);
        if let Some(sandbox) = oldest.map(|(sandbox, _)| sandbox.clone()) {
            self.rings.remove(&sandbox);
        }
    }

    fn of(&self, sandbox: &SandboxId) -> Vec<NetEvent> {
        let ring = self.rings.get(sandbox);
        ring.map(|ring| ring.events.iter().cloned().collect())
            .unwrap_or_default()
    }

    fn forget(&mut self, sandbox: &SandboxId) {
        self.rings.remove(sandbox);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::PermissionsExt,
        sync::mpsc::channel,
        time::{Duration, SystemTime},
    };

    use ranges::Protocol;

    use super::*;
    use crate::events::event::{Direction, Reason};

    pub(super) fn event(n: u16, port: u16) -> NetEvent {
        let [high, low] = n.to_be_bytes();
        let mut id = [0; 19];
        // Hexadecimal digits, so that each number gives a different id.
        id[..4].copy_from_slice(&[high / 16, high % 16, low / 16, low % 16]);
        NetEvent {
            sandbox: SandboxId::from_random(id),
            time: SystemTime::UNIX_EPOCH + Duration::from_millis(1500),
            direction: Direction::Out,
            protocol: Protocol::Tcp,
            source: ([169, 254, 0, 21], 40000).into(),
            destination: ([10, 0, 0, 1], port).into(),
            reason: Reason::Forbidden,
            name: Some("a.test".into()),
            count: 3,
        }
    }

    fn ports(events: &[NetEvent]) -> Vec<u16> {
        events
            .iter()
            .map(|event| event.destination.port())
            .collect()
    }

    #[tokio::test]
    async fn events_are_kept_per_sandbox_written_and_passed_to_the_subscriber() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let (passed, received) = channel();
        let subscriber = Box::new(move |event: &NetEvent| passed.send(event.clone()).unwrap());
        let log = EventLog::open(&path, subscriber).unwrap();
        let (datapath, events) = channel();
        log.follow(events).unwrap();
        for n in 1..=300 {
            datapath.send(event(1, n)).unwrap();
        }
        for n in 1..=300 {
            assert_eq!(received.recv().unwrap(), event(1, n));
        }
        log.record(event(2, 7));
        let kept = log.events_of(&event(1, 0).sandbox).await;
        assert_eq!(ports(&kept), (45..=300).collect::<Vec<_>>());
        assert_eq!(log.events_of(&event(2, 0).sandbox).await, [event(2, 7)]);
        log.forget(&event(1, 0).sandbox);
        assert!(log.events_of(&event(1, 0).sandbox).await.is_empty());
        let lines = fs::read_to_string(&path).unwrap();
        assert_eq!((lines.lines().count(), log.lost()), (301, 0));
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
    }

    #[test]
    fn events_beyond_the_queue_are_counted_as_lost_without_blocking() {
        let dir = tempfile::tempdir().unwrap();
        let (go, gate) = channel::<()>();
        let (done, ended) = channel();
        let subscriber = Box::new(move |_: &NetEvent| {
            // Returns at once after the sender is dropped.
            let _ = gate.recv();
            done.send(()).unwrap();
        });
        let log = EventLog::open(&dir.path().join("events.jsonl"), subscriber).unwrap();
        for n in 0..6000 {
            log.record(event(1, n));
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
            rings.push(event(n, n));
            rings.push(event(0, n));
        }
        assert_eq!(rings.rings.len(), MAX_SANDBOXES);
        assert_eq!(rings.of(&event(0, 0).sandbox).len(), KEPT);
        assert!(rings.of(&event(1, 0).sandbox).is_empty());
        assert_eq!(rings.of(&event(1999, 0).sandbox).len(), 1);
    }
}
