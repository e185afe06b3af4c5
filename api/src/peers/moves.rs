//! Moves of sandboxes between nodes, and the owner records of sandboxes that have moved. The giver is the source of a
//! move, the taker its target.
//!
//! ```text
//!  giver                                               taker
//!  find a taker: POST /cluster/moves/can ────────────► VMM, room
//!  claim "sharing"; pause, which seals the sandbox
//!  Share, or Pause ── etcd
//!  claim "offered"; Offer ── etcd
//!  POST /cluster/moves ──────────────────────────────► note "incoming"; GET /cluster/files/…
//!                                                      fetch the base if it is missing; hold, check all;
//!                                                      note "taking"; Take ── etcd
//!  remove the sandbox here ◄─────────────────────────── claim "held"; "taken"
//!                                                      Start ── etcd; resume, if it ran
//! ```
//! Claims are stored in the pool's record of the sandbox, notes next to the files that arrive. Both are durable before
//! the next step. `cluster::OwnerNote`, `cluster::IncomingNote` and `cluster::giver` decide each step from them and from a
//! linearizable read, also after a crash. This module performs the steps.
//!
//! Invariants:
//! - A sandbox with an owner record must not be resumed before `Start` is acknowledged. The pool refuses to while it is
//!   sealed.
//! - A giver must not remove files before it is certain that the taker has them or that the sandbox has ended.
//! - A taker must not use files of an epoch other than the offer's.

mod base;
mod claim;
mod give;
mod own;
mod take;
mod tend;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cluster::{Holding, MoveHalt, NodeId, OwnerError};
use model::SandboxId;
use pool::{Pool, PoolError};
use tasks::boxed;
use tokio::{
    sync::{oneshot, watch},
    task::JoinSet,
};

pub(crate) use give::Asked;
pub(crate) use take::Offer;
pub(crate) use tend::tend;

use super::{Peers, transfer::TransferError};
use crate::{peers::PeerError, registry::Opener, telemetry::Tables};

/// Directory for incoming files, below the state directory.
const INCOMING: &str = "incoming";
/// How long a request waits for a move of its sandbox to finish.
const PATIENCE: Duration = Duration::from_secs(20);

/// Moves from and to this node. Clones refer to the same ones.
#[derive(Clone, Debug)]
pub(crate) struct Moves(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    peers: Peers,
    pool: Pool,
    incoming: PathBuf,
    /// Locked while a base is fetched, because two sandboxes may need the same one.
    bases: base::Bases,
    /// Sandboxes that a task on this node is working on.
    busy: Mutex<BTreeMap<SandboxId, watch::Sender<()>>>,
    /// Why sandboxes could not be moved away from this node.
    stuck: Mutex<BTreeMap<SandboxId, Stuck>>,
    /// Number of failed offers by node.
    refusals: Mutex<BTreeMap<NodeId, u32>>,
    counts: Counts,
    /// Tasks that other nodes have requested. `None` once the next process has taken over.
    tasks: Mutex<Option<JoinSet<()>>>,
}

/// A sandbox that could not be moved away from this node.
#[derive(Clone, Debug)]
struct Stuck {
    why: String,
    /// How often it was paused in vain. Backs off, so that it is not paused all the time.
    paused: u32,
}

#[derive(Debug, Default)]
struct Counts {
    given: AtomicU64,
    taken: AtomicU64,
    withdrawn: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
}

/// Why a sandbox could not be moved, or could not be resumed after a move.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MoveError {
    #[error("no other node can take the sandbox{0}")]
    NoTaker(String),
    #[error("this node has not reached etcd for half a lease, or is busy with the sandbox")]
    Detached,
    #[error(transparent)]
    Halted(#[from] MoveHalt),
    #[error("etcd has no offer of the sandbox to this node")]
    NoOffer,
    #[error(transparent)]
    Owner(#[from] OwnerError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error(transparent)]
    Transfer(#[from] TransferError),
    #[error("cannot write below {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot read {}, keeping the files next to it", path.display())]
    Note {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("malformed: {0}")]
    Malformed(String),
}

/// This node's exclusive right to change the owner of a sandbox. Requests for the sandbox wait until it is dropped.
#[derive(Debug)]
struct Busy<'a> {
    inner: &'a Inner,
    id: SandboxId,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        // Receivers see that the sender is gone.
        self.inner.busy().remove(&self.id);
    }
}

