//! Messages of the Connect protocol as values.

use envd::{
    ConnectCode::{self, Internal, InvalidArgument},
    ConnectError,
};
use serde::{Serialize, de::DeserializeOwned};

/// A failed call.
pub(crate) fn error<T>(code: ConnectCode, message: impl Into<String>) -> Result<T, ConnectError> {
    Err(ConnectError::new(code, message))
}

/// Reads a message.
///
/// # Errors
/// Returns `InvalidArgument` if the JSON does not fit the type.
pub(crate) fn read<T: DeserializeOwned>(json: &[u8]) -> Result<T, ConnectError> {
    serde_json::from_slice(json)
        .or_else(|e| error(InvalidArgument, format!("the message cannot be read: {e}")))
}

/// Writes a message.
///
/// # Errors
/// Returns `Internal` if the value has no JSON form.
pub(crate) fn write<T: Serialize>(message: &T) -> Result<Vec<u8>, ConnectError> {
    serde_json::to_vec(message).or_else(|e| error(Internal, e.to_string()))
}
