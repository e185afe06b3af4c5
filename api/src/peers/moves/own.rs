//! Resumes of sandboxes that other nodes may own. They are allowed only after `Start` is acknowledged.

use cluster::{MoveHalt, NoteStep, Owned, OwnerError, OwnerNote, OwnerState, RecordStep, Stamp};
use model::SandboxId;
use pool::{Hold, SandboxState, UnixMs, Wake};

use super::{
    MoveError, Moves,
    claim::{claim, noted},
};

/// Attempts to change one record before the caller must retry.
const TRIES: usize = 4;

impl Moves {
    /// Opens a sealed sandbox, so that the pool can resume it. Does nothing for other sandboxes.
    ///
    /// # Errors
    /// Returns [`MoveError`] if it is not certain that this node may run the sandbox.
    pub(crate) async fn open(&self, id: &SandboxId) -> Result<(), MoveError> {
        let busy = self.begin_in_turn(id).await;
        let _busy = busy.ok_or(MoveError::Detached)?;
        // From here on the client decides whether the sandbox runs.
        self.open_locked(id, None).await
    }

    /// `wake` is the value in the note afterwards.
    pub(super) async fn open_locked(
        &self,
        id: &SandboxId,
        wake: Option<UnixMs>,
    ) -> Result<(), MoveError> {
        let sandbox = self.0.pool.get(id).await?;
        let is_sealed = sandbox.claim.as_ref().map(|claim| claim.hold) == Some(Hold::Sealed);
        let is_paused = matches!(sandbox.state, SandboxState::Paused(_));
        if !is_sealed || !is_paused {
            return Ok(());
        }
        let noted = self.noted(id).await?;
        if let NoteStep::Offered { to } = &noted.step {
            return Err(MoveHalt::Unsettled(to.clone()).into());
        }
        let owned = self.record_as(id, &noted, OwnerState::Running).await?;
        if !Stamp::permits(noted.stamp.as_ref(), &owned.owner) {
            return Err(MoveHalt::Stale.into());
        }
        // Durable before the guest runs.
        let held = OwnerNote::held(&owned, Some(owned.owner.stamp()), wake);
        self.hold(id, &owned);
        let claim = claim(&held, Hold::Open);
        self.0.pool.set_claim(id, Some(claim)).await?;
        Ok(())
    }

    /// Creates or updates the record of this node's sandbox until it has this state. The sandbox must be paused.
    ///
    /// # Errors
    /// Returns [`MoveError`] if the sandbox, or the decision about it, may belong to another node.
    pub(super) async fn record_as(
        &self,
        id: &SandboxId,
        noted: &OwnerNote,
        wanted: OwnerState,
    ) -> Result<Owned, MoveError> {
        let cluster = self.0.peers.cluster();
        let mut last = OwnerError::Changed;
        for _ in 0..TRIES {
            let found = cluster.owner(id).await?;
            let change = match noted.record(cluster.this(), wanted, found.as_ref())? {
                RecordStep::Done(owned) => return Ok(owned),
                RecordStep::Change(change) => change,
            };
            match cluster.change_owner(id, found.as_ref(), change).await {
                // Acknowledged, or created first.
                Ok(Some(owned)) if owned.owner.state == wanted => return Ok(owned),
                Ok(_) => {}
                Err(why @ (OwnerError::Changed | OwnerError::Unknown)) => last = why,
                Err(why) => return Err(why.into()),
            }
        }
        Err(last.into())
    }

    /// Resumes a sandbox that was running before its move, with its previous deadline.
    pub(super) async fn go_on(&self, id: &SandboxId, end_at: UnixMs) -> Result<(), MoveError> {
        let pool = &self.0.pool;
        pool.connect(id, None, Wake::GoOn { end_at }).await?;
        self.awake(id).await?;
        tracing::info!(sandbox = %id, "resumed a sandbox after its move");
        Ok(())
    }

    /// Notes that a sandbox has been resumed, so that it stays paused after its next pause.
    pub(super) async fn awake(&self, id: &SandboxId) -> Result<(), MoveError> {
        let sandbox = self.0.pool.get(id).await?;
        let Some(mut noted) = noted(&sandbox).filter(|noted| noted.wake.is_some()) else {
            return Ok(());
        };
        noted.wake = None;
        // It may have been paused again.
        let hold = sandbox.claim.map_or(Hold::Sealed, |claim| claim.hold);
        let claim = Some(claim(&noted, hold));
        Ok(self.0.pool.set_claim(id, claim).await?)
    }
}