impl Inner {
    fn busy(&self) -> MutexGuard<'_, BTreeMap<SandboxId, watch::Sender<()>>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refusals(&self) -> MutexGuard<'_, BTreeMap<NodeId, u32>> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Moves {
    pub(crate) fn new(peers: Peers, pool: Pool, state: &std::path::Path) -> Self {
        Self(Arc::new(Inner {
            peers,
            pool,
            incoming: state.join(INCOMING),
            bases: base::Bases::default(),
            busy: Mutex::default(),
            stuck: Mutex::default(),
            refusals: Mutex::default(),
            counts: Counts::default(),
            tasks: Mutex::new(Some(JoinSet::new())),
        }))
    }

    /// Spawns a task that ends before another process takes over the state directory.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let tasks = self.0.tasks.lock();
        if let Some(tasks) = tasks.unwrap_or_else(PoisonError::into_inner).as_mut() {
            while tasks.try_join_next().is_some() {}
            tasks.spawn(boxed(task));
        }
    }

    /// For the registry, which does not depend on this module.
    pub(crate) fn opener(self) -> Opener {
        Opener(Arc::new(move |id: SandboxId| {
            let moves = self.clone();
            boxed(async move { moves.open(&id).await.map_err(|why| model::chain(&why)) })
        }))
    }

    /// Stops all tasks, so that the next process can take over. It continues from their notes.
    pub(crate) async fn stop(&self) {
        let tasks = self.0.tasks.lock();
        let tasks = tasks.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut tasks) = tasks {
            tasks.shutdown().await;
        }
    }

    /// Like [`Moves::take`], but completes even if the giver stops waiting.
    pub(crate) async fn taken(&self, from: NodeId, offer: Offer) -> Result<Holding, MoveError> {
        let (sender, answer) = oneshot::channel();
        let moves = self.clone();
        self.spawn(async move {
            // The giver may have stopped waiting.
            let _ = sender.send(moves.take(&from, offer).await);
        });
        let stopped = |_| MoveError::Malformed("the server is shutting down".to_owned());
        answer.await.map_err(stopped)?
    }

    /// `None` if another task is working on the sandbox.
    fn begin(&self, id: &SandboxId) -> Option<Busy<'_>> {
        let mut busy = self.0.busy();
        if busy.contains_key(id) {
            return None;
        }
        busy.insert(id.clone(), watch::channel(()).0);
        let id = id.clone();
        Some(Busy { inner: &self.0, id })
    }

    /// Waits until no task of this node is changing the owner of the sandbox, up to a limit.
    pub(crate) async fn settled(&self, id: &SandboxId) {
        let receiver = self.0.busy().get(id).map(watch::Sender::subscribe);
        if let Some(mut receiver) = receiver {
            let gone = async { while receiver.changed().await.is_ok() {} };
            let _ = tokio::time::timeout(PATIENCE, gone).await;
        }
    }

    async fn begin_in_turn(&self, id: &SandboxId) -> Option<Busy<'_>> {
        if let Some(busy) = self.begin(id) {
            return Some(busy);
        }
        self.settled(id).await;
        self.begin(id)
    }

    /// Why sandboxes could not be moved away from this node, which is draining.
    pub(crate) fn stuck(&self) -> BTreeMap<SandboxId, String> {
        let stuck = self.stuck_lock();
        let reasons = stuck.iter();
        reasons
            .map(|(id, stuck)| (id.clone(), stuck.why.clone()))
            .collect()
    }

    fn stuck_lock(&self) -> MutexGuard<'_, BTreeMap<SandboxId, Stuck>> {
        self.0.stuck.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the metrics of moves.
    pub(crate) fn add_metrics(&self, tables: &mut Tables) {
        let counts = &self.0.counts;
        let outcomes = [
            ("given", &counts.given),
            ("taken", &counts.taken),
            ("withdrawn", &counts.withdrawn),
            ("failed", &counts.failed),
        ];
        let outcomes = outcomes.map(|(outcome, count)| {
            let count = count.load(Ordering::Relaxed);
            (vec![("outcome", outcome.to_owned())], count)
        });
        let help = "Moves of sandboxes by their outcome on this node";
        tables.counters("cluster_moves", help, outcomes);
        let bytes = counts.bytes.load(Ordering::Relaxed);
        let help = "Bytes of sandboxes received";
        tables.counter("cluster_moved_bytes", help, bytes);
        let stuck = u64::try_from(self.stuck_lock().len()).unwrap_or(u64::MAX);
        let help = "Sandboxes of this draining node that cannot move";
        tables.gauge("cluster_stuck_sandboxes", help, stuck);
    }
}
