//! Background task for sandboxes that can move. It finishes interrupted moves, keeps owner records up to date, and
//! moves sandboxes away while this node drains.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use cluster::{ClusterEvent, NodeState, OwnerChange, OwnerNote, OwnerState, ReclaimStep, TendStep};
use model::SandboxId;
use pool::{Hold, Sandbox, SandboxState};
use tasks::boxed;
use tokio::sync::broadcast::{Receiver, error::RecvError};

use super::{
    MoveError, Moves, Stuck, base,
    claim::{claim, noted},
};
use builds::machine;

const EVERY: Duration = Duration::from_secs(1);
/// How often incomplete bases are cleaned up.
const CLEAN: Duration = Duration::from_secs(3600);
/// Concurrent moves away from this node. Each pauses a sandbox and writes its memory.
const AT_ONCE: usize = 2;
/// Rounds after which a sandbox that could not move is tried again. Each pause in vain doubles them, up to this many
/// times.
const AGAIN: u64 = 5;
const LONGEST: u32 = 6;

/// Finishes moves and starts those of a drain. Never returns.
pub(crate) async fn tend(moves: Moves) {
    // Deleting records that nothing here refers to may be late, but must not be missed.
    let events = moves.0.peers.cluster().events();
    // The cluster's task needs to know the records that this node holds before it compares anything.
    for sandbox in moves.0.pool.list().await.unwrap_or_default() {
        if let Some(owned) = noted(&sandbox).and_then(|noted| noted.owned()) {
            let cluster = moves.0.peers.cluster();
            cluster.hold(sandbox.id.clone(), owned.owner, 0);
        }
    }
    tokio::join!(follow(&moves, events), finish(&moves), drain(&moves));
}

async fn follow(moves: &Moves, mut events: Receiver<ClusterEvent>) {
    loop {
        match events.recv().await {
            Ok(ClusterEvent::Superseded { sandbox, by }) => {
                moves.superseded(&sandbox, &by.owner.node).await;
            }
            Ok(ClusterEvent::Forgotten { sandbox }) => moves.tend_one(&sandbox).await,
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return std::future::pending().await,
        }
    }
}

async fn finish(moves: &Moves) {
    let mut cleaned = None::<Instant>;
    loop {
        if cleaned.is_none_or(|at| at.elapsed() > CLEAN) {
            cleaned = Some(Instant::now());
            moves.clean_bases(base::KEPT).await;
        }
        moves.recover_incoming().await;
        let view = moves.0.peers.cluster().view();
        let sandboxes = moves.0.pool.list().await.unwrap_or_default();
        for sandbox in &sandboxes {
            if sandbox.claim.is_some() || view.owners.contains_key(&sandbox.id) {
                moves.tend_one(&sandbox.id).await;
            }
        }
        moves.collect(&sandboxes).await;
        tokio::time::sleep(EVERY).await;
    }
}

async fn drain(moves: &Moves) {
    let mut round = 0;
    loop {
        if moves.is_leaving() {
            moves.move_all(round).await;
            round += 1;
        } else {
            moves.stuck_lock().clear();
        }
        tokio::time::sleep(EVERY).await;
    }
}

impl Moves {
    /// Whether the sandboxes of this node should move away.
    fn is_leaving(&self) -> bool {
        let cluster = self.0.peers.cluster();
        cluster.view().state(cluster.this()) == NodeState::Moving
    }

