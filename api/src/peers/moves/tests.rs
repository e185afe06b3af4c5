//! A node with a real pool, for tests. It has no etcd: reads and changes of records fail.

use std::path::Path;

use cluster::{Cluster, CpuKind, Node};
use model::{Bytes, Platform};
use pool::{BaseKind, PauseMode, PauseNeeds};

use super::*;
use crate::{
    node::settings::Dir,
    peers::{PeerTls, join, transfer::TransferLimits},
    registry::tests::empty_pool,
};

/// An offer of a sandbox and of the template that it booted from.
pub(super) fn offer(id: &SandboxId, base: String, epoch: u64) -> Offer {
    Offer {
        sandbox: id.clone(),
        key: "move".to_owned(),
        base_key: Some("base".to_owned()),
        epoch,
        needs: PauseNeeds {
            base,
            kind: BaseKind::Guest,
            format: None,
            boot: None,
            vmm: None,
            mode: PauseMode::FilesystemOnly,
        },
        stamp: None,
        wake: None,
    }
}

pub(super) async fn alone(state: &Path) -> Moves {
    with_reserve(state, Bytes(0)).await
}

/// A node whose transfers leave this much of the disk free.
pub(super) async fn with_reserve(state: &Path, disk_reserve: Bytes) -> Moves {
    let pool = empty_pool(state).await;
    let (dir, id) = (Dir::of(state), "b".parse::<NodeId>().unwrap());
    let address = "127.0.0.1:9".parse().unwrap();
    let settings = join::init(&dir, id.clone(), address, Vec::new()).unwrap();
    let cluster = Cluster::alone(Node {
        id,
        identity: String::new(),
        address: address.to_string(),
        incarnation: "0".parse().unwrap(),
        platform: Platform::Ring3,
        cpu: CpuKind::default(),
        version: String::new(),
    });
    let limits = TransferLimits {
        rate: Bytes::mib(64),
        disk_reserve,
    };
    let tls = PeerTls::load(&dir).unwrap();
    let peers = Peers::new(cluster, tls, dir, settings, limits);
    Moves::new(peers, pool, state)
}
