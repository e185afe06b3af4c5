//! The log ring: console output of the guest kernel and messages of the monitor. The VMM reads it whenever the vCPU is
//! out of the guest.

use core::{
    fmt,
    ptr::{addr_of, addr_of_mut, read_volatile, write_volatile},
};

use crate::{
    gate,
    layout::{BASE, LOG_BYTES, offset, port},
    state::{poke, shared},
};

/// Appends bytes. When the ring is half full, exits to the VMM, which drains it.
pub fn write(bytes: &[u8]) {
    for &byte in bytes {
        let (head, tail) = unsafe {
            (
                read_volatile(addr_of!((*shared()).log_head)),
                read_volatile(addr_of!((*shared()).log_tail)),
            )
        };
        poke(BASE + offset::LOG + head % LOG_BYTES, byte);
        unsafe { write_volatile(addr_of_mut!((*shared()).log_head), head.wrapping_add(1)) };
        if head.wrapping_sub(tail) >= LOG_BYTES / 2 {
            gate::out(port::LOG);
        }
    }
}

/// Formats text into the log ring.
pub struct Writer;

impl fmt::Write for Writer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        write(text.as_bytes());
        Ok(())
    }
}

macro_rules! log {
    ($($arg:tt)*) => {{
        use core::fmt::Write as _;
        let _ = writeln!(crate::log::Writer, $($arg)*);
    }};
}
pub(crate) use log;
