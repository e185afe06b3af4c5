//! How much an agent may send.

/// What one call reads of an answer at most. An agent is untrusted: what is beyond a limit ends the call with an
/// error, and no memory is taken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerLimits {
    /// Bytes of everything that is received in one call: heads, framing, bodies, streams.
    pub received: u64,
    /// Bytes of a body that is collected in whole; longest file that is read.
    pub body: usize,
    /// Bytes of one message of a stream.
    pub frame: u32,
}

impl AnswerLimits {
    /// For calls that a server makes of its own accord, to begin, pause and end sandboxes: nothing that they ask
    /// has a long answer.
    pub const CONTROL: Self = Self {
        received: 64 << 10,
        body: 64 << 10,
        frame: 64 << 10,
    };
    /// For programs that read files and the output of commands, and have nothing to lose but their own memory.
    pub const DATA: Self = Self {
        received: u64::MAX,
        body: 256 << 20,
        frame: 8 << 20,
    };
}
