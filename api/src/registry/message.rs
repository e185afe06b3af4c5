//! What is said to the registry's task.

use std::collections::BTreeMap;

use api_types::rest::NetworkConfig;
use model::SandboxId;
use netisolation::Policy;
use pool::{PauseMode, TemplateInfo, Usage};
use serde_json::Value;
use tokio::sync::oneshot;

use super::{
    Connected, Created, History, RegistryError, Route, RouteError, View, lifecycle::Ask,
    note::UnixMs, signature::Tokens,
};

/// Where an answer goes.
pub(super) type Reply<T> = oneshot::Sender<Result<T, RegistryError>>;

/// A sandbox that is asked for. Times and tokens are the registry's.
#[derive(Clone, Debug)]
pub struct NewLease {
    /// Id, name, `name:tag` or snapshot id.
    pub template: String,
    /// Seconds until it ends or pauses.
    pub timeout_s: u32,
    /// How it pauses at its deadline; `None`: it ends.
    pub at_deadline: Option<PauseMode>,
    /// Traffic wakes it.
    pub auto_resume: bool,
    /// The agent asks for a token.
    pub envd_token: Token,
    /// The other ports ask for a token.
    pub traffic_token: Token,
    /// The caller's words.
    pub metadata: BTreeMap<String, String>,
    /// Environment of every process in it.
    pub env_vars: BTreeMap<String, String>,
    /// What was asked for.
    pub allow_internet_access: Option<bool>,
    /// What was asked for.
    pub network: Option<NetworkConfig>,
    /// What both come to.
    pub policy: Policy,
    /// Kept for the client.
    pub mcp: Option<Value>,
}

/// Whether a token is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// It is, and is asked for.
    Drawn,
    /// There is none; the door is open.
    None,
}

/// How a sandbox is brought back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// As it was paused; one that runs is welcome.
    Connect,
    /// From its disk, its memory left aside; one that runs is welcome.
    ConnectColdBoot,
    /// As it was paused; one that runs is refused. Replaces what it does at its deadline if that is told.
    Resume {
        /// Pause at the deadline, or end.
        auto_pause: Option<bool>,
    },
}

/// What is said to the registry's task.
#[derive(Debug)]
pub(super) enum Message {
    Create {
        lease: Box<NewLease>,
        reply: Reply<Created>,
    },
    Connect {
        id: SandboxId,
        timeout_s: Option<u32>,
        wake: Wake,
        reply: Reply<Connected>,
    },
    SetTimeout {
        id: SandboxId,
        timeout_s: u32,
        reply: Reply<()>,
    },
    Refresh {
        id: SandboxId,
        timeout_s: u32,
        reply: Reply<()>,
    },
    Pause {
        id: SandboxId,
        mode: PauseMode,
        reply: Reply<()>,
    },
    Kill {
        id: SandboxId,
        reply: Reply<()>,
    },
    Snapshot {
        id: SandboxId,
        names: Vec<String>,
        reply: Reply<TemplateInfo>,
    },
    Fork {
        id: SandboxId,
        count: u32,
        timeout_s: u32,
        reply: Reply<Vec<Result<View, RegistryError>>>,
    },
    SetNetwork {
        id: SandboxId,
        outbound: Box<NetworkConfig>,
        allow_internet_access: Option<bool>,
        policy: Policy,
        reply: Reply<()>,
    },
    Route {
        id: SandboxId,
        reply: oneshot::Sender<Result<Route, RouteError>>,
    },
    Get {
        id: SandboxId,
        reply: Reply<View>,
    },
    List {
        reply: Reply<Vec<View>>,
    },
    History {
        id: SandboxId,
        reply: Reply<History>,
    },
    Tokens {
        reply: Reply<Tokens>,
    },
    Record {
        at: UnixMs,
        usage: Vec<(SandboxId, Usage)>,
    },
    Drain {
        reply: Reply<()>,
    },
}

impl Message {
    /// What is asked of which sandbox; `None` for questions, which any state answers.
    pub(super) fn asks(&self) -> Option<(&SandboxId, Ask)> {
        match self {
            Self::Connect { id, .. } => Some((id, Ask::Connect)),
            Self::SetTimeout { id, .. }
            | Self::Refresh { id, .. }
            | Self::SetNetwork { id, .. } => Some((id, Ask::Adjust)),
            Self::Pause { id, mode, .. } => Some((id, Ask::Pause(*mode))),
            Self::Kill { id, .. } => Some((id, Ask::Kill)),
            Self::Snapshot { id, .. } => Some((id, Ask::Snapshot)),
            Self::Fork { id, .. } => Some((id, Ask::Fork)),
            Self::Route { id, .. } => Some((id, Ask::Reach)),
            Self::Create { .. }
            | Self::Get { .. }
            | Self::List { .. }
            | Self::History { .. }
            | Self::Tokens { .. }
            | Self::Record { .. }
            | Self::Drain { .. } => None,
        }
    }

    /// Answers with a refusal. A caller that has gone away does not mind.
    pub(super) fn refuse(self, error: RegistryError) {
        match self {
            Self::Create { reply, .. } => drop(reply.send(Err(error))),
            Self::Connect { reply, .. } => drop(reply.send(Err(error))),
            Self::SetTimeout { reply, .. }
            | Self::Refresh { reply, .. }
            | Self::Pause { reply, .. }
            | Self::Kill { reply, .. }
            | Self::SetNetwork { reply, .. }
            | Self::Drain { reply } => drop(reply.send(Err(error))),
            Self::Snapshot { reply, .. } => drop(reply.send(Err(error))),
            Self::Fork { reply, .. } => drop(reply.send(Err(error))),
            Self::Get { reply, .. } => drop(reply.send(Err(error))),
            Self::List { reply } => drop(reply.send(Err(error))),
            Self::History { reply, .. } => drop(reply.send(Err(error))),
            Self::Tokens { reply } => drop(reply.send(Err(error))),
            Self::Route { reply, .. } => drop(reply.send(Err(route_error(&error)))),
            Self::Record { .. } => {}
        }
    }
}

/// The same for the data plane.
pub(super) fn route_error(error: &RegistryError) -> RouteError {
    match error {
        RegistryError::NotFound(_)
        | RegistryError::NotRunning(_)
        | RegistryError::AlreadyPaused(_)
        | RegistryError::AlreadyRunning(_)
        | RegistryError::ColdBoot(_) => RouteError::NotFound,
        RegistryError::Crowded(_)
        | RegistryError::Resting { .. }
        | RegistryError::Draining
        | RegistryError::Note(_)
        | RegistryError::Random(_)
        | RegistryError::Pool(_) => RouteError::Unavailable(error.to_string()),
    }
}
