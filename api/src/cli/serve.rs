//! `cube-api serve`: options, their validation and defaults.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use api::{
    auth::{Auth, Rate},
    handover::Predecessor,
    node,
    peers::{ClusterSpec, transfer::TransferLimits},
    secrets::KeySource,
    serve::{self, BuildsSpec, ServeError, ServeSpec, TlsFiles},
    shield::shield,
    systemd,
    traces::{self, TraceSpec},
};
use clap::{Args, ValueEnum};
use ipnet::IpNet;
use model::{Bytes, STATE_DIR};
use pool::{MissingLimits, OnClose, PoolConfig, SandboxLimits, WarmMarks};
use tracing_subscriber::EnvFilter;

use super::{
    Failure,
    ceiling::Ceiling,
    failure,
    images::ImageOptions,
    network::{NetworkOptions, forbidden},
};

/// Default listening address.
const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 3000);
/// Burst size of a key's rate limit, as a multiple of its requests per second.
const BURST: u32 = 2;
/// Default number of warm slots of installed templates, if other templates do not need the room.
const WARM: WarmMarks = WarmMarks { low: 2, high: 4 };

/// Minimum value of `--server-memory`.
const LEAST_SERVER_MEMORY: Bytes = Bytes::mib(64);

#[derive(Args)]
#[command(
    after_help = "--config FILE is replaced by the options in FILE, one per line: `max-sandboxes = 64`."
)]
pub(super) struct ServeConfig {
    /// Address to listen on; repeat for more [default: the sockets that systemd passes, or 127.0.0.1:3000]
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<SocketAddr>,
    /// Directory for everything that outlives the server: keys, sandboxes, snapshots
    #[arg(long, value_name = "DIR", default_value = STATE_DIR)]
    pub(super) state: PathBuf,
    /// Directory of templates [default: ../templates next to this program, or installed/templates in the state
    /// directory]
    #[arg(long, value_name = "DIR")]
    templates: Option<PathBuf>,
    /// Further directory of root images and base memory that templates may refer to; repeat for more [default: ../guest
    /// and ../stages relative to the directory of templates]
    #[arg(long, value_name = "DIR")]
    images: Vec<PathBuf>,
    /// Path of cube-vmm [default: next to this program]
    #[arg(long, value_name = "FILE")]
    pub(super) vmm: Option<PathBuf>,
    /// Domain of the sandboxes' host names, with the port unless it is 443; returned to clients
    #[arg(long)]
    domain: Option<String>,
    /// Certificate chain (PEM); `cube-api ca init` creates one
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Reverse proxy whose `X-Forwarded-For` header identifies clients; repeat for more
    #[arg(long, value_name = "CIDR", value_parser = block)]
    trusted_proxy: Vec<IpNet>,
    /// Turn authentication off; refused unless all addresses to listen on are loopback addresses
    #[arg(long)]
    insecure_loopback: bool,
    /// Minimum warm slots of each template that is installed or in use: refilled up to HIGH when fewer than LOW are
    /// left; busy templates get more; 0:0 for no warm slots [default: 2:4 for installed templates, as long as templates
    /// in use leave room for them]
    #[arg(long, value_name = "LOW:HIGH")]
    warm: Option<Marks>,
    /// Maximum number of warm slots of all templates together [default: half of --max-sandboxes]
    #[arg(long, value_name = "N")]
    warm_slots: Option<u32>,
    /// Maximum memory of warm slots and of templates loaded into huge pages [default: half of the host's memory]
    #[arg(long, value_name = "SIZE")]
    warm_memory: Option<Bytes>,
    /// Maximum number of running sandboxes, including warm slots
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_sandboxes: u32,
    /// Host memory that is never given to sandboxes
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    memory_reserve: Bytes,
    /// Memory limit of the server, enforced by a cgroup that it creates and enters, or none to stay in its current
    /// cgroup; loaded templates do not count
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    server_memory: Ceiling,
    /// Disk space that is never given to sandboxes, on the file systems of the state directory and of layers
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    disk_reserve: Bytes,
    /// Maximum disk space of the writable layer of each sandbox [default: the layer's size]
    #[arg(long, value_name = "SIZE")]
    disk_limit: Option<Bytes>,
    /// Maximum number of paused sandboxes and snapshots together
    #[arg(long, value_name = "N", default_value_t = 1000)]
    max_saved: u32,
    /// Maximum disk space of snapshots and built templates together; further ones are refused [default: no limit]
    #[arg(long, value_name = "SIZE")]
    template_quota: Option<Bytes>,
    /// CPU weight of each sandbox when CPUs are contended, from 1 to 10000
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    cpu_weight: u16,
    /// CPU limit of each sandbox in thousandths of a core [default: no limit]
    #[arg(long, value_name = "N")]
    cpu_millis: Option<u32>,
    /// Disk bandwidth of each sandbox per second and direction, or none for no limit
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    io_rate: Ceiling,
    /// Run sandboxes even if the host cannot enforce all limits
    #[arg(long)]
    allow_missing_limits: bool,
    /// Maximum timeout of a sandbox
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = humantime::parse_duration)]
    max_timeout: Duration,
    /// Requests per second of each key; twice as many may arrive at once
    #[arg(long, value_name = "N", default_value_t = 500)]
    rate: u32,
    /// Fate of running sandboxes when the server stops
    #[arg(long, value_enum, default_value = "keep")]
    on_exit: Exit,
    /// Log format on standard error; CUBE_LOG sets the filter (`info`, `api=debug`, …)
    #[arg(long, value_enum, default_value = "human")]
    log: Log,
    /// Maximum number of template builds that run at the same time; further ones wait
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    max_builds: u8,
    /// Disk space of all files that clients upload for builds; the least recently used ones are removed
    #[arg(long, value_name = "SIZE", default_value = "10GiB")]
    upload_quota: Bytes,
    /// Disk space of the results of build steps that later builds continue from; the least recently used ones are removed
    #[arg(long, value_name = "SIZE", default_value = "20GiB")]
    build_cache: Bytes,
    /// File with the key that encrypts stored secrets: 64 hex digits or base64 of 32 bytes [default: CUBE_SECRETS_KEY,
    /// the systemd credential cube-secrets-key, or a key that the first server creates in the state directory]
    #[arg(long, value_name = "FILE")]
    secrets_key: Option<PathBuf>,
    /// Name of this node: lower-case letters, digits and hyphens [default: the host's name]
    #[arg(long, value_name = "NAME", value_parser = node_name)]
    node: Option<String>,
    /// Serve as a node of the cluster that `cube-api cluster init` or `join` has set up in the state directory
    #[arg(long)]
    cluster: bool,
    /// Maximum bytes per second of template copies and sandbox moves, in each direction between this node and others
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    transfer_rate: Bytes,
    /// Block within the ranges denied to sandboxes, or an address of this host, that webhooks may use; repeat for more
    #[arg(long, value_name = "CIDR", value_parser = block)]
    webhook_exception: Vec<IpNet>,
    /// Directory of cube-bench runs for comparison in the console
    #[arg(long, value_name = "DIR")]
    reports: Option<PathBuf>,
    /// Collector for request traces (OTLP over HTTP), such as http://127.0.0.1:4318
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Share of the requests without a traceparent header that are traced, 0 to 1
    #[arg(
        long,
        value_name = "SHARE",
        default_value_t = 1.0,
        requires = "otlp_endpoint"
    )]
    otlp_share: f64,
    #[command(flatten)]
    registries: ImageOptions,
    #[command(flatten)]
    network: NetworkOptions,
}

