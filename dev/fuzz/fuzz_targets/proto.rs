//! The conversion of the data plane's binary messages to JSON and back. The first byte selects an RPC, the rest is the
//! message.
#![no_main]

use envd::proto;

const PATHS: [&str; 6] = [
    "/process.Process/Start",
    "/process.Process/Connect",
    "/process.Process/StreamInput",
    "/process.Process/SendSignal",
    "/filesystem.Filesystem/ListDir",
    "/filesystem.Filesystem/WatchDir",
];

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((choice, message)) = bytes.split_first() else {
        return;
    };
    let path = PATHS[usize::from(*choice) % PATHS.len()];
    let method = proto::method(path).expect("a known path");
    for side in [method.request, method.response] {
        if let Ok(json) = side.to_json(message) {
            // An unknown number of an enum converts to JSON, but not back.
            let Ok(canonical) = side.from_json(&json) else {
                continue;
            };
            let again = side
                .to_json(&canonical)
                .expect("an encoded message decodes");
            assert_eq!(side.from_json(&again).as_ref(), Ok(&canonical));
        }
        let _ = side.from_json(message);
    }
});
