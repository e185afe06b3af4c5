//! The bridge's end of the control socket ([`crate::message`]).

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Write},
    os::{fd::AsFd, unix::net::UnixStream},
};

use crate::message::Request;

/// The control socket: requests in, lines out.
#[derive(Debug)]
pub(crate) struct Control {
    input: BufReader<UnixStream>,
    output: UnixStream,
}

impl Control {
    /// Takes over the socket on standard input, and replaces standard input by /dev/null. No other code of this process
    /// may have read from standard input.
    pub(crate) fn take_standard_input() -> io::Result<Self> {
        let copy = io::stdin().as_fd().try_clone_to_owned()?;
        nix::unistd::dup2_stdin(File::open("/dev/null")?)?;
        let output = UnixStream::from(copy);
        let input = BufReader::new(output.try_clone()?);
        Ok(Self { input, output })
    }

    /// Reads the next cell; `None` if the server has closed the socket.
    pub(crate) fn next_request(&mut self) -> io::Result<Option<Request>> {
        let mut line = Vec::new();
        match self.input.read_until(b'\n', &mut line)? {
            0 => Ok(None),
            _ => Ok(Some(serde_json::from_slice(&line)?)),
        }
    }

    pub(crate) fn send_line(&mut self, line: &str) -> io::Result<()> {
        self.send(format!("{line}\n").as_bytes())
    }

    /// Sends `line`, which must include its line end. Blocks while the server does not read.
    pub(crate) fn send(&mut self, line: &[u8]) -> io::Result<()> {
        self.output.write_all(line)
    }
}
