//! The source side of a move.

use std::{
    fs::{self, File},
    sync::atomic::Ordering,
    time::Duration,
};

use cluster::{
    GiverStep, Holding, MoveHalt, NodeId, NodeState, NoteStep, Owned, OwnerChange, OwnerNote,
    OwnerState, Stamp, UndoStep, giver, giver_without_taker,
};
use model::SandboxId;
use pool::{Hold, PauseMode, PauseNeeds, PoolError, Refusal, Sandbox, SandboxState};
use serde::{Deserialize, Serialize};

use super::{
    MoveError, Moves,
    claim::{claim, noted},
    take::Offer,
};
use crate::peers::{
    ask::{MAX_ANSWER, answer_of, question},
    transfer::{Offered, Takers},
};
use tasks::blocking;

/// Timeout for the taker to fetch the files.
const MOVE: Duration = Duration::from_secs(1800);
/// How long this node waits to see the new owner in its own view before it removes the sandbox.
const SEEN: Duration = Duration::from_secs(10);
/// Reads of one record, or requests to one taker, per round.
const TRIES: usize = 4;

/// The outcome of an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Settled {
    Left,
    Kept,
}

/// Body of `POST /cluster/moves/can` and `/cluster/moves/holding`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Asked {
    pub(crate) sandbox: SandboxId,
    /// Set by `can` only.
    #[serde(default)]
    pub(crate) needs: Option<PauseNeeds>,
    /// Set by `can` only: the files of the base are offered together with those of the pause. False in older releases.
    #[serde(default)]
    pub(crate) gives_base: bool,
    /// Set by `holding` only: the epoch of the offer.
    #[serde(default)]
    pub(crate) epoch: u64,
}

/// The offered files. Dropping this value withdraws them.
struct Files {
    pause: Offered,
    base: Offered,
}

impl Moves {
    /// Moves a sandbox to another node, if one can take it. Pauses it first if it is running.
    ///
    /// # Errors
    /// Returns [`MoveError`]. The sandbox is then unchanged, or the next round continues.
    pub(super) async fn give(&self, id: &SandboxId) -> Result<(), MoveError> {
        let Some(_busy) = self.begin(id) else {
            return Ok(());
        };
        if !self.0.peers.cluster().may_act_as_owner() {
            return Err(MoveError::Detached);
        }
        // Finish an interrupted move first: an offer may still be in force.
        let sandbox = self.0.pool.get(id).await?;
        match noted(&sandbox).map(|noted| noted.step) {
            Some(NoteStep::Offered { .. }) => return self.settle_offer(id, None).await.map(drop),
            Some(NoteStep::Sharing) => self.abandon(id).await?,
            Some(NoteStep::Held) => {}
            None if sandbox.claim.is_some() => return Err(unreadable()),
            None => {}
        }
        let needs = self.0.pool.pause_needs(id).await?;
        let to = self.find_taker(id, &needs).await?;
        let noted = self.seal(id).await?;
        let needs = self.sealed_needs(id, needs).await?;
        match self.offer(id, &noted, &to).await {
            Ok(Some(offered)) => {
                let answer = self.send(id, &noted, &needs, &to, offered).await;
                if let Err(why) = &answer {
                    tracing::warn!(sandbox = %id, %to, why = %model::chain(why), "another node did not accept the move of a sandbox");
                }
                let (answer, failed) = match answer {
                    Ok(answer) => (Some(answer), None),
                    Err(why) => (None, Some(why)),
                };
                match self.settle_offer(id, answer).await? {
                    Settled::Left => Ok(()),
                    Settled::Kept => {
                        *self.0.refusals().entry(to.clone()).or_default() += 1;
                        Err(failed.unwrap_or(MoveHalt::Unsettled(to).into()))
                    }
                }
            }
            Ok(None) => self.settle_offer(id, None).await.map(drop),
            Err(why) => {
                self.abandon(id).await?;
                Err(why)
            }
        }
    }

