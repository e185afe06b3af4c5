//! Functions that `core` needs from a platform, and the panic handler. Only the linked image contains them.

use core::arch::asm;

use crate::{layout::end, log::log};

#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, n: usize) -> *mut u8 {
    unsafe {
        asm!("rep movsb", inout("rcx") n => _, inout("rdi") to => _, inout("rsi") from => _,
             options(nostack, preserves_flags));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, n: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= n {
        return unsafe { memcpy(to, from, n) };
    }
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") n => _,
             inout("rdi") to.add(n).wrapping_sub(1) => _,
             inout("rsi") from.add(n).wrapping_sub(1) => _, options(nostack));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, n: usize) -> *mut u8 {
    unsafe {
        asm!("rep stosb", inout("rcx") n => _, inout("rdi") to => _, in("al") byte as u8,
             options(nostack, preserves_flags));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, n: usize) -> i32 {
    for i in 0..n {
        let (x, y) = unsafe { (*a.add(i), *b.add(i)) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
    }
    0
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo) -> ! {
    log!("monitor: {info}");
    crate::events::end(end::MONITOR)
}
