//! Compares the owner records that this node holds with those in etcd.

use model::SandboxId;

use crate::{
    ClusterEvent, Owned, Owner, OwnerChange, OwnerState,
    keys::{self, Key},
    store::{Answer, Fault, Request, Txn, When, Write},
};

use super::{Asked, Effect, Engine, Kind};

/// A record as this node last wrote or read it.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) owner: Owner,
    /// A view older than this revision does not include the record.
    pub(super) revision: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Consistent,
    /// etcd has a newer record of this node.
    Follow(Owned),
    /// etcd has a newer record of another node.
    Superseded(Owned),
    /// etcd has lost this node's record.
    Reassert,
    /// An offer is involved. The recovery of moves decides.
    Unsettled,
}

impl Engine {
    pub(super) fn hold(&mut self, id: SandboxId, owner: Owner, revision: u64) {
        self.held.insert(id.clone(), Held { owner, revision });
        self.judge(&id);
    }

    /// Compares one held record with the view.
    pub(super) fn judge(&mut self, id: &SandboxId) {
        let view = self.mirror.view();
        let Some(held) = self.held.get(id) else {
            return;
        };
        let is_known = self.listed_at.is_some() && view.revision >= held.revision;
        if !is_known || self.changing.contains(id) {
            return;
        }
        self.reassert.remove(id);
        match verdict(&held.owner, view.owners.get(id)) {
            Verdict::Consistent | Verdict::Unsettled => {}
            Verdict::Follow(Owned { owner, revision }) => {
                self.held.insert(id.clone(), Held { owner, revision });
            }
            Verdict::Superseded(by) => {
                self.held.remove(id);
                let sandbox = id.clone();
                let event = ClusterEvent::Superseded { sandbox, by };
                self.effects.push(Effect::Event(event));
            }
            // A sandbox that runs here cannot have ended elsewhere. A paused one can: the server must check its files.
            Verdict::Reassert => match held.owner.state {
                OwnerState::Running => drop(self.reassert.insert(id.clone())),
                OwnerState::Paused => {
                    let sandbox = id.clone();
                    let event = ClusterEvent::Forgotten { sandbox };
                    self.effects.push(Effect::Event(event));
                }
            },
        }
    }

    pub(super) fn keep_held(&mut self, now: u64) {
        let asserting = |asked: &Asked| matches!(asked, Asked::Reassert { .. });
        let Some(id) = self.reassert.first().cloned() else {
            return;
        };
        if self.list_wanted || !self.may(now, Kind::Reassert, asserting) {
            return;
        }
        let Some(held) = self.held.get(&id) else {
            self.reassert.remove(&id);
            return;
        };
        let found = self.mirror.view().owners.get(&id).cloned();
        let change = OwnerChange::Reassert {
            epoch: held.owner.epoch,
            state: held.owner.state,
        };
        match change.apply(&self.this.id, found.as_ref().map(|f| &f.owner), true) {
            Ok(Some(owner)) => {
                let key = Key::Owner(id.clone());
                let when = match found {
                    None => When::Absent(key.clone()),
                    Some(found) => When::Revision(key.clone(), found.revision),
                };
                let value = keys::encode(&owner);
                let put = Write::Put {
                    key,
                    value,
                    lease: None,
                };
                let txn = Txn {
                    when: vec![when],
                    then: vec![put],
                };
                self.ask(Asked::Reassert { id, owner }, Request::Txn(txn));
            }
            Ok(None) | Err(_) => self.judge(&id),
        }
    }

    pub(super) fn reassert_answered(
        &mut self,
        now: u64,
        id: &SandboxId,
        owner: Owner,
        answer: Result<Answer, Fault>,
    ) {
        match answer {
            Ok(Answer::Txn {
                revision,
                succeeded: true,
            }) => {
                self.reassert.remove(id);
                // If it was released in the meantime, it has ended, and the task that ended it deletes its record.
                if let Some(held) = self.held.get_mut(id) {
                    *held = Held { owner, revision };
                }
            }
            _ => {
                self.list_wanted = true;
                self.later(now, Kind::Reassert);
            }
        }
    }
}

fn verdict(held: &Owner, found: Option<&Owned>) -> Verdict {
    let Some(found) = found else {
        return if held.offered_to.is_some() {
            Verdict::Unsettled
        } else {
            Verdict::Reassert
        };
    };
    let owner = &found.owner;
    if owner.node != held.node {
        return if held.offered_to.is_some() {
            Verdict::Unsettled
        } else if owner.beats(held.epoch, held.state) {
            Verdict::Superseded(found.clone())
        } else {
            Verdict::Reassert
        };
    }
    if owner.epoch > held.epoch {
        Verdict::Follow(found.clone())
    } else if owner == held {
        Verdict::Consistent
    } else if held.offered_to.is_some() || (owner.offered_to.is_some() && owner.epoch == held.epoch)
    {
        Verdict::Unsettled
    } else {
        Verdict::Reassert
    }
}
