//! The parsers of network isolation: policies, names, guests' DNS queries, records from the eBPF programs, and kernel
//! tables (`netisolation::fuzz`).
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| netisolation::fuzz::network(bytes));
