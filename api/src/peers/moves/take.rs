//! The target side of a move.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    time::Duration,
};

use cluster::{
    Holding, IncomingNote, MoveHalt, NodeId, NodeState, Owned, OwnerChange, OwnerNote, Stamp,
    TakeOutcome, TakeStep, TakerNote, taker,
};
use model::{MANIFEST_NAME, SandboxId, template_file};
use pool::{
    Claim, GivesBase, Hold, PauseNeeds, UnixMs,
    durable::{Durability, private_dir, read_bounded, replace, sync_dir},
};
use serde::{Deserialize, Serialize};

use super::{
    MoveError, Moves,
    base::in_dir,
    claim::{claim, noted},
};
use crate::peers::transfer::{FileList, TransferError};
use tasks::blocking;

const NOTE: &str = "incoming.json";
const MAX_NOTE: u64 = 1 << 20;
/// Directory of the files, named as in a sandbox's directory.
const PAUSE: &str = "pause";
/// The files of a pause.
const FILES: [&str; 6] = [
    MANIFEST_NAME,
    template_file::STATE,
    template_file::MEMORY,
    template_file::LAYER,
    template_file::EXTENTS,
    "record.json",
];
/// Attempts to fetch the files, and to get a definite response from etcd.
const TRIES: usize = 4;
const AGAIN: Duration = Duration::from_millis(300);

/// Body of `POST /cluster/moves`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Offer {
    pub(crate) sandbox: SandboxId,
    /// Key under which the giver offers the files.
    pub(crate) key: String,
    /// Key of the base's files. `None` if the giver's release does not offer them.
    #[serde(default)]
    pub(crate) base_key: Option<String>,
    pub(crate) epoch: u64,
    pub(crate) needs: PauseNeeds,
    pub(crate) stamp: Option<Stamp>,
    pub(crate) wake: Option<UnixMs>,
}

/// The note stored next to incoming files.
type Incoming = IncomingNote<PauseNeeds>;

impl Moves {
    /// Returns why this node cannot take a sandbox with these needs.
    pub(crate) async fn refuses(&self, needs: PauseNeeds, gives: GivesBase) -> Option<String> {
        let cluster = self.0.peers.cluster();
        if !cluster.may_act_as_owner() {
            return Some(model::chain(&MoveError::Detached));
        }
        if cluster.view().state(cluster.this()) != NodeState::Ready {
            return Some("it accepts no sandboxes: it is cordoned or draining".to_owned());
        }
        let can = self.0.pool.can_take(needs, gives).await;
        can.err().map(|why| model::chain(&why))
    }

    /// Takes an offered sandbox. Returns whether this node owns it now.
    ///
    /// # Errors
    /// Returns [`MoveError`]. The giver then asks this node for its state.
    pub(crate) async fn take(&self, from: &NodeId, offer: Offer) -> Result<Holding, MoveError> {
        let id = offer.sandbox.clone();
        let Some(_busy) = self.begin(&id) else {
            return Ok(Holding::Busy);
        };
        if let Some(note) = self.has(&id, offer.epoch).await {
            return Ok(taker(note));
        }
        match self.incoming(&id).await {
            Ok(note) if note.as_ref().is_some_and(|note| note.is_taking) => {
                return self.finish(&id).await;
            }
            Ok(_) => {}
            Err(why) => return Ok(unread(&id, &why)),
        }
        let gives = match offer.base_key {
            Some(_) => GivesBase::Yes,
            None => GivesBase::No,
        };
        if let Some(why) = self.refuses(offer.needs.clone(), gives).await {
            return Err(MoveError::NoTaker(format!(": {why}")));
        }
        let note = Incoming {
            from: from.clone(),
            epoch: offer.epoch,
            stamp: offer.stamp.clone(),
            wake: offer.wake,
            needs: Some(offer.needs.clone()),
            is_taking: false,
        };
        // Fetch only what etcd lists as offered, so that no member can fill this node's disk with unrecorded offers.
        let cluster = self.0.peers.cluster();
        let found = cluster.owner(&id).await?;
        let owner = found.as_ref().map(|found| &found.owner);
        if !owner.is_some_and(|owner| note.is_offered(cluster.this(), owner)) {
            return Err(MoveError::NoOffer);
        }
        let fetched = async {
            self.note(&id, &note).await?;
            self.hold_base(from, &offer).await?;
            self.fetch(from, &offer.key, &id).await?;
            self.take_files(&id, &note, None).await
        };
        if let Err(why) = fetched.await {
            self.0.counts.failed.fetch_add(1, Ordering::Relaxed);
            self.forget(&id).await?;
            return Err(why);
        }
        self.finish(&id).await
    }

    async fn fetch(&self, from: &NodeId, key: &str, id: &SandboxId) -> Result<(), MoveError> {
        let peers = &self.0.peers;
        let list: FileList = peers.list_files(from, key).await?;
        let unknown = list
            .files()
            .iter()
            .find(|file| !FILES.contains(&&*file.name));
        if let Some(file) = unknown {
            return Err(MoveError::Malformed(format!(
                "not a file of a pause: {}",
                file.name
            )));
        }
        self.fetch_list(from, key, &list, &self.dir(id).join(PAUSE))
            .await
    }

