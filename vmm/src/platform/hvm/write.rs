//! A register write of a vCPU, to be handled by the devices.

use serde::{Deserialize, Serialize};

use crate::platform::Exit;

/// A write to the register page.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Write {
    pub(super) offset: u64,
    pub(super) bytes: [u8; 8],
    pub(super) len: u8,
}

impl Write {
    pub(super) fn new(offset: u64, data: &[u8]) -> Self {
        let mut bytes = [0; 8];
        let len = data.len().min(8);
        bytes[..len].copy_from_slice(&data[..len]);
        let len = u8::try_from(len).unwrap_or(0);
        Self { offset, bytes, len }
    }

    pub(super) fn exit(self) -> Exit {
        Exit::DeviceWrite {
            offset: self.offset,
            bytes: self.bytes,
            // An invalid snapshot can contain a larger length.
            len: usize::from(self.len.min(8)),
        }
    }
}
