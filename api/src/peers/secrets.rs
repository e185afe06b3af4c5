//! Secrets belong to the cluster: each node has all of them, encrypted with its own key.
//!
//! ```text
//! change ─► disk of this node ─► PUT /cluster/secrets ─► disks of the reachable nodes ─► response to the client
//! every 2 s ─ GET /cluster/state: digest differs? ─► POST /cluster/secrets: get changes ─► disk of this node
//! ```
//! A change waits at most 3 s for each node. A node that does not respond catches up by comparison, as after an
//! absence.
//!
//! Values are sent to members only. They must never be in etcd, in a log, in an error, or in `/cluster/state`.

use std::{io, time::Duration};

use hyper::StatusCode;
use model::clock::unix_ms;
use tasks::blocking;
use zeroize::Zeroizing;

use super::{
    Peers,
    ask::{ASK, MAX_ANSWER, MAX_REFUSAL, question},
};
use crate::secrets::{Secrets, merge::Batch};
use cluster::NodeId;

/// How long to wait for other nodes to confirm a change.
const CONFIRMED: Duration = Duration::from_secs(3);

impl Peers {
    /// Sends a change to all reachable nodes. Returns when they have it on disk, or after [`CONFIRMED`].
    pub(crate) async fn push_secrets(&self, batch: &Batch) {
        let Ok(body) = serde_json::to_vec(batch) else {
            return;
        };
        let body = Zeroizing::new(body);
        let push = |peers: Self, node| {
            let body = body.to_vec();
            async move { peers.push_to(&node, body).await }
        };
        for (node, why) in self.unconfirmed(push).await {
            tracing::warn!(%node, why, "another node has not confirmed a change of secrets: it may use the old ones for some seconds");
        }
    }

    async fn push_to(&self, node: &NodeId, body: Vec<u8>) -> Result<(), String> {
        let question = question("PUT", "/cluster/secrets", body);
        let answer = self.read(node, question, MAX_REFUSAL, CONFIRMED).await;
        match answer.map_err(|why| model::chain(&why))?.0 {
            StatusCode::NOT_FOUND => {
                tracing::debug!(%node, "a node of an older release does not accept secrets");
                Ok(())
            }
            status if status.is_success() => Ok(()),
            status => Err(format!("status {status}")),
        }
    }

    /// Merges secrets that another node has and this one lacks.
    pub(super) async fn pull_secrets(
        &self,
        node: &NodeId,
        secrets: &Secrets,
    ) -> Result<(), String> {
        let known = serde_json::to_vec(&secrets.stamps()).map_err(|why| why.to_string())?;
        let question = question("POST", "/cluster/secrets", known);
        let answer = self.read(node, question, MAX_ANSWER, ASK).await;
        let (status, bytes) = answer.map_err(|why| model::chain(&why))?;
        if !status.is_success() {
            return Err(format!("status {status}"));
        }
        let merged = merge(secrets, Batch::parse(&bytes)?).await;
        merged.map(drop).map_err(|why| model::chain(&why))
    }
}

/// Merges secrets sent by another node and returns how many were refused.
///
/// # Errors
/// Returns an error if they cannot be stored.
pub(crate) async fn merge(secrets: &Secrets, batch: Batch) -> io::Result<usize> {
    let secrets = secrets.clone();
    blocking(move || secrets.merge(batch, unix_ms()).map_err(io::Error::other)).await
}
