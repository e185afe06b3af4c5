//! The network of all sandboxes: the operator's configuration, and the start of network isolation and of the DNS
//! resolver.

use std::{fs, io, net::SocketAddr, path::Path, sync::Arc};

use ::egress::control::Flow;
use journal::EventLogError;
use model::hex;
use netisolation::{
    DefaultEgress, EventLog, ForbiddenAddresses, Hooks, Isolation, IsolationConfig, IsolationError,
    MAX_TAPS, NetEvent, Resolver, ResolverConfig, ResolverSockets, Uplinks, follow, open_log,
};
use sha2::{Digest, Sha256};
use tasks::{boxed, on_thread};
use tokio::{sync::watch, task::JoinSet};

use crate::{
    egress::{AlertSpec, Alerts, EgressSpec, Handed, Seat},
    events::Refusal,
};

/// Where eBPF programs and maps are pinned, so that they outlive the server.
const PINS: &str = "/sys/fs/bpf/cube";
/// Log of refused packets, below the state directory.
const LOG: &str = "network-events.jsonl";
/// Number of TAPs kept ready. A fork may need 50 at once, but TAPs can only be created one after another, and each
/// takes more than 10 ms.
const STOCK: u32 = 64;
/// TAP ids in addition to `pool.max_sandboxes`: for the TAPs kept ready, and for TAPs of ended sandboxes whose flows have
/// not been removed yet.
const SPARE: u32 = 192;
/// Maximum of `pool.max_sandboxes` on a server whose sandboxes have a network.
pub const MAX_SANDBOXES: u32 = MAX_TAPS - SPARE;
/// Maximum number of concurrent flows of one sandbox.
const MAX_FLOWS: u32 = 4096;

/// The operator's configuration of outbound traffic.
#[derive(Clone, Debug, Default)]
pub struct EgressConfig {
    /// Policy for sandboxes whose client sets no network options.
    pub default: DefaultEgress,
    /// Addresses that are denied to all sandboxes, and to their DNS servers and proxies.
    pub forbidden: ForbiddenAddresses,
    pub rewriting: Rewriting,
}

/// Whether `cube-egress` can rewrite requests of sandboxes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rewriting {
    /// `network.rules` are refused.
    #[default]
    Off,
    On,
}

/// The operator's network configuration.
#[derive(Clone, Debug)]
pub struct NetworkSpec {
    /// Interfaces through which packets may leave the host.
    pub uplinks: Uplinks,
    /// Default policy for sandboxes, and the addresses that are denied to all of them.
    pub egress: EgressConfig,
    /// Upstream DNS servers of the resolver. Empty: the servers in /etc/resolv.conf.
    pub dns_servers: Vec<SocketAddr>,
    /// Bandwidth of each sandbox in each direction. `None`: unlimited.
    pub bytes_per_s: Option<u64>,
    /// The proxy of outbound requests. `None`: no flow is redirected.
    pub proxy: Option<EgressSpec>,
    /// Reaction to frequent refusals of a sandbox.
    pub alert: Option<AlertSpec>,
}

/// The parts of the network that the server uses outside of the pool.
#[derive(Clone, Debug)]
pub struct Network {
    pub egress: EgressConfig,
    /// The log of refused packets.
    pub log: EventLog,
}

