//! Every refusal becomes a status and a body here, and nowhere else.

use std::time::Duration;

use api_types::rest::RestError;
use axum::{
    Json,
    response::{IntoResponse, Response},
};
use hyper::{
    StatusCode,
    header::{HeaderValue, RETRY_AFTER},
};
use model::SandboxId;
use pool::{PoolError, Refusal};
use tracing::{error, warn};

use crate::{
    auth::AuthError,
    registry::{RegistryError, note::NoteError},
};

/// The word by which clients know a guest that does not answer.
const UNRESPONSIVE: &str = "sandbox_snapshot_guest_agent_unresponsive";

/// Why a request of the control plane is refused.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The request is wrong, whatever the state.
    #[error("{0}")]
    BadRequest(String),
    /// The body is too large.
    #[error("the body is larger than {0} bytes")]
    TooLarge(usize),
    /// The body has another type than JSON, or none.
    #[error(
        "the body must be JSON: send it with `Content-Type: application/json` (it came with {0})"
    )]
    NotJson(String),
    /// A page of another origin asks by way of a browser, and the server asks nobody for a key.
    #[error("requests of other origins' pages are refused by a server that asks for no key ({0})")]
    Foreign(String),
    /// The caller may not.
    #[error(transparent)]
    Auth(#[from] AuthError),
    /// No such sandbox; the text need not be an id.
    #[error("sandbox {0:?} was not found")]
    NoSandbox(String),
    /// No such template.
    #[error("template {0:?} was not found")]
    NoTemplate(String),
    /// No such route.
    #[error("there is no route {0}")]
    NoRoute(String),
    /// The route has other methods.
    #[error("{0} does not go with this route")]
    NoMethod(String),
    /// Part of E2B's interface that this server does not have.
    #[error("not supported by this server: {0}")]
    NotImplemented(String),
    /// The guest's agent does not answer, and the caller asked for a healthy one.
    #[error("the agent of sandbox {0} does not answer; the sandbox was not paused")]
    Unresponsive(SandboxId),
    #[error(transparent)]
    Note(NoteError),
    /// Tokens need random numbers.
    #[error("no random numbers")]
    Random(#[source] getrandom::Error),
    #[error(transparent)]
    Pool(#[from] PoolError),
}

impl ApiError {
    /// See [`ApiError::Foreign`]; `value` is cut and escaped.
    pub(super) fn foreign(field: &str, value: &str) -> Self {
        let value: String = value.chars().take(100).collect();
        Self::Foreign(format!("{field}: {value:?}"))
    }

    /// The status that it becomes.
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
            Self::NoSandbox(_) | Self::NoTemplate(_) | Self::NoRoute(_) => StatusCode::NOT_FOUND,
            Self::NoMethod(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::NotImplemented(_) => StatusCode::NOT_IMPLEMENTED,
            Self::Unresponsive(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Note(_) => StatusCode::BAD_REQUEST,
            Self::Random(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Pool(why) => pool_status(why),
        }
    }

    /// When to try again, for those who should.
    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Auth(AuthError::Rate { retry_after })
            | Self::Pool(PoolError::Full { retry_after, .. }) => Some(*retry_after),
            Self::Pool(PoolError::Draining | PoolError::Refused(_, Refusal::Crowded)) => {
                Some(Duration::from_secs(1))
            }
            _ => None,
        }
    }

    /// The body that it becomes.
    #[must_use]
    pub fn body(&self) -> RestError {
        let error_code = match self {
            Self::Unresponsive(_) => Some(UNRESPONSIVE.to_owned()),
            _ => None,
        };
        RestError {
            code: self.status().as_u16(),
            message: model::chain(self),
            error_code,
        }
    }
}

fn pool_status(why: &PoolError) -> StatusCode {
    match why {
        PoolError::NoTemplate(_) => StatusCode::NOT_FOUND,
        PoolError::Refused(_, refusal) => refusal_status(*refusal),
        PoolError::InUse(..) => StatusCode::CONFLICT,
        // Both official clients retry after this status by themselves.
        PoolError::Full { .. } => StatusCode::TOO_MANY_REQUESTS,
        PoolError::NoSpace(_) | PoolError::TooManySaved(_) => StatusCode::INSUFFICIENT_STORAGE,
        PoolError::BadName(_) | PoolError::NoteTooLong(_) => StatusCode::BAD_REQUEST,
        PoolError::Failed { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        PoolError::AgentSilent(_) | PoolError::Draining => StatusCode::SERVICE_UNAVAILABLE,
    }
}

fn refusal_status(refusal: Refusal) -> StatusCode {
    match refusal {
        Refusal::NotFound | Refusal::NotRunning => StatusCode::NOT_FOUND,
        Refusal::AlreadyPaused | Refusal::AlreadyRunning | Refusal::NoMemory => {
            StatusCode::CONFLICT
        }
        Refusal::ColdBoot => StatusCode::NOT_IMPLEMENTED,
        Refusal::Crowded | Refusal::BackingOff { .. } => StatusCode::SERVICE_UNAVAILABLE,
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

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = self.status();
        let body = self.body();
        if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED {
            error!(
                status = status.as_u16(),
                why = body.message,
                "a request failed"
            );
        } else if matches!(self, Self::NoRoute(_) | Self::NoMethod(_)) {
            // A newer client than this server knows: worth seeing.
            warn!(
                status = status.as_u16(),
                why = body.message,
                "a client asks for what is not there"
            );
        }
        let mut response = (status, Json(body)).into_response();
        if let Some(after) = self.retry_after() {
            // Whole seconds, rounded up: the header has no fractions.
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            let value = HeaderValue::from(seconds.max(1));
            response.headers_mut().insert(RETRY_AFTER, value);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> SandboxId {
        SandboxId::from_random([0; 19])
    }

    #[test]
    fn statuses_that_clients_act_on() {
        let full = || PoolError::Full {
            why: "memory".into(),
            retry_after: Duration::from_millis(1200),
        };
        let cases: [(ApiError, u16); 9] = [
            (PoolError::Refused(id(), Refusal::NotFound).into(), 404),
            (PoolError::Refused(id(), Refusal::AlreadyPaused).into(), 409),
            (PoolError::Draining.into(), 503),
            (RegistryError::Pool(full()).into(), 429),
            (PoolError::NoSpace("disk".into()).into(), 507),
            (PoolError::TooManySaved(7).into(), 507),
            (PoolError::NoTemplate("x".into()).into(), 404),
            (AuthError::Missing.into(), 401),
            (ApiError::NotImplemented("volumes".into()), 501),
        ];
        for (error, status) in cases {
            assert_eq!(error.status().as_u16(), status, "{error}");
            assert_eq!(error.body().code, status);
        }
        let response = ApiError::from(full()).into_response();
        assert_eq!(response.headers()[RETRY_AFTER], "2");
    }

    #[test]
    fn an_unresponsive_guest_has_its_word() {
        let body = serde_json::to_value(ApiError::Unresponsive(id()).body()).unwrap();
        assert_eq!(body["error_code"], UNRESPONSIVE);
        assert_eq!(body["code"], 503);
    }
}
