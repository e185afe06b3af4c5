//! etcd cut off, compacted, killed, stopped, restored from a backup.

use std::{path::Path, process::Command};

use cluster::{Cluster, ClusterEvent, NodeState, OwnerChange, OwnerState};
use nix::sys::signal::Signal;

use super::support::{Cable, Etcd, LEASE, block_on, founded, id, join, join_as, sees, until};

/// While a node is cut off, keys are written and deleted, and the changes are compacted. Its watch cannot continue, and
/// a list without comparison would keep deleted keys.
pub(crate) fn cluster_a_watch_goes_on_after_a_compaction() {
    let dir = tempfile::tempdir().unwrap();
    let etcd = Etcd::start("etcd", dir.path(), None);
    block_on(async {
        let b = join(etcd.config(), founded(&etcd.config(), "b").await).await;
        let cable = Cable::lay(etcd.port).await;
        let a = join_as(etcd.config_at(cable.port), "a").await;
        let (kept, ended) = (b.mint([1; 19]), b.mint([2; 19]));
        let record = b.change_owner(&ended, None, OwnerChange::Share).await;
        let record = record.unwrap();
        until("a sees the record", || a.view().owners.contains_key(&ended)).await;

        cable.cut(true);
        let mut events = a.events();
        until("a is detached", || {
            std::iter::from_fn(|| events.try_recv().ok()).any(|e| e == ClusterEvent::Detached)
        })
        .await;
        assert!(!a.may_act_as_owner());
        b.change_owner(&ended, record.as_ref(), OwnerChange::End)
            .await
            .unwrap();
        let second = b.change_owner(&kept, None, OwnerChange::Share).await;
        let second = second.unwrap().unwrap();
        b.set_node_state(&id("a"), NodeState::Cordoned)
            .await
            .unwrap();
        until("b misses a", || !sees(&b, "a")).await;
        etcd.compact(b.view().revision);
        // Until here, a still has its last view.
        assert!(a.view().owners.contains_key(&ended) && sees(&a, "b"));

        cable.cut(false);
        until("a has caught up", || {
            let view = a.view();
            !view.owners.contains_key(&ended)
                && view.owners.get(&kept) == Some(&second)
                && view.state(&id("a")) == NodeState::Cordoned
        })
        .await;
        until("a is back", || sees(&b, "a") && a.may_act_as_owner()).await;
        // The new watch also works.
        b.set_node_state(&id("a"), NodeState::Ready).await.unwrap();
        until("a is ready", || {
            a.view().state(&id("a")) == NodeState::Ready
        })
        .await;
    });
}

pub(crate) fn cluster_nodes_return_after_etcd_was_killed_or_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let mut etcd = Etcd::start("etcd", dir.path(), None);
    block_on(async {
        let a = join(etcd.config(), founded(&etcd.config(), "a").await).await;
        let b = join_as(etcd.config(), "b").await;
        until("a sees b", || sees(&a, "b")).await;

        etcd.kill();
        until("a is no owner", || !a.may_act_as_owner()).await;
        // Creates continue with the last view.
        assert!(sees(&a, "b"));
        etcd.restart();
        until("both are back", || {
            a.may_act_as_owner() && b.may_act_as_owner()
        })
        .await;
        works(&a, &b).await;

        etcd.signal(Signal::SIGSTOP);
        tokio::time::sleep(LEASE * 2).await;
        assert!(!a.may_act_as_owner());
        etcd.signal(Signal::SIGCONT);
        until("both are back again", || {
            a.may_act_as_owner() && b.may_act_as_owner() && sees(&a, "b") && sees(&b, "a")
        })
        .await;
        works(&a, &b).await;
    });
}

/// Changes reach both nodes.
async fn works(a: &Cluster, b: &Cluster) {
    for state in [NodeState::Cordoned, NodeState::Ready] {
        a.set_node_state(&id("b"), state).await.unwrap();
        until("the state arrives", || {
            [a, b]
                .iter()
                .all(|node| node.view().state(&id("b")) == state)
        })
        .await;
    }
}

/// Waits until etcd responds. Before half a lease has passed, the node itself has not noticed its absence.
async fn answers(node: &Cluster, sandbox: &model::SandboxId) {
    let start = std::time::Instant::now();
    while node.owner(sandbox).await.is_err() {
        assert!(start.elapsed() < LEASE * 10);
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// The backup is older than the start of a sandbox. The sandbox's record is rewritten with a later epoch.
pub(crate) fn cluster_a_restored_backup_is_noticed_and_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let mut etcd = Etcd::start("etcd", &dir.path().join("data"), None);
    block_on(async {
        let a = join(etcd.config(), founded(&etcd.config(), "a").await).await;
        let sandbox = a.mint([6; 19]);
        let shared = a.change_owner(&sandbox, None, OwnerChange::Share).await;
        let shared = shared.unwrap().unwrap();
        etcd.kill();
        let data = etcd.dir.clone();
        copy(&data, &dir.path().join("backup"));
        etcd.restart();
        answers(&a, &sandbox).await;
        let started = a
            .change_owner(&sandbox, Some(&shared), OwnerChange::Start)
            .await;
        let started = started.unwrap().unwrap();
        for state in [NodeState::Cordoned, NodeState::Ready] {
            a.set_node_state(&id("a"), state).await.unwrap();
        }
        let had = a.health().revision;
        until("the view has it all", || {
            a.view().owners.get(&sandbox) == Some(&started)
        })
        .await;

        let mut events = a.events();
        etcd.kill();
        std::fs::remove_dir_all(&data).unwrap();
        std::fs::rename(dir.path().join("backup"), &data).unwrap();
        etcd.restart();
        until("the loss is noticed", || {
            std::iter::from_fn(|| events.try_recv().ok())
                .any(|event| matches!(event, ClusterEvent::HistoryLost { .. }))
        })
        .await;
        until("the record is back", || {
            let owned = a.view().owners.get(&sandbox).cloned();
            owned.is_some_and(|owned| {
                owned.owner.state == OwnerState::Running && owned.owner.epoch > started.owner.epoch
            })
        })
        .await;
        until("a is registered", || a.may_act_as_owner()).await;
        println!("revision {had} before, {} after", a.health().revision);
    });
}

fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(done.unwrap().success());
}
