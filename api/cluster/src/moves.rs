//! Decisions about a move on each of its two nodes, also when an outcome is unknown. Pure: from a node's durable note
//! ([`OwnerNote`], [`IncomingNote`]) and a read of the owner record to the next step, which the server performs. After
//! a crash it decides again from the same note. The giver is the source of a move, the taker its target.
//!
//! ```text
//!  giver A                                      taker B
//!  pause, note "sharing", Share (once)           an unknown outcome: read the record before anything else
//!  note "offered to B"
//!  Offer(B) ──────────────── etcd
//!  send files ────────────────────────────────► write all, verify, sync, note "incoming"
//!                                                Take ── etcd     until the outcome is definite
//!  delete files ◄─────────────────────────────── "taken"          note "held"
//! ```
//! Notes are durable before the next step. After a crash or a lost response, A decides by [`giver`], with B's response
//! from [`taker`]. Until then A resumes nothing, which also keeps a sandbox from running twice after etcd was restored
//! from a backup that still has the offer. A deletes its files only after B has responded that it holds them, or has
//! written a record that only a holder writes. The record of a take alone proves that etcd has accepted the take, but
//! not that B has learned of it. If B never returns, A keeps the sandbox once B has been removed from the cluster
//! ([`giver_without_taker`]).

mod incoming;
mod note;

pub use incoming::{IncomingNote, TakeOutcome, TakeStep};
pub use note::{MoveHalt, NoteStep, OwnerNote, ReclaimStep, RecordStep, TendStep, UndoStep};

use crate::{NodeId, Owner, OwnerChange, OwnerState};

/// The next step of a giver whose note is "offered to".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GiverStep {
    /// Ask the taker what it holds.
    Ask,
    /// The taker has not decided: ask again later.
    Wait,
    /// Nothing was taken: apply [`OwnerChange::Withdraw`], then remove the note.
    Withdraw,
    /// The offer is not in force: remove the note.
    Keep,
    /// etcd is older than the offer, and nothing was taken: apply [`OwnerChange::Reassert`], then remove the note.
    Reassert,
    /// Another node has the sandbox, or it has ended: delete the files.
    Discard,
}

/// A taker's response to the giver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Holding {
    /// Not taken, and it will not be taken under this offer.
    Nothing,
    Taken,
    /// A take is in progress.
    Busy,
}

/// A taker's note about one sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakerNote {
    Absent,
    /// Some or all files have arrived. No take has been sent.
    Incoming,
    /// A take has been sent, and its outcome is unknown.
    Taking,
    Held,
}

/// Decides for a giver that offered `epoch` to `to`. `found` is a linearizable read of the record, and `answer` is the
/// taker's response, once it was asked.
#[must_use]
pub fn giver(
    this: &NodeId,
    to: &NodeId,
    epoch: u64,
    found: Option<&Owner>,
    answer: Option<Holding>,
) -> GiverStep {
    match found {
        Some(owner) if is_take(to, epoch, owner) => {
            return match answer {
                None => GiverStep::Ask,
                Some(Holding::Taken) => GiverStep::Discard,
                // With `Nothing`, the sandbox has ended there, and its record will be deleted.
                Some(Holding::Busy | Holding::Nothing) => GiverStep::Wait,
            };
        }
        Some(owner) if owner.node != *this && owner.epoch > epoch => return GiverStep::Discard,
        Some(owner) if owner.node == *this && owner.epoch > epoch => return GiverStep::Keep,
        _ => {}
    }
    let is_offered = found.is_some_and(|owner| owner.offered_to.as_ref() == Some(to));
    match answer {
        None => GiverStep::Ask,
        Some(Holding::Busy) => GiverStep::Wait,
        Some(Holding::Taken) => GiverStep::Discard,
        Some(Holding::Nothing) => match found {
            Some(_) if is_offered => GiverStep::Withdraw,
            Some(owner) if owner.node == *this => GiverStep::Keep,
            // etcd is older than the offer, or another node has started the sandbox in the current history.
            Some(owner) if !owner.beats(epoch, OwnerState::Paused) => GiverStep::Reassert,
            Some(_) => GiverStep::Wait,
            // Taken, and ended since.
            None => GiverStep::Discard,
        },
    }
}

