//! File transfers between nodes, by content.
//!
//! ```text
//! giver:  Offers::offer(key, takers, files) ─► GET /cluster/files/KEY            hashes of all chunks
//!                                      GET /cluster/files/KEY/FILE/N     one chunk
//! taker:  Peers::list_files ─► Peers::fetch_files into an exclusive directory:
//!                              NAME.part ─► every chunk verified ─► synced ─► NAME
//! ```
//! A file is a list of chunks of [`CHUNK`] bytes, each with its SHA-256. Chunks of zeros are not sent and stay holes.
//! An interrupted fetch resumes by comparing the data on disk with the hashes. It needs no journal, and neither a crash
//! of the host nor a different list can make it keep a wrong chunk.
//!
//! Invariants:
//! - A file must not get its final name before each of its chunks was verified and the file was synced.
//! - A list must not decide about memory or disk: counts, names and sizes are checked while it is read, and the disk
//!   keeps its reserve.
//! - Transfers must not exceed their rate, in either direction.

mod fetch;
mod list;
mod offer;
mod rate;
mod sums;
#[cfg(test)]
mod tests;

use std::{io, path::PathBuf};

use cluster::NodeId;
use model::Bytes;

use super::PeerError;
pub(crate) use fetch::{Fetch, PART, Source};
pub use list::{FileList, FileSum};
pub(crate) use offer::{Offered, Offers, Takers};
pub(crate) use rate::Rate;
pub(crate) use sums::Sums;

/// Bytes per chunk. The last chunk of a file may be shorter.
pub const CHUNK: u64 = 4 << 20;

/// Limits of all transfers of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferLimits {
    /// Bytes per second, in each direction.
    pub rate: Bytes,
    /// Disk space that transfers leave free.
    pub disk_reserve: Bytes,
}

/// Why files of another node could not be fetched. Data fetched so far is kept for the next attempt, except a file that
/// could not be synced.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The node has withdrawn the offer, or its server was restarted.
    #[error("node {node} does not offer {key}")]
    NotOffered { node: NodeId, key: String },
    #[error("node {node} sent chunk {chunk} of {file} whose content does not match its list")]
    Corrupt {
        node: NodeId,
        file: String,
        chunk: usize,
    },
    #[error("no space on disk for {needed} from another node (pool.disk_reserve stays free)")]
    NoSpace { needed: Bytes },
    #[error("cannot write {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}
