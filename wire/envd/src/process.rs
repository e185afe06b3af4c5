//! Messages of `process.Process` in proto3 JSON. For every field, an absent key and `null` mean the default value.
//! Unknown keys are ignored, because newer clients send them.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, de};

use super::proto_json::{Blob, null_is_default, opt_u32};

/// A message without fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Empty {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessConfig {
    /// Path of the program, or a name that is looked up in the `PATH` of the command's environment.
    #[serde(default, deserialize_with = "null_is_default")]
    pub cmd: String,
    /// Arguments without the program's name.
    #[serde(default, deserialize_with = "null_is_default")]
    pub args: Vec<String>,
    /// Added to the environment; takes precedence over existing variables.
    #[serde(default, deserialize_with = "null_is_default")]
    pub envs: BTreeMap<String, String>,
    /// Working directory. Absent or empty: the sandbox's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// Size of a terminal in characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PtySize {
    #[serde(default)]
    pub cols: u32,
    #[serde(default)]
    pub rows: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pty {
    /// Absent: the kernel's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<PtySize>,
}

/// Request of `Start`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartRequest {
    /// Required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessConfig>,
    /// Present: the process runs on a pseudo-terminal instead of pipes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
    /// A name by which the process can be selected, in addition to its pid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Whether standard input is a pipe. Absent: yes. `false`: standard input is /dev/null.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<bool>,
}

/// Selects a process by its pid or its tag. One of the two is required.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessSelector {
    /// As in [`StartEvent`].
    #[serde(default, deserialize_with = "opt_u32")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// As in [`StartRequest`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// Request of `Connect`, which follows a running process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectRequest {
    #[serde(default, deserialize_with = "null_is_default")]
    pub process: ProcessSelector,
}

/// One message of a `Start` or `Connect` stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventResponse {
    #[serde(default, deserialize_with = "null_is_default")]
    pub event: ProcessEvent,
}

/// An event of a process. Exactly one field is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessEvent {
    /// The process has started. Always the first event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartEvent>,
    /// The process wrote output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataEvent>,
    /// The process ended. Always the last event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<EndEvent>,
    /// Sent when no event has occurred for a while.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<KeepAlive>,
}

/// Keeps an otherwise idle stream alive.
pub type KeepAlive = Empty;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartEvent {
    /// Process id in the guest.
    #[serde(default)]
    pub pid: u32,
}

/// Output of a process. Exactly one field is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataEvent {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout: Option<Blob>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr: Option<Blob>,
    /// Output on the pseudo-terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Blob>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndEvent {
    /// -1 if a signal ended the process. Zero may be absent on the wire.
    #[serde(default)]
    pub exit_code: i32,
    /// Whether the process exited, as opposed to being ended by a signal.
    #[serde(default)]
    pub exited: bool,
    /// `exit status N` or `signal: killed`.
    #[serde(default)]
    pub status: String,
    /// Equal to `status` unless the exit code is zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Request of `List`.
pub type ListRequest = Empty;

/// Response to `List`: the running processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListResponse {
    /// In order of their start. An empty list may be absent on the wire.
    #[serde(default, deserialize_with = "null_is_default")]
    pub processes: Vec<ProcessInfo>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInfo {
    /// The command as requested.
    #[serde(default, deserialize_with = "null_is_default")]
    pub config: ProcessConfig,
    /// Process id in the guest.
    #[serde(default)]
    pub pid: u32,
    /// The tag as requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// Input of a process. Exactly one field is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInput {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<Blob>,
    /// Input on the pseudo-terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Blob>,
}

/// Request of `SendInput`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendInputRequest {
    #[serde(default, deserialize_with = "null_is_default")]
    pub process: ProcessSelector,
    #[serde(default, deserialize_with = "null_is_default")]
    pub input: ProcessInput,
}

/// One message of `StreamInput`. Exactly one field is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamInputRequest {
    /// Selects the process. Only in the first message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<ConnectRequest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<StreamInputData>,
    /// Keeps an otherwise idle stream alive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<KeepAlive>,
}

/// Input in a `StreamInput` message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamInputData {
    #[serde(default, deserialize_with = "null_is_default")]
    pub input: ProcessInput,
}

/// Request of `CloseStdin`.
pub type CloseStdinRequest = ConnectRequest;

/// Request of `Update`, which changes the size of the pseudo-terminal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateRequest {
    #[serde(default, deserialize_with = "null_is_default")]
    pub process: ProcessSelector,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
}

/// Request of `SendSignal`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendSignalRequest {
    #[serde(default, deserialize_with = "null_is_default")]
    pub process: ProcessSelector,
    #[serde(default)]
    pub signal: Signal,
}

/// The signals that a client can send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Signal {
    /// The signal is missing or its number is unknown. Such a request is invalid.
    #[default]
    #[serde(rename = "SIGNAL_UNSPECIFIED")]
    Unspecified,
    #[serde(rename = "SIGNAL_SIGTERM")]
    Term,
    #[serde(rename = "SIGNAL_SIGKILL")]
    Kill,
}

impl<'de> Deserialize<'de> for Signal {
    /// Accepts the name and, as proto3 JSON requires, the number of the enum value.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl de::Visitor<'_> for Name {
            type Value = Signal;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("SIGNAL_SIGTERM or SIGNAL_SIGKILL")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Signal, E> {
                match name {
                    "SIGNAL_SIGTERM" => Ok(Signal::Term),
                    "SIGNAL_SIGKILL" => Ok(Signal::Kill),
                    "SIGNAL_UNSPECIFIED" => Ok(Signal::Unspecified),
                    _ => Err(E::unknown_variant(
                        name,
                        &["SIGNAL_SIGTERM", "SIGNAL_SIGKILL"],
                    )),
                }
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Signal, E> {
                Ok(match number {
                    15 => Signal::Term,
                    9 => Signal::Kill,
                    _ => Signal::Unspecified,
                })
            }
            fn visit_unit<E: de::Error>(self) -> Result<Signal, E> {
                Ok(Signal::Unspecified)
            }
        }
        deserializer.deserialize_any(Name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_the_sdks_are_parsed() {
        let start = r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","true"],"envs":null},
                        "stdin":false,"newKey":{"x":[1]}}"#;
        let start: StartRequest = serde_json::from_str(start).unwrap();
        assert_eq!(start.process.unwrap().args, ["-l", "-c", "true"]);
        assert_eq!(start.stdin, Some(false));
        let signal = r#"{"process":{"pid":"7"},"signal":"SIGNAL_SIGKILL"}"#;
        let signal: SendSignalRequest = serde_json::from_str(signal).unwrap();
        assert_eq!((signal.process.pid, signal.signal), (Some(7), Signal::Kill));
        let input = r#"{"process":{"tag":"t"},"input":{"stdin":"aGk="}}"#;
        let input: SendInputRequest = serde_json::from_str(input).unwrap();
        assert_eq!(input.input.stdin, Some(Blob(b"hi".to_vec())));
    }

    #[test]
    fn answers_have_the_field_names_of_proto3_json() {
        let event = EventResponse {
            event: ProcessEvent {
                end: Some(EndEvent {
                    exit_code: 3,
                    exited: true,
                    status: "exit status 3".into(),
                    error: Some("exit status 3".into()),
                }),
                ..ProcessEvent::default()
            },
        };
        assert_eq!(
            serde_json::to_string(&event).unwrap(),
            r#"{"event":{"end":{"exitCode":3,"exited":true,"status":"exit status 3","error":"exit status 3"}}}"#
        );
    }
}
