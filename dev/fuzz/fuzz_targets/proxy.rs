//! The proxy's parsers: clients' request heads, sandboxes' response heads, host names, paths, and guests' vsock
//! greetings (`api::proxy::fuzz`).
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| api::proxy::fuzz::proxy(bytes));
