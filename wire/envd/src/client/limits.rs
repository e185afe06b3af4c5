//! Limits on the data that a client reads from an agent.

/// Limits of one call. Agents are not trusted: if a response exceeds a limit, the call ends with an error, and at
/// most one read buffer of data beyond the limit has been stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerLimits {
    /// Maximum number of bytes received in one call, including heads and framing.
    pub received: u64,
    /// Maximum size of a collected body in bytes, and thus of a file that can be read.
    pub body: usize,
    /// Maximum size of one message of a stream in bytes.
    pub frame: u32,
}

impl AnswerLimits {
    /// For a server that starts, pauses and ends sandboxes, and expects only short responses.
    pub const CONTROL: Self = Self {
        received: 64 << 10,
        body: 64 << 10,
        frame: 64 << 10,
    };
    /// For programs that read files and command output. A hostile agent can exhaust only the memory of such a program.
    pub const DATA: Self = Self {
        received: u64::MAX,
        body: 256 << 20,
        frame: 8 << 20,
    };
}
