//! The data plane of a sandbox: Connect-JSON over HTTP/1.1 on guest port [`ENVD_PORT`].
//!
//! Names and shapes are those of E2B's `envd`: messages in proto3 JSON (lowerCamelCase, bytes as base64,
//! enums by name), streams in [`frame`]s, errors as [`ErrorBody`] on plain routes and [`ConnectError`] on
//! RPC routes.

mod chunked;
mod client;
mod error;
pub mod frame;
mod init;
mod process;
mod proto_json;
mod timestamp;

pub use chunked::{ChunkError, ChunkedDecoder, Decoded};
pub use client::{
    ClientError, EnvdClient, ExecOutput, ExecRequest, ExecStream, HttpAnswer, MAX_EXEC_OUTPUT,
};
pub use error::{ConnectCode, ConnectError, EndStream, ErrorBody};
pub use frame::{Frame, FrameError};
pub use init::InitRequest;
pub use process::{
    CloseStdinRequest, ConnectRequest, DataEvent, Empty, EndEvent, EventResponse, KeepAlive,
    ListRequest, ListResponse, ProcessConfig, ProcessEvent, ProcessInfo, ProcessInput,
    ProcessSelector, Pty, PtySize, SendInputRequest, SendSignalRequest, Signal, StartEvent,
    StartRequest, UpdateRequest, WriteInfo,
};
pub use proto_json::Blob;
pub use timestamp::{Timestamp, TimestampError};

/// Port of the agent inside every guest.
pub const ENVD_PORT: u16 = 49_983;
