//! Lines of the protocol between `cube-bench` and an adapter.

use std::io::{self, BufRead, Read};

use serde::{Deserialize, Serialize};

/// Longest line from an adapter, in bytes.
pub(super) const MAX_LINE: usize = 1 << 20;
/// Longest id of a sandbox, in bytes.
pub(super) const MAX_ID: usize = 256;
/// Longest adapter text quoted in a message, in characters.
const MAX_TEXT: usize = 200;

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Op {
    Hello,
    Start,
    Exec,
    Stop,
}

/// A request. Fields that the operation does not use are absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Request {
    /// Set by the driver: 1, 2, 3 and so on.
    pub(super) id: u64,
    pub(super) op: Op,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) protocol: Option<u32>,
    /// Name of a new sandbox, unique in the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) template: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) sandbox: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) argv: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) timeout_ms: Option<u64>,
}

impl Request {
    pub(super) fn new(op: Op) -> Self {
        Self {
            id: 0,
            op,
            protocol: None,
            name: None,
            template: None,
            sandbox: None,
            argv: None,
            user: None,
            timeout_ms: None,
        }
    }
}

/// A response. Other fields are ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Answer {
    pub(super) id: u64,
    /// Why the request failed; `None` if it succeeded.
    pub(super) error: Option<String>,
    pub(super) protocol: Option<u32>,
    pub(super) version: Option<String>,
    pub(super) platform: Option<String>,
    pub(super) sandbox: Option<String>,
    /// Exit status of a command; `None` if a signal ended it.
    pub(super) status: Option<i32>,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

/// Reads one line without its end; `None` at the end of the stream.
///
/// # Errors
/// Returns [`io::ErrorKind::InvalidData`] for a line that is longer than [`MAX_LINE`].
pub(super) fn read(from: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let limit = MAX_LINE as u64 + 1;
    from.by_ref().take(limit).read_until(b'\n', &mut line)?;
    match line.pop() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(line)),
        Some(_) if line.len() >= MAX_LINE => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a line is longer than {MAX_LINE} bytes"),
        )),
        Some(last) => {
            line.push(last);
            Ok(Some(line))
        }
    }
}

/// Adapter text for messages and reports: its first characters, without control characters.
pub(super) fn printable(text: &str) -> String {
    let replaced = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(MAX_TEXT).map(replaced).collect()
}
