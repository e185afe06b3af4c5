//! The devices under a driver that is a program of random bytes: register writes, rings in memory, polls.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // Longer programs find nothing that shorter ones do not, and run slower.
    vmm::devices::fuzz::drive(&bytes[..bytes.len().min(2400)]);
});
