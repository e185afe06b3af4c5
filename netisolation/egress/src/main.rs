//! `cube-egress`: the egress proxy of one server. `cube-api` starts it with the control socket as standard input and
//! the listening socket as descriptor 3, and responds to its requests. When the control socket closes, the proxy
//! accepts no further connections, and exits with its last connection.

mod confine;
mod proxy;
mod sys;

use std::{io, process::ExitCode};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use egress::control::LISTENER;
use jail::Identity;
use tracing_subscriber::EnvFilter;

use crate::proxy::Settings;

/// Checks the names of sandboxes' connections and adds the headers of their rules. Started by cube-api.
#[derive(Parser)]
#[command(name = "cube-egress", version)]
struct Options {
    /// Change to this user, which should own nothing. Required if the program is started by root.
    #[arg(long, requires = "group")]
    user: Option<u32>,
    /// Change to this group.
    #[arg(long, requires = "user")]
    group: Option<u32>,
    /// Port whose connections begin with TLS. Connections to all other ports begin with HTTP/1.
    #[arg(long, default_value_t = 443)]
    https_port: u16,
    /// Maximum number of connections of all sandboxes together
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    connections: u32,
    /// Maximum number of connections of one sandbox
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    sandbox_connections: u32,
    /// Maximum number of requests per second of one sandbox that the proxy reads. Bursts may be twice as large.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    sandbox_requests: u32,
    /// Number of threads that move data. Default: one for two cores, at most 8.
    #[arg(long, default_value_t = threads())]
    threads: usize,
    /// Level of the messages on standard error: error, warn, info or debug.
    #[arg(long, default_value = "info")]
    log: tracing::Level,
}

/// Guests and the server need cores as well. With as many threads as cores, a request wakes a thread on another core
/// for each step, and takes longer (results/notes-use.md).
fn threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 2).clamp(1, 8)
}

fn main() -> ExitCode {
    let options = Options::parse();
    // Only this program's own messages, because messages of libraries could contain parts of requests.
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(format!("cube_egress={}", options.log)))
        .with_writer(io::stderr)
        .with_ansi(false)
        .init();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let control = sys::control().context("standard input is not a Unix stream socket")?;
    let listener = sys::listener()
        .with_context(|| format!("descriptor {LISTENER} is not a listening TCP socket"))?;
    let roots = proxy::host_roots();
    let identity = options.user.zip(options.group);
    let identity = identity.map(|(user, group)| Identity { user, group });
    ensure!(
        identity.is_some() || !nix::unistd::geteuid().is_root(),
        "refusing to run as root: give --user and --group"
    );
    let descriptors = confine::confine(identity)?;
    let settings = Settings {
        https_port: options.https_port,
        connections: confine::connections(options.connections, descriptors),
        sandbox_connections: options.sandbox_connections,
        sandbox_requests: options.sandbox_requests,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(options.threads.max(1))
        .max_blocking_threads(1)
        .enable_io()
        .enable_time()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(proxy::run(control, listener, roots, settings))?;
    Ok(())
}
