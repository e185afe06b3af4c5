//! The entry point that the C library calls. Rust's own start-up code is omitted: it aborts if PID 1 has no console
//! and /dev/null does not exist yet, and it dirties pages for a signal stack that the agent does not need.
#![expect(unsafe_code, reason = "an exported symbol needs it")]

use std::ffi::{c_char, c_int};

// SAFETY: the symbol must be the only `main` of the link and have C's signature. `no_main` keeps Rust from generating
// another one, and the signature is the one below. This holds for the whole link.
#[unsafe(no_mangle)]
extern "C" fn main(_argc: c_int, _argv: *const *const c_char) -> c_int {
    crate::run()
}
