//! What isolation reads: policies, names, queries of guests, records of the programs, tables of the kernel; see
//! `netisolation::fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| netisolation::fuzz::network(bytes));
