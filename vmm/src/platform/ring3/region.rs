//! Size of the monitor's region.

use monitor::layout;

/// Bytes of the monitor's region for `ram` bytes of RAM.
pub(super) fn region_bytes(ram: u64) -> u64 {
    const ALIGN: u64 = 2 << 20;
    let m2p = (ram >> 12) * 8;
    layout::offset::M2P + m2p.div_ceil(ALIGN) * ALIGN
}
