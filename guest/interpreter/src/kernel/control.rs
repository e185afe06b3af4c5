//! The bridge's side of the control socket (see [`crate::message`]).

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Write},
    os::{fd::AsFd, unix::net::UnixStream},
};

use crate::message::Request;

/// Requests come in, lines go out.
#[derive(Debug)]
pub(crate) struct Control {
    input: BufReader<UnixStream>,
    output: UnixStream,
}

impl Control {
    /// Takes the socket that is this process's standard input. Nobody else here reads that.
    pub(crate) fn take_standard_input() -> io::Result<Self> {
        let copy = io::stdin().as_fd().try_clone_to_owned()?;
        nix::unistd::dup2_stdin(File::open("/dev/null")?)?;
        let output = UnixStream::from(copy);
        let input = BufReader::new(output.try_clone()?);
        Ok(Self { input, output })
    }

    /// The next cell; `None` when the server is gone.
    pub(crate) fn next_request(&mut self) -> io::Result<Option<Request>> {
        let mut line = Vec::new();
        match self.input.read_until(b'\n', &mut line)? {
            0 => Ok(None),
            _ => Ok(Some(serde_json::from_slice(&line)?)),
        }
    }

    pub(crate) fn say(&mut self, line: &str) -> io::Result<()> {
        self.send(format!("{line}\n").as_bytes())
    }

    /// Sends a line with its end; blocks while the server does not read.
    pub(crate) fn send(&mut self, line: &[u8]) -> io::Result<()> {
        self.output.write_all(line)
    }
}
