//! The data plane's view of a sandbox.

use std::path::PathBuf;

use model::SandboxId;
use pool::{PoolError, Refusal};

use super::{RegistryError, Renewal, View};

/// How the data plane reaches the ports of a sandbox.
#[derive(Clone, Debug)]
pub struct Route {
    pub id: SandboxId,
    /// Unix socket of the vsock device. A client sends `CONNECT <vsock port>\n` and receives `OK <n>\n`.
    pub vsock: PathBuf,
    /// Required in `e2b-traffic-access-token` on ports other than envd's; `None`: the ports are public.
    pub traffic_token: Option<String>,
    /// Required in `X-Access-Token` where code is run. `None`: the sandbox is not secure and requires no token.
    pub envd_token: Option<String>,
    /// Replaces `Host` on ports other than envd's; `${PORT}` stands for the port.
    pub mask_request_host: Option<String>,
    /// Ports whose servers speak TLS.
    pub https_ports: Vec<u16>,
    /// Number of the sandbox's VM. When it changes, pooled connections to the previous VM are dead.
    pub generation: u64,
    /// `None` if requests do not extend the sandbox's deadline.
    pub renewal: Option<Renewal>,
}

impl From<View> for Route {
    fn from(view: View) -> Self {
        let renewal = Renewal::of(&view);
        let View { sandbox, note } = view;
        Self {
            id: sandbox.id,
            vsock: sandbox.vsock,
            traffic_token: note.traffic_token.clone(),
            envd_token: note.envd_token.clone(),
            mask_request_host: note.mask_request_host().map(str::to_owned),
            https_ports: note.https_ports().to_vec(),
            generation: sandbox.generation,
            renewal,
        }
    }
}

/// Why there is no route.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// The sandbox is unknown, has ended, or is paused and cannot be resumed by traffic. The response is 502 with "The
    /// sandbox was not found".
    #[error("The sandbox was not found")]
    NotFound,
    /// The sandbox exists but cannot be used now, for example because its resume failed or there is no room. The
    /// response is 503.
    #[error("the sandbox cannot be resumed: {0}")]
    Unavailable(String),
}

impl RouteError {
    pub(super) fn of(error: &RegistryError) -> Self {
        match error {
            RegistryError::Pool(PoolError::Refused(
                _,
                Refusal::NotFound
                | Refusal::AlreadyPaused
                | Refusal::NotRunning
                | Refusal::AlreadyRunning
                | Refusal::ColdBoot
                | Refusal::NoMemory,
            )) => Self::NotFound,
            RegistryError::Pool(_) | RegistryError::Note(_) | RegistryError::Random(_) => {
                Self::Unavailable(error.to_string())
            }
        }
    }
}
