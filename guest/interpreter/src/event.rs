//! The events of an execution that the server itself creates, each one line of JSON. Events of the hosts are passed on
//! unread ([`crate::message`]).

use std::time::{SystemTime, UNIX_EPOCH};

use envd::Timestamp;
use serde::Serialize;

/// An event in the response to `/execute`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Event<'a> {
    /// The first event: how many cells the context has begun, including this one.
    NumberOfExecutions {
        execution_count: u64,
    },
    /// Clients require the time stamp.
    Stdout {
        text: &'a str,
        timestamp: Timestamp,
    },
    Stderr {
        text: &'a str,
        timestamp: Timestamp,
    },
    Error {
        name: &'a str,
        value: &'a str,
        traceback: &'a str,
    },
    Keepalive,
}

/// The last line, byte for byte as official servers write it.
pub(crate) const END: &str = "{\"type\": \"end_of_execution\"}\n";

impl<'a> Event<'a> {
    /// The event as a line, including the line end.
    pub(crate) fn line(&self) -> Vec<u8> {
        // Serializing strings and numbers cannot fail.
        let mut line = serde_json::to_vec(self).unwrap_or_default();
        line.push(b'\n');
        line
    }

    /// The error of a cell whose host has ended.
    pub(crate) fn unexpected_end() -> Self {
        Self::Error {
            name: "UnexpectedEndOfExecution",
            value: "Connection to the execution was closed before the execution was finished",
            traceback: "",
        }
    }

    /// The error of a cell for which no host can be started.
    pub(crate) fn no_host(text: &'a str) -> Self {
        Self::Error {
            name: "UnexpectedEndOfExecution",
            value: text,
            traceback: "",
        }
    }

    /// The error of a cell whose context was restarted by another client.
    pub(crate) fn restarted() -> Self {
        Self::Error {
            name: "ContextRestarting",
            value: "Context was restarted",
            traceback: "",
        }
    }
}

/// The current wall-clock time.
pub(crate) fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let ns = since.map_or(0, |since| since.as_nanos());
    Timestamp::from_unix_ns(u64::try_from(ns).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_the_format_of_the_api() {
        let text = |event: Event<'_>| String::from_utf8(event.line()).unwrap();
        assert_eq!(
            text(Event::NumberOfExecutions { execution_count: 3 }),
            "{\"type\":\"number_of_executions\",\"execution_count\":3}\n"
        );
        let stdout = text(Event::Stdout {
            text: "a\n",
            timestamp: Timestamp::from_unix_ns(0),
        });
        assert!(
            stdout
                .starts_with("{\"type\":\"stdout\",\"text\":\"a\\n\",\"timestamp\":\"1970-01-01T")
        );
        assert_eq!(text(Event::Keepalive), "{\"type\":\"keepalive\"}\n");
    }
}