    pub(super) async fn fetch_list(
        &self,
        from: &NodeId,
        key: &str,
        list: &FileList,
        dir: &Path,
    ) -> Result<(), MoveError> {
        let mut last = None;
        for _ in 0..TRIES {
            match self.0.peers.fetch_files(from, key, list, dir).await {
                Ok(bytes) => {
                    self.0.counts.bytes.fetch_add(bytes, Ordering::Relaxed);
                    return Ok(());
                }
                // The next attempt continues with the chunks that are here.
                Err(why @ TransferError::Peer(_)) => last = Some(why),
                // Files kept for other attempts make room for those needed now.
                Err(why @ TransferError::NoSpace { .. }) => {
                    if self.clean_bases(0).await == 0 {
                        return Err(why.into());
                    }
                    last = Some(why);
                }
                Err(why) => return Err(why.into()),
            }
            tokio::time::sleep(AGAIN).await;
        }
        last.map_or(Ok(()), |why| Err(why.into()))
    }

    /// Checks the files that have arrived. A claim then makes them this node's.
    async fn take_files(
        &self,
        id: &SandboxId,
        note: &Incoming,
        claim: Option<Claim>,
    ) -> Result<(), MoveError> {
        let (pool, needs) = (&self.0.pool, note.needs.clone());
        let taken = pool.take(&self.0.incoming, id, needs, claim).await;
        taken.map_err(MoveError::from)
    }

    /// Takes a sandbox whose files have arrived, and retries until the outcome is definite.
    pub(super) async fn finish(&self, id: &SandboxId) -> Result<Holding, MoveError> {
        let mut note = match self.incoming(id).await {
            Ok(Some(note)) => note,
            Ok(None) => return Ok(Holding::Nothing),
            Err(why) => return Ok(unread(id, &why)),
        };
        let cluster = self.0.peers.cluster();
        for attempt in 0..TRIES {
            if attempt > 0 {
                tokio::time::sleep(AGAIN).await;
            }
            let Ok(found) = cluster.owner(id).await else {
                continue;
            };
            let owned = match note.take(cluster.this(), found) {
                TakeStep::Hold(owned) => return self.arrived(id, &note, owned).await,
                TakeStep::Take(owned) => owned,
                TakeStep::Stop => break,
            };
            // A previous process may have left less than its note describes.
            if let Err(why) = self.take_files(id, &note, None).await {
                let why = model::chain(&why);
                tracing::error!(sandbox = %id, why, "the files of a sandbox that is moving to this node are damaged");
                if note.is_taking {
                    // The take may be in flight: the giver keeps its files and asks again.
                    return Ok(Holding::Busy);
                }
                break;
            }
            note.is_taking = true;
            self.note(id, &note).await?;
            let taken = cluster
                .change_owner(id, Some(&owned), OwnerChange::Take)
                .await;
            if let Ok(Some(owned)) = taken {
                return self.arrived(id, &note, owned).await;
            }
        }
        match note.outcome(cluster.this(), cluster.owner(id).await) {
            TakeOutcome::Taken(owned) => self.arrived(id, &note, owned).await,
            TakeOutcome::Open => Ok(Holding::Busy),
            TakeOutcome::Nothing => {
                self.forget(id).await?;
                Ok(Holding::Nothing)
            }
            TakeOutcome::Failed(why) => {
                self.forget(id).await?;
                Err(why.into())
            }
        }
    }

    /// Installs the sandbox once etcd names this node as its owner.
    async fn arrived(
        &self,
        id: &SandboxId,
        note: &Incoming,
        owned: Owned,
    ) -> Result<Holding, MoveError> {
        if !Stamp::permits(note.stamp.as_ref(), &owned.owner) {
            return Err(MoveHalt::Stale.into());
        }
        let held = OwnerNote::held(&owned, Some(owned.owner.stamp()), note.wake);
        let claim = claim(&held, Hold::Sealed);
        self.take_files(id, note, Some(claim)).await?;
        self.hold(id, &owned);
        self.0.counts.taken.fetch_add(1, Ordering::Relaxed);
        tracing::info!(sandbox = %id, from = %note.from, epoch = owned.owner.epoch, "a sandbox moved to this node");
        if note.wake.is_some() {
            let (moves, id) = (self.clone(), id.clone());
            self.spawn(async move { moves.tend_one(&id).await });
        }
        Ok(Holding::Taken)
    }

