//! From the configuration to the [`ServeSpec`]: defaults that depend on the host, and keys that depend on each other.

use std::{
    fmt::Display,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
};

use api::{
    auth::{Auth, Rate},
    node,
    peers::{ClusterSpec, transfer::TransferLimits},
    secrets::KeySource,
    serve::{BuildsSpec, ServeSpec, TlsFiles},
    traces::TraceSpec,
};
use pool::{MissingLimits, OnClose, PoolConfig, SandboxLimits, WarmMarks};

use super::{
    super::{Failure, failure, prepare},
    images::images,
    layers::{Layers, Mistake, report},
    network::{destinations, forbidden, network},
    sections::{BuildsSection, OnExit, ServerConfig, ServerSection, TlsSection, TracesSection},
};

/// Default listening address.
const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 3000);
/// Burst size of a key's rate limit, as a multiple of its requests per second.
const BURST: u32 = 2;
/// Default number of warm slots of installed templates, if other templates do not need the room.
const WARM: WarmMarks = WarmMarks { low: 2, high: 4 };

/// Collects the mistakes of one configuration.
pub(super) struct Checks<'a> {
    layers: &'a Layers,
    mistakes: Vec<Mistake>,
}

impl Checks<'_> {
    pub(super) fn wrong(&mut self, key: &str, what: impl Display) {
        self.mistakes.push(self.layers.mistake(key, what));
    }
}

/// Checks the configuration and fills in the defaults. `program` is the path of this executable, `sockets` are those of
/// systemd. The node is not in its cluster yet: [`join_cluster`].
///
/// # Errors
/// Returns an error that lists all mistakes.
pub(in super::super) fn spec(
    config: &ServerConfig,
    layers: &Layers,
    program: &Path,
    sockets: Vec<(SocketAddr, TcpListener)>,
) -> Result<ServeSpec, Failure> {
    let mut checks = Checks {
        layers,
        mistakes: Vec::new(),
    };
    let (server, sandbox) = (&config.server, &config.sandbox);
    let (addresses, bound): (Vec<_>, Vec<_>) = sockets.into_iter().unzip();
    let listen = addresses_of(&server.listen, addresses, &mut checks);
    if server.insecure_loopback
        && let Some(address) = listen.iter().find(|address| !address.ip().is_loopback())
    {
        checks.wrong(
            "server.insecure_loopback",
            format!(
                "turns authentication off, and {address} is not a loopback address: remove it, and create a key with \
                 `cube-api key new`"
            ),
        );
    }
    let beside = program.parent().unwrap_or(Path::new("/"));
    let installed = templates(config, beside, &mut checks);
    traces(&config.traces, &mut checks);
    let denied = destinations(&config.network.denied);
    let memory = server.memory.value.0;
    let from_images = images(
        &config.images,
        &mut checks,
        beside,
        installed.as_deref(),
        memory,
        &denied,
    );
    let spec = ServeSpec {
        listen,
        bound,
        domain: server.domain.clone(),
        trusted_proxies: server
            .trusted_proxies
            .iter()
            .map(|block| block.value.0)
            .collect(),
        tls: tls(&config.tls, &mut checks),
        auth: auth(server),
        max_timeout_s: sandbox.max_timeout.value.seconds,
        on_exit: match server.on_exit {
            OnExit::Keep => OnClose::Keep,
            OnExit::Kill => OnClose::Kill,
        },
        builds: builds(&config.builds),
        network: network(config, &mut checks, beside),
        secrets_key: KeySource::of_process(server.secrets_key.clone()),
        images: from_images,
        node: (config.cluster.node.as_ref())
            .map_or_else(node::name_of_host, |node| node.text.clone()),
        cluster: None,
        webhooks_forbidden: forbidden(&config.network.webhook_exceptions, &denied),
        reports: server.reports.clone(),
        pool: pool(config, vmm(config, beside), installed, &mut checks),
    };
    if checks.mistakes.is_empty() {
        Ok(spec)
    } else {
        Err(report(&checks.mistakes))
    }
}

