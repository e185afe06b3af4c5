//! Observations of clients.

use model::clock::monotonic_ns;
use serde::{Deserialize, Serialize};

/// Activity of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// `GET /sandboxes/{id}`, each on a new connection.
    LookUp,
    /// `GET /sandboxes`, all on one connection; every sandbox of the run must be listed.
    List,
    /// A command in a sandbox, each on a new connection.
    Command,
    /// A command in a sandbox, all on one connection.
    CommandKept,
    /// A command that prints numbers for as long as it runs.
    Counter,
    /// A terminal that echoes.
    Pty,
    /// A watch on a directory.
    Watch,
    /// A file that is sent slowly.
    Upload,
    /// A file that is received slowly.
    Download,
    Create,
    Kill,
    Pause,
    Resume,
}

impl Work {
    pub const ALL: [Self; 13] = [
        Self::LookUp,
        Self::List,
        Self::Command,
        Self::CommandKept,
        Self::Counter,
        Self::Pty,
        Self::Watch,
        Self::Upload,
        Self::Download,
        Self::Create,
        Self::Kill,
        Self::Pause,
        Self::Resume,
    ];

    /// Whether the client itself slows it down.
    #[must_use]
    pub fn is_slow(self) -> bool {
        matches!(self, Self::Upload | Self::Download)
    }

    /// Name in JSON and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::LookUp => "look_up",
            Self::List => "list",
            Self::Command => "command",
            Self::CommandKept => "command_kept",
            Self::Counter => "counter",
            Self::Pty => "pty",
            Self::Watch => "watch",
            Self::Upload => "upload",
            Self::Download => "download",
            Self::Create => "create",
            Self::Kill => "kill",
            Self::Pause => "pause",
            Self::Resume => "resume",
        }
    }
}

/// Why a request or a stream failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The connection was refused.
    Refused,
    /// The connection ended before the response was complete.
    Reset,
    /// No response in time.
    Timeout,
    /// The response says that the sandbox does not exist.
    NotFound,
    /// Another unexpected status.
    Status,
    /// The response is malformed.
    Malformed,
}

impl Cause {
    /// Name in JSON and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Reset => "reset",
            Self::Timeout => "timeout",
            Self::NotFound => "not_found",
            Self::Status => "status",
            Self::Malformed => "malformed",
        }
    }
}

/// Outcome of a request or stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The response, or the next part of a stream, was correct.
    Done,
    /// A request failed.
    Failed(Cause, String),
    /// An established stream ended with an error.
    Cut(Cause, String),
    /// A response, or the end of a stream, that looks successful but is wrong.
    Wrong(String),
}

/// One request, or a part of a stream. Times are nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub work: Work,
    pub began_ns: u64,
    pub ended_ns: u64,
    pub seen: Seen,
}

impl Event {
    /// An event that ends now.
    pub(super) fn now(work: Work, began_ns: u64, seen: Seen) -> Self {
        Self {
            work,
            began_ns,
            ended_ns: monotonic_ns(),
            seen,
        }
    }
}

/// State of a sandbox according to the responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Running,
    Paused,
    /// A pause or a resume got no response.
    Either,
    /// The kill was acknowledged.
    Gone,
    /// A kill got no response.
    PerhapsGone,
}

/// A message of the load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    Event(Event),
    /// The last response about a sandbox.
    Fate {
        id: String,
        fate: Fate,
    },
    /// A create got no response, so there may be one sandbox whose id no client has.
    PerhapsBorn,
}
