//! Complete answers, and the errors that they contain.

use super::{ClientError, protocol};
use crate::{
    envd::{ConnectError, ErrorBody},
    guest_text,
};

/// A complete HTTP answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpAnswer {
    pub status: u16,
    /// Names in lower case, in wire order.
    pub headers: Vec<(String, String)>,
    /// Without transfer coding.
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

pub(super) fn accept(answer: &HttpAnswer) -> Result<(), ClientError> {
    match answer.status {
        200..300 => Ok(()),
        _ => Err(refused(answer)),
    }
}

/// The error in a failed answer, whose body must be an [`ErrorBody`] or a [`ConnectError`].
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
