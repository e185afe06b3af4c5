//! The OTLP messages (opentelemetry-proto 1.x, `trace/v1` and `collector/trace/v1`) that a span needs, as protobuf.

use super::{Context, Program};

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Text(String),
    Number(i64),
    Flag(bool),
}

#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub(super) program: Program,
    pub(super) context: Context,
    pub(super) parent: Option<[u8; 8]>,
    pub(super) name: String,
    /// Whether it serves a request of another process. Otherwise it is internal.
    pub(super) is_server: bool,
    /// Nanoseconds since 1970.
    pub(super) began_ns: u64,
    pub(super) ended_ns: u64,
    pub(super) attributes: Vec<(&'static str, Value)>,
    /// Times (as above) and names.
    pub(super) events: Vec<(u64, &'static str)>,
    pub(super) is_error: bool,
}

/// An `ExportTraceServiceRequest`.
pub(super) fn encode(spans: &[Span]) -> Vec<u8> {
    let mut request = Message::default();
    for program in [Program::Api, Program::Pool, Program::Vmm, Program::Agent] {
        let of_program = spans.iter().filter(|span| span.program == program);
        let encoded: Vec<_> = of_program.map(encode_span).collect();
        if encoded.is_empty() {
            continue;
        }
        let name = Value::Text(program.name().to_owned());
        let mut resource = Message::default();
        resource.message(1, attribute("service.name", &name));
        let mut scope = Message::default();
        scope.text(1, "cube");
        scope.text(2, env!("CARGO_PKG_VERSION"));
        let mut scoped = Message::default();
        scoped.message(1, scope);
        for span in encoded {
            scoped.message(2, span);
        }
        let mut of_resource = Message::default();
        of_resource.message(1, resource);
        of_resource.message(2, scoped);
        request.message(1, of_resource);
    }
    request.0
}

fn encode_span(span: &Span) -> Message {
    let mut message = Message::default();
    message.bytes(1, &span.context.trace);
    message.bytes(2, &span.context.span);
    if let Some(parent) = &span.parent {
        message.bytes(4, parent);
    }
    message.text(5, &span.name);
    // SPAN_KIND_SERVER, SPAN_KIND_INTERNAL.
    message.number(6, if span.is_server { 2 } else { 1 });
    message.fixed(7, span.began_ns);
    message.fixed(8, span.ended_ns);
    for (key, value) in &span.attributes {
        message.message(9, attribute(key, value));
    }
    for (at, name) in &span.events {
        let mut event = Message::default();
        event.fixed(1, *at);
        event.text(2, name);
        message.message(11, event);
    }
    if span.is_error {
        let mut status = Message::default();
        // STATUS_CODE_ERROR.
        status.number(3, 2);
        message.message(15, status);
    }
    message
}

fn attribute(key: &str, value: &Value) -> Message {
    let mut any = Message::default();
    match value {
        Value::Text(text) => any.text(1, text),
        Value::Flag(flag) => any.number(2, u64::from(*flag)),
        Value::Number(number) => any.number(3, number.cast_unsigned()),
    }
    let mut pair = Message::default();
    pair.text(1, key);
    pair.message(2, any);
    pair
}

/// A message in protobuf encoding.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        let low = |value: u64| value.to_le_bytes()[0];
        while value >= 0x80 {
            self.0.push(low(value) | 0x80);
            value >>= 7;
        }
        self.0.push(low(value));
    }

    fn key(&mut self, field: u32, wire_type: u32) {
        self.varint(u64::from(field << 3 | wire_type));
    }

    fn number(&mut self, field: u32, value: u64) {
        self.key(field, 0);
        self.varint(value);
    }

    fn fixed(&mut self, field: u32, value: u64) {
        self.key(field, 1);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, field: u32, value: &[u8]) {
        self.key(field, 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn text(&mut self, field: u32, value: &str) {
        self.bytes(field, value.as_bytes());
    }

    fn message(&mut self, field: u32, value: Self) {
        self.bytes(field, &value.0);
    }
}
