//! This host as a node: its name, whether it accepts new sandboxes, and its figures.
//!
//! The operator sets the status: `ready`, `draining` or `standby`. It is written to `node.json` in the state directory
//! before it takes effect, so that a restart does not open a cordoned node. Existing sandboxes are not affected: they
//! run, pause and resume as before.

pub(crate) mod deleted;
mod machine;
pub mod settings;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use model::clock::unix_ms;
use pool::durable::{Durability, read_bounded, replace};
use rest::NodeStatus;
use serde::{Deserialize, Serialize};

pub use machine::{disks, info, memory};

const FILE: &str = "node.json";
const FORMAT: u32 = 1;
const MAX_FILE: u64 = 4 << 10;
/// Maximum length of a name, which is a label of a host name in certificates.
const MAX_NAME: usize = 63;
/// Interval of CPU usage measurements.
const CPU_INTERVAL: Duration = Duration::from_secs(5);

/// Why the node's status cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error("cannot access the node's status in {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not a node's status of format {FORMAT}: {why}", path.display())]
    Malformed { path: PathBuf, why: String },
    #[error("cannot create an id: the kernel provides no random numbers")]
    Random(#[from] getrandom::Error),
}

/// A status that cannot be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the status {} cannot be set: use ready, draining or standby", .0.name())]
pub struct NotSettable(pub NodeStatus);

/// The status set by the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// `Ready`, `Draining` or `Standby`.
    pub status: NodeStatus,
    pub changed_unix_ms: u64,
}

#[derive(Deserialize)]
struct Header {
    format: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    format: u32,
    status: NodeStatus,
    changed_unix_ms: u64,
}

/// The node of this server. Clones refer to the same node.
#[derive(Clone, Debug)]
pub struct OwnNode(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    /// Random number of this process.
    instance: String,
    state: PathBuf,
    chosen: Mutex<Chosen>,
    /// Whether [`Chosen::status`] is `Ready`, as an atomic that the create path reads without the lock.
    is_open: std::sync::atomic::AtomicBool,
    successes: AtomicU64,
    fails: AtomicU64,
    starting: AtomicU32,
    cpu_percent: AtomicU32,
}

/// A create in progress. If it is dropped before [`Starting::succeeded`], the create counts as failed.
#[derive(Debug)]
pub struct Starting {
    node: OwnNode,
    has_succeeded: bool,
}

