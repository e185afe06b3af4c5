//! Limits on the data that a client reads from an agent.

/// Limits of one call. Agents are not trusted: data beyond a limit ends the call with an error, before memory is
/// allocated for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerLimits {
    /// All bytes received in one call: heads, framing, bodies, streams.
    pub received: u64,
    /// Bytes of a collected body, and thus of the longest file that can be read.
    pub body: usize,
    /// Bytes of one message of a stream.
    pub frame: u32,
}

impl AnswerLimits {
    /// For a server that starts, pauses and ends sandboxes: none of its calls has a long answer.
    pub const CONTROL: Self = Self {
        received: 64 << 10,
        body: 64 << 10,
        frame: 64 << 10,
    };
    /// For programs that read files and command output, and risk only their own memory.
    pub const DATA: Self = Self {
        received: u64::MAX,
        body: 256 << 20,
        frame: 8 << 20,
    };
}
