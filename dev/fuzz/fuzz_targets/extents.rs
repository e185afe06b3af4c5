//! Lists of extents: the bytes as they are, and as the body of a file whose header is right; what is read is
//! then looked up.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmm::fuzz::extents(bytes));
