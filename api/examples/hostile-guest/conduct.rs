//! What a stand-in does wrong.

use serde::{Deserialize, Serialize};

/// How a stand-in behaves; unless it says otherwise, well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Conduct {
    /// Well.
    #[default]
    Good,
    /// The first answer has a body without end.
    EndlessBody,
    /// The same, in chunks.
    EndlessChunks,
    /// The same, of a length that is announced: 10 GB.
    TenGigabytes,
    /// The first answer has fields without end.
    EndlessHead,
    /// Interim answers without end come before it.
    EndlessInterim,
    /// Two lengths, and a second answer where the shorter one ends.
    TwoLengths,
    /// Half of the first answer, and no more.
    Half,
    /// Half of it, and the connection ends.
    Broken,
    /// Something else than HTTP.
    Nonsense,
    /// A greeting without end.
    EndlessGreeting,
    /// Answers come before questions.
    Early,
    /// Refuses with a megabyte of words in which lines of a log are forged.
    Wordy,
    /// Bytes without end follow the end of a stream.
    AfterTheEnd,
    /// An answer too many comes a while after the last question, when the VM is warm, with a word to standard error.
    ChattyWhenWarm,
    /// Nothing is answered once it was paused.
    SilentWhenResumed,
    /// The connection ends at the first question once it was paused.
    BrokenWhenResumed,
    /// Takes much memory.
    Inflated,
    /// The VMM answers nothing.
    MuteVmm,
    /// The VMM announces four gigabytes.
    HugeVmm,
    /// The VMM refuses with a megabyte of words in which lines of a log are forged.
    WordyVmm,
    /// The VMM's last words are without end, and then it ends.
    LastWords,
}

/// A conduct, and whether it was paused before.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) conduct: Conduct,
    #[serde(default)]
    pub(crate) resumed: bool,
}
