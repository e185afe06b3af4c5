//! A server with a small service, on a unix socket.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    thread::JoinHandle,
    time::Instant,
};

use envd::Framing;
use nix::sys::epoll::EpollFlags;
use proptest::prelude::*;
use transport::{
    Admission, After, Conn, Conns, Exchange, Gone, Head, Key, Listener, Reactor, Refusal, Rest,
    Server, Service, Sink, Step, http,
};

/// Answers `/echo` with the body, `/count` with its length, `/drip` with a stream of four chunks.
struct Toy {
    io: Reactor,
    ending: bool,
}

/// Counts the bytes of a body.
struct Count(usize);

/// Sends one chunk per step.
struct Drip(u8);

impl Service for Toy {
    type Fields = ();
    type Call = ();

    const MAX_CONNS: usize = 4;
    const MAX_BODY: usize = 1000;

    fn reactor(&mut self) -> &mut Reactor {
        &mut self.io
    }

    fn admit(
        &mut self,
        _: Key,
        conn: &mut Conn<Self>,
        head: &Head<()>,
        _: &Framing,
    ) -> Admission<Self> {
        match head.path.as_str() {
            "/echo" | "/end" => Admission::Handle,
            "/count" => Admission::Receive(Box::new(Count(0))),
            "/drip" => {
                http::push_chunked_head(&mut conn.out, "text/plain", conn.after);
                conn.begin(Drip(4));
                Admission::Begun
            }
            _ => Admission::Refuse(Refusal {
                status: 404,
                message: "no such route".into(),
            }),
        }
    }

    fn handle(&mut self, _: Key, conn: &mut Conn<Self>, head: &Head<()>, body: &[u8]) {
        self.ending = head.path == "/end";
        conn.answer(200, "text/plain", body);
    }

    fn push_error(out: &mut Vec<u8>, status: u16, message: &str, after: After) {
        http::push_answer(out, status, "text/plain", message.as_bytes(), after);
    }

    fn ready(&mut self, _: u8, _: Key, _: EpollFlags) {}

    fn work(&mut self, _: &mut Conns<Self>, _: u8, _: Key) {}

    fn deadline(&self) -> Option<Instant> {
        None
    }

    fn expire(&mut self, _: &mut Conns<Self>, _: Instant) {}

    fn is_ending(&self) -> bool {
        self.ending
    }
}

impl Sink<Toy> for Count {
    fn write(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        self.0 += bytes.len();
        Ok(())
    }

    fn finish(self: Box<Self>, _: &mut Toy, conn: &mut Conn<Toy>) {
        conn.answer(200, "text/plain", self.0.to_string().as_bytes());
    }
}

impl Exchange<Toy> for Drip {
    fn step(&mut self, _: &mut Toy, _: Key, conn: &mut Conn<Toy>) -> Result<Step, Gone> {
        http::push_chunk(&mut conn.out, b"drop");
        self.0 -= 1;
        if self.0 == 0 {
            conn.out.extend_from_slice(http::LAST_CHUNK);
            conn.end_request(Rest::Read);
        }
        Ok(Step::Again)
    }
}

/// A running server, ended on drop.
struct Running {
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Running {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let listener = Listener::unix(&socket).unwrap();
        let thread = std::thread::spawn(move || {
            let toy = Toy {
                io: Reactor::new(64).unwrap(),
                ending: false,
            };
            Server::new(vec![listener], toy).unwrap().run().unwrap();
        });
        Self {
            socket,
            thread: Some(thread),
            _dir: dir,
        }
    }

    /// Sends the pieces on one connection, then closes the sending side. Returns everything that is received.
    fn exchange(&self, pieces: &[&[u8]]) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        for piece in pieces {
            stream.write_all(piece).unwrap();
        }
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8(answer).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.write_all(b"GET /end HTTP/1.1\r\n\r\n").unwrap();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn with_length(path: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

fn chunked(path: &str, body: &[u8]) -> Vec<u8> {
    let mut request =
        format!("POST {path} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n").into_bytes();
    for chunk in body.chunks(7) {
        http::push_chunk(&mut request, chunk);
    }
    request.extend_from_slice(http::LAST_CHUNK);
    request
}

fn answer(body: &str) -> String {
    let mut out = Vec::new();
    http::push_answer(
        &mut out,
        200,
        "text/plain",
        body.as_bytes(),
        After::KeepAlive,
    );
    String::from_utf8(out).unwrap()
}

#[test]
fn requests_of_one_connection_are_answered_in_order() {
    let server = Running::start();
    let drip = "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n\
                4\r\ndrop\r\n4\r\ndrop\r\n4\r\ndrop\r\n4\r\ndrop\r\n0\r\n\r\n";
    let requests = [
        with_length("/echo", b"one"),
        chunked("/echo", b"two is longer"),
        b"GET /drip HTTP/1.1\r\n\r\n".to_vec(),
        with_length("/count", &[b'x'; 500]),
        with_length("/echo", b""),
    ];
    let wanted = [
        answer("one"),
        answer("two is longer"),
        drip.to_owned(),
        answer("500"),
        answer(""),
    ];
    assert_eq!(server.exchange(&[&requests.concat()]), wanted.concat());
}

#[test]
fn large_bodies_are_refused_and_unknown_routes_keep_the_connection() {
    let server = Running::start();
    let body = vec![b'x'; 1001];
    for request in [
        b"POST /echo HTTP/1.1\r\ncontent-length: 1001\r\n\r\n".to_vec(),
        chunked("/echo", &body),
    ] {
        let refused = server.exchange(&[&request]);
        assert!(
            refused.starts_with("HTTP/1.1 413 ") && refused.contains("connection: close"),
            "{refused}"
        );
    }
    assert_eq!(
        server.exchange(&[&chunked("/count", &body)]),
        answer("1001")
    );
    let requests = [with_length("/nowhere", b"x"), with_length("/echo", b"y")];
    let answers = server.exchange(&[&requests.concat()]);
    assert!(answers.starts_with("HTTP/1.1 404 "), "{answers}");
    assert!(answers.ends_with(&answer("y")), "{answers}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn bodies_arrive_in_any_pieces(body in "[a-z]{0,200}", cut in 0_usize..300) {
        let server = Running::start();
        for request in [with_length("/echo", body.as_bytes()), chunked("/echo", body.as_bytes())] {
            let (first, second) = request.split_at(cut.min(request.len()));
            prop_assert_eq!(server.exchange(&[first, second]), answer(&body));
        }
    }
}
