//! The control plane: bodies of the REST routes, with E2B's names.
//!
//! Requests take absent and `null` alike and ignore keys they do not know: clients are newer than servers.
//! Answers leave out what is not set.

mod error;
mod network;
mod observe;
mod sandbox;
mod template;

pub use error::RestError;
pub use network::{NetworkConfig, NetworkUpdate};
pub use observe::{
    LogEntry, LogLevel, LogLine, NetworkEvent, SandboxLogs, SandboxLogsV2, SandboxMetric,
    SandboxesWithMetrics,
};
pub use sandbox::{
    AutoResume, ConnectSandbox, ForkRequest, ForkResult, Lifecycle, ListedSandbox, NewSandbox,
    OnTimeout, PauseMode, PauseRequest, RefreshRequest, ResumeRequest, Sandbox, SandboxDetail,
    SandboxState, SnapshotInfo, SnapshotRequest, TimeoutRequest,
};
pub use template::{Team, Template, TemplateAlias, TemplateTag};
