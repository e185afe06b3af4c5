//! The table-driven codec of binary messages (Protocol Buffers documentation, "Encoding" and "ProtoJSON Format").

use serde_json::{Map, Value};

use super::{Blob, Field, Kind, Label, Message, ProtoError, Timestamp};

/// Wire types.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED32: u64 = 5;

/// A field value on the wire.
enum Raw<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// A fixed-width number. No field of the schema has this wire type.
    Fixed,
}

/// Takes a base-128 varint from the front of `bytes`.
fn take_varint(bytes: &mut &[u8]) -> Result<u64, ProtoError> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first().ok_or(ProtoError::Truncated)?;
        *bytes = rest;
        // Bits above the 64th are dropped, as in all other implementations.
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(ProtoError::Truncated)
}

fn take<'a>(bytes: &mut &'a [u8], len: u64) -> Result<&'a [u8], ProtoError> {
    let len = usize::try_from(len).map_err(|_| ProtoError::Truncated)?;
    let (taken, rest) = bytes.split_at_checked(len).ok_or(ProtoError::Truncated)?;
    *bytes = rest;
    Ok(taken)
}

/// Takes a field from the front of `bytes`: its number and its value.
fn take_field<'a>(bytes: &mut &'a [u8]) -> Result<(u32, Raw<'a>), ProtoError> {
    let tag = take_varint(bytes)?;
    let number = u32::try_from(tag >> 3).map_err(|_| ProtoError::Truncated)?;
    let raw = match tag & 7 {
        VARINT => Raw::Varint(take_varint(bytes)?),
        FIXED64 => take(bytes, 8).map(|_| Raw::Fixed)?,
        LENGTH => {
            let len = take_varint(bytes)?;
            Raw::Bytes(take(bytes, len)?)
        }
        FIXED32 => take(bytes, 4).map(|_| Raw::Fixed)?,
        // Groups, which proto3 does not support, and undefined wire types.
        _ => return Err(ProtoError::Field(number)),
    };
    match number {
        0 => Err(ProtoError::Field(0)),
        _ => Ok((number, raw)),
    }
}

/// Decodes a message into `object`, which may already contain the fields of an earlier occurrence of the same message.
pub(super) fn decode(
    message: &Message,
    mut bytes: &[u8],
    object: &mut Map<String, Value>,
) -> Result<(), ProtoError> {
    while !bytes.is_empty() {
        let (number, raw) = take_field(&mut bytes)?;
        let mut fields = message.fields.iter();
        let Some(field) = fields.find(|field| field.number == number) else {
            continue;
        };
        if field.label == Label::OneOf {
            let others = message.fields.iter().filter(|f| f.label == Label::OneOf);
            for other in others.filter(|other| other.number != number) {
                object.remove(other.name);
            }
        }
        set(field, &raw, object)?;
    }
    Ok(())
}

fn set(field: &Field, raw: &Raw<'_>, object: &mut Map<String, Value>) -> Result<(), ProtoError> {
    let malformed = || ProtoError::Field(field.number);
    let place = object.entry(field.name).or_insert(Value::Null);
    if field.label == Label::Repeated {
        if place.is_null() {
            *place = Value::Array(Vec::new());
        }
        let mut element = Value::Null;
        set_one(field, raw, &mut element)?;
        place.as_array_mut().ok_or_else(malformed)?.push(element);
        return Ok(());
    }
    set_one(field, raw, place)
}

