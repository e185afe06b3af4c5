//! The log of refusal events.

use std::{io, net::SocketAddr, path::Path, sync::mpsc::Receiver, thread};

use journal::{EventForm, EventLogError};
use model::SandboxId;
use ranges::Protocol;
use serde::Serialize;

use crate::events::event::{Direction, NetEvent, Reason};

/// A handle to the log. Its thread ends when the last handle is dropped, including those that [`follow`] holds.
pub type EventLog = journal::EventLog<NetEvent>;

/// A [`NetEvent`] as one line, with its time in RFC 3339 format.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    sandbox: &'a SandboxId,
    direction: Direction,
    protocol: Protocol,
    source: SocketAddr,
    destination: SocketAddr,
    reason: Reason,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    count: u64,
}

fn line(event: &NetEvent) -> io::Result<Vec<u8>> {
    let line = Line {
        time: humantime::format_rfc3339_millis(event.time).to_string(),
        sandbox: &event.sandbox,
        direction: event.direction,
        protocol: event.protocol,
        source: event.source,
        destination: event.destination,
        reason: event.reason,
        name: event.name.as_deref(),
        count: event.count,
    };
    Ok(serde_json::to_vec(&line)?)
}

/// Opens the log of refused traffic in a file. Both `subscriber` and the file get every event.
///
/// # Errors
/// Returns [`EventLogError`].
pub fn open_log(
    path: &Path,
    mut subscriber: impl FnMut(&NetEvent) + Send + 'static,
) -> Result<EventLog, EventLogError> {
    let subscriber = Box::new(move |_: &SandboxId, event: &NetEvent| subscriber(event));
    let form = EventForm {
        line: |_, event| line(event),
        is_kept: |_| true,
        is_expired: |_, _| false,
    };
    EventLog::open("net-events", Some(path), form, subscriber)
}

/// Starts a thread that logs the events of [`crate::Isolation::open`] until their sender is dropped.
///
/// # Errors
/// Returns [`EventLogError::Thread`] if the thread cannot be started.
pub fn follow(log: &EventLog, events: Receiver<NetEvent>) -> Result<(), EventLogError> {
    let (log, name) = (log.clone(), "net-events-in");
    let record = move |event: NetEvent| log.record(event.sandbox.clone(), event);
    let started = thread::Builder::new()
        .name(name.into())
        .spawn(move || events.iter().for_each(record));
    started.map(drop).map_err(|source| EventLogError::Thread {
        name: name.into(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        sync::mpsc::channel,
        time::{Duration, SystemTime},
    };

    use super::*;

    fn event(n: u16, port: u16) -> NetEvent {
        let [high, low] = n.to_be_bytes();
        let mut id = [0; 19];
        // Hexadecimal digits, so that each number gives a different id.
        id[..4].copy_from_slice(&[high / 16, high % 16, low / 16, low % 16]);
        NetEvent {
            sandbox: SandboxId::from_random(id),
            time: SystemTime::UNIX_EPOCH + Duration::from_millis(1500),
            direction: Direction::Out,
            protocol: Protocol::Tcp,
            source: ([169, 254, 0, 21], 40000).into(),
            destination: ([10, 0, 0, 1], port).into(),
            reason: Reason::Forbidden,
            name: Some("a.test".into()),
            count: 3,
        }
    }

    #[tokio::test]
    async fn refused_packets_reach_the_subscriber_the_memory_and_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let (passed, received) = channel();
        let log = open_log(&path, move |event| passed.send(event.clone()).unwrap()).unwrap();
        let (datapath, events) = channel();
        follow(&log, events).unwrap();
        datapath.send(event(1, 443)).unwrap();
        assert_eq!(received.recv().unwrap(), event(1, 443));
        let sandbox = event(1, 0).sandbox;
        assert_eq!(log.events_of(&sandbox).await, [event(1, 443)]);
        let expected = format!(
            "{{\"time\":\"1970-01-01T00:00:01.500Z\",\"sandbox\":\"{sandbox}\",\"direction\":\"out\",\"protocol\":\"tcp\",\
             \"source\":\"169.254.0.21:40000\",\"destination\":\"10.0.0.1:443\",\"reason\":\"forbidden\",\
             \"name\":\"a.test\",\"count\":3}}\n"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), expected);
    }
}
