//! Where the monitor's region lies in guest-physical memory, and its shared page.

use monitor::layout;

/// Bytes of the monitor's region for so much RAM.
pub(super) fn region_bytes(ram: u64) -> u64 {
    const ALIGN: u64 = 2 << 20;
    let m2p = (ram >> 12) * 8;
    layout::offset::M2P + m2p.div_ceil(ALIGN) * ALIGN
}
