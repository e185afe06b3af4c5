//! The data plane of a sandbox: Connect with JSON over HTTP/1.1 on guest port [`ENVD_PORT`]. Messages, codecs and a
//! blocking client; no server and no async runtime.
//!
//! This is the protocol of E2B's `envd`: messages in proto3 JSON (lowerCamelCase, bytes as base64, enums by name),
//! streams in [`frame`]s, errors as [`ErrorBody`] on plain routes and as [`ConnectError`] on RPC routes.

mod chunked;
mod client;
mod error;
mod filesystem;
pub mod frame;
mod guest_text;
mod init;
mod metrics;
mod process;
pub mod proto;
mod proto_json;
mod request;
mod timestamp;
mod transport;

pub use chunked::{ChunkError, ChunkedDecoder, Decoded};
pub use client::{
    AnswerLimits, ClientError, CutAnswer, EnvdClient, ExecOutput, ExecRequest, ExecStream,
    HttpAnswer, InputStream, MAX_EXEC_OUTPUT, Tunnel, WatchStream,
};
pub use error::{ConnectCode, ConnectError, EndStream, ErrorBody};
pub use filesystem::{
    CreateWatcherResponse, EntryInfo, EntryResponse, EventType, FileType, FilesystemEvent,
    GetWatcherEventsResponse, ListDirRequest, ListDirResponse, MoveRequest, PathRequest,
    WatchDirRequest, WatchDirResponse, WatcherRequest, WriteInfo,
};
pub use frame::{Frame, FrameError};
pub use guest_text::{GUEST_TEXT_MAX, guest_text, one_line};
pub use init::InitRequest;
pub use metrics::Metrics;
pub use process::{
    CloseStdinRequest, ConnectRequest, DataEvent, Empty, EndEvent, EventResponse, KeepAlive,
    ListRequest, ListResponse, ProcessConfig, ProcessEvent, ProcessInfo, ProcessInput,
    ProcessSelector, Pty, PtySize, SendInputRequest, SendSignalRequest, Signal, StartEvent,
    StartRequest, StreamInputData, StreamInputRequest, UpdateRequest,
};
pub use proto_json::Blob;
pub use request::{
    BadRequest, Framing, FramingHeaders, MAX_HEAD, MAX_HEADERS, asks_to_close, header_text,
    parse_head,
};
pub use timestamp::{Timestamp, TimestampError};
pub use transport::Transport;

/// Port of the agent in every guest.
pub const ENVD_PORT: u16 = 49_983;
