//! The fuzz target `agent`: the agent's parsers of requests, without its handlers.

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| crate::server::fuzz::agent(bytes));