    /// Moves this node's sandboxes away, except those that recently failed to move.
    async fn move_all(&self, round: u64) {
        let Ok(sandboxes) = self.0.pool.list().await else {
            return;
        };
        let present: HashSet<&SandboxId> = sandboxes.iter().map(|sandbox| &sandbox.id).collect();
        self.stuck_lock().retain(|id, _| present.contains(id));
        let stuck = self.stuck_lock().clone();
        let is_due = |id: &SandboxId| {
            let stuck = stuck.get(id);
            stuck.is_none_or(|stuck| round.is_multiple_of(AGAIN << stuck.paused.min(LONGEST)))
        };
        let due = sandboxes
            .iter()
            .filter(|sandbox| &*sandbox.note != machine::NOTE && is_due(&sandbox.id))
            .map(|sandbox| sandbox.id.clone());
        let mut due = due.collect::<Vec<_>>().into_iter();
        let mut under_way = tokio::task::JoinSet::new();
        loop {
            // The drain may end before all sandboxes have been tried.
            while under_way.len() < AT_ONCE
                && self.is_leaving()
                && let Some(id) = due.next()
            {
                let moves = self.clone();
                under_way.spawn(boxed(async move {
                    let moved = moves.give(&id).await;
                    (id, moved)
                }));
            }
            match under_way.join_next().await {
                None => return,
                Some(Ok((id, Ok(())))) => drop(self.stuck_lock().remove(&id)),
                Some(Ok((id, Err(MoveError::Pool(why))))) if why.is_not_found() => {
                    self.stuck_lock().remove(&id);
                }
                Some(Ok((id, Err(why)))) => {
                    let is_paused = !matches!(why, MoveError::NoTaker(_) | MoveError::Detached);
                    let why = model::chain(&why);
                    tracing::warn!(sandbox = %id, why, "cannot move a sandbox to another node: retrying later");
                    let mut stuck = self.stuck_lock();
                    let before = stuck.get(&id).map_or(0, |stuck| stuck.paused);
                    let paused = before + u32::from(is_paused);
                    stuck.insert(id, Stuck { why, paused });
                }
                Some(Err(_)) => {}
            }
        }
    }

    /// Does the outstanding work for one sandbox.
    pub(super) async fn tend_one(&self, id: &SandboxId) {
        let Some(_busy) = self.begin(id) else {
            return;
        };
        let Ok(sandbox) = self.0.pool.get(id).await else {
            return;
        };
        if let Err(why) = self.tend_locked(&sandbox).await {
            tracing::debug!(sandbox = %id, why = %model::chain(&why), "cannot finish the work for a moved sandbox: retrying in the next round");
        }
    }

    async fn tend_locked(&self, sandbox: &Sandbox) -> Result<(), MoveError> {
        let id = &sandbox.id;
        let Some(noted) = noted(sandbox) else {
            return self.adopt(sandbox).await;
        };
        let state = match sandbox.state {
            SandboxState::Paused(_) => OwnerState::Paused,
            _ => OwnerState::Running,
        };
        let cluster = self.0.peers.cluster();
        let view = cluster.view();
        let seen = view.owners.get(id).map(|owned| &owned.owner);
        match noted.tend(cluster.this(), state, seen) {
            TendStep::Nothing => Ok(()),
            TendStep::Settle => self.settle_offer(id, None).await.map(drop),
            TendStep::Undo => self.abandon(id).await,
            TendStep::Resume(end_at) => {
                self.open_locked(id, noted.wake).await?;
                self.go_on(id, end_at).await
            }
            TendStep::Resumed => self.awake(id).await,
            TendStep::RecordPaused => self.seal_paused(sandbox, noted).await,
            TendStep::Discard(node) => {
                self.discard(id, &node).await;
                Ok(())
            }
            TendStep::Reclaim => self.reclaim(sandbox, &noted).await,
        }
    }

    /// Adopts a sandbox that has a record but no claim on this node: the pool's record on disk is older than the claim.
    async fn adopt(&self, sandbox: &Sandbox) -> Result<(), MoveError> {
        let cluster = self.0.peers.cluster();
        let found = cluster.owner(&sandbox.id).await?;
        let Some(owned) = found.filter(|found| found.owner.node == *cluster.this()) else {
            return Ok(());
        };
        let is_running = sandbox.state == SandboxState::Running;
        let owned = match (is_running, owned.owner.state) {
            (true, OwnerState::Paused) => {
                let started = cluster.change_owner(&sandbox.id, Some(&owned), OwnerChange::Start);
                started.await?.unwrap_or(owned)
            }
            _ => owned,
        };
        let hold = if is_running { Hold::Open } else { Hold::Sealed };
        let noted = OwnerNote::held(&owned, Some(owned.owner.stamp()), None);
        self.hold(&sandbox.id, &owned);
        let claim = Some(claim(&noted, hold));
        Ok(self.0.pool.set_claim(&sandbox.id, claim).await?)
    }

