//! The call log: requests that the proxy has read, connections that it has passed on unread, and refusals. The latest
//! ruled and refused ones of each sandbox are kept in memory. All of them are written to a file if the operator enables
//! it.
//!
//! One thread owns both. Calls reach it through a bounded queue. If the queue is full, a call is dropped and counted.

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
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use ::egress::control::Call;
use model::SandboxId;
use netisolation::LogFile;
use serde::Serialize;
use tokio::sync::oneshot;

/// File name in the state directory.
const FILE: &str = "egress-calls.jsonl";
/// Maximum number of calls in memory per sandbox, and how long they are kept.
const KEPT: usize = 256;
const MAX_AGE: Duration = Duration::from_secs(24 * 60 * 60);
/// Maximum number of sandboxes with calls in memory. The one whose last call is the oldest is dropped first.
const MAX_SANDBOXES: usize = 1024;
const QUEUE: usize = 4096;
/// Maximum size of a text from the proxy in bytes.
const MAX_TEXT: usize = 1024;
const MAX_NAME: usize = 255;
/// Maximum number of secrets in a call, as in a rule.
const MAX_SECRETS: usize = 32;

/// A handle. The thread exits when the last one is dropped.
#[derive(Clone, Debug)]
pub struct CallLog {
    queue: SyncSender<Message>,
    lost: Arc<AtomicU64>,
    counts: Arc<Counters>,
}

/// Calls by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// Passed without changes.
    pub passed: u64,
    /// A rule was applied.
    pub ruled: u64,
    pub refused: u64,
}

#[derive(Debug, Default)]
struct Counters {
    passed: AtomicU64,
    ruled: AtomicU64,
    refused: AtomicU64,
}

#[derive(Debug)]
enum Message {
    Record(SandboxId, Box<Call>),
    Query(SandboxId, oneshot::Sender<Vec<Call>>),
    Forget(SandboxId),
}

/// The log could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum CallLogError {
    #[error("cannot open the log of outbound calls {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot start a thread for the log of outbound calls")]
    Thread(#[source] io::Error),
}

/// Whether calls are appended to [`FILE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallFile {
    #[default]
    Off,
    On,
}

/// Called on the log's thread for every call.
type Subscriber = Box<dyn FnMut(&SandboxId, &Call) + Send>;

impl CallLog {
    /// # Errors
    /// Returns [`CallLogError`].
    pub(super) fn open(
        state: &Path,
        file: CallFile,
        subscriber: Subscriber,
    ) -> Result<Self, CallLogError> {
        let path = state.join(FILE);
        let file = match file {
            CallFile::Off => None,
            CallFile::On => Some(LogFile::open(&path)),
        };
        let file = file.transpose();
        let file = file.map_err(|source| CallLogError::Open { path, source })?;
        let (queue, messages) = sync_channel(QUEUE);
        let lost = Arc::new(AtomicU64::new(0));
        let log = Log {
            file,
            subscriber,
            rings: Rings::default(),
            lost: Arc::clone(&lost),
        };
        thread::Builder::new()
            .name("egress-calls".into())
            .spawn(move || log.run(&messages))
            .map_err(CallLogError::Thread)?;
        Ok(Self {
            queue,
            lost,
            counts: Arc::default(),
        })
    }

    /// Queues a call from the proxy. Cuts its texts to the maximum lengths.
    pub(super) fn record(&self, sandbox: SandboxId, call: Call) {
        let counter = match (&call.refused, &call.rule) {
            (Some(_), _) => &self.counts.refused,
            (None, Some(_)) => &self.counts.ruled,
            (None, None) => &self.counts.passed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let message = Message::Record(sandbox, Box::new(cut(call)));
        if self.queue.try_send(message).is_err() {
            self.count_lost(1);
        }
    }

    pub(super) fn count_lost(&self, calls: u64) {
        self.lost.fetch_add(calls, Ordering::Relaxed);
    }

    /// The latest ruled and refused calls of a sandbox, oldest first. Empty if the queue is full.
    pub async fn calls_of(&self, sandbox: &SandboxId) -> Vec<Call> {
        let (answer, calls) = oneshot::channel();
        let asked = self.queue.try_send(Message::Query(sandbox.clone(), answer));
        match asked {
            Ok(()) => calls.await.unwrap_or_default(),
            Err(_) => Vec::new(),
        }
    }

    /// Drops the calls of an ended sandbox from memory.
    pub fn forget(&self, sandbox: &SandboxId) {
        // If the queue is full, they stay until other calls displace them.
        let _dropped_later = self.queue.try_send(Message::Forget(sandbox.clone()));
    }

    #[must_use]
    pub fn counts(&self) -> CallCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CallCounts {
            passed: of(&self.counts.passed),
            ruled: of(&self.counts.ruled),
            refused: of(&self.counts.refused),
        }
    }

