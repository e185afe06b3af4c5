//! The agent behind the vsock socket of the stand-in.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    time::Duration,
};

use envd::frame;

use crate::conduct::{Conduct, State};

/// Bytes of an "endless" answer: enough to exceed every limit of the server, too few to exhaust the host's memory if a
/// limit fails.
const FLOOD: u64 = 1 << 30;
/// Time within which the server puts a VM into the warm pool after the VM's last command.
const WHILE: Duration = Duration::from_millis(500);
const NO_CONTENT: &[u8] = b"HTTP/1.1 204 No Content\r\n\r\n";
const OK: &[u8] = b"HTTP/1.1 200 OK\r\n";

/// A 1 MB error message that contains a forged log line.
pub(crate) fn forged_words() -> String {
    format!(
        "no\n2026-01-01T00:00:00Z ERROR forged: all is lost\u{1b}[2J{}",
        "y".repeat(900 << 10)
    )
}

pub(crate) fn serve(listener: &UnixListener, state: State) {
    for stream in listener.incoming() {
        std::thread::spawn(move || {
            // The server hangs up once it has read enough.
            let _ = Agent::new(stream.unwrap(), state).and_then(|mut agent| agent.serve());
        });
    }
}

struct Agent {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    conduct: Conduct,
    resumed: bool,
}

impl Agent {
    fn new(stream: UnixStream, state: State) -> io::Result<Self> {
        Ok(Self {
            reader: BufReader::new(stream.try_clone()?),
            writer: stream,
            conduct: state.conduct,
            resumed: state.resumed,
        })
    }

    fn serve(&mut self) -> io::Result<()> {
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        match self.conduct {
            Conduct::EndlessGreeting => return self.flood(b"OK, and besides "),
            Conduct::Early => self.writer.write_all(&[b"OK 1\n", NO_CONTENT].concat())?,
            _ => self.writer.write_all(b"OK 1\n")?,
        }
        while let Some(path) = self.request()? {
            self.answer(&path)?;
        }
        Ok(())
    }

    /// Reads a complete request and returns its path. `None`: the connection has ended.
    fn request(&mut self) -> io::Result<Option<String>> {
        let (mut line, mut path, mut length) = (String::new(), None, 0);
        loop {
            line.clear();
            if self.reader.read_line(&mut line)? == 0 {
                return Ok(None);
            }
            let text = line.trim();
            if text.is_empty() {
                break;
            }
            path = path.or_else(|| text.split(' ').nth(1).map(str::to_owned));
            if let Some((name, value)) = text.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().unwrap();
            }
        }
        io::copy(&mut (&mut self.reader).take(length), &mut io::sink())?;
        Ok(path)
    }

    fn answer(&mut self, path: &str) -> io::Result<()> {
        match path {
            "/init" => self.first_answer(),
            "/process.Process/Start" => self.run(),
            _ if path.starts_with("/files") => self.ten_gigabytes(),
            _ => self.writer.write_all(NO_CONTENT),
        }
    }

    fn first_answer(&mut self) -> io::Result<()> {
        let zeros = [0; 16 << 10];
        match self.conduct {
            Conduct::EndlessBody => {
                self.say(&[OK, b"\r\n"])?;
                self.flood(&zeros)
            }
            Conduct::EndlessChunks => {
                self.say(&[OK, b"Transfer-Encoding: chunked\r\n\r\n"])?;
                self.flood(&[b"4000\r\n".as_slice(), &zeros, b"\r\n"].concat())
            }
            Conduct::TenGigabytes => self.ten_gigabytes(),
            Conduct::EndlessHead => {
                self.say(&[OK])?;
                self.flood(&b"X-More: and more\r\n".repeat(1000))
            }
            Conduct::EndlessInterim => self.flood(&b"HTTP/1.1 100 Continue\r\n\r\n".repeat(1000)),
            Conduct::TwoLengths => {
                let lengths = b"Content-Length: 0\r\nContent-Length: 27\r\n\r\n";
                self.say(&[OK, lengths, NO_CONTENT])
            }
            Conduct::Half => {
                self.say(&[b"HTTP/1.1 20"])?;
                self.hold()
            }
            Conduct::Broken => {
                self.say(&[b"HTTP/1.1 20"])?;
                self.writer.shutdown(std::net::Shutdown::Both)
            }
            Conduct::Nonsense => self.flood(b"SSH-2.0-OpenSSH\r\n"),
            Conduct::Wordy => self.refuse(),
            Conduct::SilentWhenResumed if self.resumed => self.hold(),
            Conduct::BrokenWhenResumed if self.resumed => {
                self.writer.shutdown(std::net::Shutdown::Both)
            }
            Conduct::Good
            | Conduct::EndlessGreeting
            | Conduct::Early
            | Conduct::AfterTheEnd
            | Conduct::ChattyWhenWarm
            | Conduct::SilentWhenResumed
            | Conduct::BrokenWhenResumed
            | Conduct::Inflated
            | Conduct::MuteVmm
            | Conduct::HugeVmm
            | Conduct::WordyVmm
            | Conduct::LastWords => self.writer.write_all(NO_CONTENT),
        }
    }

    fn refuse(&mut self) -> io::Result<()> {
        let refusal = serde_json::json!({"code": 500, "message": forged_words()}).to_string();
        let length = format!("Content-Length: {}\r\n\r\n", refusal.len());
        self.say(&[
            b"HTTP/1.1 500 No\r\n",
            length.as_bytes(),
            refusal.as_bytes(),
        ])
    }

    /// Answers as if a command ran successfully; [`Conduct`] decides what follows the end of the command's stream.
    fn run(&mut self) -> io::Result<()> {
        let mut stream = Vec::new();
        for (flags, message) in [
            (0, r#"{"event":{"start":{"pid":7}}}"#),
            (0, r#"{"event":{"end":{"exited":true}}}"#),
            (frame::END_STREAM, "{}"),
        ] {
            frame::encode(flags, message.as_bytes(), &mut stream).unwrap();
        }
        let kind = b"Content-Type: application/connect+json\r\n";
        if self.conduct == Conduct::AfterTheEnd {
            self.say(&[OK, kind, b"\r\n", &stream])?;
            return self.flood(&[0; 16 << 10]);
        }
        let length = format!("Content-Length: {}\r\n\r\n", stream.len());
        self.say(&[OK, kind, length.as_bytes(), &stream])?;
        if self.conduct == Conduct::ChattyWhenWarm {
            std::thread::sleep(WHILE);
            self.say(&[NO_CONTENT])?;
            eprintln!("said");
        }
        Ok(())
    }

    fn ten_gigabytes(&mut self) -> io::Result<()> {
        self.say(&[OK, b"Content-Length: 10737418240\r\n\r\n"])?;
        self.flood(&[0; 64 << 10])
    }

    fn say(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        self.writer.write_all(&parts.concat())
    }

    /// Sends `piece` repeatedly, at least [`FLOOD`] bytes in total, and then waits until the server closes the
    /// connection.
    fn flood(&mut self, piece: &[u8]) -> io::Result<()> {
        let mut sent = 0;
        while sent < FLOOD {
            self.writer.write_all(piece)?;
            sent += u64::try_from(piece.len()).unwrap();
        }
        self.hold()
    }

    /// Waits until the other side closes the connection.
    fn hold(&mut self) -> io::Result<()> {
        io::copy(&mut self.reader, &mut io::sink()).map(drop)
    }
}
