//! Parses queries of guests and encodes replies. Pure.

use std::{net::IpAddr, time::Duration};

use hickory_proto::{
    op::{Edns, Message, MessageType, Metadata, OpCode, Query, ResponseCode},
    rr::{
        DNSClass, Name, RData, Record, RecordType,
        rdata::{A, AAAA},
    },
};

/// Longest accepted query, in bytes. Only unusual EDNS options make a query longer.
pub(super) const MAX_QUERY: usize = 1232;
/// Longest UDP reply, in bytes: short enough to cross common links unfragmented (DNS flag day 2020).
const MAX_DATAGRAM: u16 = 1232;
/// Longest UDP reply to a client without EDNS, in bytes (RFC 1035, 4.2.1).
pub(super) const PLAIN_DATAGRAM: usize = 512;
/// Longest message on a TCP connection, in bytes: its length field has 16 bits.
pub(super) const MAX_MESSAGE: usize = u16::MAX as usize;
const HEADER_LEN: usize = 12;
/// QR, the bit in the header's third byte that marks responses.
const IS_RESPONSE: u8 = 0x80;

#[derive(Debug)]
pub(super) enum Parsed {
    Question(Question),
    /// An invalid query, with the error reply.
    Invalid(Message),
    /// A response, or fewer bytes than a header. Gets no reply.
    Ignored,
}

/// One question of class IN.
#[derive(Debug)]
pub(super) struct Question {
    /// Lower case, without a trailing dot. `None` if the name is not a valid host name.
    pub(super) name: Option<String>,
    pub(super) kind: Kind,
    head: Metadata,
    query: Query,
    edns: Option<Edns>,
}

/// The record type that a question requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A or AAAA.
    Address(RecordType),
    /// HTTPS or SVCB. Answered without records: clients also query addresses, and address hints would need pins.
    Service,
    /// Any other type. Refused: clients do not need it to connect, and TXT records can carry a tunnel.
    Other,
}

/// Parses a query. Does not panic on any input. A response is ignored, so that it never gets a reply.
pub(super) fn parse(bytes: &[u8]) -> Parsed {
    let Some(header) = bytes.first_chunk::<HEADER_LEN>() else {
        return Parsed::Ignored;
    };
    let [id_high, id_low, flags, ..] = *header;
    if flags & IS_RESPONSE != 0 {
        return Parsed::Ignored;
    }
    let id = u16::from_be_bytes([id_high, id_low]);
    let invalid = |code| Parsed::Invalid(Message::error_msg(id, OpCode::Query, code));
    if bytes.len() > MAX_QUERY || !has_one_question(header) {
        return invalid(ResponseCode::FormErr);
    }
    let Ok(message) = Message::from_vec(bytes) else {
        return invalid(ResponseCode::FormErr);
    };
    question(message).unwrap_or_else(invalid)
}

/// Checks the counts in the header before the rest is decoded: one question, no answers, no authorities, and at most
/// two additional records (EDNS and a signature).
fn has_one_question(header: &[u8; HEADER_LEN]) -> bool {
    let [.., q1, q0, a1, a0, n1, n0, r1, r0] = *header;
    [q1, q0, a1, a0, n1, n0] == [0, 1, 0, 0, 0, 0] && r1 == 0 && r0 <= 2
}

fn question(mut message: Message) -> Result<Parsed, ResponseCode> {
    if message.metadata.op_code != OpCode::Query {
        return Err(ResponseCode::NotImp);
    }
    let query = message.queries.pop().ok_or(ResponseCode::FormErr)?;
    if query.query_class != DNSClass::IN {
        return Err(ResponseCode::Refused);
    }
    let question = Question {
        name: host_name(&query.name),
        kind: kind(query.query_type),
        head: message.metadata,
        query,
        edns: message.edns,
    };
    if question
        .edns
        .as_ref()
        .is_some_and(|edns| edns.version() != 0)
    {
        return Ok(Parsed::Invalid(question.reply(ResponseCode::BADVERS)));
    }
    Ok(Parsed::Question(question))
}

fn kind(asked: RecordType) -> Kind {
    match asked {
        RecordType::A | RecordType::AAAA => Kind::Address(asked),
        RecordType::HTTPS | RecordType::SVCB => Kind::Service,
        _ => Kind::Other,
    }
}