/// The value of `--warm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Marks(WarmMarks);

impl FromStr for Marks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not LOW:HIGH with LOW at most HIGH: write it like 2:4");
        let (low, high) = text.split_once(':').ok_or_else(wrong)?;
        let low = low.parse().map_err(|_| wrong())?;
        let high = high.parse().map_err(|_| wrong())?;
        if low <= high {
            Ok(Self(WarmMarks { low, high }))
        } else {
            Err(wrong())
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum Exit {
    /// They keep running, and the next server takes them over
    Keep,
    /// They are killed
    Kill,
}

#[derive(Clone, Copy, ValueEnum)]
enum Log {
    Human,
    Json,
}

pub(super) fn run(config: ServeConfig) -> Result<(), Failure> {
    log_as(config.log);
    shield().map_err(|why| {
        let why = format!("cannot exclude the memory of this process from core dumps: {why}");
        Failure::UnsuitableHost(why)
    })?;
    let sockets = systemd::listening_sockets();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|why| failure(Failure::UnsuitableHost, &why))?;
    runtime.block_on(async {
        let predecessor = Predecessor::find();
        let predecessor = predecessor.map_err(|why| failure(Failure::UnsuitableHost, &why))?;
        let sockets = sockets.map_err(|why| failure(Failure::UnsuitableHost, &why))?;
        let program = std::env::current_exe();
        let spec = program
            .map_err(|why| failure(Failure::UnsuitableHost, &why))
            .and_then(|program| check(config, &program, sockets));
        match spec {
            Ok(spec) => {
                let served = serve::run(spec, predecessor).await;
                let _flushed = tokio::task::spawn_blocking(traces::flush).await;
                served.map_err(|why| ended(&why))
            }
            Err(why) => {
                if let Some(predecessor) = predecessor {
                    predecessor.failed(why.to_string()).await;
                }
                Err(why)
            }
        }
    })
}

