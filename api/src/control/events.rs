//! Packets that the network policy of a sandbox refused, and its calls through the egress proxy.

use std::{
    collections::BTreeMap,
    time::{SystemTime, UNIX_EPOCH},
};

use ::egress::control::Call;
use axum::{extract::State, routing::MethodFilter};
use envd::Timestamp;
use netisolation::{Direction, NetEvent, Protocol};
use rest::{LogEntry, LogLevel, NetworkCall, NetworkEvent};

use super::{
    app::App,
    body::OfSandbox,
    endpoint::{Access, Endpoint},
    error::ApiError,
    spread::Spread,
};
use crate::{auth::Scope, egress::time_of, events::name_of_reason, json::Json};

const READ: Access = Access::Key(Scope::SandboxesRead);

pub(super) fn endpoints() -> Vec<Endpoint> {
    let get = MethodFilter::GET;
    vec![Spread::BySandbox.at(get, "/sandboxes/{id}/network/events", READ, list)]
}

/// `reason` of calls: refused by the proxy, and not refused.
const BY_PROXY: &str = "proxy";
const NOT_REFUSED: &str = "none";

/// The refused packets and calls still stored for the sandbox, oldest first.
async fn list(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
) -> Result<Json<Vec<NetworkEvent>>, ApiError> {
    let view = app.registry.get(&id).await?;
    let refused = app.refused(&view.sandbox.id).await;
    let calls = app.calls(&view.sandbox.id).await;
    let packets = refused.iter().map(on_wire);
    let mut all: Vec<_> = packets.chain(calls.into_iter().map(call_on_wire)).collect();
    // Stable sort: simultaneous events keep their order.
    all.sort_by_key(|event| event.timestamp.unix_ns());
    Ok(Json(all))
}

/// Converts a call of the proxy.
pub(super) fn call_on_wire(call: Call) -> NetworkEvent {
    let is_refused = call.refused.is_some();
    let unknown: std::net::IpAddr = match call.remote {
        std::net::SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        std::net::SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    NetworkEvent {
        timestamp: timestamp(time_of(&call)),
        direction: "out".to_owned(),
        protocol: "tcp".to_owned(),
        source: std::net::SocketAddr::new(unknown, 0).to_string(),
        destination: call.remote.to_string(),
        reason: if is_refused { BY_PROXY } else { NOT_REFUSED }.to_owned(),
        name: call.name,
        count: 1,
        call: Some(NetworkCall {
            method: call.method,
            path: call.path,
            status: call.status,
            bytes_out: call.bytes_out,
            bytes_in: call.bytes_in,
            duration_ms: call.duration_ms,
            rule: call.rule,
            secrets: call.secrets,
            refused: call.refused,
        }),
    }
}

fn on_wire(event: &NetEvent) -> NetworkEvent {
    NetworkEvent {
        timestamp: timestamp(event.time),
        direction: match event.direction {
            Direction::Out => "out",
            Direction::In => "in",
        }
        .to_owned(),
        protocol: match event.protocol {
            Protocol::Tcp => "tcp".to_owned(),
            Protocol::Udp => "udp".to_owned(),
            Protocol::Icmp => "icmp".to_owned(),
            Protocol::Other(number) => number.to_string(),
        },
        source: event.source.to_string(),
        destination: event.destination.to_string(),
        reason: name_of_reason(event.reason),
        name: event.name.clone(),
        count: event.count,
        call: None,
    }
}

/// Converts an event to an entry of the sandbox's log.
pub(super) fn log_entry(event: &NetEvent) -> LogEntry {
    let event = on_wire(event);
    let name = event.name.map(|name| format!(" ({name})"));
    let (protocol, destination, reason) = (&event.protocol, &event.destination, &event.reason);
    let from = match event.direction.as_str() {
        "in" => format!(" from {}", event.source),
        _ => String::new(),
    };
    let name = name.unwrap_or_default();
    LogEntry {
        timestamp: event.timestamp,
        message: format!(
            "refused {protocol}{from} to {destination}{name}: {reason}, packets: {}",
            event.count
        ),
        level: LogLevel::Warn,
        fields: BTreeMap::from([
            ("logger".to_owned(), "network".to_owned()),
            ("reason".to_owned(), event.reason),
            ("destination".to_owned(), event.destination),
        ]),
    }
}

fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_unix_ns(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use netisolation::Reason;

    use super::*;

    #[test]
    fn a_call_is_an_event_with_its_request() {
        let call = Call {
            sandbox: "iabcdefghij012345678".into(),
            time_ms: 1500,
            duration_ms: 7,
            remote: "[2001:db8::1]:443".parse().unwrap(),
            name: Some("a.test".into()),
            method: Some("GET".into()),
            path: Some("/v1".into()),
            status: Some(200),
            bytes_out: 1,
            bytes_in: 2,
            rule: Some("*.test".into()),
            secrets: vec!["key".into()],
            refused: None,
        };
        let json = serde_json::to_value(call_on_wire(call.clone())).unwrap();
        let expected = serde_json::json!({
            "timestamp": "1970-01-01T00:00:01.500000000Z", "direction": "out", "protocol": "tcp",
            "source": "[::]:0", "destination": "[2001:db8::1]:443", "reason": "none", "name": "a.test", "count": 1,
            "call": {"method": "GET", "path": "/v1", "status": 200, "bytesOut": 1, "bytesIn": 2, "durationMs": 7,
                     "rule": "*.test", "secrets": ["key"]},
        });
        assert_eq!(json, expected);
        let refused = call_on_wire(Call {
            refused: Some("SNI is not the pinned name".into()),
            ..call
        });
        assert_eq!(refused.reason, "proxy");
    }

    #[test]
    fn an_event_is_converted_to_json_and_to_a_log_entry() {
        let mut event = NetEvent {
            sandbox: "iabcdefghij012345678".parse().unwrap(),
            time: UNIX_EPOCH + Duration::from_millis(1500),
            direction: Direction::Out,
            protocol: Protocol::Tcp,
            source: "169.254.0.21:40000".parse().unwrap(),
            destination: "[2001:db8::1]:443".parse().unwrap(),
            reason: Reason::NoRoute,
            name: Some("a.test".into()),
            count: 3,
        };
        let json = serde_json::to_value(on_wire(&event)).unwrap();
        let expected = serde_json::json!({
            "timestamp": "1970-01-01T00:00:01.500000000Z", "direction": "out", "protocol": "tcp",
            "source": "169.254.0.21:40000", "destination": "[2001:db8::1]:443",
            "reason": "no_route", "name": "a.test", "count": 3,
        });
        assert_eq!(json, expected);
        let line = log_entry(&event);
        assert_eq!(
            line.message,
            "refused tcp to [2001:db8::1]:443 (a.test): no_route, packets: 3"
        );
        assert_eq!(
            (line.level, line.fields["logger"].as_str()),
            (LogLevel::Warn, "network")
        );
        event.direction = Direction::In;
        event.protocol = Protocol::Other(47);
        event.name = None;
        let text = log_entry(&event).message;
        assert!(
            text.starts_with("refused 47 from 169.254.0.21:40000 to "),
            "{text}"
        );
    }
}
