//! Complete responses, and the errors in them.

use std::io;

use super::{ClientError, protocol};
use crate::{ConnectError, ErrorBody, guest_text};

/// A complete HTTP answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpAnswer {
    pub status: u16,
    /// Names in lower case, in wire order.
    pub headers: Vec<(String, String)>,
    /// Body without transfer coding.
    pub body: Vec<u8>,
}

impl HttpAnswer {
    /// The value of the first header named `name`, which must be lower case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }
}

/// A response that ended before it was complete; the source of a [`ClientError::NotReachable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the answer ended after {received}{} bytes", of(*expected))]
pub struct CutAnswer {
    /// Bytes of the body.
    pub received: u64,
    /// The length announced by the head, if any.
    pub expected: Option<u64>,
}

fn of(expected: Option<u64>) -> String {
    expected.map_or(String::new(), |expected| format!(" of {expected}"))
}

impl CutAnswer {
    /// The error for a body that was cut after this part.
    pub(super) fn error(self, error: ClientError) -> ClientError {
        let is_end = |source: &io::Error| {
            use io::ErrorKind::{ConnectionReset, UnexpectedEof};
            matches!(source.kind(), UnexpectedEof | ConnectionReset)
        };
        match error {
            ClientError::NotReachable { doing, source } if is_end(&source) => {
                let source = io::Error::new(source.kind(), self);
                ClientError::NotReachable { doing, source }
            }
            other => other,
        }
    }
}

pub(super) fn accept(answer: &HttpAnswer) -> Result<(), ClientError> {
    match answer.status {
        200..300 => Ok(()),
        _ => Err(refused(answer)),
    }
}

/// The error in a failed response, whose body must be an [`ErrorBody`] or a [`ConnectError`].
pub(super) fn refused(answer: &HttpAnswer) -> ClientError {
    let status = answer.status;
    if let Ok(error) = serde_json::from_slice::<ErrorBody>(&answer.body) {
        return ClientError::Refused {
            status,
            code: error.code.to_string(),
            message: guest_text(&error.message),
        };
    }
    match serde_json::from_slice::<ConnectError>(&answer.body) {
        Ok(error) => refusal(status, &error),
        Err(_) => protocol(format!("status {status} without a valid error body")),
    }
}

pub(super) fn refusal(status: u16, error: &ConnectError) -> ClientError {
    let code = serde_json::to_string(&error.code).unwrap_or_default();
    ClientError::Refused {
        status,
        code: code.trim_matches('"').to_owned(),
        message: guest_text(&error.message),
    }
}
