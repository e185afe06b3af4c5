//! Compares the binary codec with prost, an independent implementation with its own message types.
#![expect(clippy::unwrap_used, reason = "what fails here is the report")]

use std::collections::BTreeMap;

use envd::{
    Blob, DataEvent, EndEvent, EntryInfo, EventResponse, FileType, ListDirResponse, ProcessConfig,
    ProcessEvent, ProcessInput, ProcessSelector, Pty, PtySize, SendInputRequest, StartEvent,
    StartRequest, Timestamp, proto,
};
use proptest::prelude::*;
use prost::Message;

#[derive(Clone, PartialEq, Message)]
struct WireSize {
    #[prost(uint32, tag = "1")]
    cols: u32,
    #[prost(uint32, tag = "2")]
    rows: u32,
}

#[derive(Clone, PartialEq, Message)]
struct WirePty {
    #[prost(message, optional, tag = "1")]
    size: Option<WireSize>,
}

#[derive(Clone, PartialEq, Message)]
struct WireConfig {
    #[prost(string, tag = "1")]
    cmd: String,
    #[prost(string, repeated, tag = "2")]
    args: Vec<String>,
    #[prost(btree_map = "string, string", tag = "3")]
    envs: BTreeMap<String, String>,
    #[prost(string, optional, tag = "4")]
    cwd: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct WireStart {
    #[prost(message, optional, tag = "1")]
    process: Option<WireConfig>,
    #[prost(message, optional, tag = "2")]
    pty: Option<WirePty>,
    #[prost(string, optional, tag = "3")]
    tag: Option<String>,
    #[prost(bool, optional, tag = "4")]
    stdin: Option<bool>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum WireWho {
    #[prost(uint32, tag = "1")]
    Pid(u32),
    #[prost(string, tag = "2")]
    Tag(String),
}

#[derive(Clone, PartialEq, Message)]
struct WireSelector {
    #[prost(oneof = "WireWho", tags = "1, 2")]
    selector: Option<WireWho>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum WireBytes {
    #[prost(bytes = "vec", tag = "1")]
    First(Vec<u8>),
    #[prost(bytes = "vec", tag = "2")]
    Second(Vec<u8>),
    #[prost(bytes = "vec", tag = "3")]
    Third(Vec<u8>),
}

#[derive(Clone, PartialEq, Message)]
struct WireData {
    #[prost(oneof = "WireBytes", tags = "1, 2, 3")]
    bytes: Option<WireBytes>,
}

#[derive(Clone, PartialEq, Message)]
struct WireSendInput {
    #[prost(message, optional, tag = "1")]
    process: Option<WireSelector>,
    #[prost(message, optional, tag = "2")]
    input: Option<WireData>,
}

#[derive(Clone, PartialEq, Message)]
struct WirePid {
    #[prost(uint32, tag = "1")]
    pid: u32,
}

#[derive(Clone, PartialEq, Message)]
struct WireEnd {
    #[prost(sint32, tag = "1")]
    exit_code: i32,
    #[prost(bool, tag = "2")]
    exited: bool,
    #[prost(string, tag = "3")]
    status: String,
    #[prost(string, optional, tag = "4")]
    error: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct WireEmpty {}

#[derive(Clone, PartialEq, prost::Oneof)]
enum WireKind {
    #[prost(message, tag = "1")]
    Start(WirePid),
    #[prost(message, tag = "2")]
    Data(WireData),
    #[prost(message, tag = "3")]
    End(WireEnd),
    #[prost(message, tag = "4")]
    Keepalive(WireEmpty),
}

#[derive(Clone, PartialEq, Message)]
struct WireEvent {
    #[prost(oneof = "WireKind", tags = "1, 2, 3, 4")]
    kind: Option<WireKind>,
}

#[derive(Clone, PartialEq, Message)]
struct WireResponse {
    #[prost(message, optional, tag = "1")]
    event: Option<WireEvent>,
}

#[derive(Clone, PartialEq, Message)]
struct WireTime {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

#[derive(Clone, PartialEq, Message)]
struct WireEntry {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int32, tag = "2")]
    kind: i32,
    #[prost(string, tag = "3")]
    path: String,
    #[prost(int64, tag = "4")]
    size: i64,
    #[prost(uint32, tag = "5")]
    mode: u32,
    #[prost(string, tag = "6")]
    permissions: String,
    #[prost(string, tag = "7")]
    owner: String,
    #[prost(string, tag = "8")]
    group: String,
    #[prost(message, optional, tag = "9")]
    modified_time: Option<WireTime>,
    #[prost(string, optional, tag = "10")]
    symlink_target: Option<String>,
    #[prost(btree_map = "string, string", tag = "11")]
    metadata: BTreeMap<String, String>,
    #[prost(bool, tag = "12")]
    is_symlink: bool,
}

#[derive(Clone, PartialEq, Message)]
struct WireEntries {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<WireEntry>,
}

fn texts() -> impl Strategy<Value = BTreeMap<String, String>> {
    prop::collection::btree_map(".{0,4}", ".{0,4}", 0..3)
}

fn entries() -> impl Strategy<Value = Vec<EntryInfo>> {
    let kind = prop_oneof![
        Just(FileType::Unspecified),
        Just(FileType::File),
        Just(FileType::Directory),
        Just(FileType::Symlink),
    ];
    // Only a part of the range of `Timestamp`, which ends in the year 2554.
    let time = prop::option::of(0..u64::MAX / 2);
    let target = prop::option::of(".{0,4}");
    let parts = (
        ".{0,9}",
        kind,
        0..i64::MAX,
        any::<u32>(),
        time,
        target,
        texts(),
    );
    let entry =
        parts.prop_map(
            |(text, kind, size, mode, time, symlink_target, metadata)| EntryInfo {
                name: text.clone(),
                kind,
                path: format!("/{text}"),
                size,
                mode,
                permissions: "-rw".into(),
                owner: text.clone(),
                group: text,
                modified_time: time.map(Timestamp::from_unix_ns),
                symlink_target,
                metadata,
            },
        );
    prop::collection::vec(entry, 0..3)
}

fn wire_entry(entry: EntryInfo) -> WireEntry {
    let ns = entry.modified_time.map(Timestamp::unix_ns);
    WireEntry {
        name: entry.name,
        kind: match entry.kind {
            FileType::Unspecified => 0,
            FileType::File => 1,
            FileType::Directory => 2,
            FileType::Symlink => 3,
        },
        path: entry.path,
        size: entry.size,
        mode: entry.mode,
        permissions: entry.permissions,
        owner: entry.owner,
        group: entry.group,
        modified_time: ns.map(|ns| WireTime {
            seconds: i64::try_from(ns / 1_000_000_000).unwrap(),
            nanos: i32::try_from(ns % 1_000_000_000).unwrap(),
        }),
        symlink_target: entry.symlink_target,
        metadata: entry.metadata,
        is_symlink: false,
    }
}

proptest! {
    #[test]
    fn requests_encoded_by_prost_are_decoded(
        (cmd, args, envs, cwd) in
            (".{0,8}", prop::collection::vec(".{0,4}", 0..4), texts(), prop::option::of(".{0,4}")),
        size in prop::option::of(prop::option::of((any::<u32>(), any::<u32>()))),
        (tag, stdin) in (prop::option::of(".{0,4}"), any::<Option<bool>>()),
    ) {
        let wire = WireStart {
            process: Some(WireConfig {
                cmd: cmd.clone(),
                args: args.clone(),
                envs: envs.clone(),
                cwd: cwd.clone(),
            }),
            pty: size.map(|size| WirePty { size: size.map(|(cols, rows)| WireSize { cols, rows }) }),
            tag: tag.clone(),
            stdin,
        };
        let expected = StartRequest {
            process: Some(ProcessConfig { cmd, args, envs, cwd }),
            pty: size.map(|size| Pty { size: size.map(|(cols, rows)| PtySize { cols, rows }) }),
            tag,
            stdin,
        };
        let start = proto::method("/process.Process/Start").unwrap().request;
        let json = start.to_json(&wire.encode_to_vec()).unwrap();
        let read: StartRequest = serde_json::from_slice(&json).unwrap();
        prop_assert_eq!(&read, &expected);
        // The reverse direction.
        let bytes = start.from_json(&serde_json::to_vec(&expected).unwrap()).unwrap();
        prop_assert_eq!(WireStart::decode(bytes.as_slice()).unwrap(), wire);
    }

    #[test]
    fn events_are_encoded_so_that_prost_decodes_them(
        pid: u32,
        bytes in prop::collection::vec(any::<u8>(), 0..40),
        (exit_code, exited, error) in (any::<i32>(), any::<bool>(), prop::option::of(".{0,4}")),
        which in 0..6,
    ) {
        let end = EndEvent { exit_code, exited, status: "s".into(), error: error.clone() };
        let blob = Some(Blob(bytes.clone()));
        let mut event = ProcessEvent::default();
        let data = |bytes| WireKind::Data(WireData { bytes: Some(bytes) });
        let kind = match which {
            0 => {
                event.start = Some(StartEvent { pid });
                WireKind::Start(WirePid { pid })
            }
            1 => {
                event.end = Some(end);
                WireKind::End(WireEnd { exit_code, exited, status: "s".into(), error })
            }
            2 => {
                event.keepalive = Some(Default::default());
                WireKind::Keepalive(WireEmpty {})
            }
            3 => {
                let direct = proto::data_event(proto::DataField::Stdout, &bytes);
                let wire = WireEvent { kind: Some(data(WireBytes::First(bytes.clone()))) };
                let wire = WireResponse { event: Some(wire) };
                prop_assert_eq!(WireResponse::decode(direct.as_slice()).unwrap(), wire);
                event.data = Some(DataEvent { stdout: blob, ..DataEvent::default() });
                data(WireBytes::First(bytes))
            }
            4 => {
                event.data = Some(DataEvent { stderr: blob, ..DataEvent::default() });
                data(WireBytes::Second(bytes))
            }
            _ => {
                event.data = Some(DataEvent { pty: blob, ..DataEvent::default() });
                data(WireBytes::Third(bytes))
            }
        };
        let response = proto::method("/process.Process/Connect").unwrap().response;
        let event = EventResponse { event };
        let bytes = response.from_json(&serde_json::to_vec(&event).unwrap()).unwrap();
        let expected = WireResponse { event: Some(WireEvent { kind: Some(kind) }) };
        prop_assert_eq!(WireResponse::decode(bytes.as_slice()).unwrap(), expected.clone());
        let json = response.to_json(&expected.encode_to_vec()).unwrap();
        prop_assert_eq!(serde_json::from_slice::<EventResponse>(&json).unwrap(), event);
    }

    #[test]
    fn listings_are_encoded_so_that_prost_decodes_them(entries in entries()) {
        let list = proto::method("/filesystem.Filesystem/ListDir").unwrap().response;
        let response = ListDirResponse { entries: entries.clone() };
        let bytes = list.from_json(&serde_json::to_vec(&response).unwrap()).unwrap();
        let wire = WireEntries { entries: entries.into_iter().map(wire_entry).collect() };
        prop_assert_eq!(WireEntries::decode(bytes.as_slice()).unwrap(), wire.clone());
        let json = list.to_json(&wire.encode_to_vec()).unwrap();
        let back: ListDirResponse = serde_json::from_slice(&json).unwrap();
        prop_assert_eq!(back, response);
    }

    #[test]
    fn no_input_panics(
        bytes in prop::collection::vec(any::<u8>(), 0..60),
        text in "[\\[{}\\]\":,a-z0-9]{0,40}",
    ) {
        for path in [
            "/process.Process/Start",
            "/process.Process/SendInput",
            "/filesystem.Filesystem/WatchDir",
        ] {
            let method = proto::method(path).unwrap();
            for message in [method.request, method.response] {
                let _ = message.to_json(&bytes);
                let _ = message.from_json(text.as_bytes());
            }
        }
    }

    #[test]
    fn a_truncated_message_is_accepted_by_both_codecs_or_by_neither(
        pid: u32,
        bytes in prop::collection::vec(any::<u8>(), 1..40),
    ) {
        let wire = WireSendInput {
            process: Some(WireSelector { selector: Some(WireWho::Pid(pid)) }),
            input: Some(WireData { bytes: Some(WireBytes::First(bytes)) }),
        };
        let whole = wire.encode_to_vec();
        let input = proto::method("/process.Process/SendInput").unwrap().request;
        for len in 0..whole.len() {
            let cut = &whole[..len];
            prop_assert_eq!(input.to_json(cut).is_ok(), WireSendInput::decode(cut).is_ok());
        }
    }
}

#[test]
fn the_last_field_of_a_oneof_wins_and_messages_are_merged() {
    let input = proto::method("/process.Process/SendInput").unwrap().request;
    let read = |bytes: &[u8]| -> SendInputRequest {
        serde_json::from_slice(&input.to_json(bytes).unwrap()).unwrap()
    };
    // Field 1 twice: { pid: 7 }, { tag: "t" }; field 2 twice: { stdin: "a" }, { stdin: "b" }; unknown field 9.
    let bytes = b"\x0a\x02\x08\x07\x0a\x03\x12\x01t\x12\x03\x0a\x01a\x12\x03\x0a\x01b\x48\x05";
    let expected = SendInputRequest {
        process: ProcessSelector {
            pid: None,
            tag: Some("t".into()),
        },
        input: ProcessInput {
            stdin: Some(Blob(b"b".to_vec())),
            pty: None,
        },
    };
    assert_eq!(read(bytes), expected);
}

#[test]
fn malformed_messages_are_refused() {
    for path in [
        "/process.Process/Nothing",
        "/process.Process/",
        "",
        "/health",
    ] {
        assert!(proto::method(path).is_none(), "{path}");
    }
    let update = proto::method("/process.Process/Update").unwrap();
    // In order: a length beyond the input, a group, field zero, text that is not UTF-8, and two wrong wire types.
    let cases: [&[u8]; 6] = [
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0b",
        b"\x00\x00",
        b"\x0a\x03\x12\x01\xff",
        b"\x08\x01",
        b"\x0a\x02\x0a\x00",
    ];
    for bytes in cases {
        assert!(update.request.to_json(bytes).is_err(), "{bytes:?}");
    }
    assert_eq!(update.response.to_json(b"").unwrap(), b"{}");
    for text in [
        "[]",
        "1",
        "",
        r#"{"process":1}"#,
        r#"{"pty":{"size":{"cols":-1}}}"#,
    ] {
        assert!(update.request.from_json(text.as_bytes()).is_err(), "{text}");
    }
}
