//! Debug registers: the guest kernel's values, and the hardware's.

use crate::{
    gate,
    state::{Frame, flag, rest},
};

/// Single-step bit of DR6.
const BS: u64 = 1 << 14;
/// Bits of DR6 that always read as one.
const DR6_ONES: u64 = 0xffff_0ff0;
/// Enable bits of DR7.
const DR7_ENABLES: u64 = 0xff;

/// Sets the guest's DR6 after a debug exception, and clears the hardware's if a breakpoint is enabled.
pub fn hit(frame: &Frame) {
    let debug = &mut rest().debug;
    let hardware = if debug[7] & DR7_ENABLES != 0 {
        let value = gate::read_dr6();
        gate::write_dr(6, DR6_ONES);
        value & 0xf
    } else {
        0
    };
    let step = if frame.rflags & flag::TF != 0 { BS } else { 0 };
    debug[6] = DR6_ONES | hardware | step;
}

/// The hypercall `get_debugreg`.
pub fn get(index: u64) -> u64 {
    rest().debug.get(index as usize).copied().unwrap_or(0)
}

/// The hypercall `set_debugreg`. The hardware is written only while a breakpoint is or was enabled, because kernels
/// write zeros to all debug registers when they start a CPU, and each hardware write takes time.
pub fn set(index: u64, value: u64) {
    let debug = &mut rest().debug;
    let index = index as usize;
    let Some(slot) = debug.get_mut(index) else {
        return;
    };
    let was = core::mem::replace(slot, value);
    match index {
        7 if (was | value) & DR7_ENABLES != 0 => {
            for (i, address) in debug[..4].iter().enumerate() {
                gate::write_dr(i, *address);
            }
            gate::write_dr(7, value);
        }
        0..=3 if debug[7] & DR7_ENABLES != 0 => gate::write_dr(index, value),
        _ => {}
    }
}
