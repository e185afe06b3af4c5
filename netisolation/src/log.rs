//! What was refused, kept: the last records of each sandbox in memory, all of them in a file.
//!
//! One thread owns both. Records come to it through a bounded queue; who is too fast for it loses records, which is
//! counted, and never waits.

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

use self::file::LogFile;
use crate::event::NetEvent;

mod file;

/// Records of one sandbox in memory; the oldest go first.
const KEPT: usize = 256;
/// Sandboxes with records in memory; of the one whose last record is oldest they go first.
const MAX_SANDBOXES: usize = 1024;
/// Messages that wait for the thread.
const QUEUE: usize = 4096;

/// A cloneable way to reach the log. The thread ends with the last handle.
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

/// Hears of every record, on the log's thread.
pub type Subscriber = dyn FnMut(&NetEvent) + Send;

/// Why there is no log.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The file.
    #[error("cannot open {} for records of refused traffic", path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The thread.
    #[error("cannot start a thread for records of refused traffic")]
    Thread(#[source] io::Error),
}

impl EventLog {
    /// Appends to `path`, which only the owner can read; when it is full it becomes `path` with `.1` after it, in place
    /// of an older one.
    ///
    /// # Errors
    /// See [`LogError`].
    pub fn open(path: &Path, subscriber: Box<Subscriber>) -> Result<Self, LogError> {
        let file = LogFile::open(path).map_err(|source| LogError::Open {
            path: path.into(),
            source,
        })?;
        let (queue, messages) = sync_channel(QUEUE);
        let lost = Arc::new(AtomicU64::new(0));
        let owner = Owner {
            file,
            subscriber,
            rings: Rings::default(),
            lost: Arc::clone(&lost),
        };
        thread::Builder::new()
            .name("net-events".into())
            .spawn(move || owner.run(&messages))
            .map_err(LogError::Thread)?;
        Ok(Self { queue, lost })
    }

    /// Takes what the datapath reports until it ends. The thread that does it ends with it.
    ///
    /// # Errors
    /// See [`LogError::Thread`].
    pub fn follow(&self, events: Receiver<NetEvent>) -> Result<(), LogError> {
        let log = self.clone();
        let take = move || events.iter().for_each(|event| log.record(event));
        thread::Builder::new()
            .name("net-events-in".into())
            .spawn(take)
            .map(drop)
            .map_err(LogError::Thread)
    }

    /// Takes a record, or counts it as lost.
    pub fn record(&self, event: NetEvent) {
        if self.queue.try_send(Message::Record(event)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The last records of a sandbox, oldest first. Empty for one that is not known, or if the log is overrun.
    pub async fn events_of(&self, sandbox: &SandboxId) -> Vec<NetEvent> {
        let (answer, events) = oneshot::channel();
        match self.queue.try_send(Message::Query(sandbox.clone(), answer)) {
            Ok(()) => events.await.unwrap_or_default(),
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => Vec::new(),
        }
    }

    /// Forgets a sandbox that has ended; its records stay in the file.
    pub fn forget(&self, sandbox: &SandboxId) {
        // If the queue is full, they go as the oldest in their turn.
        let _later = self.queue.try_send(Message::Forget(sandbox.clone()));
    }

    /// Records that were lost on the way, or could not be written.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

struct Owner {
    file: LogFile,
    subscriber: Box<Subscriber>,
    rings: Rings,
    lost: Arc<AtomicU64>,
}

impl Owner {
    fn run(mut self, messages: &Receiver<Message>) {
        for message in messages {
            match message {
                Message::Record(event) => self.record(event),
                Message::Forget(sandbox) => self.rings.forget(&sandbox),
                Message::Query(sandbox, answer) => {
                    let _gone = answer.send(self.rings.of(&sandbox));
                }
            }
        }
    }

    fn record(&mut self, event: NetEvent) {
        if self.file.append(&event).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        (self.subscriber)(&event);
        self.rings.push(event);
    }
}

/// The last records of sandboxes.
#[derive(Default)]
struct Rings {
    rings: HashMap<SandboxId, Ring>,
    pushed: u64,
}

#[derive(Default)]
struct Ring {
    events: VecDeque<NetEvent>,
    /// Number of the last record among all.
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

    use super::*;
    use crate::event::{Direction, Protocol, Reason};

    pub(super) fn event(n: u16, port: u16) -> NetEvent {
        let [high, low] = n.to_be_bytes();
        let mut id = [0; 19];
        // Digits of the id's alphabet, so that no two numbers meet.
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
    async fn records_are_kept_by_sandbox_written_and_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let (told, heard) = channel();
        let subscriber = Box::new(move |event: &NetEvent| told.send(event.clone()).unwrap());
        let log = EventLog::open(&path, subscriber).unwrap();
        let (datapath, events) = channel();
        log.follow(events).unwrap();
        for n in 1..=300 {
            datapath.send(event(1, n)).unwrap();
        }
        for n in 1..=300 {
            assert_eq!(heard.recv().unwrap(), event(1, n));
        }
        log.record(event(2, 7));
        let first = log.events_of(&event(1, 0).sandbox).await;
        assert_eq!(ports(&first), (45..=300).collect::<Vec<_>>());
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
    fn what_is_too_much_is_counted_and_nobody_waits() {
        let dir = tempfile::tempdir().unwrap();
        let (go, gate) = channel::<()>();
        let (done, ended) = channel();
        let subscriber = Box::new(move |_: &NetEvent| {
            // After the gate is gone, nothing holds.
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
    fn sandboxes_that_were_never_forgotten_go_when_others_come() {
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
