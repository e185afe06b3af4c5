//! The virtio devices, with a driver whose register writes, rings and polls come from the input.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // Longer inputs run slower and find no more than short ones.
    vmm::devices::fuzz::drive(&bytes[..bytes.len().min(2400)]);
});