    /// Number of calls that found a queue full or could not be written to the file.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

/// Truncates fields that are longer than the protocol allows.
fn cut(mut call: Call) -> Call {
    let texts = [&mut call.method, &mut call.path, &mut call.refused];
    for text in texts.into_iter().flatten() {
        truncate(text, MAX_TEXT);
    }
    for name in [&mut call.name, &mut call.rule].into_iter().flatten() {
        truncate(name, MAX_NAME);
    }
    call.secrets.truncate(MAX_SECRETS);
    for name in &mut call.secrets {
        truncate(name, MAX_NAME);
    }
    call
}

fn truncate(text: &mut String, most: usize) {
    if text.len() > most {
        let end = (0..=most).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or_default());
    }
}

/// When a call began.
#[must_use]
pub fn time_of(call: &Call) -> SystemTime {
    let since = Duration::from_millis(call.time_ms);
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}

/// The state of the log's thread.
struct Log {
    file: Option<LogFile>,
    subscriber: Subscriber,
    rings: Rings,
    lost: Arc<AtomicU64>,
}

/// A call as one line, with its time in RFC 3339 format.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    sandbox: &'a SandboxId,
    destination: std::net::SocketAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    bytes_out: u64,
    bytes_in: u64,
    duration_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    secrets: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<&'a str>,
}

fn line(sandbox: &SandboxId, call: &Call) -> io::Result<Vec<u8>> {
    let line = Line {
        time: humantime::format_rfc3339_millis(in_years_of_four_digits(time_of(call))).to_string(),
        sandbox,
        destination: call.remote,
        name: call.name.as_deref(),
        method: call.method.as_deref(),
        path: call.path.as_deref(),
        status: call.status,
        bytes_out: call.bytes_out,
        bytes_in: call.bytes_in,
        duration_ms: call.duration_ms,
        rule: call.rule.as_deref(),
        secrets: &call.secrets,
        refused: call.refused.as_deref(),
    };
    Ok(serde_json::to_vec(&line)?)
}

/// humantime panics at years above 9999.
fn in_years_of_four_digits(time: SystemTime) -> SystemTime {
    const YEAR_9999: u64 = 253_370_764_800;
    let last = UNIX_EPOCH + Duration::from_secs(YEAR_9999);
    time.min(last)
}

impl Log {
    fn run(mut self, messages: &Receiver<Message>) {
        for message in messages {
            match message {
                Message::Record(sandbox, call) => self.record(sandbox, *call),
                Message::Forget(sandbox) => {
                    self.rings.rings.remove(&sandbox);
                }
                Message::Query(sandbox, answer) => {
                    let _caller_gone = answer.send(self.rings.of(&sandbox, SystemTime::now()));
                }
            }
        }
    }

