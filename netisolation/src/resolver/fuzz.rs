//! Queries of guests, as far as nobody upstream is asked.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use hickory_proto::op::Message;

use super::query::{self, MAX_UNREAD, Parsed};
use crate::policy::Policy;

/// Bit of the third byte that tells answers from queries.
const IS_ANSWER: u8 = 0x80;

/// Whatever comes: what is answered has the query's id, is an answer, fits into what the client takes, and can be read.
///
/// # Panics
/// It is otherwise.
pub(crate) fn query(bytes: &[u8]) {
    let (reply, most) = match query::parse(bytes) {
        Parsed::Question(question) => {
            let name = question.name.as_deref().unwrap_or_default();
            assert!(name.len() <= 253 && !name.ends_with('.'));
            assert_eq!(name, name.to_ascii_lowercase());
            let _judged = Policy::internet().naming(name);
            let many = [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)); 40];
            let reply = question.answer(&many, Duration::from_secs(60));
            (reply, question.max_datagram())
        }
        Parsed::Wrong(reply) => (reply, MAX_UNREAD),
        Parsed::Nothing => return,
    };
    let reply = query::encode(&reply, most).expect("a reply can be written");
    assert!(reply.len() <= most, "{} bytes of {most}", reply.len());
    assert_eq!(reply[..2], bytes[..2]);
    assert_eq!(reply[2] & IS_ANSWER, IS_ANSWER);
    Message::from_vec(&reply).expect("a reply can be read");
}
