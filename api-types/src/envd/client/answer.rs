//! Answers, and what they refuse.

use super::{ClientError, protocol};
use crate::envd::{ConnectError, EndStream, ErrorBody, frame};

/// Longest message in a stream.
pub(super) const MAX_FRAME: u32 = 8 << 20;

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

/// Looks for an error at the end of a stream that was collected in whole.
pub(super) fn accept_stream(mut body: &[u8]) -> Result<(), ClientError> {
    while let Some((frame, used)) = frame::decode(body, MAX_FRAME).map_err(protocol)? {
        if frame.flags & frame::END_STREAM != 0 {
            let end: EndStream = serde_json::from_slice(frame.body).map_err(protocol)?;
            return match end.error {
                None => Ok(()),
                Some(error) => Err(refusal(200, &error)),
            };
        }
        body = body.get(used..).unwrap_or_default();
    }
    Err(protocol("a stream without an end-of-stream frame"))
}

/// The refusal in a failed answer, whichever of the two error bodies it has.
pub(super) fn refused(answer: &HttpAnswer) -> ClientError {
    let status = answer.status;
    if let Ok(error) = serde_json::from_slice::<ErrorBody>(&answer.body) {
        return ClientError::Refused {
            status,
            code: error.code.to_string(),
            message: error.message,
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
        message: error.message.clone(),
    }
}