    fn record(&mut self, sandbox: SandboxId, call: Call) {
        if let Some(file) = &mut self.file {
            let line = line(&sandbox, &call);
            if line.and_then(|line| file.append(&sandbox, line)).is_err() {
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
        (self.subscriber)(&sandbox, &call);
        // Unchanged connections would displace the others.
        if call.rule.is_some() || call.refused.is_some() {
            self.rings.push(sandbox, call);
        }
    }
}

/// The latest calls by sandbox.
#[derive(Default)]
struct Rings {
    rings: HashMap<SandboxId, Ring>,
    pushed: u64,
}

#[derive(Default)]
struct Ring {
    calls: VecDeque<Call>,
    /// Value of `Rings::pushed` at the last call.
    last: u64,
}

impl Rings {
    fn push(&mut self, sandbox: SandboxId, call: Call) {
        self.pushed += 1;
        if !self.rings.contains_key(&sandbox) && self.rings.len() >= MAX_SANDBOXES {
            let oldest = self.rings.iter().min_by_key(|(_, ring)| ring.last);
            if let Some(oldest) = oldest.map(|(sandbox, _)| sandbox.clone()) {
                self.rings.remove(&oldest);
            }
        }
        let ring = self.rings.entry(sandbox).or_default();
        ring.last = self.pushed;
        ring.calls.push_back(call);
        if ring.calls.len() > KEPT {
            ring.calls.pop_front();
        }
    }

    fn of(&mut self, sandbox: &SandboxId, now: SystemTime) -> Vec<Call> {
        let Some(ring) = self.rings.get_mut(sandbox) else {
            return Vec::new();
        };
        let is_old = |call: &Call| {
            let age = now.duration_since(time_of(call));
            age.is_ok_and(|age| age > MAX_AGE)
        };
        ring.calls.retain(|call| !is_old(call));
        ring.calls.iter().cloned().collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::{fs, sync::mpsc::channel};

    use super::*;

    pub(in crate::egress) fn sandbox(n: u8) -> SandboxId {
        SandboxId::from_random([n; 19])
    }

    pub(in crate::egress) fn call(n: u64) -> Call {
        Call {
            sandbox: sandbox(1).to_string(),
            time_ms: 1_700_000_000_000 + n,
            duration_ms: 5,
            remote: "10.0.0.1:443".parse().unwrap(),
            name: Some("a.test".into()),
            method: Some("GET".into()),
            path: Some("/v1".into()),
            status: Some(200),
            bytes_out: n,
            bytes_in: 9,
            rule: Some("*.test".into()),
            secrets: vec!["key".into()],
            refused: None,
        }
    }

    fn recent(n: u64) -> Call {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        Call {
            time_ms: u64::try_from(now.as_millis()).unwrap(),
            ..call(n)
        }
    }

    #[tokio::test]
    async fn ruled_and_refused_calls_are_kept_and_all_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let (passed, received) = channel();
        let subscriber = Box::new(move |_: &SandboxId, call: &Call| {
            passed.send(call.bytes_out).unwrap();
        });
        let log = CallLog::open(dir.path(), CallFile::On, subscriber).unwrap();
        for n in 0..300 {
            log.record(sandbox(1), recent(n));
        }
        let plain = Call {
            rule: None,
            ..recent(300)
        };
        log.record(sandbox(1), plain.clone());
        let refused = Call {
            refused: Some("é".repeat(MAX_TEXT)),
            ..plain
        };
        log.record(sandbox(2), refused);
        for _ in 0..302 {
            received.recv().unwrap();
        }
        let counts = CallCounts {
            passed: 1,
            ruled: 300,
            refused: 1,
        };
        assert_eq!(log.counts(), counts);
        let kept = log.calls_of(&sandbox(1)).await;
        let numbers: Vec<_> = kept.iter().map(|call| call.bytes_out).collect();
        assert_eq!(numbers, (44..300).collect::<Vec<_>>());
        let of_two = log.calls_of(&sandbox(2)).await;
        assert_eq!(of_two[0].refused.as_ref().unwrap().len(), MAX_TEXT);
        log.forget(&sandbox(1));
        assert!(log.calls_of(&sandbox(1)).await.is_empty());
        let text = fs::read_to_string(dir.path().join(FILE)).unwrap();
        assert_eq!((text.lines().count(), log.lost()), (302, 0));
        let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        assert_eq!(first["secrets"], serde_json::json!(["key"]));
        assert_eq!(first["sandbox"], sandbox(1).to_string());
    }

    #[test]
    fn old_calls_and_those_of_silent_sandboxes_make_room() {
        let mut rings = Rings::default();
        rings.push(sandbox(1), call(0));
        rings.push(sandbox(1), call(1000));
        let now = time_of(&call(500)) + MAX_AGE;
        assert_eq!(rings.of(&sandbox(1), now).len(), 1);
        for n in 0..1100_u16 {
            let [high, low] = n.to_be_bytes();
            let mut id = [0; 19];
            id[..4].copy_from_slice(&[high / 16, high % 16, low / 16, low % 16]);
            id[4] = 1;
            rings.push(SandboxId::from_random(id), call(1));
        }
        assert_eq!(rings.rings.len(), MAX_SANDBOXES);
        assert!(rings.of(&sandbox(1), now).is_empty());
    }

    #[test]
    fn a_time_of_the_far_future_has_a_line() {
        let mut late = call(0);
        late.time_ms = u64::MAX;
        let line = String::from_utf8(line(&sandbox(1), &late).unwrap()).unwrap();
        assert!(line.contains("\"time\":\""), "{line}");
    }
}
