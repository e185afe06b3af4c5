//! The sandboxes' network: what the operator says of it, and how it is opened.

use std::{fs, net::SocketAddr, path::Path, sync::Arc};

use netisolation::{
    EventLog, Hooks, Isolation, IsolationConfig, IsolationError, LogError, NetEvent, Resolver,
    ResolverConfig, Uplinks,
};
use sha2::{Digest, Sha256};

use crate::control::EgressConfig;

/// Where programs and maps outlive the server.
const PINS: &str = "/sys/fs/bpf/cube";
/// What was refused, below the state directory.
const LOG: &str = "network-events.jsonl";
/// TAPs kept ready: to make one takes ten milliseconds and more, one after the other, and a fork may ask for 50 at once.
const STOCK: u32 = 64;
/// Numbers of TAPs beyond the most sandboxes: of the stock, and of those whose flows have yet to be removed.
const SPARE: u32 = 192;
/// Flows of one sandbox at a time.
const MAX_FLOWS: u32 = 4096;

/// What an operator says of the sandboxes' network.
#[derive(Clone, Debug)]
pub struct NetworkSpec {
    /// Where packets may leave the host.
    pub uplinks: Uplinks,
    /// What sandboxes may reach unasked, and what of the forbidden ranges is open.
    pub egress: EgressConfig,
    /// Whom the resolver asks; empty: what /etc/resolv.conf says.
    pub dns_servers: Vec<SocketAddr>,
    /// Bytes a second of each sandbox, each way; absent: no limit.
    pub bytes_per_s: Option<u64>,
}

/// The parts of an opened network that the server needs beside the pool.
#[derive(Clone, Debug)]
pub struct Network {
    /// See [`EgressConfig`].
    pub egress: EgressConfig,
    /// What was refused.
    pub log: EventLog,
}

/// Why there is no network.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The isolation's reason.
    #[error(
        "sandboxes cannot be given an isolated network (--network none starts a server whose sandboxes have none)"
    )]
    Isolation(#[from] IsolationError),
    /// The state directory cannot be named.
    #[error("cannot look at the state directory")]
    State(#[source] std::io::Error),
    /// The resolver's sockets.
    #[error("cannot serve names to sandboxes")]
    Resolver(#[source] std::io::Error),
    /// The log of what was refused.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The thread that opened it is gone.
    #[error("the network was not opened: {0}")]
    Lost(String),
}

/// Loads the programs, or takes over what the server before has left. For a state directory that is there.
///
/// # Errors
/// See [`NetworkError`].
pub(crate) async fn open(
    spec: &NetworkSpec,
    state: &Path,
    max_sandboxes: u32,
) -> Result<(Isolation, Network), NetworkError> {
    let config = IsolationConfig {
        instance: instance(state).map_err(NetworkError::State)?,
        pins: PINS.into(),
        uplinks: spec.uplinks.clone(),
        exceptions: spec.egress.exceptions.clone(),
        dns_servers: spec.dns_servers.clone(),
        stock: STOCK.min(max_sandboxes),
        max_taps: max_sandboxes.saturating_add(SPARE),
        max_flows: MAX_FLOWS,
        bytes_per_s: spec.bytes_per_s,
    };
    let opened = tokio::task::spawn_blocking(move || Isolation::open(&config)).await;
    let (isolation, events) = opened.map_err(|e| NetworkError::Lost(e.to_string()))??;
    let log = EventLog::open(&state.join(LOG), Box::new(tell))?;
    log.follow(events)?;
    resolve(&isolation, spec).map_err(NetworkError::Resolver)?;
    let egress = spec.egress.clone();
    Ok((isolation, Network { egress, log }))
}

/// Serves names to sandboxes, for as long as the server runs.
fn resolve(isolation: &Isolation, spec: &NetworkSpec) -> std::io::Result<()> {
    let (udp, tcp) = isolation.resolver_sockets()?;
    let config = ResolverConfig {
        dns_servers: spec.dns_servers.clone(),
        exceptions: spec.egress.exceptions.clone(),
    };
    let resolver = Arc::new(Resolver::new(config, Hooks::of(isolation)));
    tokio::spawn(async move {
        let Err(error) = resolver.serve(udp, tcp).await;
        tracing::error!(%error, "sandboxes have no names any more");
    });
    Ok(())
}

/// Each in the server's own log, for who asks for it.
fn tell(event: &NetEvent) {
    let NetEvent {
        sandbox,
        destination,
        reason,
        ..
    } = event;
    tracing::debug!(%sandbox, %destination, ?reason, "refused");
}

/// The state directory's name among others: the same for the next server, however the path is written.
fn instance(state: &Path) -> std::io::Result<String> {
    use std::os::unix::ffi::OsStrExt;
    let path = fs::canonicalize(state)?;
    let sum = Sha256::digest(path.as_os_str().as_bytes());
    Ok(sum.iter().take(4).map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_is_named_by_where_its_state_is() {
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
