//! The control plane: request and response bodies of the REST routes, with E2B's field names.
//!
//! In requests, an absent key and `null` mean the same, and unknown keys are ignored, because clients may be newer
//! than the server. Responses omit fields that are not set.

mod benchmark;
mod build;
mod error;
mod event;
mod key;
mod network;
mod node;
mod observe;
mod sandbox;
mod secret;
mod template;

pub use benchmark::BenchmarkRun;
pub use build::{
    AssignTags, AssignedTags, BuildInfo, BuildLogEntry, BuildLogs, BuildOrder, BuildStatus,
    BuildStep, DeleteTags, FileUpload, ImageConfig, ImageRegistry, NewBuild, RedoTemplate,
    RequestedBuild, StartBuild, StatusReason,
};
pub use error::RestError;
pub use event::{
    DeliveryBucket, DeliveryDurations, DeliveryError, DeliveryStats, DeliveryStatus, EventData,
    Execution, LifecycleEvent, NewWebhook, RefusedTraffic, Webhook, WebhookDeliveries,
    WebhookDelivery, WebhookDeliveryGroup, WebhookUpdate,
};
pub use key::ApiKey;
pub use network::{NetworkConfig, NetworkUpdate};
pub use node::{
    DiskMetrics, LostSandbox, MachineInfo, Node, NodeMetrics, NodeStatus, NodeStatusChange,
    StuckSandbox,
};
pub use observe::{
    LogEntry, LogLevel, LogLine, NetworkCall, NetworkEvent, SandboxLogs, SandboxLogsV2,
    SandboxMetric, SandboxesWithMetrics,
};
pub use sandbox::{
    AutoResume, ConnectSandbox, ForkRequest, ForkResult, Lifecycle, ListedSandbox, NewLifecycle,
    NewSandbox, OnActivity, OnTimeout, PauseMode, PauseRequest, RefreshRequest, ResumeRequest,
    Sandbox, SandboxDetail, SandboxState, SnapshotInfo, SnapshotRequest, TimeoutRequest,
};
pub use secret::{NewSecret, Secret, SecretUpdate};
pub use template::{
    Team, Template, TemplateAlias, TemplateBuild, TemplateTag, TemplateWithBuilds, UpdateTemplate,
    UpdatedTemplate,
};
