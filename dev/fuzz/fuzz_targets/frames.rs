//! The parser of control frames: every input gives a request or an error.
#![no_main]

use std::{io::Write, os::unix::net::UnixStream};

use vmm_control::{Call, frame};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let (near, mut far) = UnixStream::pair().expect("socket pair");
    // At most as much as a socket buffer holds: the write does not block.
    far.write_all(&bytes[..bytes.len().min(64 << 10)])
        .expect("room");
    drop(far);
    while frame::receive::<Call>(&near).is_ok() {}
});
