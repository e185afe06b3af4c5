//! This program as the fuzz target `agent`: its readers of requests, and nothing that acts on one.

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| crate::server::fuzz::agent(bytes));
