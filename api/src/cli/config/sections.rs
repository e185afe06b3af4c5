//! The sections of the configuration file, with their defaults. `dev/packaging/cube.toml` describes each key.

use std::{net::SocketAddr, num::NonZeroU64, path::PathBuf};

use model::{Bytes, STATE_DIR};
use serde::{Deserialize, Serialize};

use super::values::{
    AlertTo, Block, Bounded, Ceiling, Cidr, Collector, EgressProxy, Marks, Mirror, NameServer,
    NodeName, ServerMemory, Text, Timeout,
};

/// The keys of all sections.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(in super::super) struct ServerConfig {
    pub(in super::super) server: ServerSection,
    pub(super) tls: TlsSection,
    pub(in super::super) pool: PoolSection,
    pub(super) sandbox: SandboxSection,
    pub(super) network: NetworkSection,
    pub(super) egress: EgressSection,
    pub(super) alerts: AlertsSection,
    pub(super) builds: BuildsSection,
    pub(super) images: ImagesSection,
    pub(super) cluster: ClusterSection,
    pub(super) traces: TracesSection,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(in super::super) struct ServerSection {
    pub(super) listen: Vec<SocketAddr>,
    pub(in super::super) state: PathBuf,
    pub(super) domain: Option<String>,
    pub(super) insecure_loopback: bool,
    pub(super) trusted_proxies: Vec<Text<Cidr>>,
    pub(super) rate: u32,
    pub(super) memory: Text<ServerMemory>,
    pub(super) secrets_key: Option<PathBuf>,
    pub(super) on_exit: OnExit,
    pub(in super::super) log: Log,
    pub(super) reports: Option<PathBuf>,
}

impl Default for ServerSection {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            state: STATE_DIR.into(),
            domain: None,
            insecure_loopback: false,
            trusted_proxies: Vec::new(),
            rate: 500,
            memory: Text::of("2GiB"),
            secrets_key: None,
            on_exit: OnExit::Keep,
            log: Log::Human,
            reports: None,
        }
    }
}

/// What happens to running sandboxes when the server stops.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum OnExit {
    /// They keep running, and the next server takes them over.
    Keep,
    Kill,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(in super::super) enum Log {
    Human,
    Json,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct TlsSection {
    pub(super) certificate: Option<PathBuf>,
    pub(super) key: Option<PathBuf>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(in super::super) struct PoolSection {
    pub(super) templates: Option<PathBuf>,
    pub(super) images: Vec<PathBuf>,
    pub(in super::super) vmm: Option<PathBuf>,
    pub(super) warm: Option<Text<Marks>>,
    pub(super) warm_slots: Option<u32>,
    pub(super) warm_memory: Option<Bytes>,
    pub(super) max_sandboxes: u32,
    pub(super) max_saved: u32,
    pub(super) memory_reserve: Bytes,
    pub(super) memory_margin: Bounded<0, 100>,
    pub(super) memory_stalls: Bounded<1, 100>,
    pub(super) disk_reserve: Bytes,
    pub(super) template_quota: Option<Bytes>,
}

impl Default for PoolSection {
    fn default() -> Self {
        Self {
            templates: None,
            images: Vec::new(),
            vmm: None,
            warm: None,
            warm_slots: None,
            warm_memory: None,
            max_sandboxes: 256,
            max_saved: 1000,
            memory_reserve: Bytes::mib(512),
            memory_margin: Bounded(3),
            memory_stalls: Bounded(10),
            disk_reserve: Bytes::mib(1024),
            template_quota: None,
        }
    }
}

/// Limits of each sandbox.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct SandboxSection {
    pub(super) cpu_weight: Bounded<1, 10_000>,
    pub(super) cpu_millis: Option<u32>,
    pub(super) disk: Option<Bytes>,
    pub(super) io_rate: Text<Ceiling>,
    /// `None`: about half of a 1 Gbit/s link. A single sandbox leaves the other half to other sandboxes and the server.
    pub(super) network_rate: Option<Text<Ceiling>>,
    pub(super) max_timeout: Text<Timeout>,
    pub(super) allow_missing_limits: bool,
}

impl Default for SandboxSection {
    fn default() -> Self {
        Self {
            cpu_weight: Bounded(100),
            cpu_millis: None,
            disk: None,
            io_rate: Text::of("256MiB"),
            network_rate: None,
            max_timeout: Text::of("24h"),
            allow_missing_limits: false,
        }
    }
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NetworkSection {
    pub(super) mode: NetworkMode,
    pub(super) uplinks: Vec<String>,
    pub(super) default_egress: Egress,
    pub(super) exceptions: Vec<Text<Block>>,
    pub(super) webhook_exceptions: Vec<Text<Cidr>>,
    pub(super) denied: Vec<Text<Block>>,
    pub(super) dns_servers: Vec<Text<NameServer>>,
}

impl Default for NetworkSection {
    fn default() -> Self {
        Self {
            mode: NetworkMode::Isolated,
            uplinks: Vec::new(),
            default_egress: Egress::Deny,
            exceptions: Vec::new(),
            webhook_exceptions: Vec::new(),
            denied: Vec::new(),
            dns_servers: Vec::new(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum NetworkMode {
    /// Each sandbox has its own TAP with a policy, which the host must be able to enforce.
    Isolated,
    /// Sandboxes have no network.
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Egress {
    /// Nothing.
    Deny,
    /// Everything except the ranges that are denied to all sandboxes.
    Internet,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct EgressSection {
    pub(super) proxy: Option<Text<EgressProxy>>,
    pub(super) connections: Option<Bounded<1, { 1 << 20 }>>,
    pub(super) log_calls: bool,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct AlertsSection {
    pub(super) refusals: Option<NonZeroU64>,
    pub(super) to: Option<Text<AlertTo>>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct BuildsSection {
    pub(super) concurrent: Bounded<1, 64>,
    pub(super) cache: Bytes,
    pub(super) egress: Egress,
    pub(super) uploads: Bytes,
}

impl Default for BuildsSection {
    fn default() -> Self {
        Self {
            concurrent: Bounded(2),
            cache: Bytes::mib(20 << 10),
            egress: Egress::Internet,
            uploads: Bytes::mib(10 << 10),
        }
    }
}

/// Images that templates are built from.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ImagesSection {
    pub(super) quota: Bytes,
    pub(super) mirrors: Vec<Text<Mirror>>,
    pub(super) exceptions: Vec<Text<Cidr>>,
    pub(super) credentials: Option<PathBuf>,
    pub(super) converter: Option<PathBuf>,
    pub(super) userland: Option<PathBuf>,
}

impl Default for ImagesSection {
    fn default() -> Self {
        Self {
            quota: Bytes::mib(20 << 10),
            mirrors: Vec::new(),
            exceptions: Vec::new(),
            credentials: None,
            converter: None,
            userland: None,
        }
    }
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ClusterSection {
    pub(super) enabled: bool,
    pub(super) node: Option<Text<NodeName>>,
    pub(super) transfer_rate: Bytes,
}

impl Default for ClusterSection {
    fn default() -> Self {
        Self {
            enabled: false,
            node: None,
            transfer_rate: Bytes::mib(64),
        }
    }
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct TracesSection {
    pub(super) endpoint: Option<Text<Collector>>,
    pub(super) share: f64,
}

impl Default for TracesSection {
    fn default() -> Self {
        Self {
            endpoint: None,
            share: 1.0,
        }
    }
}
