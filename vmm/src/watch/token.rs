//! Identification of the descriptor that an epoll event belongs to.
//!
//! The kernel stores one `u64` per watched descriptor and returns it with each event. [`Token`] is the closed list of
//! purposes that the VMM registers. A number that belongs to no purpose decodes to `None`.

/// First raw value of the vsock streams; smaller values are the fixed tokens.
const FIRST_STREAM: u64 = 1 << 32;

/// The purpose of a watched descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The listening control socket: a client wants to connect.
    ControlListener,
    /// The connection of the current control client.
    ControlClient,
    /// The VMM's own connection to the guest agent.
    Agent,
    /// A descriptor of a device.
    Device(DeviceToken),
}

/// The purpose of a descriptor that belongs to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceToken {
    /// The network device's TAP.
    Tap,
    /// The unix socket through which clients connect to guest ports.
    VsockListener,
    /// A connection of the vsock device, by the number that the device gave it.
    VsockStream(u64),
    /// The pipe that is readable while queues wait for another turn.
    Backlog,
}

impl Token {
    pub(super) fn to_raw(self) -> u64 {
        match self {
            Self::ControlListener => 1,
            Self::ControlClient => 2,
            Self::Agent => 3,
            Self::Device(DeviceToken::Tap) => 4,
            Self::Device(DeviceToken::VsockListener) => 5,
            Self::Device(DeviceToken::Backlog) => 6,
            Self::Device(DeviceToken::VsockStream(number)) => FIRST_STREAM.saturating_add(number),
        }
    }

    pub(super) fn from_raw(raw: u64) -> Option<Self> {
        Some(match raw {
            1 => Self::ControlListener,
            2 => Self::ControlClient,
            3 => Self::Agent,
            4 => Self::Device(DeviceToken::Tap),
            5 => Self::Device(DeviceToken::VsockListener),
            6 => Self::Device(DeviceToken::Backlog),
            FIRST_STREAM.. => Self::Device(DeviceToken::VsockStream(raw - FIRST_STREAM)),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_its_encoding_and_other_numbers_decode_to_none() {
        let tokens: Vec<Token> = (0..100).filter_map(Token::from_raw).collect();
        assert_eq!(tokens.len(), 6);
        let stream = |number| Token::Device(DeviceToken::VsockStream(number));
        for token in tokens.into_iter().chain([stream(0), stream(1 << 40)]) {
            assert_eq!(Token::from_raw(token.to_raw()), Some(token));
        }
        for raw in [0, 7, FIRST_STREAM - 1] {
            assert_eq!(Token::from_raw(raw), None, "{raw}");
        }
    }
}