    /// Records in etcd that a sandbox is paused. From then on, resuming it requires another `Start`.
    async fn seal_paused(&self, sandbox: &Sandbox, noted: OwnerNote) -> Result<(), MoveError> {
        let pool = &self.0.pool;
        let id = &sandbox.id;
        let sealed = Some(claim(&noted, Hold::Sealed));
        pool.set_claim(id, sealed).await?;
        if pool.get(id).await?.state == SandboxState::Running {
            // It was resumed in between, and the record already shows that.
            let open = Some(claim(&noted, Hold::Open));
            return Ok(pool.set_claim(id, open).await?);
        }
        let owned = self.record_as(id, &noted, OwnerState::Paused).await?;
        let held = OwnerNote::held(&owned, noted.stamp, noted.wake);
        let sealed = Some(claim(&held, Hold::Sealed));
        Ok(pool.set_claim(id, sealed).await?)
    }

    /// Handles a paused sandbox whose record is missing or names another node.
    async fn reclaim(&self, sandbox: &Sandbox, noted: &OwnerNote) -> Result<(), MoveError> {
        let id = &sandbox.id;
        let cluster = self.0.peers.cluster();
        let found = cluster.owner(id).await?;
        let owner = found.as_ref().map(|found| &found.owner);
        match noted.reclaim(cluster.this(), owner)? {
            ReclaimStep::Keep => {}
            ReclaimStep::Discard(node) => self.discard(id, &node).await,
            ReclaimStep::Reassert(change) => {
                let owned = cluster.change_owner(id, found.as_ref(), change).await?;
                if let Some(owned) = owned {
                    let held = OwnerNote::held(&owned, noted.stamp.clone(), noted.wake);
                    let sealed = Some(claim(&held, Hold::Sealed));
                    self.0.pool.set_claim(id, sealed).await?;
                }
            }
        }
        Ok(())
    }

    async fn superseded(&self, id: &SandboxId, by: &cluster::NodeId) {
        // An offer of this node may be the cause. In that case only settling the offer may remove the sandbox.
        let Some(_busy) = self.begin(id) else {
            return;
        };
        let offered = match self.0.pool.get(id).await {
            Ok(sandbox) => noted(&sandbox).is_some_and(|noted| noted.is_offered()),
            Err(_) => return,
        };
        if !offered {
            self.discard(id, by).await;
        }
    }

    pub(super) async fn discard(&self, id: &SandboxId, by: &cluster::NodeId) {
        if self.0.pool.get(id).await.is_ok() {
            tracing::warn!(sandbox = %id, node = %by, "another node owns the sandbox with a later epoch: removing it here");
            if let Err(why) = self.0.pool.discard(id).await {
                tracing::error!(sandbox = %id, why = %model::chain(&why), "cannot remove a sandbox that another node owns");
            }
        }
    }

    /// Deletes records that name this node but whose sandboxes have ended.
    async fn collect(&self, sandboxes: &[Sandbox]) {
        let cluster = self.0.peers.cluster();
        let view = cluster.view();
        let present: HashSet<&SandboxId> = sandboxes.iter().map(|sandbox| &sandbox.id).collect();
        let stray = view
            .owners
            .iter()
            .filter(|(id, owned)| owned.owner.node == *cluster.this() && !present.contains(id));
        let stray: Vec<_> = stray
            .map(|(id, owned)| (id.clone(), owned.clone()))
            .collect();
        for (id, owned) in stray {
            if self.is_incoming(&id).await {
                continue;
            }
            let Some(_busy) = self.begin(&id) else {
                continue;
            };
            // The sandbox may have arrived since the list was made.
            if self
                .0
                .pool
                .get(&id)
                .await
                .is_err_and(|why| why.is_not_found())
                && !self.is_incoming(&id).await
            {
                let ended = cluster.change_owner(&id, Some(&owned), OwnerChange::End);
                // The next round tries again.
                let _ = ended.await;
            }
        }
    }
}