    /// The best node of the same platform and CPU kind that meets the sandbox's needs.
    async fn find_taker(&self, id: &SandboxId, needs: &PauseNeeds) -> Result<NodeId, MoveError> {
        let peers = &self.0.peers;
        let view = peers.cluster().view();
        let own = view.nodes.get(peers.this()).ok_or(MoveError::Detached)?;
        let same = |node: &&cluster::Node| {
            node.id != own.id
                && view.state(&node.id) == NodeState::Ready
                && node.platform == own.platform
                && own.cpu.features.is_subset(&node.cpu.features)
        };
        let mut nodes: Vec<NodeId> = view
            .nodes
            .values()
            .filter(same)
            .map(|n| n.id.clone())
            .collect();
        let free = |node: &NodeId| view.loads.get(node).map_or(0, |load| load.memory_free_mib);
        // Nodes that have failed to take a sandbox come last.
        let refusals = self.0.refusals().clone();
        let failed = |node: &NodeId| refusals.get(node).copied().unwrap_or(0);
        nodes.sort_by_key(|node| (failed(node), std::cmp::Reverse(free(node))));
        let asked = Asked {
            sandbox: id.clone(),
            needs: Some(needs.clone()),
            gives_base: true,
            epoch: 0,
        };
        let mut reasons = String::new();
        for node in nodes {
            let body = encode(&asked)?;
            let refused: Option<String> = match peers
                .ask(&node, question("POST", "/cluster/moves/can", body))
                .await
            {
                Ok(refused) => refused,
                Err(why) => Some(model::chain(&why)),
            };
            match refused {
                None => return Ok(node),
                Some(why) => {
                    reasons.push_str("; ");
                    reasons.push_str(node.as_str());
                    reasons.push_str(": ");
                    reasons.extend(why.chars().take(200));
                }
            }
        }
        if reasons.is_empty() {
            reasons.push_str(": no other ready node has the same platform and CPU features");
        }
        Err(MoveError::NoTaker(reasons))
    }

    /// Makes sure that the sandbox is paused and that only this node's next step can change that.
    async fn seal(&self, id: &SandboxId) -> Result<OwnerNote, MoveError> {
        let pool = &self.0.pool;
        let sandbox = pool.get(id).await?;
        let before = sandbox.claim.clone();
        let mut noted = noted(&sandbox).unwrap_or_else(OwnerNote::sharing);
        noted.step = NoteStep::Sharing;
        if sandbox.state == SandboxState::Running {
            noted.wake = Some(sandbox.lifetime.end_at);
            // A pause seals a sandbox that has a claim.
            pool.set_claim(id, Some(claim(&noted, Hold::Open))).await?;
            match pool.pause(id, PauseMode::Memory).await {
                Ok(()) => {}
                // Its deadline or a client paused it, so it stays paused.
                Err(PoolError::Refused(_, Refusal::AlreadyPaused)) => noted.wake = None,
                Err(why) => {
                    pool.set_claim(id, before).await?;
                    return Err(why.into());
                }
            }
        }
        pool.set_claim(id, Some(claim(&noted, Hold::Moving)))
            .await?;
        Ok(noted)
    }

    /// The needs of the sandbox now that it is paused. The pause has no base if its template was removed in between.
    async fn sealed_needs(
        &self,
        id: &SandboxId,
        asked: PauseNeeds,
    ) -> Result<PauseNeeds, MoveError> {
        let why = match self.0.pool.pause_needs(id).await {
            Ok(needs) if needs == asked => return Ok(needs),
            Ok(_) => MoveError::Malformed("the needs of the sandbox have changed".to_owned()),
            Err(why) => why.into(),
        };
        self.abandon(id).await?;
        Err(why)
    }

    /// Offers a sealed sandbox. Returns `None` if the outcome is unknown.
    async fn offer(
        &self,
        id: &SandboxId,
        noted: &OwnerNote,
        to: &NodeId,
    ) -> Result<Option<(Owned, Files)>, MoveError> {
        let owned = self.record_as(id, noted, OwnerState::Paused).await?;
        if !Stamp::permits(noted.stamp.as_ref(), &owned.owner) {
            return Err(MoveHalt::Stale.into());
        }
        let (pause, base) = (
            self.open_files(id).await?,
            self.0.pool.base_files(id).await?,
        );
        let offers = self.0.peers.offers();
        let offered = Files {
            pause: offers.offer(&key(id), Takers::Only(to.clone()), pause),
            base: offers.offer(&base_key(id), Takers::Only(to.clone()), base),
        };
        let claim = claim(&noted.offered(&owned, to), Hold::Moving);
        self.0.pool.set_claim(id, Some(claim)).await?;
        let change = OwnerChange::Offer(to.clone());
        let cluster = self.0.peers.cluster();
        match cluster.change_owner(id, Some(&owned), change).await {
            Ok(Some(owned)) => Ok(Some((owned, offered))),
            // The recovery reads the record.
            Ok(None) | Err(_) => Ok(None),
        }
    }

    async fn open_files(&self, id: &SandboxId) -> Result<Vec<(String, File)>, MoveError> {
        let dir = self.0.pool.pause_files(id).await?;
        let path = dir.clone();
        let opened = blocking(move || {
            let mut files = Vec::new();
            for entry in fs::read_dir(&dir)? {
                let entry = entry?;
                if entry.file_type()?.is_file()
                    && let Some(name) = entry.file_name().to_str()
                {
                    files.push((name.to_owned(), File::open(entry.path())?));
                }
            }
            Ok(files)
        });
        let failed = |source| MoveError::Io { path, source };
        opened.await.map_err(failed)
    }

