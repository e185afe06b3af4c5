//! Ways in which the stand-in for `cube-vmm` and its agent can misbehave.

use serde::{Deserialize, Serialize};

/// The misbehaviour of a stand-in. It follows the protocols in everything that its variant does not mention. The "first
/// answer" is the agent's response to `/init`; "endless" data is limited to 1 GiB.
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
    /// The first answer announces a body of 10 GiB and sends endless data.
    TenGigabytes,
    /// The first answer has endless headers.
    EndlessHead,
    /// Endless interim (1xx) answers precede the first answer.
    EndlessInterim,
    /// The first answer has two conflicting `Content-Length` headers; a second answer follows where the shorter body
    /// would end.
    TwoLengths,
    /// The first answer stops in its status line, and the connection stays open.
    Half,
    /// The first answer stops in its status line, and the connection is closed.
    Broken,
    /// The first answer is not HTTP.
    Nonsense,
    /// The vsock `OK <port>` line never ends.
    EndlessGreeting,
    /// An answer is sent before the first request.
    Early,
    /// `/init` is refused with a 1 MB message that contains a forged log line.
    Wordy,
    /// After a command's end-of-stream frame, the response body continues without end.
    AfterTheEnd,
    /// Half a second after a command has finished, when the VM is already in the warm pool, the agent sends an
    /// unsolicited answer and the VMM writes a line to standard error.
    ChattyWhenWarm,
    /// Once restored from its own snapshot, the agent does not answer `/init`.
    SilentWhenResumed,
    /// Once restored from its own snapshot, the agent closes the connection at `/init`.
    BrokenWhenResumed,
    /// The VMM allocates a lot of memory (`INFLATED` bytes).
    Inflated,
    /// The VMM does not answer requests on its control socket.
    MuteVmm,
    /// The VMM answers with the header of a 4 GiB frame.
    HugeVmm,
    /// The VMM refuses to restore with a 1 MB message that contains a forged log line.
    WordyVmm,
    /// Instead of restoring, the VMM writes 64 MiB to standard error and exits.
    LastWords,
}

/// The contents of the stand-in's state file: the misbehaviour, and whether the file comes from a snapshot that the
/// stand-in itself took.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) conduct: Conduct,
    #[serde(default)]
    pub(crate) resumed: bool,
}
