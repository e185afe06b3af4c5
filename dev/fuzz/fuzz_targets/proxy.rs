//! Heads of clients and of sandboxes, hosts, paths, and greetings of guests; see `api::proxy::fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| api::proxy::fuzz::proxy(bytes));