/// Settles an offer to a node that has been removed from the cluster together with its sandboxes: the giver keeps the
/// sandbox, unless the record shows that another node has had it. As long as the node is a member, it is not enough
/// that the node is down. It can return with the files after etcd was restored from a backup in which it is the owner,
/// and run the sandbox at the same time as the giver.
#[must_use]
pub fn giver_without_taker(
    this: &NodeId,
    to: &NodeId,
    epoch: u64,
    found: Option<&Owner>,
) -> Option<OwnerChange> {
    match found {
        None => Some(OwnerChange::Reassert {
            epoch,
            state: OwnerState::Paused,
        }),
        Some(owner) if owner.node == *this && owner.offered_to.as_ref() == Some(to) => {
            Some(OwnerChange::Withdraw)
        }
        Some(owner) if is_take(to, epoch, owner) => Some(OwnerChange::Take),
        Some(_) => None,
    }
}

/// Whether the record was written by a take under the offer of `epoch`, and not changed since.
fn is_take(to: &NodeId, epoch: u64, owner: &Owner) -> bool {
    let is_next = owner.epoch == epoch + 1;
    owner.node == *to && is_next && owner.state == OwnerState::Paused && owner.offered_to.is_none()
}

/// A taker's response. With [`TakerNote::Incoming`] it must delete the files and the note before it sends this
/// response, so that it cannot take afterwards.
#[must_use]
pub fn taker(note: TakerNote) -> Holding {
    match note {
        TakerNote::Absent | TakerNote::Incoming => Holding::Nothing,
        TakerNote::Taking => Holding::Busy,
        TakerNote::Held => Holding::Taken,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(node: &str, epoch: u64, offered_to: Option<&str>) -> Owner {
        Owner {
            node: node.parse().unwrap(),
            epoch,
            state: OwnerState::Paused,
            offered_to: offered_to.map(|to| to.parse().unwrap()),
        }
    }

    #[test]
    fn a_giver_keeps_the_sandbox_only_if_no_other_node_can_have_it() {
        use GiverStep::{Ask, Discard, Keep, Reassert, Wait, Withdraw};
        let step = |found: Option<&Owner>, answer| {
            giver(
                &"a".parse().unwrap(),
                &"b".parse().unwrap(),
                4,
                found,
                answer,
            )
        };
        let offered = owner("a", 4, Some("b"));
        let taken = owner("b", 5, None);
        let started = Owner {
            state: OwnerState::Running,
            ..owner("b", 6, None)
        };
        let withdrawn = owner("a", 5, None);
        let before = owner("a", 4, None);
        let nothing = Some(Holding::Nothing);
        for (found, answer, expected) in [
            (Some(&offered), None, Ask),
            (Some(&offered), Some(Holding::Busy), Wait),
            (Some(&offered), nothing, Withdraw),
            // etcd was restored from a backup that has the offer.
            (Some(&offered), Some(Holding::Taken), Discard),
            // Until the taker has confirmed it, it may not have learned of it: etcd can be restored from an earlier
            // backup.
            (Some(&taken), None, Ask),
            (Some(&taken), Some(Holding::Busy), Wait),
            (Some(&taken), nothing, Wait),
            (Some(&taken), Some(Holding::Taken), Discard),
            // Records that only a holder writes.
            (Some(&started), None, Discard),
            (Some(&owner("b", 5, Some("c"))), None, Discard),
            (Some(&owner("c", 6, None)), None, Discard),
            (Some(&withdrawn), None, Keep),
            (Some(&before), None, Ask),
            (Some(&before), nothing, Keep),
            (Some(&before), Some(Holding::Taken), Discard),
            (Some(&owner("c", 3, None)), nothing, Reassert),
            (Some(&owner("c", 4, None)), nothing, Wait),
            (None, None, Ask),
            (None, Some(Holding::Taken), Discard),
            (None, nothing, Discard),
        ] {
            assert_eq!(step(found, answer), expected, "{found:?} {answer:?}");
        }
    }

    #[test]
    fn a_giver_keeps_what_a_removed_taker_has_not_started() {
        let step = |found: Option<&Owner>| {
            giver_without_taker(&"a".parse().unwrap(), &"b".parse().unwrap(), 4, found)
        };
        let running = Owner {
            state: OwnerState::Running,
            ..owner("b", 5, None)
        };
        let reassert = OwnerChange::Reassert {
            epoch: 4,
            state: OwnerState::Paused,
        };
        assert_eq!(step(None), Some(reassert));
        let offered = owner("a", 4, Some("b"));
        assert_eq!(step(Some(&offered)), Some(OwnerChange::Withdraw));
        let taken = owner("b", 5, None);
        assert_eq!(step(Some(&taken)), Some(OwnerChange::Take));
        for other in [
            running,
            owner("b", 6, None),
            owner("b", 5, Some("c")),
            owner("c", 5, None),
            owner("a", 4, None),
        ] {
            assert_eq!(step(Some(&other)), None, "{other:?}");
        }
    }
}
