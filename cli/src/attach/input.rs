//! Standard input of this program to the process.

use std::{
    io::{self, Read},
    thread,
    time::Duration,
};

use api_types::envd::{Blob, CloseStdinRequest, Empty, ProcessInput, ProcessSelector};

use super::Streams;
use crate::server::SandboxRoute;

/// Most bytes of one message.
const PIECE: usize = 32 << 10;
const FOREVER: Duration = Duration::from_secs(30 * 86_400);
/// The key ^D, which ends the input of a terminal.
const END_OF_TRANSMISSION: &[u8] = b"\x04";

/// Starts the thread. It ends with the input, or with the process, which may end before its input. A failure is not
/// reported: a lost connection ends the main thread too.
pub(super) fn start(route: SandboxRoute, pid: u32, streams: Streams) {
    thread::spawn(move || {
        let _process_has_ended = forward(&route, pid, streams);
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
            // The terminal has gone: as the end of input.
            read => read.unwrap_or(0),
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
    // The answer means that all bytes are in the process's pipe.
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