/// Sets a value, or merges a message or map entry into the existing value.
fn set_one(field: &Field, raw: &Raw<'_>, place: &mut Value) -> Result<(), ProtoError> {
    let malformed = || ProtoError::Field(field.number);
    *place = match (field.kind, raw) {
        (Kind::Bool, Raw::Varint(number)) => Value::from(*number != 0),
        // Larger values are truncated to 32 bits, as in all other implementations.
        (Kind::Uint32, Raw::Varint(number)) => Value::from(low_half(*number)),
        (Kind::Int64, Raw::Varint(number)) => Value::from(number.cast_signed().to_string()),
        (Kind::Sint32, Raw::Varint(number)) => Value::from(unzigzag(low_half(*number))),
        (Kind::Enum(names), Raw::Varint(number)) => {
            let number = low_half(*number);
            let known = names.iter().find(|(known, _)| *known == number);
            known.map_or_else(|| Value::from(number), |(_, name)| Value::from(*name))
        }
        (Kind::Text, Raw::Bytes(bytes)) => Value::from(text(bytes).ok_or_else(malformed)?),
        (Kind::Bytes, Raw::Bytes(bytes)) => {
            let mut encoded = Vec::new();
            Blob::encode_into(bytes, &mut encoded);
            Value::from(String::from_utf8(encoded).map_err(|_| malformed())?)
        }
        (Kind::Message(message), Raw::Bytes(bytes)) => {
            let mut object = as_object(place);
            decode(message, bytes, &mut object)?;
            Value::Object(object)
        }
        (Kind::TextMap, Raw::Bytes(bytes)) => {
            let mut object = as_object(place);
            let (key, value) = decode_pair(bytes).ok_or_else(malformed)?;
            object.insert(key, Value::from(value));
            Value::Object(object)
        }
        (Kind::Timestamp, Raw::Bytes(bytes)) => {
            let time = decode_timestamp(bytes).ok_or_else(malformed)?;
            serde_json::to_value(time).map_err(|_| malformed())?
        }
        (_, Raw::Varint(_) | Raw::Bytes(_) | Raw::Fixed) => return Err(malformed()),
    };
    Ok(())
}