fn auth(server: &ServerSection) -> Auth {
    if server.insecure_loopback {
        return Auth::Open;
    }
    Auth::Keys {
        rate: Rate {
            per_second: server.rate,
            burst: server.rate.saturating_mul(BURST),
        },
    }
}

fn builds(builds: &BuildsSection) -> BuildsSpec {
    BuildsSpec {
        cache_quota: builds.cache,
        egress: builds.egress.into(),
        running: usize::try_from(builds.concurrent.0).unwrap_or(usize::MAX),
        upload_quota: builds.uploads,
    }
}

/// Path of cube-vmm. `beside` is the directory of this program.
pub(in super::super) fn vmm(config: &ServerConfig, beside: &Path) -> PathBuf {
    let named = config.pool.vmm.clone();
    named.unwrap_or_else(|| beside.join("cube-vmm"))
}

fn pool(
    config: &ServerConfig,
    vmm: PathBuf,
    installed: Option<PathBuf>,
    checks: &mut Checks<'_>,
) -> PoolConfig {
    let (pool, sandbox) = (&config.pool, &config.sandbox);
    let marks = pool.warm.as_ref().map(|marks| marks.value.0);
    let (warm, warm_spare) = match marks {
        Some(marks) => (marks, WarmMarks::default()),
        None => (WarmMarks::default(), WARM),
    };
    let warm_slots = match marks {
        Some(WarmMarks { high: 0, .. }) => 0,
        _ => pool.max_sandboxes / 2,
    };
    PoolConfig {
        images: image_dirs(&pool.images, installed.as_deref(), checks),
        installed_templates: installed,
        warm,
        warm_in_use: warm,
        warm_spare,
        warm_slots: pool.warm_slots.unwrap_or(warm_slots),
        warm_memory: pool.warm_memory,
        limits: SandboxLimits {
            cpu_weight: u16::try_from(sandbox.cpu_weight.0).unwrap_or(u16::MAX),
            cpu_millis: sandbox.cpu_millis,
            io_bytes_per_s: sandbox.io_rate.value.0.map(|rate| rate.0),
            layer: sandbox.disk,
            ..SandboxLimits::default()
        },
        missing_limits: if sandbox.allow_missing_limits {
            MissingLimits::Allow
        } else {
            MissingLimits::Refuse
        },
        max_sandboxes: pool.max_sandboxes,
        memory_reserve: pool.memory_reserve,
        memory_margin: pool.memory_margin.0,
        memory_stalls: pool.memory_stalls.0,
        server_memory: config.server.memory.value.0,
        disk_reserve: pool.disk_reserve,
        max_saved: pool.max_saved,
        template_quota: pool.template_quota,
        lifetime_of_note: api::registry::note::lifetime_of_note,
        ..PoolConfig::new(vmm, config.server.state.clone())
    }
}

/// Loads the cluster that this host has joined, if the configuration enables it.
///
/// # Errors
/// Returns an error if the cluster cannot be loaded, or if the node has another name in it.
pub(in super::super) fn join_cluster(
    spec: &mut ServeSpec,
    config: &ServerConfig,
    layers: &Layers,
) -> Result<(), Failure> {
    if !config.cluster.enabled {
        return Ok(());
    }
    let transfers = TransferLimits {
        rate: config.cluster.transfer_rate,
        disk_reserve: config.pool.disk_reserve,
    };
    let cluster = ClusterSpec::load(&config.server.state, transfers);
    let cluster = cluster.map_err(|why| failure(Failure::UnsuitableHost, &why))?;
    let joined = cluster.settings.node.as_str();
    if let Some(named) = config
        .cluster
        .node
        .as_ref()
        .filter(|named| named.text != joined)
    {
        let what = format!(
            "is {}, but this host has joined its cluster as {joined}: remove it",
            named.text
        );
        return Err(report(&[layers.mistake("cluster.node", what)]));
    }
    spec.node = joined.to_owned();
    spec.cluster = Some(cluster);
    Ok(())
}

