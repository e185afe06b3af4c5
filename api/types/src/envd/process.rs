//! Messages of `process.Process`, in proto3 JSON. Absent and `null` mean the default value everywhere;
//! unknown keys are ignored, since newer clients send them.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, de};

use super::proto_json::{Blob, null_is_default, opt_u32};

/// A message without fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Empty {}

/// What to run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessConfig {
    /// Program: a path, or a name that is looked for in the PATH of its environment.
    #[serde(default, deserialize_with = "null_is_default")]
    pub cmd: String,
    /// Arguments after the program's own name.
    #[serde(default, deserialize_with = "null_is_default")]
    pub args: Vec<String>,
    /// Added to the environment, winning over what is there.
    #[serde(default, deserialize_with = "null_is_default")]
    pub envs: BTreeMap<String, String>,
    /// Working directory; absent or empty means the sandbox's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// A terminal's size in characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PtySize {
    /// Columns.
    #[serde(default)]
    pub cols: u32,
    /// Rows.
    #[serde(default)]
    pub rows: u32,
}

/// A terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pty {
    /// Its size; absent means the kernel's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<PtySize>,
}

/// `Start`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartRequest {
    /// What to run. Absent is an error of the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessConfig>,
    /// Run it on a terminal instead of pipes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
    /// A name to select it by, beside its pid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Whether it gets a pipe as standard input; absent means yes, `false` gives it /dev/null.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<bool>,
}

/// Which process: by pid or by tag. Neither is an error of the caller.
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

/// `Connect`: follow a process that runs already.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectRequest {
    /// Which.
    #[serde(default, deserialize_with = "null_is_default")]
    pub process: ProcessSelector,
}

/// One message of a `Start` or `Connect` stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventResponse {
    /// What happened.
    #[serde(default, deserialize_with = "null_is_default")]
    pub event: ProcessEvent,
}

/// What happened to a process; exactly one field is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessEvent {
    /// It runs. Always first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartEvent>,
    /// It wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataEvent>,
    /// It ended. Always last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<EndEvent>,
    /// Nothing happened for a while.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<KeepAlive>,
}

/// A sign of life.
pub type KeepAlive = Empty;

/// It runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartEvent {
    /// Its process id inside the guest.
    #[serde(default)]
    pub pid: u32,
}

/// It wrote; exactly one field is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataEvent {
    /// To standard output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout: Option<Blob>,
    /// To standard error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr: Option<Blob>,
    /// To its terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Blob>,
}

/// It ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndEvent {
    /// Exit code, -1 when a signal ended it. Zero may be absent on the wire.
    #[serde(default)]
    pub exit_code: i32,
    /// Whether it ended by itself rather than by a signal.
    #[serde(default)]
    pub exited: bool,
    /// `exit status N` or `signal: killed`.
    #[serde(default)]
    pub status: String,
    /// The status again unless the exit code is zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// `List`.
pub type ListRequest = Empty;

/// The running processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListResponse {
    /// In the order of their start. An empty list may be absent on the wire.
    #[serde(default, deserialize_with = "null_is_default")]
    pub processes: Vec<ProcessInfo>,
}

/// One of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInfo {
    /// As it was asked for.
    #[serde(default, deserialize_with = "null_is_default")]
    pub config: ProcessConfig,
    /// Its process id inside the guest.
    #[serde(default)]
    pub pid: u32,
    /// As it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// Bytes for a process; exactly one field is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInput {
    /// For its standard input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<Blob>,
    /// For its terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Blob>,
}

/// `SendInput`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendInputRequest {
    /// To which.
    #[serde(default, deserialize_with = "null_is_default")]
    pub process: ProcessSelector,
    /// What.
    #[serde(default, deserialize_with = "null_is_default")]
    pub input: ProcessInput,
}

/// One message of `StreamInput`; exactly one field is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamInputRequest {
    /// Which process; the first message, once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<ConnectRequest>,
    /// Bytes for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<StreamInputData>,
    /// A sign of life.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<KeepAlive>,
}

/// Bytes for the process of a `StreamInput`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamInputData {
    /// What.
    #[serde(default, deserialize_with = "null_is_default")]
    pub input: ProcessInput,
}

/// `CloseStdin`.
pub type CloseStdinRequest = ConnectRequest;

/// `Update`: another size of the terminal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateRequest {
    /// Whose.
    #[serde(default, deserialize_with = "null_is_default")]
    pub process: ProcessSelector,
    /// The size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
}

/// `SendSignal`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendSignalRequest {
    /// To which.
    #[serde(default, deserialize_with = "null_is_default")]
    pub process: ProcessSelector,
    /// Which signal.
    #[serde(default)]
    pub signal: Signal,
}

/// The signals that can be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Signal {
    /// Said nothing, or something unknown: an error of the caller.
    #[default]
    #[serde(rename = "SIGNAL_UNSPECIFIED")]
    Unspecified,
    /// 15.
    #[serde(rename = "SIGNAL_SIGTERM")]
    Term,
    /// 9.
    #[serde(rename = "SIGNAL_SIGKILL")]
    Kill,
}

impl<'de> Deserialize<'de> for Signal {
    /// By name, or by the enum's number as proto3 JSON allows.
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
    fn what_the_sdks_send_is_read() {
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
    fn what_is_sent_has_the_names_of_proto3_json() {
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
