//! How a call's messages look on the wire: JSON, or binary for those who ask for it.
//!
//! Handlers read and write JSON. What a binary client sends and gets is translated at the edge, here and in
//! [`super::events`]; errors are JSON for everybody (Connect protocol reference, "Error end-stream").

use std::borrow::Cow;

use api_types::envd::{
    ConnectCode::{Internal, InvalidArgument},
    ConnectError,
    proto::{self, Method},
};

use super::http::{self, Head};

/// How messages are written.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Codec {
    Json,
    Binary(&'static Method),
}

impl Codec {
    /// Of a call that is answered once; `None` when its content type is none of ours.
    pub(crate) fn of_unary(head: &Head) -> Option<Self> {
        match head.content_type.split(';').next().map(str::trim) {
            Some(http::JSON) => Some(Self::Json),
            Some(http::PROTO) => proto::method(&head.path).map(Self::Binary),
            Some(_) | None => None,
        }
    }

    /// Of a stream.
    pub(crate) fn of_stream(head: &Head) -> Option<Self> {
        match head.content_type.as_str() {
            http::CONNECT_JSON => Some(Self::Json),
            http::CONNECT_PROTO => proto::method(&head.path).map(Self::Binary),
            _ => None,
        }
    }

    /// The content type of an answer.
    pub(crate) fn unary_type(self) -> &'static str {
        match self {
            Self::Json => http::JSON,
            Self::Binary(_) => http::PROTO,
        }
    }

    /// The content type of a stream.
    pub(crate) fn stream_type(self) -> &'static str {
        match self {
            Self::Json => http::CONNECT_JSON,
            Self::Binary(_) => http::CONNECT_PROTO,
        }
    }

    /// A request's message as JSON.
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

    /// An answer's message from JSON.
    pub(crate) fn write(self, json: &[u8]) -> Result<Cow<'_, [u8]>, ConnectError> {
        match self {
            Self::Json => Ok(Cow::Borrowed(json)),
            Self::Binary(method) => {
                let message = method.response.from_json(json).map_err(|error| {
                    let message = format!("the answer cannot be written: {error}");
                    ConnectError::new(Internal, message)
                })?;
                Ok(Cow::Owned(message))
            }
        }
    }
}

/// Whether a content type is that of a stream in either codec.
pub(crate) fn is_stream(content_type: &str) -> bool {
    matches!(content_type, http::CONNECT_JSON | http::CONNECT_PROTO)
}