/// Kills all sandboxes that a stopped server has left running.
pub(super) fn end(config: ServeConfig) -> Result<(), Failure> {
    log_as(config.log);
    let unsuitable = |why: &dyn std::error::Error| failure(Failure::UnsuitableHost, why);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|why| unsuitable(&why))?;
    let program = std::env::current_exe().map_err(|why| unsuitable(&why))?;
    let mut spec = check(config, &program, Vec::new())?;
    spec.secrets_key = KeySource::Unused;
    // Killing the sandboxes of this host needs no other node.
    spec.cluster = None;
    runtime.block_on(async { serve::end(&spec).await.map_err(|why| ended(&why)) })
}

fn log_as(log: Log) {
    let filter = EnvFilter::try_from_env("CUBE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match log {
        Log::Json => builder.json().init(),
        Log::Human => {
            let colour = std::io::IsTerminal::is_terminal(&std::io::stderr())
                && std::env::var_os("NO_COLOR").is_none();
            builder.with_ansi(colour).init();
        }
    }
}

/// Validates the options and fills in defaults. `program` is the path of this executable, `sockets` are those of systemd.
fn check(
    config: ServeConfig,
    program: &Path,
    sockets: Vec<(SocketAddr, TcpListener)>,
) -> Result<ServeSpec, Failure> {
    let (addresses, bound): (Vec<_>, Vec<_>) = sockets.into_iter().unzip();
    let listen = addresses_of(config.listen, addresses)?;
    if config.insecure_loopback {
        let open = listen.iter().find(|a| !a.ip().is_loopback());
        if let Some(address) = open {
            return Err(Failure::Usage(format!(
                "--insecure-loopback turns authentication off, and {address} is not a loopback address: \
                 leave the option out and create a key with `cube-api key new`"
            )));
        }
    }
    let beside = program.parent().unwrap_or(Path::new("/"));
    let vmm = config.vmm.unwrap_or_else(|| beside.join("cube-vmm"));
    if !vmm.is_file() {
        return Err(Failure::UnsuitableHost(format!(
            "cannot find cube-vmm at {}: set its path with --vmm",
            vmm.display()
        )));
    }
    let max_timeout_s = u32::try_from(config.max_timeout.as_secs());
    let max_timeout_s = max_timeout_s
        .map_err(|_| Failure::Usage("--max-timeout is too long: use at most 136 years".into()))?;
    let installed = templates(config.templates, beside, &config.state)?;
    let traced = config.otlp_endpoint.map(|collector| TraceSpec {
        collector,
        share: config.otlp_share,
    });
    if let Some(traced) = &traced {
        traces::install(traced).map_err(|why| Failure::Usage(format!("--otlp-endpoint: {why}")))?;
    }
    let server_memory = server_memory(config.server_memory)?;
    let denied = config.network.denied();
    if let Some(blocks) = config.network.shown_denied() {
        tracing::info!(
            blocks,
            "addresses denied to all sandboxes in addition to the built-in ranges"
        );
    }
    let from_images =
        (config.registries).spec(beside, installed.as_deref(), server_memory, &denied);
    let from_images = from_images.map_err(Failure::Usage)?;
    let (warm, warm_spare) = match config.warm {
        Some(Marks(marks)) => (marks, WarmMarks::default()),
        None => (WarmMarks::default(), WARM),
    };
    let warm_slots = match config.warm {
        Some(Marks(WarmMarks { high: 0, .. })) => 0,
        _ => config.max_sandboxes / 2,
    };
    let pool = PoolConfig {
        images: images(config.images, installed.as_deref())?,
        installed_templates: installed,
        warm,
        warm_in_use: warm,
        warm_spare,
        warm_slots: config.warm_slots.unwrap_or(warm_slots),
        warm_memory: config.warm_memory,
        limits: SandboxLimits {
            cpu_weight: config.cpu_weight,
            cpu_millis: config.cpu_millis,
            io_bytes_per_s: config.io_rate.0.map(|rate| rate.0),
            layer: config.disk_limit,
            ..SandboxLimits::default()
        },
        missing_limits: if config.allow_missing_limits {
            MissingLimits::Allow
        } else {
            MissingLimits::Refuse
        },
        max_sandboxes: config.max_sandboxes,
        memory_reserve: config.memory_reserve,
        server_memory,
        disk_reserve: config.disk_reserve,
        max_saved: config.max_saved,
        template_quota: config.template_quota,
        lifetime_of_note: api::registry::note::lifetime_of_note,
        ..PoolConfig::new(vmm, config.state.clone())
    };
    let rate = Rate {
        per_second: config.rate,
        burst: config.rate.saturating_mul(BURST),
    };
    let tls = config.tls_cert.zip(config.tls_key);
    let cluster = if config.cluster {
        let transfers = TransferLimits {
            rate: config.transfer_rate,
            disk_reserve: config.disk_reserve,
        };
        let loaded = ClusterSpec::load(&config.state, transfers);
        Some(loaded.map_err(|why| failure(Failure::UnsuitableHost, &why))?)
    } else {
        None
    };
    let node = node_of(config.node, cluster.as_ref())?;
    Ok(ServeSpec {
        listen,
        bound,
        pool,
        domain: config.domain,
        trusted_proxies: config.trusted_proxy,
        tls: tls.map(|(certificates, key)| TlsFiles { certificates, key }),
        auth: if config.insecure_loopback {
            Auth::Open
        } else {
            Auth::Keys { rate }
        },
        max_timeout_s,
        on_exit: match config.on_exit {
            Exit::Keep => OnClose::Keep,
            Exit::Kill => OnClose::Kill,
        },
        builds: BuildsSpec {
            cache_quota: config.build_cache,
            egress: config.network.build_egress(),
            running: config.max_builds.into(),
            upload_quota: config.upload_quota,
        },
        network: config.network.spec(beside).map_err(Failure::Usage)?,
        secrets_key: KeySource::of_process(config.secrets_key),
        images: from_images,
        node,
        cluster,
        webhooks_forbidden: forbidden(&config.webhook_exception, &denied),
        reports: config.reports,
    })
}

