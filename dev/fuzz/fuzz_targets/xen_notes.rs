//! The parser of the Xen notes in kernel images, used by the platform `ring3`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmm::fuzz::xen_notes(bytes));