/// Destination and sampling of traces, if they are collected.
pub(in super::super) fn trace_spec(config: &ServerConfig) -> Option<TraceSpec> {
    let TracesSection { endpoint, share } = &config.traces;
    endpoint.as_ref().map(|endpoint| TraceSpec {
        collector: endpoint.text.clone(),
        share: *share,
    })
}

/// The blocks that the operator denies, for the log. Empty if there are none.
pub(in super::super) fn denied_text(config: &ServerConfig) -> String {
    let blocks: Vec<_> = config
        .network
        .denied
        .iter()
        .map(|block| block.text.as_str())
        .collect();
    blocks.join(", ")
}

fn traces(traces: &TracesSection, checks: &mut Checks<'_>) {
    if !(0.0..=1.0).contains(&traces.share) {
        checks.wrong(
            "traces.share",
            format!("{} is not a share: use a number from 0 to 1", traces.share),
        );
    }
    if traces.endpoint.is_none() && checks.layers.setting("traces.share").is_some() {
        checks.wrong(
            "traces.share",
            "also set traces.endpoint: without it, nothing is traced",
        );
    }
}

fn tls(tls: &TlsSection, checks: &mut Checks<'_>) -> Option<TlsFiles> {
    match (tls.certificate.clone(), tls.key.clone()) {
        (Some(certificates), Some(key)) => return Some(TlsFiles { certificates, key }),
        (Some(_), None) => checks.wrong(
            "tls.certificate",
            "also set tls.key: the private key of the certificate",
        ),
        (None, Some(_)) => checks.wrong(
            "tls.key",
            "also set tls.certificate: the certificate chain of the key",
        ),
        (None, None) => {}
    }
    None
}

/// The addresses to listen on. `bound` are those of systemd. If both are set, they must be equal.
fn addresses_of(
    named: &[SocketAddr],
    bound: Vec<SocketAddr>,
    checks: &mut Checks<'_>,
) -> Vec<SocketAddr> {
    match (named, bound.as_slice()) {
        ([], []) => return vec![LISTEN],
        ([], _) => return bound,
        (_, []) => return named.to_vec(),
        (named, bound) => {
            let is_same = named.len() == bound.len() && named.iter().all(|a| bound.contains(a));
            if !is_same {
                let list = |addresses: &[SocketAddr]| {
                    let texts: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
                    texts.join(", ")
                };
                checks.wrong(
                    "server.listen",
                    format!(
                        "names {}, and the sockets that systemd passes have {}: remove it, or make them equal",
                        list(named),
                        list(bound)
                    ),
                );
            }
        }
    }
    bound
}

/// The directory of installed templates, which must exist if it is set. By default, the first default directory that
/// exists.
fn templates(config: &ServerConfig, beside: &Path, checks: &mut Checks<'_>) -> Option<PathBuf> {
    if let Some(dir) = &config.pool.templates {
        if !dir.is_dir() {
            checks.wrong(
                "pool.templates",
                format!("{} is not a directory", dir.display()),
            );
        }
        return Some(dir.clone());
    }
    let prepared = prepare::installed(&config.server.state).join("templates");
    let usual = [beside.join("../templates"), prepared];
    let usual = usual.iter().filter_map(|dir| dir.canonicalize().ok());
    usual.into_iter().find(|dir| dir.is_dir())
}

/// The directories in `named`, which must exist. By default, those default directories that exist.
fn image_dirs(
    named: &[PathBuf],
    templates: Option<&Path>,
    checks: &mut Checks<'_>,
) -> Vec<PathBuf> {
    for wrong in named.iter().filter(|dir| !dir.is_dir()) {
        checks.wrong(
            "pool.images",
            format!("{} is not a directory", wrong.display()),
        );
    }
    if !named.is_empty() {
        return named.to_vec();
    }
    // The directories in which `cargo xtask` stores images: `guest` for the base template, `stages` for further
    // templates.
    let usual = ["../guest", "../stages"];
    let usual = templates
        .into_iter()
        .flat_map(|dir| usual.map(|images| dir.join(images)));
    usual.filter(|dir| dir.is_dir()).collect()
}

#[cfg(test)]
mod tests;