    /// The state of a sandbox that was offered in this epoch, or `None` if it is not here. Files from before the offer
    /// must be removed first, by a decision that is not made yet.
    async fn has(&self, id: &SandboxId, offered: u64) -> Option<TakerNote> {
        let sandbox = match self.0.pool.get(id).await {
            Ok(sandbox) => sandbox,
            Err(why) if why.is_not_found() => return None,
            Err(_) => return Some(TakerNote::Taking),
        };
        let this = self.0.peers.this();
        let is_taken = noted(&sandbox).is_some_and(|noted| noted.is_taken(this, offered));
        Some(if is_taken {
            TakerNote::Held
        } else {
            TakerNote::Taking
        })
    }

    /// The state of a sandbox on this node, for the giver that offered it in this epoch.
    ///
    /// # Errors
    /// Returns [`MoveError::Io`] if incoming files cannot be removed.
    pub(crate) async fn holding(&self, id: &SandboxId, epoch: u64) -> Result<Holding, MoveError> {
        let Some(_busy) = self.begin(id) else {
            return Ok(Holding::Busy);
        };
        if let Some(note) = self.has(id, epoch).await {
            return Ok(taker(note));
        }
        let note = match self.incoming(id).await {
            Ok(Some(note)) if note.is_taking => TakerNote::Taking,
            Ok(Some(_)) => TakerNote::Incoming,
            Ok(None) => TakerNote::Absent,
            Err(why) => return Ok(unread(id, &why)),
        };
        if note == TakerNote::Taking {
            return self.finish(id).await;
        }
        if matches!(note, TakerNote::Incoming | TakerNote::Absent) {
            self.forget(id).await?;
        }
        Ok(taker(note))
    }

    /// Recovers after a start: gives up unfinished fetches and decides takes whose outcome is unknown.
    pub(super) async fn recover_incoming(&self) {
        let list = |dir: &Path| {
            let entries = fs::read_dir(dir)?.flatten();
            Ok(entries.map(|entry| entry.file_name()).collect::<Vec<_>>())
        };
        // The next round tries again.
        let names = in_dir(self.0.incoming.clone(), list).await;
        for name in names.unwrap_or_default() {
            let Some(id) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let Some(_busy) = self.begin(&id) else {
                continue;
            };
            let done = match self.incoming(&id).await {
                Ok(Some(note)) if note.is_taking => self.finish(&id).await.map(drop),
                Ok(Some(_) | None) => self.forget(&id).await,
                Err(why) => Err(why),
            };
            if let Err(why) = done {
                tracing::warn!(sandbox = %id, why = %model::chain(&why), "cannot finish the move of a sandbox to this node yet: retrying");
            }
        }
    }

    /// Whether there are files of the sandbox that may belong to this node.
    pub(super) async fn is_incoming(&self, id: &SandboxId) -> bool {
        let found = in_dir(self.dir(id), Path::try_exists).await;
        // An error does not prove that there are none.
        found.unwrap_or(true)
    }

    fn dir(&self, id: &SandboxId) -> PathBuf {
        self.0.incoming.join(id.as_str())
    }

    /// Reads the note next to a sandbox's incoming files. Returns `None` if the file does not exist. A note that exists
    /// but cannot be read may belong to a take, so nothing may be removed.
    ///
    /// # Errors
    /// Returns [`MoveError::Note`].
    async fn incoming(&self, id: &SandboxId) -> Result<Option<Incoming>, MoveError> {
        let path = self.dir(id).join(NOTE);
        let read = {
            let path = path.clone();
            move || match read_bounded(&path, MAX_NOTE) {
                Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
                Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(why) => Err(why),
            }
        };
        let note = blocking(read).await;
        note.map_err(|source| MoveError::Note { path, source })
    }

    async fn note(&self, id: &SandboxId, note: &Incoming) -> Result<(), MoveError> {
        let bytes = super::give::encode(note)?;
        let write = move |dir: &Path| {
            private_dir(dir)?;
            replace(dir, NOTE, &bytes, Durability::Host)?;
            let parent = dir.parent().unwrap_or(dir);
            sync_dir(parent)?;
            sync_dir(parent.parent().unwrap_or(parent))
        };
        in_dir(self.dir(id), write).await
    }

    /// Removes incoming files. When it returns, the removal survives a crash of the host.
    async fn forget(&self, id: &SandboxId) -> Result<(), MoveError> {
        let remove = |dir: &Path| {
            // The note goes last: as long as it exists, files of an earlier move are not mistaken for files of the next
            // one.
            absent(fs::remove_dir_all(dir.join(PAUSE)))?;
            absent(fs::remove_dir_all(dir))?;
            // Sync even if the file was absent: the sync of an earlier removal may have failed.
            absent(sync_dir(dir.parent().unwrap_or(dir)))
        };
        in_dir(self.dir(id), remove).await
    }
}

/// Treats a missing file as success.
fn absent(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// The response if the note cannot be read: the giver keeps its files and asks again.
fn unread(id: &SandboxId, why: &MoveError) -> Holding {
    let why = model::chain(why);
    tracing::error!(sandbox = %id, why, "cannot determine the outcome of a move to this node");
    Holding::Busy
}

#[cfg(test)]
#[path = "take/tests.rs"]
mod tests;
