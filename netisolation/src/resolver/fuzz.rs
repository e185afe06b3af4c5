//! Fuzzing of guests' queries, without upstream queries.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use hickory_proto::op::Message;

use super::query::{self, PLAIN_DATAGRAM, Parsed};
use crate::policy::Policy;

/// QR, the bit in the header's third byte that marks responses.
const IS_RESPONSE: u8 = 0x80;

/// Checks that a reply to any bytes has the query's id, is a response, fits the client's limit, and can be parsed.
///
/// # Panics
/// Panics if a check fails.
pub(crate) fn query(bytes: &[u8]) {
    let (reply, most) = match query::parse(bytes) {
        Parsed::Question(question) => {
            let name = question.name.as_deref().unwrap_or_default();
            assert!(name.len() <= 253 && !name.ends_with('.'));
            assert_eq!(name, name.to_ascii_lowercase());
            let _decided = Policy::internet().naming(name);
            let many = [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)); 40];
            let reply = question.answer(&many, Duration::from_secs(60));
            (reply, question.max_datagram())
        }
        Parsed::Invalid(reply) => (reply, PLAIN_DATAGRAM),
        Parsed::Ignored => return,
    };
    let reply = query::encode(&reply, most).expect("a reply can be encoded");
    assert!(reply.len() <= most, "{} bytes of {most}", reply.len());
    assert_eq!(reply[..2], bytes[..2]);
    assert_eq!(reply[2] & IS_RESPONSE, IS_RESPONSE);
    Message::from_vec(&reply).expect("a reply can be parsed");
}
