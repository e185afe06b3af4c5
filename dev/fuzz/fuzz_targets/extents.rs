//! The parser of extent lists, on the raw input and on the input behind a valid header. Lists that parse are then used
//! for look-ups.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmm::fuzz::extents(bytes));
