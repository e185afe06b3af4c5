//! Guest-physical addresses and interrupt numbers that several parts of the platform use.

use crate::memory::Hole;

/// Guest-physical address of the register page.
pub(super) const REGISTERS: u64 = 0xd000_0000;
/// Guest-physical addresses without RAM. They include the register page and the interrupt controllers.
pub(in crate::platform) const HOLE: Hole = Hole {
    start: 0xc000_0000,
    end: 0x1_0000_0000,
};
/// Interrupt of the serial port.
pub(super) const SERIAL_GSI: u32 = 4;
/// Interrupt of device slot 0. Slot `n` has interrupt `DEVICE_GSI + n`.
pub(super) const DEVICE_GSI: u32 = 5;
