//! Binary messages of the same services, for clients that speak `application/proto`.
//!
//! There is one set of types, in proto3 JSON; binary messages are translated from and to it by tables of
//! field numbers ([`schema`]) and a codec that knows no message by name ([`wire`]). Nearly all clients speak
//! JSON, so this costs them nothing but text that is never touched, and others a second pass.
//!
//! The codec is pure and bounded by its input: schemas do not nest without end, and what is decoded is at
//! most a constant times longer than what was received.

mod schema;
mod wire;

use serde_json::{Map, Value};

pub use schema::method;

use super::{Blob, Timestamp};

/// The messages of an RPC.
#[derive(Debug)]
pub struct Method {
    path: &'static str,
    /// What the caller sends.
    pub request: &'static Message,
    /// What it gets.
    pub response: &'static Message,
}

/// A message's fields.
#[derive(Debug)]
pub struct Message {
    fields: &'static [Field],
}

/// One of them.
#[derive(Debug)]
struct Field {
    number: u32,
    /// Its name in JSON.
    name: &'static str,
    kind: Kind,
    label: Label,
}

/// What a field holds.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Bool,
    Uint32,
    Int64,
    /// Zigzag on the wire.
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

/// How often a field may be there, and what its absence means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Label {
    /// Absent is the default value.
    Implicit,
    /// Absent and the default value are two things.
    Optional,
    /// The same, and setting one of these unsets the others.
    OneOf,
    Repeated,
}

/// Bytes or JSON that are not the message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtoError {
    /// The bytes end within a field.
    #[error("the message is cut")]
    Cut,
    /// A field is not as its type is written.
    #[error("field {0} is malformed")]
    Field(u32),
    /// A value is not what the field holds; its JSON name.
    #[error("the value of \"{0}\" does not fit")]
    Value(&'static str),
    /// The JSON is no object.
    #[error("no JSON object")]
    Json,
}

/// Where output is in a process's event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataField {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// A terminal.
    Pty,
}

/// The binary message of a `Start` or `Connect` stream that carries output: bytes go into it as they are.
#[must_use]
pub fn data_event(field: DataField, bytes: &[u8]) -> Vec<u8> {
    let field = match field {
        DataField::Stdout => 1,
        DataField::Stderr => 2,
        DataField::Pty => 3,
    };
    // The event is field 1 of the message, output is its field 2.
    let parts = [field, 2, 1];
    parts.iter().fold(bytes.to_vec(), |inner, number| {
        let mut outer = Vec::with_capacity(inner.len() + 8);
        wire::push_bytes(*number, &inner, &mut outer);
        outer
    })
}

impl Message {
    /// The JSON text of a binary message. Unknown fields are dropped.
    ///
    /// # Errors
    /// The bytes are not such a message.
    pub fn to_json(&self, bytes: &[u8]) -> Result<Vec<u8>, ProtoError> {
        let mut object = Map::new();
        wire::decode(self, bytes, &mut object)?;
        serde_json::to_vec(&object).map_err(|_| ProtoError::Json)
    }

    /// The binary message of a JSON text. Unknown keys are dropped.
    ///
    /// # Errors
    /// The text is not such a message.
    pub fn from_json(&self, text: &[u8]) -> Result<Vec<u8>, ProtoError> {
        let value: Value = serde_json::from_slice(text).map_err(|_| ProtoError::Json)?;
        let object = value.as_object().ok_or(ProtoError::Json)?;
        let mut out = Vec::new();
        wire::encode(self, object, &mut out)?;
        Ok(out)
    }
}
