//! What the data plane is told.

use std::path::PathBuf;

use model::SandboxId;

/// How the data plane reaches a port of a sandbox. Looking it up wakes a paused sandbox that asked for it.
#[derive(Clone, Debug)]
pub struct Route {
    /// Which.
    pub id: SandboxId,
    /// Unix socket of the vsock device; `CONNECT <vsock port>\n` answers `OK <n>\n`.
    pub vsock: PathBuf,
    /// What `e2b-traffic-access-token` must say on ports other than envd's; absent: the ports are public.
    pub traffic_token: Option<String>,
    /// What `X-Access-Token` must say where code is run; absent: the sandbox is not secure, and nothing asks for it.
    pub envd_token: Option<String>,
    /// What `Host` becomes on ports other than envd's; `${PORT}` stands for the port.
    pub mask_request_host: Option<String>,
    /// Counts VMs of this server: another number means that pooled connections are dead.
    pub generation: u64,
}

/// Why there is no route.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// Unknown, ended, or paused without auto-resume: 502 with "The sandbox was not found".
    #[error("The sandbox was not found")]
    NotFound,
    /// A resume failed or there is no room: 503.
    #[error("the sandbox cannot be resumed: {0}")]
    Unavailable(String),
}
