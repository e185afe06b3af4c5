//! Answers, and what they refuse.

use super::{ClientError, protocol};
use crate::{
    envd::{ConnectError, ErrorBody},
    guest_text,
};

/// A whole HTTP answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpAnswer {
    /// HTTP status.
    pub status: u16,
    /// Names in lower case, in the order of the wire.
    pub headers: Vec<(String, String)>,
    /// With transfer coding removed.
    pub body: Vec<u8>,
}

impl HttpAnswer {
    /// The first header of that lower-case name.
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

/// The refusal in a failed answer, whichever of the two error bodies it has.
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
        Err(_) => protocol(format!("status {status} without an error body")),
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
