//! Page faults. Reading CR2 is privileged and slow, so the address is determined by other means if possible
//! ([`operand`]).

use crate::{
    exceptions::bounce_vector,
    gate, operand,
    pagetable::{self, Repair},
    state::{Frame, entry, poke},
};

/// Bits of the error code.
pub const PRESENT: u64 = 1;
pub const WRITE: u64 = 2;
pub const USER: u64 = 4;
pub const FETCH: u64 = 16;
const VECTOR: u64 = 14;
/// Offset of `arch.cr2` in vcpu_info.
const CR2_IN_VCPU_INFO: u64 = 16;

/// Repairs faults of the guest kernel that [`pagetable::repair`] can repair. Delivers all others to the guest, with CR2
/// where Xen puts it.
pub fn handle(frame: &mut Frame) {
    let address = operand::fault_address(frame).unwrap_or_else(gate::read_cr2);
    if entry().user_mode == 0 {
        if frame.error & PRESENT != 0
            && (address as i64) < 0
            && matches!(
                pagetable::repair(address, frame.error & WRITE != 0),
                Repair::Retry
            )
        {
            return;
        }
        frame.error &= !USER;
    }
    entry().last_write_fault = if frame.error & (WRITE | USER) == WRITE | USER {
        address >> 12
    } else {
        0
    };
    poke(entry().vcpu_info + CR2_IN_VCPU_INFO, address);
    bounce_vector(frame, VECTOR);
}
