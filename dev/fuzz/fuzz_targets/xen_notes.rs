//! Kernel images, as far as the ring3 platform reads them itself.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmm::fuzz::xen_notes(bytes));
