//! Error bodies of the agent.

use serde::{Deserialize, Serialize};

/// The body of a failed plain request. The official clients cannot parse a body without `code`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub code: u16,
    pub message: String,
}

/// Error codes of the Connect protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConnectCode {
    /// The caller cancelled the request.
    Canceled,
    /// The error does not fit any other code.
    Unknown,
    /// The request is invalid, whatever the state of the server.
    InvalidArgument,
    /// The caller's deadline passed.
    DeadlineExceeded,
    /// The named object does not exist.
    NotFound,
    /// The object to create exists already.
    AlreadyExists,
    /// The caller is authenticated, but not permitted to do this.
    PermissionDenied,
    /// A limit is reached.
    ResourceExhausted,
    /// The request is invalid in the current state.
    FailedPrecondition,
    /// The operation was interrupted by a concurrent operation.
    Aborted,
    /// The request refers to data beyond the valid range.
    OutOfRange,
    /// The server does not support this operation.
    Unimplemented,
    /// The server has a bug or a broken invariant.
    Internal,
    /// The operation is temporarily impossible; a retry may succeed.
    Unavailable,
    DataLoss,
    /// The caller, or the user that it wants to act as, is unknown.
    Unauthenticated,
}

impl ConnectCode {
    /// The HTTP status of a unary response with this code (Connect protocol reference, "Error codes").
    #[must_use]
    pub fn http_status(self) -> u16 {
        match self {
            Self::Canceled => 499,
            Self::InvalidArgument | Self::OutOfRange | Self::FailedPrecondition => 400,
            Self::Unauthenticated => 401,
            Self::PermissionDenied => 403,
            Self::NotFound => 404,
            Self::AlreadyExists | Self::Aborted => 409,
            Self::ResourceExhausted => 429,
            Self::Unknown | Self::Internal | Self::DataLoss => 500,
            Self::Unimplemented => 501,
            Self::Unavailable => 503,
            Self::DeadlineExceeded => 504,
        }
    }
}

/// The body of a failed unary call, and the `error` of an end-of-stream frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code:?}: {message}")]
pub struct ConnectError {
    pub code: ConnectCode,
    /// Describes the failure; may be empty.
    #[serde(default)]
    pub message: String,
}

impl ConnectError {
    #[must_use]
    pub fn new(code: ConnectCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}

/// The JSON body of an end-of-stream frame.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndStream {
    /// `None`: the stream ended successfully.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ConnectError>,
}
