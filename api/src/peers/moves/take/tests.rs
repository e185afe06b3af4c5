use std::fs::File;

use cluster::OwnerError;

use super::*;
use crate::peers::moves::tests::{self, alone};

fn offer(id: &SandboxId, epoch: u64) -> Offer {
    tests::offer(id, "0".repeat(64), epoch)
}

fn incoming(from: &str, epoch: u64, is_taking: bool) -> Incoming {
    Incoming {
        from: from.parse().unwrap(),
        epoch,
        stamp: None,
        wake: None,
        needs: None,
        is_taking,
    }
}

/// Incoming files of a sandbox, without a note.
fn arriving(moves: &Moves, id: &SandboxId) -> PathBuf {
    let dir = moves.dir(id);
    fs::create_dir_all(dir.join(PAUSE)).unwrap();
    fs::write(dir.join(PAUSE).join("memory"), "all").unwrap();
    dir
}

#[tokio::test]
async fn a_note_that_cannot_be_read_removes_nothing() {
    let state = tempfile::tempdir().unwrap();
    let moves = alone(state.path()).await;
    let [torn, long, failed] = [1, 2, 3].map(|n| SandboxId::from_random([n; 19]));
    let a = "a".parse().unwrap();
    let later = br#"{"from": "a", "epoch": "4.1", "is_taking": true}"#;
    fs::write(arriving(&moves, &torn).join(NOTE), later).unwrap();
    let file = File::create(arriving(&moves, &long).join(NOTE)).unwrap();
    file.set_len(MAX_NOTE + 1).unwrap();
    // A read that fails: EISDIR.
    fs::create_dir(arriving(&moves, &failed).join(NOTE)).unwrap();
    for id in [&torn, &long, &failed] {
        assert_eq!(moves.holding(id, 4).await.unwrap(), Holding::Busy);
        assert_eq!(moves.finish(id).await.unwrap(), Holding::Busy);
        let taken = moves.take(&a, offer(id, 5)).await;
        assert_eq!(taken.unwrap(), Holding::Busy);
    }
    moves.recover_incoming().await;
    for id in [&torn, &long, &failed] {
        let kept = moves.dir(id).join(PAUSE).join("memory");
        assert_eq!(fs::read(kept).unwrap(), b"all");
        assert!(moves.is_incoming(id).await && moves.dir(id).join(NOTE).exists());
    }
}

#[tokio::test]
async fn what_arrived_without_a_take_is_removed() {
    let state = tempfile::tempdir().unwrap();
    let moves = alone(state.path()).await;
    let [absent, noted, taking] = [1, 2, 3].map(|n| SandboxId::from_random([n; 19]));
    let all = [&absent, &noted, &taking];
    for id in all {
        arriving(&moves, id);
    }
    moves.note(&noted, &incoming("a", 4, false)).await.unwrap();
    moves.note(&taking, &incoming("a", 4, true)).await.unwrap();
    let mut held = Vec::new();
    for id in all {
        held.push(moves.holding(id, 4).await.unwrap());
    }
    // Without etcd, the outcome of the take is unknown.
    let expected = [Holding::Nothing, Holding::Nothing, Holding::Busy];
    assert_eq!(held, expected);
    let here = all.map(|id| moves.dir(id).exists());
    assert_eq!(here, [false, false, true]);
}

#[tokio::test]
async fn nothing_is_fetched_before_etcd_has_confirmed_the_offer() {
    let state = tempfile::tempdir().unwrap();
    let moves = alone(state.path()).await;
    let id = SandboxId::from_random([1; 19]);
    let refused = moves.take(&"a".parse().unwrap(), offer(&id, 4)).await;
    let refused = refused.unwrap_err();
    assert!(
        matches!(refused, MoveError::Owner(OwnerError::Alone)),
        "{refused:?}"
    );
    assert!(!state.path().join("incoming").exists(), "nothing is noted");
}
