//! Error bodies.

use serde::{Deserialize, Serialize};

/// The body of every failed plain request. Official clients fail on a body without `code`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The HTTP status, repeated.
    pub code: u16,
    /// What failed, for a person.
    pub message: String,
}

/// Error codes of the Connect protocol that are used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConnectCode {
    /// The caller went away.
    Canceled,
    /// Nothing better is known.
    Unknown,
    /// The request is wrong whatever the state.
    InvalidArgument,
    /// The caller's deadline passed.
    DeadlineExceeded,
    /// No such thing.
    NotFound,
    /// It is there already.
    AlreadyExists,
    /// The caller is known and may not.
    PermissionDenied,
    /// A limit is reached.
    ResourceExhausted,
    /// The request is wrong in the present state.
    FailedPrecondition,
    /// Interrupted by something concurrent.
    Aborted,
    /// Past the end.
    OutOfRange,
    /// Not offered by this server.
    Unimplemented,
    /// The server is at fault.
    Internal,
    /// Not now; another attempt may succeed.
    Unavailable,
    /// Data are gone.
    DataLoss,
    /// The caller, or the user it asked for, is not known.
    Unauthenticated,
}

impl ConnectCode {
    /// The HTTP status of a unary answer with this code (Connect protocol reference, "Error codes").
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
    /// See [`ConnectCode`].
    pub code: ConnectCode,
    /// What failed, for a person; may be empty.
    #[serde(default)]
    pub message: String,
}

impl ConnectError {
    /// An error with its text.
    #[must_use]
    pub fn new(code: ConnectCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}

/// The JSON of an end-of-stream frame.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndStream {
    /// Absent when the stream ended well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ConnectError>,
}
