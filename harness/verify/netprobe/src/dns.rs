//! The parts of DNS (RFC 1035) that queries and responses need.

use std::net::IpAddr;

use crate::RecordKind;

// Record types.
pub const A: u16 = 1;
pub const CNAME: u16 = 5;
pub const TXT: u16 = 16;
pub const AAAA: u16 = 28;
/// The class IN.
pub const IN: u16 = 1;
/// Maximum number of compression pointers in a name.
const MAX_POINTERS: usize = 16;

impl RecordKind {
    /// The number of the type.
    #[must_use]
    pub fn number(self) -> u16 {
        match self {
            Self::A => A,
            Self::Aaaa => AAAA,
            Self::Txt => TXT,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Response code. 0: no error.
    pub code: u8,
    /// Addresses in the order of the response.
    pub addresses: Vec<IpAddr>,
}

/// Encodes a name. Labels longer than 63 bytes are cut.
#[must_use]
pub fn wire_name(name: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        let label = &label.as_bytes()[..label.len().min(63)];
        out.push(u8::try_from(label.len()).unwrap_or(63));
        out.extend(label);
    }
    out.push(0);
    out
}

/// Encodes a query with the id `id`.
#[must_use]
pub fn question(id: u16, name: &str, kind: RecordKind) -> Vec<u8> {
    let mut out = id.to_be_bytes().to_vec();
    // Flags: recursion desired. Counts: one question.
    out.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    out.extend(wire_name(name));
    out.extend(kind.number().to_be_bytes());
    out.extend(IN.to_be_bytes());
    out
}

/// Reads the name at offset `at`. Returns it in lower case, with the offset after it.
#[must_use]
pub fn read_name(message: &[u8], at: usize) -> Option<(String, usize)> {
    let (mut at, mut after, mut pointers) = (at, None, 0);
    let mut labels: Vec<String> = Vec::new();
    loop {
        let length = usize::from(*message.get(at)?);
        match length {
            0 => break,
            1..=63 => {
                let label = message.get(at + 1..at + 1 + length)?;
                labels.push(String::from_utf8_lossy(label).to_ascii_lowercase());
                at += 1 + length;
            }
            _ if length >= 0xc0 && pointers < MAX_POINTERS => {
                after.get_or_insert(at + 2);
                at = (length & 0x3f) << 8 | usize::from(*message.get(at + 1)?);
                pointers += 1;
            }
            _ => return None,
        }
    }
    Some((labels.join("."), after.unwrap_or(at + 1)))
}

/// Parses the response to the query with the id `id`. `None` if the message is anything else.
#[must_use]
pub fn answer(id: u16, message: &[u8]) -> Option<Answer> {
    let short = |at: usize| {
        let bytes = message.get(at..at + 2)?;
        Some(u16::from_be_bytes([bytes[0], bytes[1]]))
    };
    if short(0)? != id || message.get(2)? & 0x80 == 0 {
        return None;
    }
    let mut at = 12;
    for _ in 0..short(4)? {
        at = read_name(message, at)?.1 + 4;
    }
    let mut addresses = Vec::new();
    for _ in 0..short(6)? {
        let (_, after) = read_name(message, at)?;
        let (kind, length) = (short(after)?, usize::from(short(after + 8)?));
        let data = message.get(after + 10..after + 10 + length)?;
        match kind {
            A => addresses.push(IpAddr::from(<[u8; 4]>::try_from(data).ok()?)),
            AAAA => addresses.push(IpAddr::from(<[u8; 16]>::try_from(data).ok()?)),
            _ => {}
        }
        at = after + 10 + length;
    }
    Some(Answer {
        code: message.get(3)? & 0xf,
        addresses,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_with_a_cname_is_parsed() {
        let mut message = question(7, "ok.A.test", RecordKind::A);
        message[2] = 0x81;
        message[7] = 2;
        message.extend([0xc0, 12, 0, 5, 0, 1, 0, 0, 0, 0, 0, 2, 0xc0, 15]);
        message.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4, 198, 51, 100, 7]);
        let got = answer(7, &message).unwrap();
        assert_eq!(got.addresses, ["198.51.100.7".parse::<IpAddr>().unwrap()]);
        assert_eq!(answer(8, &message), None);
        assert_eq!(read_name(&message, 12).unwrap().0, "ok.a.test");
        for length in 0..message.len() {
            assert_eq!(answer(7, &message[..length]), None, "cut at {length}");
        }
    }

    #[test]
    fn a_name_that_points_to_itself_is_rejected() {
        assert_eq!(read_name(&[0xc0, 0], 0), None);
    }
}
