//! The parsers of the API's control plane: network options, request bodies, query strings (`api::control::fuzz`).
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| api::control::fuzz::options(bytes));
