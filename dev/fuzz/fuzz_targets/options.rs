//! Options of the control plane: network options as policies, bodies, queries; see `api::control::fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| api::control::fuzz::options(bytes));
