//! `cube-api serve` and `cube-api end`.

use std::net::{SocketAddr, TcpListener};

use api::{
    handover::Predecessor,
    secrets::KeySource,
    serve::{self, ServeError, ServeSpec},
    shield::shield,
    systemd, traces,
};
use tracing_subscriber::EnvFilter;

use super::{
    Failure,
    config::{Log, ServeArgs, ServerConfig, layers::Layers, spec},
    failure,
};

pub(super) fn run(args: ServeArgs) -> Result<(), Failure> {
    let loaded = args.load();
    log_as(
        loaded
            .as_ref()
            .map_or(Log::Human, |(config, _)| config.server.log),
    );
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
        match loaded.and_then(|(config, layers)| prepare(&config, &layers, sockets)) {
            Ok(spec) => {
                let served = serve::run(spec, predecessor).await;
                let _flushed = tasks::on_thread(traces::flush).await;
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

/// Checks the configuration, loads the cluster, and starts the export of traces.
fn prepare(
    config: &ServerConfig,
    layers: &Layers,
    sockets: Vec<(SocketAddr, TcpListener)>,
) -> Result<ServeSpec, Failure> {
    if let Some(warning) = layers.deprecation() {
        tracing::warn!("{warning}");
    }
    let mut spec = check(config, layers, sockets)?;
    spec::join_cluster(&mut spec, config, layers)?;
    if let Some(traced) = spec::trace_spec(config) {
        traces::install(&traced).map_err(Failure::UnsuitableHost)?;
    }
    let blocks = spec::denied_text(config);
    if !blocks.is_empty() {
        tracing::info!(
            blocks,
            "addresses denied to all sandboxes in addition to the built-in ranges"
        );
    }
    Ok(spec)
}

fn check(
    config: &ServerConfig,
    layers: &Layers,
    sockets: Vec<(SocketAddr, TcpListener)>,
) -> Result<ServeSpec, Failure> {
    let program = std::env::current_exe();
    let program = program.map_err(|why| failure(Failure::UnsuitableHost, &why))?;
    let spec = spec::spec(config, layers, &program, sockets)?;
    if spec.pool.vmm.is_file() {
        return Ok(spec);
    }
    let shown = spec.pool.vmm.display();
    Err(Failure::UnsuitableHost(format!(
        "cannot find cube-vmm at {shown}: set its path, pool.vmm"
    )))
}

/// Kills all sandboxes that a stopped server has left running. This needs no other node.
pub(super) fn end(args: ServeArgs) -> Result<(), Failure> {
    let (config, layers) = args.load()?;
    log_as(config.server.log);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|why| failure(Failure::UnsuitableHost, &why))?;
    let mut spec = check(&config, &layers, Vec::new())?;
    spec.secrets_key = KeySource::Unused;
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