    async fn send(
        &self,
        id: &SandboxId,
        noted: &OwnerNote,
        needs: &PauseNeeds,
        to: &NodeId,
        (owned, offered): (Owned, Files),
    ) -> Result<Holding, MoveError> {
        let offer = Offer {
            sandbox: id.clone(),
            key: offered.pause.key().to_owned(),
            base_key: Some(offered.base.key().to_owned()),
            epoch: owned.owner.epoch,
            needs: needs.clone(),
            stamp: noted.stamp.clone(),
            wake: noted.wake,
        };
        let peers = &self.0.peers;
        let question = question("POST", "/cluster/moves", encode(&offer)?);
        let (status, bytes) = peers.read_long(to, question, MAX_ANSWER, MOVE).await?;
        Ok(answer_of(to, status, &bytes)?)
    }

    /// Finds out the outcome of an offer and acts on it.
    pub(super) async fn settle_offer(
        &self,
        id: &SandboxId,
        mut answer: Option<Holding>,
    ) -> Result<Settled, MoveError> {
        let noted = self.noted(id).await?;
        let (NoteStep::Offered { to }, Some(owner)) = (&noted.step, &noted.owner) else {
            return self.abandon(id).await.map(|()| Settled::Kept);
        };
        let peers = &self.0.peers;
        let cluster = peers.cluster();
        for _ in 0..TRIES {
            let found = cluster.owner(id).await?;
            let record = found.as_ref().map(|found| &found.owner);
            match giver(cluster.this(), to, owner.epoch, record, answer) {
                GiverStep::Ask => {
                    let asked = Asked {
                        sandbox: id.clone(),
                        needs: None,
                        gives_base: false,
                        epoch: owner.epoch,
                    };
                    let question = question("POST", "/cluster/moves/holding", encode(&asked)?);
                    match peers.ask(to, question).await {
                        Ok(held) => answer = Some(held),
                        Err(_) if !cluster.view().members.contains_key(to) => {
                            let change =
                                giver_without_taker(cluster.this(), to, owner.epoch, record);
                            let change = change.ok_or(MoveHalt::Superseded)?;
                            if self
                                .keep_without(id, &noted, found.as_ref(), change)
                                .await?
                            {
                                return Ok(Settled::Kept);
                            }
                        }
                        Err(why) => return Err(why.into()),
                    }
                }
                GiverStep::Wait => break,
                GiverStep::Withdraw => {
                    let withdrawn = cluster
                        .change_owner(id, found.as_ref(), OwnerChange::Withdraw)
                        .await;
                    if let Ok(Some(owned)) = withdrawn {
                        self.keep(id, &noted, &owned).await?;
                        return Ok(Settled::Kept);
                    }
                }
                GiverStep::Reassert => {
                    let change = OwnerChange::Reassert {
                        epoch: owner.epoch,
                        state: OwnerState::Paused,
                    };
                    let made = cluster.change_owner(id, found.as_ref(), change).await;
                    if let Ok(Some(owned)) = made {
                        self.keep(id, &noted, &owned).await?;
                        return Ok(Settled::Kept);
                    }
                }
                GiverStep::Keep => {
                    match found {
                        Some(owned) => self.keep(id, &noted, &owned).await?,
                        None => self.abandon(id).await?,
                    }
                    return Ok(Settled::Kept);
                }
                GiverStep::Discard => {
                    self.leave(id, found.is_some()).await?;
                    return Ok(Settled::Left);
                }
            }
        }
        Err(MoveHalt::Unsettled(to.clone()).into())
    }

    /// Keeps a sandbox whose taker was removed from the cluster. Returns whether the record now names this node.
    async fn keep_without(
        &self,
        id: &SandboxId,
        noted: &OwnerNote,
        found: Option<&Owned>,
        change: OwnerChange,
    ) -> Result<bool, MoveError> {
        let cluster = self.0.peers.cluster();
        let Ok(Some(owned)) = cluster.change_owner(id, found, change).await else {
            // The next round reads the record.
            return Ok(false);
        };
        if !Stamp::permits(noted.stamp.as_ref(), &owned.owner) {
            return Err(MoveHalt::Stale.into());
        }
        let mut noted = noted.clone();
        noted.stamp = Some(owned.owner.stamp());
        self.keep(id, &noted, &owned).await?;
        Ok(true)
    }

