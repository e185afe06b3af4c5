//! Standard input of this program to the process.

use std::{
    io::{self, Read},
    thread,
    time::Duration,
};

use envd::{Blob, CloseStdinRequest, Empty, ProcessInput, ProcessSelector, one_line};

use super::Streams;
use crate::server::SandboxRoute;

/// Maximum size of a message in bytes.
const PIECE: usize = 32 << 10;
const FOREVER: Duration = Duration::from_secs(30 * 86_400);
/// The key ^D, which ends the input of a terminal.
const END_OF_TRANSMISSION: &[u8] = b"\x04";

/// Time for the main thread to exit if a process ends before its input.
const EXITS: Duration = Duration::from_secs(1);

/// Starts the thread. It ends with the input, or with the process, which may end first. It reports other failures,
/// and the process continues without its input.
pub(super) fn start(route: SandboxRoute, pid: u32, streams: Streams) {
    thread::spawn(move || {
        if let Err(why) = forward(&route, pid, streams) {
            thread::sleep(EXITS);
            let why = one_line(&model::chain(why.as_ref()));
            eprintln!("cube: cannot send the rest of standard input to the command: {why}");
        }
    });
}

fn forward(
    route: &SandboxRoute,
    pid: u32,
    streams: Streams,
) -> Result<(), Box<dyn std::error::Error>> {
    let process = ProcessSelector {
        pid: Some(pid),
        tag: None,
    };
    let mut client = route.dial()?;
    let mut stream = client.stream_input(&process, None, FOREVER)?;
    let mut piece = vec![0; PIECE];
    let mut input = io::stdin().lock();
    loop {
        let read = match input.read(&mut piece) {
            Err(why) if why.kind() == io::ErrorKind::Interrupted => continue,
            Err(why) => {
                eprintln!("cube: cannot read standard input: {why}; the command's input ends here");
                0
            }
            Ok(read) => read,
        };
        if read == 0 {
            break;
        }
        stream.send(message(streams, piece.get(..read).unwrap_or_default()))?;
    }
    if let Streams::Terminal(_) = streams {
        stream.send(message(streams, END_OF_TRANSMISSION))?;
        return Ok(stream.finish()?);
    }
    // This response means that all bytes are in the process's pipe.
    stream.finish()?;
    let _: Empty = client.call("process.Process/CloseStdin", &CloseStdinRequest { process })?;
    Ok(())
}

fn message(streams: Streams, bytes: &[u8]) -> ProcessInput {
    let bytes = Some(Blob(bytes.to_vec()));
    match streams {
        Streams::Terminal(_) => ProcessInput {
            pty: bytes,
            stdin: None,
        },
        Streams::Pipes => ProcessInput {
            stdin: bytes,
            pty: None,
        },
    }
}