/// Why the network could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The host cannot enforce network policies.
    #[error(
        "cannot set up an isolated network for sandboxes: fix the cause, or run sandboxes without network (network.mode = \"none\")"
    )]
    Isolation(#[from] IsolationError),
    #[error("cannot resolve the path of the state directory")]
    State(#[source] std::io::Error),
    #[error("cannot open the DNS sockets for sandboxes")]
    Resolver(#[source] std::io::Error),
    #[error(transparent)]
    Log(#[from] EventLogError),
    /// The thread that opened the network panicked or was cancelled.
    #[error("the task that opens the network failed: {0}")]
    Lost(String),
}

/// The resolver, which runs until this value is dropped.
#[derive(Debug)]
pub(crate) struct Serving(watch::Sender<bool>);

impl Serving {
    /// Stops the resolver: it accepts no more queries from its sockets, and finishes those in progress. Returns when it
    /// has stopped.
    pub(crate) async fn stop(self) {
        self.0.send_replace(true);
        self.0.closed().await;
    }
}

/// Loads the eBPF programs, or takes over those of the previous server process. The state directory must exist. The
/// resolver runs on `tasks`, using the sockets of a predecessor if `sockets` is set.
///
/// # Errors
/// Returns [`NetworkError`], whose variant names the part that could not be opened.
pub(crate) async fn open(
    spec: &NetworkSpec,
    state: &Path,
    max_sandboxes: u32,
    sockets: Option<ResolverSockets>,
    alerts: Option<Alerts>,
    tasks: &mut JoinSet<()>,
) -> Result<(Isolation, Network, Serving), NetworkError> {
    let config = IsolationConfig {
        instance: instance(state).map_err(NetworkError::State)?,
        pins: PINS.into(),
        uplinks: spec.uplinks.clone(),
        forbidden: spec.egress.forbidden.clone(),
        stock: STOCK.min(max_sandboxes),
        max_taps: max_sandboxes.saturating_add(SPARE),
        max_flows: MAX_FLOWS,
        bytes_per_s: spec.bytes_per_s,
        proxy: spec.proxy.is_some(),
    };
    let opened = on_thread(move || Isolation::open_with(&config, sockets)).await;
    let (isolation, events) = opened.map_err(|e| NetworkError::Lost(e.to_string()))??;
    if let Some(why) = isolation.unlimited_proxy().filter(|_| spec.proxy.is_some()) {
        tracing::warn!(
            why = model::chain(why),
            "the kernel does not limit where the egress proxy connects: only the proxy's own checks and its system call filter do"
        );
    }
    let subscriber = move |event: &NetEvent| {
        log_event(event);
        if let Some(alerts) = &alerts {
            alerts.refused(Refusal::of_packets(event));
        }
    };
    let log = open_log(&state.join(LOG), subscriber)?;
    follow(&log, events)?;
    let serving = resolve(&isolation, spec, tasks).map_err(NetworkError::Resolver)?;
    let egress = spec.egress.clone();
    Ok((isolation, Network { egress, log }, serving))
}

/// Ports of connections in which the proxy looks for host names. Other ports are redirected only for sandboxes with
/// their own proxy.
const CHECKED: [u16; 2] = [80, 443];

/// The listening socket and the limits of the egress proxy, and the flows that are handed to it. The programs have judged
/// their remote ends, but the proxy connects to them from this host, where more addresses than those of its interfaces can
/// be local.
pub(crate) fn proxied(isolation: &Isolation, forbidden: ForbiddenAddresses) -> (Seat, Handed) {
    let (listening, handing, adopting) = (isolation.clone(), isolation.clone(), isolation.clone());
    let limiting = isolation.clone();
    let seat = Seat {
        listen: Box::new(move || listening.proxy_listener()),
        limit: Box::new(move |pid| {
            let limited = limiting.limit_proxy(pid);
            limited.map_err(|why| io::Error::other(model::chain(&why)))
        }),
    };
    let judge = forbidden.clone();
    let flow = move |peer| {
        let flow = handing.handed(peer)?;
        if let Err(why) = judge.check_connection(flow.remote) {
            tracing::warn!(sandbox = %flow.sandbox, why = model::chain(&why), "refused a connection of a sandbox through the egress proxy");
            return None;
        }
        Some(Flow {
            sandbox: flow.sandbox.to_string(),
            remote: flow.remote,
            names: flow.names,
            admitted_by_address: flow.admitted_by_address,
            is_unread: !CHECKED.contains(&flow.remote.port()),
            has_own_way: flow.is_of_all,
        })
    };
    let handed = Handed {
        flow: Box::new(flow),
        awaits_adoption: Box::new(move |peer| adopting.awaits_adoption(peer)),
        forbidden,
    };
    (seat, handed)
}

/// Starts the sandboxes' DNS resolver.
fn resolve(
    isolation: &Isolation,
    spec: &NetworkSpec,
    tasks: &mut JoinSet<()>,
) -> std::io::Result<Serving> {
    let sockets = isolation.resolver_sockets()?;
    let config = ResolverConfig {
        dns_servers: spec.dns_servers.clone(),
        forbidden: spec.egress.forbidden.clone(),
    };
    let resolver = Arc::new(Resolver::new(config, Hooks::of(isolation)));
    let (serving, stop) = watch::channel(false);
    tasks.spawn(boxed(async move {
        if let Err(error) = resolver.serve(sockets, stop).await {
            tracing::error!(%error, "the DNS resolver of the sandboxes stopped: restart the server to resolve names again");
        }
    }));
    Ok(Serving(serving))
}

/// Writes an event to the server's own log at debug level.
fn log_event(event: &NetEvent) {
    let NetEvent {
        sandbox,
        destination,
        reason,
        ..
    } = event;
    tracing::debug!(%sandbox, %destination, ?reason, "packet refused");
}

/// A name for this server's objects in kernel-wide namespaces. It is derived from the real path of the state directory,
/// so that the next server process that uses this directory gets the same name.
fn instance(state: &Path) -> std::io::Result<String> {
    use std::os::unix::ffi::OsStrExt;
    let path = fs::canonicalize(state)?;
    let sum = Sha256::digest(path.as_os_str().as_bytes());
    Ok(hex(&sum[..4]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_is_named_after_the_real_path_of_its_state_directory() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        fs::create_dir(&one).unwrap();
        fs::create_dir(&two).unwrap();
        let name = instance(&one).unwrap();
        assert_eq!(name, instance(&two.join("../one")).unwrap());
        assert_ne!(name, instance(&two).unwrap());
        assert!(name.len() == 8 && name.bytes().all(|b| b.is_ascii_alphanumeric()));
        assert!(instance(&dir.path().join("none")).is_err());
    }
}