    /// Keeps the sandbox on this node.
    async fn keep(
        &self,
        id: &SandboxId,
        noted: &OwnerNote,
        owned: &Owned,
    ) -> Result<(), MoveError> {
        self.0.counts.withdrawn.fetch_add(1, Ordering::Relaxed);
        let held = OwnerNote::held(owned, noted.stamp.clone(), noted.wake);
        self.hold(id, owned);
        let claim = claim(&held, Hold::Sealed);
        self.0.pool.set_claim(id, Some(claim)).await?;
        tracing::info!(sandbox = %id, "withdrew a move: the sandbox stays on this node");
        Ok(())
    }

    /// Removes a sandbox that another node now owns. Later requests must be routed there, so this waits until the new
    /// owner appears in this node's view.
    async fn leave(&self, id: &SandboxId, has_record: bool) -> Result<(), MoveError> {
        let cluster = self.0.peers.cluster();
        let mut views = cluster.views();
        let this = cluster.this();
        let elsewhere = |view: &std::sync::Arc<cluster::View>| {
            let owned = view.owners.get(id);
            owned.is_some_and(|owned| owned.owner.node != *this)
        };
        if has_record {
            let seen = tokio::time::timeout(SEEN, views.wait_for(elsewhere)).await;
            if seen.is_err() {
                tracing::warn!(sandbox = %id, "the new owner of a moved sandbox has not appeared in this node's view");
            }
        }
        self.0.pool.discard(id).await?;
        self.0.counts.given.fetch_add(1, Ordering::Relaxed);
        tracing::info!(sandbox = %id, "a sandbox moved to another node");
        Ok(())
    }

    /// Undoes the preparations for an offer.
    pub(super) async fn abandon(&self, id: &SandboxId) -> Result<(), MoveError> {
        let sandbox = self.0.pool.get(id).await?;
        let noted = match (noted(&sandbox), &sandbox.claim) {
            (Some(noted), _) => noted,
            (None, None) => OwnerNote::sharing(),
            (None, Some(_)) => return Err(unreadable()),
        };
        let cluster = self.0.peers.cluster();
        let found = cluster.owner(id).await?;
        let is_running = sandbox.state == SandboxState::Running;
        let (state, hold) = if is_running {
            (OwnerState::Running, Hold::Open)
        } else {
            (OwnerState::Paused, Hold::Sealed)
        };
        let next = match noted.undo(cluster.this(), state, found)? {
            UndoStep::Offered { owned, to } => {
                let claim = claim(&noted.offered(&owned, &to), Hold::Moving);
                self.0.pool.set_claim(id, Some(claim)).await?;
                return Err(MoveHalt::Unsettled(to).into());
            }
            UndoStep::Hold(owned) => {
                self.hold(id, &owned);
                let wake = noted.wake.filter(|_| !is_running);
                Some(OwnerNote::held(&owned, noted.stamp, wake))
            }
            UndoStep::Discard(node) => {
                self.discard(id, &node).await;
                return Ok(());
            }
            UndoStep::Forget => {
                if let Some(end_at) = noted.wake.filter(|_| !is_running) {
                    let claim = claim(&noted, Hold::Open);
                    self.0.pool.set_claim(id, Some(claim)).await?;
                    self.go_on(id, end_at).await?;
                }
                None
            }
            UndoStep::Reassert(change) => {
                let owned = cluster.change_owner(id, None, change).await?;
                let owned = owned.ok_or(MoveHalt::Stale)?;
                Some(OwnerNote::held(&owned, noted.stamp, noted.wake))
            }
        };
        let claim = next.map(|note| claim(&note, hold));
        Ok(self.0.pool.set_claim(id, claim).await?)
    }

    pub(super) async fn noted(&self, id: &SandboxId) -> Result<OwnerNote, MoveError> {
        let sandbox: Sandbox = self.0.pool.get(id).await?;
        noted(&sandbox).ok_or_else(unreadable)
    }

    /// Reports to the cluster's task which record this node holds.
    pub(super) fn hold(&self, id: &SandboxId, owned: &Owned) {
        let cluster = self.0.peers.cluster();
        cluster.hold(id.clone(), owned.owner.clone(), owned.revision);
    }
}

/// The claim may come from a newer release.
fn unreadable() -> MoveError {
    MoveError::Malformed("the claim of the sandbox cannot be read".to_owned())
}

fn key(id: &SandboxId) -> String {
    format!("move-{id}")
}

fn base_key(id: &SandboxId) -> String {
    format!("base-of-{id}")
}

pub(super) fn encode(body: &impl Serialize) -> Result<Vec<u8>, MoveError> {
    serde_json::to_vec(body).map_err(|why| MoveError::Malformed(why.to_string()))
}
