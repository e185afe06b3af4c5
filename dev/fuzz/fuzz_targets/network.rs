//! The parsers of network isolation: policies, names, DNS queries of guests, records of the eBPF programs, tables of
//! the kernel (`netisolation::fuzz`).
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| netisolation::fuzz::network(bytes));
