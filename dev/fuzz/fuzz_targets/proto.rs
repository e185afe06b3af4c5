//! Binary messages of the data plane: the first byte chooses an RPC, the rest is what a client sends. It
//! becomes a request that the JSON side reads or refuses, or an error.
#![no_main]

use api_types::envd::proto;

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
            // An enum's number without a name is the one thing that is read and not written.
            let Ok(canonical) = side.from_json(&json) else {
                continue;
            };
            let again = side.to_json(&canonical).expect("what was written is read");
            assert_eq!(side.from_json(&again).as_ref(), Ok(&canonical));
        }
        let _ = side.from_json(message);
    }
});
