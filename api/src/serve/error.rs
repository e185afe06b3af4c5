//! Why a server could not start.

use std::{io, path::PathBuf};

use pool::PoolError;

use crate::{
    auth::KeyError, egress::EgressError, handover::HandoverError, listen::ListenError,
    network::NetworkError, node::NodeError, peers::join::JoinError, secrets::OpenError,
    tls::TlsError,
};

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Keys(#[from] KeyError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error("cannot join the cluster")]
    Cluster(#[source] JoinError),
    #[error(transparent)]
    Secrets(#[from] OpenError),
    #[error(transparent)]
    Egress(#[from] EgressError),
    #[error("cannot open the events in the state directory")]
    Events(#[source] io::Error),
    #[error("cannot open the directory of builds in the state directory")]
    Builds(#[source] io::Error),
    #[error("cannot open the pool")]
    Pool(#[source] PoolError),
    #[error("cannot install handlers for SIGTERM, SIGINT and SIGHUP")]
    Signals(#[source] io::Error),
    #[error("cannot duplicate the lock of the state directory")]
    Lock(#[source] io::Error),
    #[error("cannot use the sockets that were passed to this process")]
    Sockets(#[source] io::Error),
    #[error(transparent)]
    Handover(#[from] HandoverError),
}

/// Why a state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error(
        "cannot create or open the state directory {}: run as root, or choose another directory with --state",
        path.display()
    )]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Other users could read the secrets in the directory.
    #[error(
        "other users can access the state directory {} (owner {owner}, mode {mode:o}): \
         chown it to the server's user and chmod it to 700",
        path.display()
    )]
    Open {
        path: PathBuf,
        /// The uid of the directory's owner.
        owner: u32,
        /// The permission bits of the directory.
        mode: u32,
    },
}
