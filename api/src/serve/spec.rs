//! The validated configuration of a server.

use std::{net::SocketAddr, path::PathBuf};

use builds::bases::ImagesSpec;
use ipnet::IpNet;
use model::Bytes;
use netisolation::{DefaultEgress, ForbiddenAddresses};
use pool::{OnClose, PoolConfig};

use crate::{auth::Auth, network::NetworkSpec, peers::ClusterSpec, secrets::KeySource};

#[derive(Debug)]
pub struct ServeSpec {
    /// Addresses to bind.
    pub listen: Vec<SocketAddr>,
    /// Sockets of these addresses that systemd has already bound. Empty: the server binds the addresses.
    pub bound: Vec<std::net::TcpListener>,
    pub pool: PoolConfig,
    /// Domain below which sandboxes have host names, with the server's port unless the port is 443. `None`: no domain
    /// is configured. Requests then identify their sandbox by headers or, unless authentication is off, by a host name
    /// `<port>-<id>` below any domain.
    pub domain: Option<String>,
    /// Reverse proxies whose `X-Forwarded-For` is trusted.
    pub trusted_proxies: Vec<IpNet>,
    /// `None`: plain HTTP.
    pub tls: Option<TlsFiles>,
    pub auth: Auth,
    /// Maximum timeout that a client can set for a sandbox, in seconds.
    pub max_timeout_s: u32,
    pub on_exit: OnClose,
    /// `None`: sandboxes have no network.
    pub network: Option<NetworkSpec>,
    pub builds: BuildsSpec,
    /// Source of the key that encrypts the secrets.
    pub secrets_key: KeySource,
    /// Images that templates are built from.
    pub images: ImagesSpec,
    /// Name of this node.
    pub node: String,
    /// `None` outside a cluster.
    pub cluster: Option<ClusterSpec>,
    /// Addresses that no webhook of a client may have.
    pub webhooks_forbidden: ForbiddenAddresses,
    /// Directory of benchmark runs that the console compares.
    pub reports: Option<PathBuf>,
}

/// How templates are built.
#[derive(Clone, Copy, Debug)]
pub struct BuildsSpec {
    /// Disk space of cached step results in bytes.
    pub cache_quota: Bytes,
    /// Network access of the steps.
    pub egress: DefaultEgress,
    /// Maximum number of concurrent builds; at least 1.
    pub running: usize,
    /// Space of all uploaded archives.
    pub upload_quota: Bytes,
}

/// PEM files of the server's certificate.
#[derive(Debug)]
pub struct TlsFiles {
    /// The certificate chain, leaf first.
    pub certificates: PathBuf,
    /// The private key of the leaf certificate.
    pub key: PathBuf,
}
