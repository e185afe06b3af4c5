//! The call log: requests that the proxy has read, connections that it has passed on unread, and refusals. The latest
//! ruled and refused ones of each sandbox are kept in memory. All of them are written to a file if the operator enables
//! it.

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use ::egress::control::Call;
use journal::{EventForm, EventLog, EventLogError, Subscriber};
use model::SandboxId;
use serde::Serialize;

/// File name in the state directory.
const FILE: &str = "egress-calls.jsonl";
/// How long calls are kept in memory.
const MAX_AGE: Duration = Duration::from_secs(24 * 60 * 60);
/// Maximum size of a text from the proxy in bytes.
const MAX_TEXT: usize = 1024;
const MAX_NAME: usize = 255;
/// Maximum number of secrets in a call, as in a rule.
const MAX_SECRETS: usize = 32;

/// A handle. The thread exits when the last one is dropped.
#[derive(Clone, Debug)]
pub struct CallLog {
    /// The latest ruled and refused calls of each sandbox, and the file.
    pub log: EventLog<Call>,
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

/// Whether calls are appended to [`FILE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallFile {
    #[default]
    Off,
    On,
}

impl CallLog {
    /// # Errors
    /// Returns [`EventLogError`].
    pub(super) fn open(
        state: &Path,
        file: CallFile,
        subscriber: Box<Subscriber<Call>>,
    ) -> Result<Self, EventLogError> {
        let path = state.join(FILE);
        let path = (file == CallFile::On).then_some(path.as_path());
        let form = EventForm {
            line,
            // Unchanged connections would displace the others.
            is_kept: |call| call.rule.is_some() || call.refused.is_some(),
            is_expired,
        };
        Ok(Self {
            log: EventLog::open("egress-calls", path, form, subscriber)?,
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
        self.log.record(sandbox, cut(call));
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

fn is_expired(call: &Call, now: SystemTime) -> bool {
    let age = now.duration_since(time_of(call));
    age.is_ok_and(|age| age > MAX_AGE)
}

/// humantime panics at years above 9999.
fn in_years_of_four_digits(time: SystemTime) -> SystemTime {
    const YEAR_9999: u64 = 253_370_764_800;
    let last = UNIX_EPOCH + Duration::from_secs(YEAR_9999);
    time.min(last)
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
        let kept = log.log.events_of(&sandbox(1)).await;
        let numbers: Vec<_> = kept.iter().map(|call| call.bytes_out).collect();
        assert_eq!(numbers, (44..300).collect::<Vec<_>>());
        let of_two = log.log.events_of(&sandbox(2)).await;
        assert_eq!(of_two[0].refused.as_ref().unwrap().len(), MAX_TEXT);
        log.log.forget(&sandbox(1));
        assert!(log.log.events_of(&sandbox(1)).await.is_empty());
        let text = fs::read_to_string(dir.path().join(FILE)).unwrap();
        assert_eq!((text.lines().count(), log.log.lost()), (302, 0));
        let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        assert_eq!(first["secrets"], serde_json::json!(["key"]));
        assert_eq!(first["sandbox"], sandbox(1).to_string());
    }

    #[test]
    fn calls_expire_after_a_day() {
        let now = time_of(&call(500)) + MAX_AGE;
        assert!(is_expired(&call(0), now) && !is_expired(&call(1000), now));
    }

    #[test]
    fn a_time_of_the_far_future_has_a_line() {
        let mut late = call(0);
        late.time_ms = u64::MAX;
        let line = String::from_utf8(line(&sandbox(1), &late).unwrap()).unwrap();
        assert!(line.contains("\"time\":\""), "{line}");
    }
}
