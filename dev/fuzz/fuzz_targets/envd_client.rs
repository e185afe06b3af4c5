//! `EnvdClient` against an agent that sends arbitrary bytes. The first byte of the input selects the call, the
//! second the size of the pieces. Each call must end with a response or an error, and must not hold more bytes than
//! it received.
#![no_main]

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

use envd::{EnvdClient, ExecRequest, InitRequest, ListResponse, ProcessInput, ProcessSelector, Transport};

/// Never reached: this agent responds at once or closes the connection.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes that can be written to a socket without a reader.
const SOCKET: usize = 64 << 10;

/// An agent that sends `words`, at most `piece` bytes per read.
struct Agent<'a> {
    words: &'a [u8],
    piece: usize,
}

impl Read for Agent<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = self.piece.min(buffer.len()).min(self.words.len());
        let (now, later) = self.words.split_at(len);
        buffer[..len].copy_from_slice(now);
        self.words = later;
        Ok(len)
    }
}

impl Write for Agent<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Transport for Agent<'_> {
    fn bound_reads(&self, _timeout: Option<Duration>) -> io::Result<()> {
        Ok(())
    }

    fn bound_writes(&self, _timeout: Option<Duration>) -> io::Result<()> {
        Ok(())
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let [choice, piece, words @ ..] = bytes else {
        return;
    };
    if choice % 16 == 15 {
        return stream_input(words);
    }
    let piece = usize::from(*piece) + 1;
    let mut client = EnvdClient::over(Agent { words, piece }, PATIENCE);
    let most = words.len();
    // Calls reuse the connection until one fails.
    for turn in 0..4 {
        if !call(choice.wrapping_add(turn * 16) % 15, &mut client, most) {
            return;
        }
    }
    if let Ok(tunnel) = client.tunnel(80) {
        assert!(tunnel.early.len() <= most);
    }
});

/// Makes a call. Returns whether the connection can be used again.
fn call(choice: u8, client: &mut EnvdClient<Agent<'_>>, most: usize) -> bool {
    match choice {
        0 => client.health().is_ok(),
        1 => client.metrics().is_ok(),
        2 => client.init(&InitRequest::default()).is_ok(),
        3 => {
            let answer = client.call::<_, ListResponse>("process.Process/List", &());
            answer.is_ok()
        }
        4 => client
            .read_file("/etc/hostname", None)
            .is_ok_and(|file| bounded(file.len(), most)),
        5 => client.write_file("/tmp/a", b"b", Some("user")).is_ok(),
        6..=9 => run(client, most),
        10..=12 => follow(client),
        _ => client
            .request("GET", "/any", &[], b"")
            .is_ok_and(|answer| bounded(answer.body.len(), most)),
    }
}

fn bounded(held: usize, most: usize) -> bool {
    assert!(
        held <= most,
        "the client holds {held} bytes of an answer of {most}"
    );
    true
}

fn run(client: &mut EnvdClient<Agent<'_>>, most: usize) -> bool {
    let output = client.exec(&ExecRequest::new("true", &[]), PATIENCE);
    // Base64 encodes three bytes as four characters, so the output is never longer than the response.
    output.is_ok_and(|output| bounded(output.stdout.len() + output.stderr.len(), most))
}

fn follow(client: &mut EnvdClient<Agent<'_>>) -> bool {
    let Ok(mut stream) = client.start(&ExecRequest::new("true", &[]), PATIENCE) else {
        return false;
    };
    loop {
        match stream.next_event() {
            Ok(Some(_)) => {}
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

/// The call `StreamInput`, which needs a real socket.
fn stream_input(words: &[u8]) {
    let (ours, mut agent) = UnixStream::pair().expect("socket pair");
    agent
        .write_all(&words[..words.len().min(SOCKET)])
        .expect("room");
    agent
        .shutdown(std::net::Shutdown::Write)
        .expect("a connected socket");
    let mut client = EnvdClient::over(ours, PATIENCE);
    let selector = ProcessSelector {
        pid: Some(1),
        ..ProcessSelector::default()
    };
    if let Ok(mut stream) = client.stream_input(&selector, None, PATIENCE) {
        let _refused = stream.send(ProcessInput::default());
        let _refused = stream.finish();
    }
}
