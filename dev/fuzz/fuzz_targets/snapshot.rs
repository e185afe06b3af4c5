//! The decoder of state files, on the raw input and on the input behind a valid header. States that decode are then
//! restored, as far as that needs no KVM.
#![no_main]

use sha2::{Digest, Sha256};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    vmm::fuzz::state(bytes);
    let Some((platform, body)) = bytes.split_first() else {
        return;
    };
    let mut file = b"CUBESNAP".to_vec();
    file.extend(vmm::fuzz::FORMAT.to_le_bytes());
    file.extend(u32::from(platform % 2 * 3).to_le_bytes());
    file.extend((body.len() as u64).to_le_bytes());
    file.extend(Sha256::digest(body));
    file.extend(body);
    vmm::fuzz::state(&file);
});
