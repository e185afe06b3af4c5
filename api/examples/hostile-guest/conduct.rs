//! Behaviours of the stand-in.

use serde::{Deserialize, Serialize};

/// How a stand-in behaves. Everything that a variant does not mention is correct.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Conduct {
    /// Entirely correct.
    #[default]
    Good,
    /// The first answer has an endless body.
    EndlessBody,
    /// As `EndlessBody`, with the chunked transfer coding.
    EndlessChunks,
    /// The first answer announces and sends a body of 10 GB.
    TenGigabytes,
    /// The first answer has endless headers.
    EndlessHead,
    /// Endless interim (1xx) answers precede the first answer.
    EndlessInterim,
    /// The first answer has two lengths, and a second answer follows after the shorter one.
    TwoLengths,
    /// The first answer stops halfway.
    Half,
    /// The first answer stops halfway, and the connection is closed.
    Broken,
    /// The first answer is not HTTP.
    Nonsense,
    /// The greeting is endless.
    EndlessGreeting,
    /// Answers are sent before their requests.
    Early,
    /// Requests are refused with a message of one megabyte that forges lines of a log.
    Wordy,
    /// Endless data follows the end of a stream.
    AfterTheEnd,
    /// A while after the last request, when the VM is warm, one more answer is sent, and a line to standard error.
    ChattyWhenWarm,
    /// No request is answered after a pause.
    SilentWhenResumed,
    /// The connection is closed at the first request after a pause.
    BrokenWhenResumed,
    /// The VMM allocates much memory.
    Inflated,
    /// The VMM does not answer.
    MuteVmm,
    /// The VMM announces a frame of four gigabytes.
    HugeVmm,
    /// The VMM refuses requests with a message of one megabyte that forges lines of a log.
    WordyVmm,
    /// The VMM writes endless data to standard error and exits.
    LastWords,
}

/// The behaviour of a VM, and whether the VM was paused before.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) conduct: Conduct,
    #[serde(default)]
    pub(crate) resumed: bool,
}