/// The name in lower case without a trailing dot. `None` for the root, and for a name with a character other than ASCII
/// letters, digits, `-` and `_` in a label.
fn host_name(name: &Name) -> Option<String> {
    let mut text = String::with_capacity(64);
    for label in name.iter() {
        let is_plain = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
        if !label.iter().all(is_plain) {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        text.extend(label.iter().map(|b| char::from(b.to_ascii_lowercase())));
    }
    (!text.is_empty()).then_some(text)
}

impl Question {
    /// A reply without records. Repeats the question in its original letter case.
    pub(super) fn reply(&self, code: ResponseCode) -> Message {
        let mut message = Message::new(self.head.id, MessageType::Response, OpCode::Query);
        message.metadata.recursion_desired = self.head.recursion_desired;
        message.metadata.recursion_available = true;
        message.metadata.checking_disabled = self.head.checking_disabled;
        message.metadata.response_code = code;
        message.add_query(self.query.clone());
        if self.edns.is_some() {
            let mut edns = Edns::new();
            edns.set_max_payload(MAX_DATAGRAM).set_version(0);
            message.set_edns(edns);
        }
        message
    }

    /// A reply with addresses for the queried name. Omits the CNAME chain that led to them.
    pub(super) fn answer(&self, addresses: &[IpAddr], ttl: Duration) -> Message {
        let ttl_s = u32::try_from(ttl.as_secs()).unwrap_or(u32::MAX);
        let mut message = self.reply(ResponseCode::NoError);
        message.add_answers(addresses.iter().map(|address| {
            let data = match address {
                IpAddr::V4(address) => RData::A(A(*address)),
                IpAddr::V6(address) => RData::AAAA(AAAA(*address)),
            };
            Record::from_rdata(self.query.name.clone(), ttl_s, data)
        }));
        message
    }

    /// Longest UDP reply to this query, in bytes: the size that the client accepts, but at most [`MAX_DATAGRAM`].
    pub(super) fn max_datagram(&self) -> usize {
        let payload = self.edns.as_ref().map_or(0, Edns::max_payload);
        usize::from(payload.min(MAX_DATAGRAM)).max(PLAIN_DATAGRAM)
    }
}

/// Encodes a reply. If it is longer than `most` bytes, drops its records and sets the truncation bit, so that the
/// client repeats the query over TCP. `None` if the reply cannot be encoded.
pub(super) fn encode(reply: &Message, most: usize) -> Option<Vec<u8>> {
    let bytes = reply.to_vec().ok()?;
    if bytes.len() <= most {
        return Some(bytes);
    }
    reply.truncate().to_vec().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes_of(name: &str, kind: RecordType) -> Vec<u8> {
        message_of(name, kind).to_vec().unwrap()
    }

    fn message_of(name: &str, kind: RecordType) -> Message {
        let mut message = Message::query();
        message.metadata.id = 0xcafe;
        message.metadata.recursion_desired = true;
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        message
    }

    fn parsed(bytes: &[u8]) -> Question {
        match parse(bytes) {
            Parsed::Question(question) => question,
            other => panic!("{other:?}"),
        }
    }

    fn code(bytes: &[u8]) -> ResponseCode {
        match parse(bytes) {
            Parsed::Invalid(reply) => {
                assert_eq!(reply.metadata.id, 0xcafe);
                reply.metadata.response_code
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn names_are_parsed_in_lower_case_and_repeated_as_sent() {
        let question = parsed(&bytes_of("WWW.Example.com.", RecordType::A));
        assert_eq!(question.name.as_deref(), Some("www.example.com"));
        assert_eq!(question.kind, Kind::Address(RecordType::A));
        let echoed = question.reply(ResponseCode::NoError);
        assert_eq!(echoed.queries[0].name.to_ascii(), "WWW.Example.com.");
        assert_eq!(parsed(&bytes_of(".", RecordType::AAAA)).name, None);
        let mut odd = bytes_of("aXb.com.", RecordType::A);
        odd[14] = b'.';
        assert_eq!(parsed(&odd).name, None, "a dot inside a label");
    }

    #[test]
    fn record_types_are_grouped_into_kinds() {
        let kind = |kind| parsed(&bytes_of("a.test.", kind)).kind;
        assert_eq!(kind(RecordType::AAAA), Kind::Address(RecordType::AAAA));
        assert_eq!(kind(RecordType::HTTPS), Kind::Service);
        for other in [
            RecordType::TXT,
            RecordType::ANY,
            RecordType::CNAME,
            RecordType::NULL,
            RecordType::AXFR,
        ] {
            assert_eq!(kind(other), Kind::Other);
        }
    }

    #[test]
    fn invalid_queries_get_an_error_code_or_no_reply() {
        let good = bytes_of("a.test.", RecordType::A);
        let patched = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        assert!(
            matches!(parse(&patched(2, 0x81)), Parsed::Ignored),
            "a response"
        );
        assert!(matches!(parse(&good[..11]), Parsed::Ignored));
        assert_eq!(
            code(&patched(2, 0x21)),
            ResponseCode::NotImp,
            "opcode NOTIFY"
        );
        assert_eq!(code(&patched(5, 2)), ResponseCode::FormErr, "two questions");
        assert_eq!(
            code(&patched(7, 1)),
            ResponseCode::FormErr,
            "a query with an answer record"
        );
        assert_eq!(
            code(&patched(good.len() - 1, 3)),
            ResponseCode::Refused,
            "class CHAOS"
        );
        assert_eq!(code(&good[..good.len() - 1]), ResponseCode::FormErr);
        let long = [good.clone(), vec![0; MAX_QUERY]].concat();
        assert_eq!(code(&long), ResponseCode::FormErr);
    }

    #[test]
    fn edns_version_0_is_supported_and_other_versions_get_badvers() {
        let mut message = message_of("a.test.", RecordType::A);
        message.set_edns(Edns::new().set_max_payload(4096).clone());
        let question = parsed(&message.to_vec().unwrap());
        assert_eq!(question.max_datagram(), 1232);
        assert!(question.reply(ResponseCode::NoError).edns.is_some());
        let plain = parsed(&bytes_of("a.test.", RecordType::A));
        assert_eq!(plain.max_datagram(), 512);
        assert!(plain.reply(ResponseCode::NoError).edns.is_none());
        message.set_edns(Edns::new().set_version(1).clone());
        assert_eq!(code(&message.to_vec().unwrap()), ResponseCode::BADVERS);
    }

    #[test]
    fn a_reply_that_does_not_fit_is_truncated() {
        let question = parsed(&bytes_of("a.test.", RecordType::A));
        let many: Vec<IpAddr> = (0..64u8).map(|n| [192, 0, 2, n].into()).collect();
        let reply = question.answer(&many, Duration::from_secs(5));
        let short = Message::from_vec(&encode(&reply, 512).unwrap()).unwrap();
        assert!(short.metadata.truncation && short.answers.is_empty());
        assert_eq!(short.metadata.message_type, MessageType::Response);
        let whole = Message::from_vec(&encode(&reply, MAX_MESSAGE).unwrap()).unwrap();
        assert!(!whole.metadata.truncation && whole.answers.len() == 64);
    }

    /// Every reply can be encoded, has the query's id, and is a response.
    fn check_reply(bytes: &[u8]) {
        let reply = match parse(bytes) {
            Parsed::Question(question) => {
                assert!(question.name.as_ref().is_none_or(|name| name.len() <= 253));
                question.answer(&[[192, 0, 2, 1].into()], Duration::ZERO)
            }
            Parsed::Invalid(reply) => reply,
            Parsed::Ignored => return,
        };
        let reply = encode(&reply, PLAIN_DATAGRAM).unwrap();
        assert_eq!(reply[..2], bytes[..2]);
        assert_eq!(reply[2] & IS_RESPONSE, IS_RESPONSE);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            check_reply(&bytes);
        }

        #[test]
        fn corrupted_queries_are_parsed_without_panic(
            patches in prop::collection::vec((0usize..64, any::<u8>()), 1..6), cut in 0usize..64,
        ) {
            let mut message = message_of("www.example.com.", RecordType::A);
            message.set_edns(Edns::new());
            let mut bytes = message.to_vec().unwrap();
            let length = bytes.len();
            for (at, byte) in patches {
                bytes[at % length] = byte;
            }
            bytes.truncate(length - cut % length);
            check_reply(&bytes);
        }
    }
}