/// The addresses to listen on. `named` are from options, `bound` from systemd. If both are set, they must be equal.
fn addresses_of(
    named: Vec<SocketAddr>,
    bound: Vec<SocketAddr>,
) -> Result<Vec<SocketAddr>, Failure> {
    let list = |addresses: &[SocketAddr]| {
        let texts: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
        texts.join(", ")
    };
    match (named.as_slice(), bound.as_slice()) {
        ([], []) => Ok(vec![LISTEN]),
        ([], _) => Ok(bound),
        (_, []) => Ok(named),
        (one, other) => {
            let is_same = one.len() == other.len() && one.iter().all(|a| other.contains(a));
            if is_same {
                Ok(bound)
            } else {
                Err(Failure::Usage(format!(
                    "--listen names {}, and the sockets that systemd passes have {}: leave --listen out, or make them equal",
                    list(one),
                    list(other)
                )))
            }
        }
    }
}

/// Rejects a limit below [`LEAST_SERVER_MEMORY`], because the kernel would kill the server during its start.
fn server_memory(limit: Ceiling) -> Result<Option<Bytes>, Failure> {
    match limit.0 {
        Some(size) if size < LEAST_SERVER_MEMORY => Err(Failure::Usage(format!(
            "--server-memory {size} is too little for a server: use {LEAST_SERVER_MEMORY} or more"
        ))),
        limit => Ok(limit),
    }
}

