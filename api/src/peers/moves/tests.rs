//! A node with a real pool, for tests. It has no etcd: reads and changes of records fail.

use std::path::Path;

use cluster::{Cluster, CpuKind, Node};
use model::{Bytes, Platform};
use pool::{MissingLimits, PoolConfig};

use super::*;
use crate::peers::{PeerTls, join, settings::Dir, transfer::TransferLimits};

pub(super) async fn alone(state: &Path) -> Moves {
    with_reserve(state, Bytes(0)).await
}

/// A node whose transfers leave this much of the disk free.
pub(super) async fn with_reserve(state: &Path, disk_reserve: Bytes) -> Moves {
    let config = PoolConfig {
        missing_limits: MissingLimits::Allow,
        memory_reserve: Bytes(0),
        disk_reserve: Bytes(0),
        ..PoolConfig::new("/bin/true".into(), state.to_owned())
    };
    let (pool, ..) = Pool::open(config).await.unwrap();
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