impl OwnNode {
    /// Reads the status from the state directory. `name` must be valid; see [`is_name`].
    ///
    /// # Errors
    /// Returns [`NodeError`] if the file exists but cannot be read.
    pub fn open(name: String, state: &Path) -> Result<Self, NodeError> {
        let chosen = read(&state.join(FILE))?;
        Ok(Self(Arc::new(Inner {
            name,
            instance: crate::auth::random_hex::<8>()?,
            state: state.to_owned(),
            is_open: (chosen.status == NodeStatus::Ready).into(),
            chosen: Mutex::new(chosen),
            successes: AtomicU64::new(0),
            fails: AtomicU64::new(0),
            starting: AtomicU32::new(0),
            cpu_percent: AtomicU32::new(0),
        })))
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    #[must_use]
    pub fn instance(&self) -> &str {
        &self.0.instance
    }

    #[must_use]
    pub fn chosen(&self) -> Chosen {
        *self.0.chosen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether new sandboxes are accepted.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.is_open.load(Ordering::Acquire)
    }

    /// Sets the status. It is on disk when this returns. Does nothing if it is already set.
    ///
    /// # Errors
    /// Returns [`NodeError::Io`] if the file cannot be written. The status is then unchanged.
    pub fn set(&self, status: NodeStatus) -> Result<Chosen, NodeError> {
        let mut chosen = self.0.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        if chosen.status == status {
            return Ok(*chosen);
        }
        let wanted = Chosen {
            status,
            changed_unix_ms: unix_ms(),
        };
        write(&self.0.state, wanted).map_err(|source| NodeError::Io {
            path: self.0.state.join(FILE),
            source,
        })?;
        *chosen = wanted;
        let is_open = status == NodeStatus::Ready;
        self.0.is_open.store(is_open, Ordering::Release);
        tracing::info!(
            node = self.0.name,
            status = status.name(),
            "set the status of this node"
        );
        Ok(wanted)
    }

    /// Counts a create from now on.
    #[must_use]
    pub fn begin(&self) -> Starting {
        self.0.starting.fetch_add(1, Ordering::Relaxed);
        Starting {
            node: self.clone(),
            has_succeeded: false,
        }
    }

    /// Numbers of successful and failed creates, and of creates in progress.
    #[must_use]
    pub fn creates(&self) -> (u64, u64, u32) {
        let inner = &self.0;
        (
            inner.successes.load(Ordering::Relaxed),
            inner.fails.load(Ordering::Relaxed),
            inner.starting.load(Ordering::Relaxed),
        )
    }

    /// Usage of all CPUs between the last two measurements, in percent.
    #[must_use]
    pub fn cpu_percent(&self) -> u32 {
        self.0.cpu_percent.load(Ordering::Relaxed)
    }

    /// Measures the usage of the CPUs; never returns.
    pub async fn measure(self) {
        let mut before = machine::cpu_ticks();
        loop {
            tokio::time::sleep(CPU_INTERVAL).await;
            let now = machine::cpu_ticks();
            if let (Some(before), Some(now)) = (before, now) {
                let percent = now.percent_since(before);
                self.0.cpu_percent.store(percent, Ordering::Relaxed);
            }
            before = now;
        }
    }
}

impl Starting {
    pub fn succeeded(mut self) {
        self.has_succeeded = true;
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        let inner = &self.node.0;
        inner.starting.fetch_sub(1, Ordering::Relaxed);
        let count = if self.has_succeeded {
            &inner.successes
        } else {
            &inner.fails
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Whether an operator may set the status.
///
/// # Errors
/// Returns [`NotSettable`] for statuses that only an observer can determine.
pub fn settable(status: NodeStatus) -> Result<NodeStatus, NotSettable> {
    match status {
        NodeStatus::Ready | NodeStatus::Draining | NodeStatus::Standby => Ok(status),
        NodeStatus::Connecting | NodeStatus::Unhealthy => Err(NotSettable(status)),
    }
}

/// Whether a text can name a node: a DNS label of lower-case letters, digits and hyphens.
#[must_use]
pub fn is_name(text: &str) -> bool {
    let is_inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=MAX_NAME).contains(&text.len())
        && text.bytes().all(is_inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// A node name derived from the host name.
#[must_use]
pub fn name_of_host() -> String {
    let host = nix::unistd::gethostname().unwrap_or_default();
    named_after(&host.to_string_lossy())
}

fn named_after(host: &str) -> String {
    let label = host.split('.').next().unwrap_or_default();
    let letters = label.chars().map(|c| match c.to_ascii_lowercase() {
        c if c.is_ascii_lowercase() || c.is_ascii_digit() => c,
        _ => '-',
    });
    let name: String = letters.take(MAX_NAME).collect();
    let name = name.trim_matches('-');
    if is_name(name) {
        name.to_owned()
    } else {
        "node".to_owned()
    }
}

fn read(path: &Path) -> Result<Chosen, NodeError> {
    let bytes = match read_bounded(path, MAX_FILE) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Chosen {
                status: NodeStatus::Ready,
                changed_unix_ms: unix_ms(),
            });
        }
        Err(source) => {
            let path = path.to_owned();
            return Err(NodeError::Io { path, source });
        }
    };
    let malformed = |why: String| NodeError::Malformed {
        path: path.to_owned(),
        why,
    };
    let json = |why: serde_json::Error| malformed(why.to_string());
    let Header { format } = serde_json::from_slice(&bytes).map_err(json)?;
    if format != FORMAT {
        return Err(malformed(format!("it has format {format}")));
    }
    let stored: Stored = serde_json::from_slice(&bytes).map_err(json)?;
    let status = settable(stored.status).map_err(|why| malformed(why.to_string()))?;
    Ok(Chosen {
        status,
        changed_unix_ms: stored.changed_unix_ms,
    })
}

fn write(state: &Path, chosen: Chosen) -> io::Result<()> {
    let stored = Stored {
        format: FORMAT,
        status: chosen.status,
        changed_unix_ms: chosen.changed_unix_ms,
    };
    replace(state, FILE, &serde_json::to_vec(&stored)?, Durability::Host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_node_is_closed_after_a_restart() {
        let state = tempfile::tempdir().unwrap();
        let open = || OwnNode::open("a".to_owned(), state.path()).unwrap();
        let node = open();
        assert!(node.is_open() && node.chosen().status == NodeStatus::Ready);
        let set = node.set(NodeStatus::Standby).unwrap();
        assert!(!node.is_open());
        assert_eq!(open().chosen(), set);
        assert!(!open().is_open());
        // The time of the change, not of the last request.
        assert_eq!(node.set(NodeStatus::Standby).unwrap(), set);
        node.set(NodeStatus::Ready).unwrap();
        assert!(open().is_open());
    }

    #[test]
    fn a_status_file_that_cannot_be_read_is_an_error() {
        let state = tempfile::tempdir().unwrap();
        for text in [
            "",
            r#"{"format":2,"status":"ready","changed_unix_ms":1}"#,
            r#"{"format":1,"status":"unhealthy","changed_unix_ms":1}"#,
            r#"{"format":1,"status":"ready","changed_unix_ms":1,"x":1}"#,
        ] {
            std::fs::write(state.path().join(FILE), text).unwrap();
            assert!(
                OwnNode::open("a".to_owned(), state.path()).is_err(),
                "{text}"
            );
        }
    }

    #[test]
    fn creates_are_counted_by_their_outcome() {
        let state = tempfile::tempdir().unwrap();
        let node = OwnNode::open("a".to_owned(), state.path()).unwrap();
        let (one, other) = (node.begin(), node.begin());
        assert_eq!(node.creates(), (0, 0, 2));
        one.succeeded();
        drop(other);
        assert_eq!(node.creates(), (1, 1, 0));
    }

    #[test]
    fn the_name_of_a_host_becomes_a_label() {
        for (host, name) in [
            ("Bench_01.example.com", "bench-01"),
            ("--", "node"),
            ("", "node"),
            ("a", "a"),
        ] {
            assert_eq!(named_after(host), name);
        }
        assert!(is_name(&named_after(&"x".repeat(200))));
        for wrong in ["", "-a", "a-", "A", "a.b", "a b"] {
            assert!(!is_name(wrong), "{wrong}");
        }
    }
}