/// The node's name. In a cluster it comes from the settings, and an option cannot change it.
fn node_of(named: Option<String>, cluster: Option<&ClusterSpec>) -> Result<String, Failure> {
    match (named, cluster.map(|cluster| cluster.settings.node.as_str())) {
        (named, None) => Ok(named.unwrap_or_else(node::name_of_host)),
        (Some(named), Some(joined)) if named != joined => Err(Failure::Usage(format!(
            "--node is {named}, but this host has joined its cluster as {joined}: leave --node out"
        ))),
        (_, Some(joined)) => Ok(joined.to_owned()),
    }
}

fn node_name(text: &str) -> Result<String, String> {
    if node::is_name(text) {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "{text:?} is not a name of a node: use lower-case letters, digits and hyphens, at most 63"
        ))
    }
}

/// Parses a CIDR block or a single address.
pub(super) fn block(text: &str) -> Result<IpNet, String> {
    let single = text.parse::<IpAddr>().map(IpNet::from).ok();
    single
        .or_else(|| text.parse::<IpNet>().map(|block| block.trunc()).ok())
        .ok_or_else(|| format!("{text:?} is neither an address nor a CIDR block: write it like 10.1.2.3 or fd00::/8"))
}

/// The directory `named`, which must exist. By default, the first default directory that exists.
fn templates(
    named: Option<PathBuf>,
    beside: &Path,
    state: &Path,
) -> Result<Option<PathBuf>, Failure> {
    match named {
        Some(dir) if dir.is_dir() => Ok(Some(dir)),
        Some(dir) => Err(Failure::Usage(format!(
            "--templates {}: not a directory",
            dir.display()
        ))),
        None => {
            let prepared = super::prepare::installed(state).join("templates");
            let usual = [beside.join("../templates"), prepared];
            let usual = usual.iter().filter_map(|dir| dir.canonicalize().ok());
            Ok(usual.into_iter().find(|dir| dir.is_dir()))
        }
    }
}

/// The directories in `named`, which must exist. By default, those default directories that exist.
fn images(named: Vec<PathBuf>, templates: Option<&Path>) -> Result<Vec<PathBuf>, Failure> {
    if let Some(wrong) = named.iter().find(|dir| !dir.is_dir()) {
        let why = format!("--images {}: not a directory", wrong.display());
        return Err(Failure::Usage(why));
    }
    // The directories in which `cargo xtask` stores images: `guest` for the base template, `stages` for further
    // templates.
    let usual = ["../guest", "../stages"];
    let usual = templates
        .into_iter()
        .flat_map(|dir| usual.map(|images| dir.join(images)))
        .filter(|dir| dir.is_dir());
    Ok(if named.is_empty() {
        usual.collect()
    } else {
        named
    })
}

