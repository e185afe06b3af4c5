//! The encoding of a call's messages: JSON, or binary Protobuf.
//!
//! Handlers read and write JSON. Binary messages are converted here, except for process output, which
//! [`super::process::events`] encodes directly; errors are always JSON (Connect protocol reference, "Error
//! end-stream").

use std::borrow::Cow;

use envd::{
    ConnectCode::{Internal, InvalidArgument},
    ConnectError,
    proto::{self, Method},
};

use transport::http::JSON;

use super::head::Head;

/// Clients compare these content types byte for byte.
const CONNECT_JSON: &str = "application/connect+json";
const PROTO: &str = "application/proto";
const CONNECT_PROTO: &str = "application/connect+proto";

/// The encoding of a call's messages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Codec {
    #[default]
    Json,
    Binary(&'static Method),
}

impl Codec {
    /// The codec of a unary call; `None` for any other content type, and for binary messages of an unknown method.
    pub(crate) fn of_unary(head: &Head) -> Option<Self> {
        match head.fields.content_type.split(';').next().map(str::trim) {
            Some(JSON) => Some(Self::Json),
            Some(PROTO) => proto::method(&head.path).map(Self::Binary),
            Some(_) | None => None,
        }
    }

    /// The codec of a stream; `None` for any other content type, and for binary messages of an unknown method.
    pub(crate) fn of_stream(head: &Head) -> Option<Self> {
        match head.fields.content_type.as_str() {
            CONNECT_JSON => Some(Self::Json),
            CONNECT_PROTO => proto::method(&head.path).map(Self::Binary),
            _ => None,
        }
    }

    /// The content type of a unary response.
    pub(crate) fn unary_type(self) -> &'static str {
        match self {
            Self::Json => JSON,
            Self::Binary(_) => PROTO,
        }
    }

    /// The content type of a stream.
    pub(crate) fn stream_type(self) -> &'static str {
        match self {
            Self::Json => CONNECT_JSON,
            Self::Binary(_) => CONNECT_PROTO,
        }
    }

    /// Converts a request's message to JSON.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if a binary message is malformed.
    pub(crate) fn read(self, message: &[u8]) -> Result<Cow<'_, [u8]>, ConnectError> {
        match self {
            Self::Json => Ok(Cow::Borrowed(message)),
            Self::Binary(method) => {
                let json = method.request.to_json(message).map_err(|error| {
                    let message = format!("the message cannot be read: {error}");
                    ConnectError::new(InvalidArgument, message)
                })?;
                Ok(Cow::Owned(json))
            }
        }
    }

    /// Converts a response's message from JSON.
    ///
    /// # Errors
    /// Returns `Internal` if the JSON does not fit the method's response.
    pub(crate) fn write(self, json: &[u8]) -> Result<Cow<'_, [u8]>, ConnectError> {
        match self {
            Self::Json => Ok(Cow::Borrowed(json)),
            Self::Binary(method) => {
                let message = method.response.from_json(json).map_err(|error| {
                    let message = format!("the response cannot be encoded: {error}");
                    ConnectError::new(Internal, message)
                })?;
                Ok(Cow::Owned(message))
            }
        }
    }
}

/// Whether a content type is that of a stream, in either codec.
pub(crate) fn is_stream(content_type: &str) -> bool {
    matches!(content_type, CONNECT_JSON | CONNECT_PROTO)
}
