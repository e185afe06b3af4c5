//! The proxy's parsers: heads of clients and of sandboxes, host names, paths, and vsock greetings of guests
//! (`api::proxy::fuzz`).
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| api::proxy::fuzz::proxy(bytes));
