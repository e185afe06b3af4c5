//! Files between nodes, by content.
//!
//! ```text
//! giver:  Offers::offer(key, takers, files) ─► GET /cluster/files/KEY            sums of all chunks
//!                                      GET /cluster/files/KEY/FILE/N     one chunk
//! taker:  Peers::list_files ─► Peers::fetch_files into a directory of its own:
//!                              NAME.part ─► every chunk compared with its sum ─► synced ─► NAME
//! ```
//! A file is a list of chunks of [`CHUNK`] bytes, each with its SHA-256. Chunks of zeros are not sent, and stay holes. A
//! fetch that has ended in the middle goes on where it was: it compares what is on disk with the sums, so no journal is
//! needed, and neither a crash of the host nor another list can make it keep a wrong chunk.
//!
//! What must never happen:
//! - A file has its name before each of its chunks was compared with its sum, and it was synced.
//! - A list decides about memory or disk: counts, names and sizes are checked while it is read, and the disk keeps its
//!   reserve.
//! - Transfers take more than their rate, in either direction.

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

/// Bytes of a chunk; the last one of a file may have fewer.
pub const CHUNK: u64 = 4 << 20;

/// Limits of all transfers of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferLimits {
    /// Bytes per second, in each direction.
    pub rate: Bytes,
    /// Disk space that transfers leave free.
    pub disk_reserve: Bytes,
}

/// Why files of another node are not here. What was fetched stays for the next attempt, but for a file that could not be
/// synced.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// It offers them no more, or its server was restarted.
    #[error("node {node} does not offer {key}")]
    NotOffered { node: NodeId, key: String },
    #[error("node {node} sent chunk {chunk} of {file} with another content than its list has")]
    Corrupt {
        node: NodeId,
        file: String,
        chunk: usize,
    },
    #[error("no space on disk for {needed} of another node (--disk-reserve stays free)")]
    NoSpace { needed: Bytes },
    #[error("cannot write {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}
