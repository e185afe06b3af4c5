//! Binary protobuf messages of the agent's services, for clients that use `application/proto`.
//!
//! The message types exist only once, in proto3 JSON. Binary messages are translated from and to JSON by tables of
//! field numbers ([`schema`]) and a codec that is independent of the message types ([`wire`]). Nearly all clients
//! use JSON; for them, this module costs only code pages that are never loaded. docs/develop/design/008-protobuf.md
//! compares this with prost.
//!
//! The codec performs no I/O, and the length of its input bounds its work: schemas have a fixed nesting depth, and the
//! output is at most a constant factor longer than the input.

mod schema;
mod wire;

use serde_json::{Map, Value};

pub use schema::method;

use super::{Blob, Timestamp};

/// The message types of an RPC.
#[derive(Debug)]
pub struct Method {
    path: &'static str,
    pub request: &'static Message,
    pub response: &'static Message,
}

#[derive(Debug)]
pub struct Message {
    fields: &'static [Field],
}

/// A field of a message type.
#[derive(Debug)]
struct Field {
    number: u32,
    /// Name in JSON.
    name: &'static str,
    kind: Kind,
    label: Label,
}

/// The type of a field.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Bool,
    Uint32,
    Int64,
    /// Zigzag-encoded on the wire.
    Sint32,
    Text,
    Bytes,
    Message(&'static Message),
    /// Names by number.
    Enum(&'static [(u32, &'static str)]),
    /// `map<string, string>`.
    TextMap,
    /// `google.protobuf.Timestamp`.
    Timestamp,
}

/// Cardinality and presence of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Label {
    /// An absent field is equivalent to a field with the default value.
    Implicit,
    /// An absent field differs from a field with the default value.
    Optional,
    /// Like `Optional`, but at most one field of the group is set: setting a field clears the others.
    OneOf,
    Repeated,
}

/// Why a message cannot be translated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtoError {
    /// The input ends inside a field.
    #[error("the message is truncated")]
    Truncated,
    /// The bytes of a field do not match its type.
    #[error("field {0} is malformed")]
    Field(u32),
    /// A JSON value does not match the type of the field with this JSON name.
    #[error("the value of \"{0}\" has the wrong type or range")]
    Value(&'static str),
    /// The JSON text is not an object.
    #[error("not a JSON object")]
    Json,
}

/// The field of a process event that contains output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataField {
    Stdout,
    Stderr,
    /// Output of a pseudo-terminal.
    Pty,
}

/// The binary message for output in a `Start` or `Connect` stream, encoded without a detour through JSON.
#[must_use]
pub fn data_event(field: DataField, bytes: &[u8]) -> Vec<u8> {
    let field = match field {
        DataField::Stdout => 1,
        DataField::Stderr => 2,
        DataField::Pty => 3,
    };
    // Field numbers from the innermost message outwards: the output, `data` in the event, `event` in the message.
    let parts = [field, 2, 1];
    parts.iter().fold(bytes.to_vec(), |inner, number| {
        let mut outer = Vec::with_capacity(inner.len() + 8);
        wire::push_bytes(*number, &inner, &mut outer);
        outer
    })
}

impl Message {
    /// Translates a binary message to JSON. Unknown fields are dropped.
    ///
    /// # Errors
    /// Returns [`ProtoError::Truncated`] or [`ProtoError::Field`] if the bytes are not a message of this type.
    pub fn to_json(&self, bytes: &[u8]) -> Result<Vec<u8>, ProtoError> {
        let mut object = Map::new();
        wire::decode(self, bytes, &mut object)?;
        serde_json::to_vec(&object).map_err(|_| ProtoError::Json)
    }

    /// Translates JSON to a binary message. Unknown keys are dropped.
    ///
    /// # Errors
    /// Returns [`ProtoError::Json`] or [`ProtoError::Value`] if the text is not a message of this type.
    pub fn from_json(&self, text: &[u8]) -> Result<Vec<u8>, ProtoError> {
        let value: Value = serde_json::from_slice(text).map_err(|_| ProtoError::Json)?;
        let object = value.as_object().ok_or(ProtoError::Json)?;
        let mut out = Vec::new();
        wire::encode(self, object, &mut out)?;
        Ok(out)
    }
}