fn as_object(place: &mut Value) -> Map<String, Value> {
    place
        .as_object_mut()
        .map(std::mem::take)
        .unwrap_or_default()
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

fn low_half(number: u64) -> u32 {
    u32::try_from(number & u64::from(u32::MAX)).unwrap_or(0)
}

fn unzigzag(number: u32) -> i32 {
    (number >> 1).cast_signed() ^ -(number & 1).cast_signed()
}

fn zigzag(number: i32) -> u32 {
    (number << 1 ^ number >> 31).cast_unsigned()
}

/// Decodes a map entry: a message with the key as field 1 and the value as field 2.
fn decode_pair(mut bytes: &[u8]) -> Option<(String, String)> {
    let (mut key, mut value) = (String::new(), String::new());
    while !bytes.is_empty() {
        match take_field(&mut bytes).ok()? {
            (1, Raw::Bytes(bytes)) => text(bytes)?.clone_into(&mut key),
            (2, Raw::Bytes(bytes)) => text(bytes)?.clone_into(&mut value),
            (1 | 2, _) => return None,
            _ => {}
        }
    }
    Some((key, value))
}

/// Decodes a timestamp: seconds since 1970 as field 1, nanoseconds as field 2.
fn decode_timestamp(mut bytes: &[u8]) -> Option<Timestamp> {
    let (mut seconds, mut ns) = (0, 0);
    while !bytes.is_empty() {
        match take_field(&mut bytes).ok()? {
            (1, Raw::Varint(number)) => seconds = number,
            (2, Raw::Varint(number)) => ns = number,
            (1 | 2, _) => return None,
            _ => {}
        }
    }
    let valid = ns < NS_PER_SECOND;
    let unix_ns = seconds.checked_mul(NS_PER_SECOND)?.checked_add(ns)?;
    valid.then(|| Timestamp::from_unix_ns(unix_ns))
}

const NS_PER_SECOND: u64 = 1_000_000_000;

fn push_varint(mut number: u64, out: &mut Vec<u8>) {
    while number > 0x7f {
        out.push(u8::try_from(number & 0x7f).unwrap_or(0) | 0x80);
        number >>= 7;
    }
    out.push(u8::try_from(number).unwrap_or(0));
}

fn push_tag(number: u32, wire_type: u64, out: &mut Vec<u8>) {
    push_varint(u64::from(number) << 3 | wire_type, out);
}

/// Appends a length-delimited field.
pub(super) fn push_bytes(number: u32, bytes: &[u8], out: &mut Vec<u8>) {
    push_tag(number, LENGTH, out);
    push_varint(u64::try_from(bytes.len()).unwrap_or(0), out);
    out.extend_from_slice(bytes);
}

/// Appends the binary form of a JSON object to `out`.
pub(super) fn encode(
    message: &Message,
    object: &Map<String, Value>,
    out: &mut Vec<u8>,
) -> Result<(), ProtoError> {
    for field in message.fields {
        match object.get(field.name) {
            None | Some(Value::Null) => {}
            Some(Value::Array(elements)) if field.label == Label::Repeated => {
                for element in elements {
                    encode_one(field, element, out)?;
                }
            }
            Some(value) => encode_one(field, value, out)?,
        }
    }
    Ok(())
}

fn encode_one(field: &Field, value: &Value, out: &mut Vec<u8>) -> Result<(), ProtoError> {
    let wrong = || ProtoError::Value(field.name);
    let varint = match (field.kind, value) {
        (Kind::Bool, Value::Bool(set)) => u64::from(*set),
        (Kind::Uint32, Value::Number(number)) => {
            let number = number.as_u64().and_then(|n| u32::try_from(n).ok());
            u64::from(number.ok_or_else(wrong)?)
        }
        (Kind::Sint32, Value::Number(number)) => {
            let number = number.as_i64().and_then(|n| i32::try_from(n).ok());
            u64::from(zigzag(number.ok_or_else(wrong)?))
        }
        (Kind::Int64, Value::Number(number)) => number.as_i64().ok_or_else(wrong)?.cast_unsigned(),
        (Kind::Int64, Value::String(text)) => {
            let number: i64 = text.parse().map_err(|_| wrong())?;
            number.cast_unsigned()
        }
        (Kind::Enum(names), Value::String(name)) => {
            let known = names.iter().find(|(_, known)| known == name);
            u64::from(known.ok_or_else(wrong)?.0)
        }
        _ => return encode_long(field, value, out),
    };
    if varint != 0 || field.label != Label::Implicit {
        push_tag(field.number, VARINT, out);
        push_varint(varint, out);
    }
    Ok(())
}

/// Encodes a length-delimited field.
fn encode_long(field: &Field, value: &Value, out: &mut Vec<u8>) -> Result<(), ProtoError> {
    let wrong = || ProtoError::Value(field.name);
    let mut bytes = Vec::new();
    match (field.kind, value) {
        (Kind::Text, Value::String(text)) => bytes.extend_from_slice(text.as_bytes()),
        (Kind::Bytes, Value::String(text)) => {
            bytes = Blob::decode(text.as_bytes()).ok_or_else(wrong)?;
        }
        (Kind::Message(message), Value::Object(object)) => encode(message, object, &mut bytes)?,
        (Kind::Timestamp, value) => {
            let time: Timestamp = serde_json::from_value(value.clone()).map_err(|_| wrong())?;
            encode_timestamp(time, &mut bytes);
        }
        (Kind::TextMap, Value::Object(object)) => {
            for (key, value) in object {
                let mut pair = Vec::new();
                push_bytes(1, key.as_bytes(), &mut pair);
                push_bytes(2, value.as_str().ok_or_else(wrong)?.as_bytes(), &mut pair);
                push_bytes(field.number, &pair, out);
            }
            return Ok(());
        }
        _ => return Err(wrong()),
    }
    if !bytes.is_empty() || field.label != Label::Implicit {
        push_bytes(field.number, &bytes, out);
    }
    Ok(())
}

fn encode_timestamp(time: Timestamp, out: &mut Vec<u8>) {
    let parts = [
        (1, time.unix_ns() / NS_PER_SECOND),
        (2, time.unix_ns() % NS_PER_SECOND),
    ];
    for (number, value) in parts.into_iter().filter(|(_, value)| *value > 0) {
        push_tag(number, VARINT, out);
        push_varint(value, out);
    }
}