fn ended(why: &ServeError) -> Failure {
    match why {
        ServeError::State(_)
        | ServeError::Keys(_)
        | ServeError::Tls(_)
        | ServeError::Listen(_)
        | ServeError::Network(_)
        | ServeError::Builds(_)
        | ServeError::Pool(_)
        | ServeError::Signals(_)
        | ServeError::Lock(_)
        | ServeError::Sockets(_)
        | ServeError::Node(_)
        | ServeError::Cluster(_)
        | ServeError::Secrets(_)
        | ServeError::Egress(_)
        | ServeError::Events(_)
        | ServeError::Handover(_) => failure(Failure::UnsuitableHost, why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        config: ServeConfig,
    }

    fn spec(options: &[&str]) -> Result<ServeSpec, String> {
        let line = ["cube-api", "--vmm", "/bin/true"].iter().chain(options);
        let line = Line::try_parse_from(line).map_err(|why| why.to_string())?;
        check(line.config, Path::new("/nowhere/cube-api"), Vec::new())
            .map_err(|why| why.to_string())
    }

    #[test]
    fn authentication_can_be_turned_off_on_loopback_only() {
        let open = spec(&["--insecure-loopback"]).unwrap();
        assert_eq!(open.auth, Auth::Open);
        let addresses = ["--listen", "[::1]:1", "--listen", "0.0.0.0:1"];
        let mut wide = vec!["--insecure-loopback"];
        wide.extend(addresses);
        assert!(
            spec(&wide)
                .unwrap_err()
                .contains("0.0.0.0:1 is not a loopback")
        );
        assert!(matches!(spec(&addresses).unwrap().auth, Auth::Keys { .. }));
    }

    #[test]
    fn warm_slots_follow_demand_unless_an_option_forbids_it() {
        let pool = |options: &[&str]| spec(options).unwrap().pool;
        let (usual, none) = (pool(&[]), WarmMarks::default());
        assert_eq!((usual.warm, usual.warm_in_use), (none, none));
        assert_eq!(usual.warm_spare, WARM);
        assert_eq!((usual.warm_slots, usual.warm_memory), (128, None));
        // The marks apply to all templates in use.
        let marks = WarmMarks { low: 1, high: 3 };
        let named = pool(&["--warm", "1:3", "--max-sandboxes", "20"]);
        assert_eq!((named.warm, named.warm_in_use), (marks, marks));
        assert_eq!(named.warm_spare, none);
        assert_eq!(named.warm_slots, 10);
        let off = pool(&["--warm", "0:0"]);
        assert_eq!((off.warm, off.warm_slots), (none, 0));
        let budget = pool(&[
            "--warm",
            "0:0",
            "--warm-slots",
            "7",
            "--warm-memory",
            "1GiB",
        ]);
        assert_eq!((budget.warm, budget.warm_slots), (none, 7));
        assert_eq!(budget.warm_memory, Some(Bytes::mib(1024)));
    }

    #[test]
    fn limits_hold_unless_an_option_lifts_them() {
        let usual = spec(&[]).unwrap().pool;
        assert_eq!(usual.missing_limits, MissingLimits::Refuse);
        assert_eq!(usual.limits.io_bytes_per_s, Some(256 << 20));
        assert_eq!((usual.limits.cpu_weight, usual.limits.layer), (100, None));
        assert_eq!(
            (usual.disk_reserve, usual.max_saved),
            (Bytes::mib(1024), 1000)
        );
        assert_eq!(spec(&["--max-saved", "9"]).unwrap().pool.max_saved, 9);
        let quota = |options: &[&str]| spec(options).unwrap().pool.template_quota;
        assert_eq!(quota(&[]), None);
        assert_eq!(quota(&["--template-quota", "1GiB"]), Some(Bytes::mib(1024)));
        let rate = |options: &[&str]| spec(options).unwrap().network.unwrap().bytes_per_s;
        assert_eq!(rate(&[]), Some(64 << 20));
        assert_eq!(rate(&["--network-rate", "1MiB"]), Some(1 << 20));
        assert_eq!(rate(&["--network-rate", "none"]), None);
        assert_eq!(usual.server_memory, Some(Bytes::mib(2048)));
        let lifted = [
            "--io-rate",
            "none",
            "--server-memory",
            "none",
            "--allow-missing-limits",
            "--cpu-weight",
            "7",
        ];
        let lifted = spec(&lifted).unwrap().pool;
        assert_eq!(lifted.missing_limits, MissingLimits::Allow);
        assert_eq!(
            (lifted.limits.io_bytes_per_s, lifted.limits.cpu_weight),
            (None, 7)
        );
        assert_eq!(lifted.server_memory, None);
        assert!(
            spec(&["--server-memory", "63MiB"])
                .unwrap_err()
                .contains("64MiB")
        );
        let small = spec(&["--disk-limit", "1GiB", "--io-rate", "1MiB"])
            .unwrap()
            .pool
            .limits;
        assert_eq!(
            (small.layer, small.io_bytes_per_s),
            (Some(Bytes::mib(1024)), Some(1 << 20))
        );
        assert!(spec(&["--io-rate", "much"]).is_err());
    }

    #[test]
    fn sockets_of_systemd_replace_the_default_and_must_match_named_addresses() {
        let [a, b]: [SocketAddr; 2] = ["127.0.0.1:1", "[::]:2"].map(|a| a.parse().unwrap());
        assert_eq!(addresses_of(vec![], vec![]).unwrap(), [LISTEN]);
        assert_eq!(addresses_of(vec![a], vec![]).unwrap(), [a]);
        assert_eq!(addresses_of(vec![], vec![b]).unwrap(), [b]);
        assert_eq!(addresses_of(vec![a, b], vec![b, a]).unwrap(), [b, a]);
        let why = addresses_of(vec![a], vec![a, b]).unwrap_err().to_string();
        assert!(why.contains("127.0.0.1:1, [::]:2"), "{why}");
    }

    #[test]
    fn without_authentication_a_socket_of_systemd_must_be_on_loopback() {
        let line = ["cube-api", "--vmm", "/bin/true", "--insecure-loopback"];
        let line = Line::try_parse_from(line).unwrap();
        let socket = TcpListener::bind("0.0.0.0:0").unwrap();
        let sockets = vec![(socket.local_addr().unwrap(), socket)];
        let why = check(line.config, Path::new("/nowhere/cube-api"), sockets);
        assert!(why.unwrap_err().to_string().contains("not a loopback"));
    }

    #[test]
    fn incomplete_and_contradictory_options_are_refused() {
        assert!(spec(&["--tls-cert", "/a"]).is_err());
        assert!(spec(&["--warm", "4:2"]).is_err());
        assert!(spec(&["--warm", "3"]).is_err());
        assert!(spec(&["--templates", "/nonexistent"]).is_err());
        assert!(spec(&["--network", "none", "--uplink", "eth0"]).is_err());
        assert!(spec(&["--network", "none", "--network-rate", "1MiB"]).is_err());
        assert!(spec(&["--trusted-proxy", "proxy.example"]).is_err());
        let proxies = [
            "--trusted-proxy",
            "10.1.2.3",
            "--trusted-proxy",
            "fd00::1/8",
        ];
        let proxies = spec(&proxies).unwrap().trusted_proxies;
        assert_eq!(
            proxies,
            [
                "10.1.2.3/32".parse::<IpNet>().unwrap(),
                "fd00::/8".parse().unwrap()
            ]
        );
        assert!(spec(&["--images", "/nonexistent"]).is_err());
        assert!(spec(&["--cpu-weight", "0"]).is_err());
        let warm = spec(&["--warm", "0:3"]).unwrap().pool.warm;
        assert_eq!(warm, WarmMarks { low: 0, high: 3 });
    }
}
