//! Packets that the network policy of a sandbox refused.

use std::{
    collections::BTreeMap,
    time::{SystemTime, UNIX_EPOCH},
};

use api_types::{
    envd::Timestamp,
    rest::{LogEntry, LogLevel, NetworkEvent},
};
use axum::{Json, extract::State, routing::MethodFilter};
use netisolation::{Direction, NetEvent, Protocol};

use super::{Access, ApiError, App, Endpoint, body::OfSandbox};
use crate::{auth::Scope, telemetry::name_of_reason};

const READ: Access = Access::Key(Scope::SandboxesRead);

pub(super) fn endpoints() -> Vec<Endpoint> {
    let get = MethodFilter::GET;
    vec![Endpoint::new(
        get,
        "/sandboxes/{id}/network/events",
        READ,
        list,
    )]
}

/// The refused packets that the log still holds for the sandbox, oldest first.
async fn list(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
) -> Result<Json<Vec<NetworkEvent>>, ApiError> {
    let view = app.registry.get(&id).await?;
    let refused = app.refused(&view.sandbox.id).await;
    Ok(Json(refused.iter().map(on_wire).collect()))
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
