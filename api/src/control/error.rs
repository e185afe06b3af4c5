//! Errors of the control plane. Only this module converts them to a status and a body.

use std::{io, time::Duration};

use ::builds::{
    grant::GrantError, owner::BuildsError, request::RequestError, uploads::UploadError,
};
use axum::response::{IntoResponse, Response};
use cluster::ClusterError;
use hyper::{
    StatusCode,
    header::{HeaderValue, RETRY_AFTER},
};
use model::SandboxId;
use pool::{PoolError, Refusal};
use rest::{NodeStatus, RestError};
use tracing::{error, warn};

use crate::{
    auth::AuthError,
    events::HookError,
    json::Json,
    node::{NodeError, NotSettable},
    registry::{RegistryError, note::NoteError},
    secrets::SecretError,
};

/// The error code by which clients recognize a guest whose agent does not respond.
const UNRESPONSIVE: &str = "sandbox_snapshot_guest_agent_unresponsive";

/// How to get a template that the SDKs use by default.
fn cure_of(template: &str) -> &'static str {
    if template.split(':').next() == Some("code-interpreter-v1") {
        ": install the package cube-code-interpreter, or in a checkout run `cargo xtask template code-interpreter`"
    } else {
        ""
    }
}

/// Why a request of the control plane failed.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The request is invalid, whatever the state of the server.
    #[error("{0}")]
    BadRequest(String),
    #[error("the request body exceeds {0} bytes")]
    TooLarge(usize),
    /// The content type is missing or is not JSON.
    #[error(
        "the request body must be JSON: send it with `Content-Type: application/json` (received: {0})"
    )]
    NotJson(String),
    /// A browser sent the request on behalf of a page of another origin, and the server runs without authentication.
    #[error("a server without authentication refuses requests from pages of other origins ({0})")]
    Foreign(String),
    #[error(transparent)]
    Auth(#[from] AuthError),
    /// Contains the id as the client sent it, which need not be valid.
    #[error("sandbox {0:?} was not found")]
    NoSandbox(String),
    #[error("template {0:?} was not found{cure}", cure = cure_of(.0))]
    NoTemplate(String),
    #[error("node {0:?} was not found")]
    NoNode(String),
    #[error("report {0:?} was not found")]
    NoReport(String),
    #[error("cannot read the directory of reports")]
    Reports(#[source] io::Error),
    /// The name and the status of this node.
    #[error(
        "node {0} is {status} and accepts no new sandboxes: `cube node uncordon {0}` opens it",
        status = .1.name()
    )]
    NodeClosed(String, NodeStatus),
    /// The template as the client referred to it, and its home.
    #[error(
        "the template {0:?} is changed by node {1}, which is unreachable: try again when it is back, or remove the node from the \
         cluster (`cube node remove {1}`), and another one takes its templates over"
    )]
    HomeAway(String, String),
    #[error(transparent)]
    NotSettable(#[from] NotSettable),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A task of this server did not complete.
    #[error("the request was interrupted: {0}")]
    Interrupted(String),
    #[error("route {0} does not exist")]
    NoRoute(String),
    #[error("the method of {0} is not supported by this route")]
    NoMethod(String),
    /// A part of E2B's API that this server does not support.
    #[error("not supported by this server: {0}")]
    NotImplemented(String),
    /// The caller required a healthy guest, and the guest's agent does not respond.
    #[error("the agent of sandbox {0} does not respond; the sandbox was not paused")]
    Unresponsive(SandboxId),
    /// The rules need the proxy's certificate authority in the guest.
    #[error(
        "the agent of sandbox {0} did not install the certificate authority that network.rules need; nothing was changed"
    )]
    Untrusting(SandboxId),
    #[error(transparent)]
    Idempotency(#[from] IdempotencyError),
    #[error(transparent)]
    Note(NoteError),
    #[error("cannot create tokens: the kernel provides no random numbers")]
    Random(#[source] getrandom::Error),
    #[error(transparent)]
    Builds(#[from] BuildsError),
    #[error(transparent)]
    Grant(#[from] GrantError),
    #[error(transparent)]
    Upload(#[from] UploadError),
    #[error(transparent)]
    Secret(#[from] SecretError),
    #[error(transparent)]
    Webhook(#[from] HookError),
    #[error("cannot read the events")]
    Events(#[source] io::Error),
    /// The VM of a new sandbox did not start.
    #[error(transparent)]
    CreateFailed(PoolError),
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Why a request with an idempotency key is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdempotencyError {
    #[error("this Idempotency-Key was used for another request: use a new key for each create")]
    Mismatch,
    #[error("the first request with this Idempotency-Key is still being processed: try again")]
    InProgress,
    /// The first request ended without a response because of a bug.
    #[error(
        "the outcome of the first request with this Idempotency-Key is unknown: list the sandboxes, and use a new key"
    )]
    OutcomeUnknown,
    #[error("{0} creates with an Idempotency-Key of this API key are in progress")]
    TooMany(usize),
}

impl ApiError {
    /// An error that quotes a client's reference, which may be long.
    pub(super) fn no_template(reference: &str) -> Self {
        Self::NoTemplate(reference.chars().take(200).collect())
    }

    /// An [`ApiError::Foreign`] with the truncated and escaped value of the header `field`.
    pub(super) fn foreign(field: &str, value: &str) -> Self {
        let value: String = value.chars().take(100).collect();
        Self::Foreign(format!("{field}: {value:?}"))
    }

    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::BadRequest(_) => StatusCode::BAD_REQUEST,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NotJson(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Foreign(_) => StatusCode::FORBIDDEN,
            Self::Auth(AuthError::Missing | AuthError::Unknown) => StatusCode::UNAUTHORIZED,
            Self::Auth(AuthError::Scope(_)) => StatusCode::FORBIDDEN,
            Self::Auth(AuthError::Rate { .. }) => StatusCode::TOO_MANY_REQUESTS,
            Self::NoSandbox(_)
            | Self::NoTemplate(_)
            | Self::NoRoute(_)
            | Self::NoNode(_)
            | Self::NoReport(_) => StatusCode::NOT_FOUND,
            Self::NodeClosed(..) | Self::HomeAway(..) => StatusCode::SERVICE_UNAVAILABLE,
            Self::NotSettable(_) => StatusCode::CONFLICT,
            Self::Cluster(why) => cluster_status(why),
            Self::Node(NodeError::Io { source, .. }) => disk_status(source),
            Self::Node(NodeError::Malformed { .. } | NodeError::Random(_))
            | Self::Interrupted(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::NoMethod(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::NotImplemented(_) => StatusCode::NOT_IMPLEMENTED,
            Self::Unresponsive(_) | Self::Untrusting(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Idempotency(why) => idempotency_status(*why),
            Self::Note(_) => StatusCode::BAD_REQUEST,
            Self::Random(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Builds(why) => builds_status(why),
            Self::Grant(GrantError::Forged | GrantError::Expired) => StatusCode::FORBIDDEN,
            Self::Upload(why) => upload_status(why),
            Self::Secret(why) => secret_status(why),
            Self::Webhook(why) => webhook_status(why),
            Self::Events(_) | Self::Reports(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::CreateFailed(why) | Self::Pool(why) => pool_status(why),
        }
    }

    /// Time after which a retry may succeed. `None`: a retry is pointless, or its time is unknown.
    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Auth(AuthError::Rate { retry_after })
            | Self::Pool(PoolError::Full { retry_after, .. }) => Some(*retry_after),
            Self::Builds(BuildsError::TooMany(_)) | Self::NodeClosed(..) | Self::HomeAway(..) => {
                Some(Duration::from_secs(10))
            }
            Self::Pool(
                PoolError::Draining
                | PoolError::Refused(_, Refusal::Crowded | Refusal::Sealed | Refusal::Moving),
            )
            | Self::Idempotency(IdempotencyError::InProgress | IdempotencyError::TooMany(_)) => {
                Some(Duration::from_secs(1))
            }
            _ => None,
        }
    }

    #[must_use]
    pub fn body(&self) -> RestError {
        RestError {
            code: self.status().as_u16(),
            message: model::chain(self),
            error_code: self.error_code().map(str::to_owned),
        }
    }

    /// The error identifier in E2B's specification. Most client errors have none.
    fn error_code(&self) -> Option<&'static str> {
        match self {
            Self::Unresponsive(_) => Some(UNRESPONSIVE),
            Self::Idempotency(why) => Some(match why {
                IdempotencyError::Mismatch => "idempotency_request_mismatch",
                IdempotencyError::InProgress => "idempotency_in_progress",
                IdempotencyError::OutcomeUnknown => "idempotency_outcome_unknown",
                IdempotencyError::TooMany(_) => return None,
            }),
            Self::Pool(PoolError::Full { .. } | PoolError::Draining) | Self::NodeClosed(..) => {
                Some("sandbox_capacity_unavailable")
            }
            Self::CreateFailed(_) => Some("sandbox_create_failed"),
            Self::Secret(SecretError::TooMany) => Some("secret_limit_reached"),
            _ if self.status() == StatusCode::INTERNAL_SERVER_ERROR => {
                Some("internal_server_error")
            }
            _ => None,
        }
    }

    /// The error of a create: distinguishes a failed start of the VM from other errors.
    pub(super) fn of_create(why: RegistryError) -> Self {
        match why {
            RegistryError::Pool(
                why @ (PoolError::Failed { .. }
                | PoolError::AgentSilent(_)
                | PoolError::Unfit { .. }),
            ) => Self::CreateFailed(why),
            RegistryError::Pool(PoolError::NoTemplate(name)) => Self::no_template(&name),
            other => other.into(),
        }
    }
}

fn pool_status(why: &PoolError) -> StatusCode {
    match why {
        PoolError::NoTemplate(_) => StatusCode::NOT_FOUND,
        PoolError::Refused(_, refusal) => refusal_status(*refusal),
        PoolError::InUse(..) | PoolError::NoDisk(_) => StatusCode::CONFLICT,
        // Both official clients automatically retry after this status.
        PoolError::Full { .. } => StatusCode::TOO_MANY_REQUESTS,
        PoolError::NoSpace(_) | PoolError::TooManySaved(_) | PoolError::TemplateQuota { .. } => {
            StatusCode::INSUFFICIENT_STORAGE
        }
        PoolError::BadName(_) | PoolError::NoteTooLong(_) => StatusCode::BAD_REQUEST,
        PoolError::Failed { .. } | PoolError::Unfit { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        PoolError::AgentSilent(_) | PoolError::Draining => StatusCode::SERVICE_UNAVAILABLE,
    }
}

fn idempotency_status(why: IdempotencyError) -> StatusCode {
    match why {
        IdempotencyError::Mismatch | IdempotencyError::InProgress => StatusCode::CONFLICT,
        IdempotencyError::OutcomeUnknown => StatusCode::UNPROCESSABLE_ENTITY,
        IdempotencyError::TooMany(_) => StatusCode::TOO_MANY_REQUESTS,
    }
}

fn cluster_status(why: &ClusterError) -> StatusCode {
    match why {
        ClusterError::NotMember(_) => StatusCode::NOT_FOUND,
        ClusterError::NameTaken(_)
        | ClusterError::Full(_)
        | ClusterError::NodeLives(_)
        | ClusterError::Founded
        | ClusterError::Alone => StatusCode::CONFLICT,
        ClusterError::Config(_)
        | ClusterError::Unreachable { .. }
        | ClusterError::OldEtcd { .. }
        | ClusterError::NoCluster
        | ClusterError::Accounts(_)
        | ClusterError::OtherFormat(_)
        | ClusterError::Unknown
        | ClusterError::NoAuthority(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}

fn builds_status(why: &BuildsError) -> StatusCode {
    match why {
        BuildsError::NoTemplate(_) | BuildsError::NoBuild(_) | BuildsError::NotReady(_) => {
            StatusCode::NOT_FOUND
        }
        BuildsError::NotWaiting | BuildsError::NoCredentials(_) => StatusCode::BAD_REQUEST,
        BuildsError::Installed(_) | BuildsError::Kept(_) | BuildsError::OnHost(_) => {
            StatusCode::FORBIDDEN
        }
        BuildsError::Taken(_)
        | BuildsError::Busy(_)
        | BuildsError::NoOrder(_)
        | BuildsError::OrderGone(..)
        | BuildsError::NotBuilt(_)
        | BuildsError::NoFiles(..)
        | BuildsError::OfSandbox(_) => StatusCode::CONFLICT,
        BuildsError::TooMany(_) => StatusCode::TOO_MANY_REQUESTS,
        BuildsError::Store(why) => disk_status(why),
        BuildsError::Random(_) => StatusCode::INTERNAL_SERVER_ERROR,
        BuildsError::Pool(why) => pool_status(why),
        BuildsError::Closed => StatusCode::SERVICE_UNAVAILABLE,
    }
}

fn upload_status(why: &UploadError) -> StatusCode {
    match why {
        UploadError::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
        UploadError::NoSpace | UploadError::Quota(_) => StatusCode::INSUFFICIENT_STORAGE,
        UploadError::Interrupted(_) => StatusCode::BAD_REQUEST,
        UploadError::Io(why) => disk_status(why),
    }
}

fn secret_status(why: &SecretError) -> StatusCode {
    match why {
        SecretError::Invalid(_) | SecretError::Elsewhere(..) => StatusCode::BAD_REQUEST,
        SecretError::NotFound(_) => StatusCode::NOT_FOUND,
        SecretError::Taken(_) => StatusCode::CONFLICT,
        SecretError::TooMany => StatusCode::INSUFFICIENT_STORAGE,
        SecretError::Io(why) => disk_status(why),
        SecretError::Random(_) | SecretError::Damaged(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

fn webhook_status(why: &HookError) -> StatusCode {
    match why {
        HookError::Invalid(_) => StatusCode::BAD_REQUEST,
        HookError::NotFound(_) => StatusCode::NOT_FOUND,
        HookError::TooMany => StatusCode::INSUFFICIENT_STORAGE,
        HookError::Io(why) => disk_status(why),
    }
}

fn disk_status(why: &io::Error) -> StatusCode {
    if pool::is_full(why) {
        StatusCode::INSUFFICIENT_STORAGE
    } else {
        StatusCode::INTERNAL_SERVER_ERROR
    }
}

fn refusal_status(refusal: Refusal) -> StatusCode {
    match refusal {
        Refusal::NotFound | Refusal::NotRunning => StatusCode::NOT_FOUND,
        Refusal::AlreadyPaused | Refusal::AlreadyRunning | Refusal::NoMemory => {
            StatusCode::CONFLICT
        }
        Refusal::ColdBoot => StatusCode::NOT_IMPLEMENTED,
        Refusal::Crowded | Refusal::BackingOff { .. } | Refusal::Sealed | Refusal::Moving => {
            StatusCode::SERVICE_UNAVAILABLE
        }
    }
}

impl From<RegistryError> for ApiError {
    fn from(why: RegistryError) -> Self {
        match why {
            RegistryError::Note(why) => Self::Note(why),
            RegistryError::Random(why) => Self::Random(why),
            RegistryError::Pool(why) => Self::Pool(why),
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(why: RequestError) -> Self {
        match why {
            RequestError::Invalid(why) => Self::BadRequest(why),
            RequestError::Unsupported(why) => Self::NotImplemented(why),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = self.status();
        let body = self.body();
        if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED {
            error!(
                status = status.as_u16(),
                why = body.message,
                "request failed"
            );
        } else if matches!(self, Self::NoRoute(_) | Self::NoMethod(_)) {
            // Worth a warning: a newer client may be using a route that this server lacks.
            warn!(
                status = status.as_u16(),
                why = body.message,
                "request for an unknown route or method"
            );
        }
        let mut response = (status, Json(body)).into_response();
        if let Some(after) = self.retry_after() {
            // `Retry-After` takes whole seconds: round up.
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            let value = HeaderValue::from(seconds.max(1));
            response.headers_mut().insert(RETRY_AFTER, value);
        }
        response
    }
}

#[cfg(test)]
mod tests;
