//! Clients that are busy while a server is replaced. Each panics if anything is refused, cut, lost or duplicated.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::Duration,
};

use envd::{
    Blob, Empty, EnvdClient, ExecRequest, ProcessConfig, ProcessInput, ProcessSelector, Pty,
    SendInputRequest, StartRequest,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;

use crate::{
    http,
    process::{JSON, PATIENCE, Sandbox, Server},
};

/// State shared by all clients of a test.
#[derive(Default)]
pub(crate) struct Load {
    /// Clients finish when this is set.
    pub(crate) over: AtomicBool,
    /// Number of clients whose stream is established.
    pub(crate) ready: AtomicU32,
    /// Number of requests that got a response.
    pub(crate) answered: AtomicU32,
}

impl Load {
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn is_ready(&self) {
        self.ready.fetch_add(1, Ordering::Relaxed);
    }
}

/// A connection to the agent of a sandbox, through the server.
pub(crate) fn agent(server: &Server, sandbox: &Sandbox) -> EnvdClient<TcpStream> {
    let stream = TcpStream::connect(server.address).unwrap();
    let mut client = EnvdClient::over(stream, PATIENCE);
    let headers = [
        ("E2b-Sandbox-Id", sandbox.id.as_str()),
        ("E2b-Sandbox-Port", "49983"),
    ];
    client.set_route(&server.address.to_string(), &headers);
    client.set_access_token(Some(sandbox.token.clone()));
    client
}

/// A command that counts until the test is over. No number may be missing.
pub(crate) fn count(server: &Server, sandbox: &Sandbox, load: &Load) {
    const COUNT: &str =
        "n=0; while [ ! -e /tmp/over ]; do n=$((n+1)); echo $n; sleep 0.02; done; echo end";
    let mut client = agent(server, sandbox);
    let request = ExecRequest::new("/bin/sh", &["-c", COUNT]);
    let mut stream = client.start(&request, 4 * PATIENCE).unwrap();
    let mut output = Vec::new();
    load.is_ready();
    let mut is_told = false;
    while let Some(event) = stream.next_event().unwrap() {
        output.extend(
            event
                .data
                .and_then(|data| data.stdout)
                .unwrap_or_default()
                .0,
        );
        if load.is_over() && !std::mem::replace(&mut is_told, true) {
            server.write_file(sandbox, "/tmp/over", "");
        }
    }
    let text = String::from_utf8(output).unwrap();
    let mut lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.pop(), Some("end"));
    let numbers = lines.into_iter().map(|line| line.parse::<usize>().unwrap());
    assert!(numbers.clone().eq(1..=numbers.count()), "{text}");
}

/// A terminal. Each input uses its own connection and is echoed on the stream.
pub(crate) fn type_in_terminal(server: &Server, sandbox: &Sandbox, load: &Load) {
    let mut client = agent(server, sandbox);
    let message = StartRequest {
        process: Some(ProcessConfig {
            cmd: "/bin/cat".to_owned(),
            ..ProcessConfig::default()
        }),
        pty: Some(Pty::default()),
        ..StartRequest::default()
    };
    let started = client.stream("process.Process/Start", &message, None, None, 4 * PATIENCE);
    let mut stream = started.unwrap();
    let pid = stream.pid();
    load.is_ready();
    let mut shown = String::new();
    for number in 1.. {
        let is_last = load.is_over();
        let word = format!("word-{number};");
        let request = SendInputRequest {
            process: ProcessSelector {
                pid: Some(pid),
                tag: None,
            },
            input: ProcessInput {
                pty: Some(Blob(word.clone().into_bytes())),
                ..ProcessInput::default()
            },
        };
        let sent = agent(server, sandbox).call("process.Process/SendInput", &request);
        let _: Empty = sent.unwrap();
        while !shown.contains(&word) {
            let event = stream.next_event().unwrap().expect("the terminal goes on");
            let data = event.data.and_then(|data| data.pty).unwrap_or_default();
            shown.push_str(&String::from_utf8_lossy(&data.0));
        }
        load.answered.fetch_add(1, Ordering::Relaxed);
        if is_last {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A watch of a directory: a file that is written at the end is reported.
pub(crate) fn watch(server: &Server, sandbox: &Sandbox, load: &Load) {
    let message = json!({"path": "/home/user"}).to_string();
    let mut body = vec![0];
    body.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    body.extend(message.as_bytes());
    let headers = [
        ("E2b-Sandbox-Id", sandbox.id.as_str()),
        ("E2b-Sandbox-Port", "49983"),
        ("X-Access-Token", sandbox.token.as_str()),
        ("Content-Type", "application/connect+json"),
        ("Connect-Protocol-Version", "1"),
    ];
    let path = "/filesystem.Filesystem/WatchDir";
    let mut stream = http::open(server.address, "POST", path, &headers, &body);
    let mut seen = Vec::new();
    let mut until = |word: &[u8]| {
        while !seen.windows(word.len()).any(|part| part == word) {
            let mut buffer = [0; 4096];
            let length = stream.read(&mut buffer).unwrap();
            assert!(
                length > 0,
                "the watch ended: {:?}",
                String::from_utf8_lossy(&seen)
            );
            seen.extend(&buffer[..length]);
        }
    };
    until(b"start");
    load.is_ready();
    while !load.is_over() {
        std::thread::sleep(Duration::from_millis(20));
    }
    server.write_file(sandbox, "/home/user/watched-file", "");
    until(b"watched-file");
}

/// An upload that is sent slowly.
pub(crate) fn upload(server: &Server, sandbox: &Sandbox, load: &Load) {
    const HALF: usize = 300_000;
    let text: String = (0..HALF / 10).map(|n| format!("{n:09}\n")).collect();
    let mut stream = TcpStream::connect(server.address).unwrap();
    let head = format!(
        "POST /files?username=root&path=/tmp/slow HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         E2b-Sandbox-Id: {}\r\nE2b-Sandbox-Port: 49983\r\nX-Access-Token: {}\r\n\
         Content-Type: application/octet-stream\r\nContent-Length: {}\r\n\r\n",
        sandbox.id,
        sandbox.token,
        2 * HALF
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut pieces = text.as_bytes().chunks(1000);
    for piece in pieces.by_ref() {
        stream.write_all(piece).unwrap();
        if piece.starts_with(b"000001000") {
            load.is_ready();
        }
        if !load.is_over() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    while !load.is_over() {
        std::thread::sleep(Duration::from_millis(20));
    }
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(server.read_file(sandbox, "/tmp/slow"), text.repeat(2));
}

const REQUEST: &[u8] = b"GET /sandboxes HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// A connection that has had one request, and is kept.
pub(crate) fn idle<S: Read + Write>(stream: S) -> BufReader<S> {
    let mut stream = BufReader::new(stream);
    assert!(!ask_again(&mut stream));
    stream
}

/// One request on a new connection, which the server may close afterwards.
pub(crate) fn ask_once<S: Read + Write>(stream: S) {
    ask_again(&mut BufReader::new(stream));
}

/// Sends a request on an open connection. Returns whether the server closes the connection after its answer.
pub(crate) fn ask_again<S: Read + Write>(stream: &mut BufReader<S>) -> bool {
    stream.get_mut().write_all(REQUEST).unwrap();
    read_answer(stream)
}

/// Requests on one connection after the other, each until the server asks to close it.
pub(crate) fn keep_alive(address: SocketAddr, load: &Load) {
    keep_alive_on(|| TcpStream::connect(address).unwrap(), load);
}

/// Like [`keep_alive`], on connections of any kind.
pub(crate) fn keep_alive_on<S: Read + Write>(connect: impl Fn() -> S, load: &Load) {
    load.is_ready();
    while !load.is_over() {
        let mut stream = BufReader::new(connect());
        loop {
            let closes = ask_again(&mut stream);
            load.answered.fetch_add(1, Ordering::Relaxed);
            if closes || load.is_over() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Reads one response with status 200. Returns whether the server closes the connection.
pub(crate) fn read_answer(stream: &mut impl BufRead) -> bool {
    let (mut length, mut closes, mut status) = (0, false, String::new());
    loop {
        let mut line = String::new();
        let read = stream.read_line(&mut line).unwrap();
        assert!(read > 0, "the connection was closed without an answer");
        let line = line.trim_end().to_ascii_lowercase();
        if status.is_empty() {
            status = line;
        } else if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.parse().unwrap();
        } else if line == "connection: close" {
            closes = true;
        } else if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    assert_eq!(
        status,
        "http/1.1 200 ok",
        "{}",
        String::from_utf8_lossy(&body)
    );
    closes
}

/// Requests over HTTP/2, several at a time. A request that a closing connection did not send is sent on the next one.
pub(crate) fn http2(address: SocketAddr, load: &Load) {
    type Empty = http_body_util::Empty<hyper::body::Bytes>;
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().unwrap();
    load.is_ready();
    runtime.block_on(async {
        while !load.is_over() {
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let io = TokioIo::new(stream);
            let made = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await;
            let (sender, connection) = made.unwrap();
            tokio::spawn(connection);
            let ask = |mut sender: hyper::client::conn::http2::SendRequest<Empty>| async move {
                let uri = format!("http://{address}/sandboxes");
                let request = hyper::Request::get(uri).body(Empty::new()).unwrap();
                match sender.try_send_request(request).await {
                    Ok(answer) => {
                        assert_eq!(answer.status(), 200);
                        load.answered.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(mut error) => {
                        assert!(error.take_message().is_some(), "{}", error.into_error());
                    }
                }
            };
            while !load.is_over() && !sender.is_closed() {
                let three = [0; 3].map(|_| ask(sender.clone()));
                let [a, b, c] = three;
                tokio::join!(a, b, c);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    });
}

/// Creates and ends sandboxes.
pub(crate) fn churn(server: &Server, load: &Load) {
    let body = json!({"templateID": "base", "timeout": 300}).to_string();
    load.is_ready();
    while !load.is_over() {
        let path = "/v2/sandboxes";
        let made = http::send(server.address, "POST", path, &JSON, body.as_bytes());
        let sandbox = Sandbox::of(&made.expect(201).json());
        server.delete(&sandbox.path("")).expect(204);
        load.answered.fetch_add(1, Ordering::Relaxed);
    }
}

/// Python program: an echo server behind an upgrade of the connection.
const ECHO: &str = r#"
import socket, threading
listener = socket.create_server(("127.0.0.1", 8000))
def serve(stream):
    head = b""
    while b"\r\n\r\n" not in head:
        head += stream.recv(4096)
    stream.sendall(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    while part := stream.recv(4096):
        stream.sendall(part)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"#;

/// Starts a program in a sandbox that accepts upgrades at port 8000.
pub(crate) fn start_echo(server: &Server, sandbox: &Sandbox) {
    server.write_file(sandbox, "/tmp/echo.py", ECHO);
    server.sh(
        sandbox,
        "setsid python3 /tmp/echo.py >/tmp/echo.log 2>&1 </dev/null &",
    );
    let listens = "grep -q ':1F40 ' /proc/net/tcp && echo yes || echo no";
    crate::process::until("the program listens", || {
        server.sh(sandbox, listens).trim() == "yes"
    });
}

/// Upgrades a connection to the program of [`start_echo`].
pub(crate) fn upgrade(
    mut stream: BufReader<TcpStream>,
    server: &Server,
    sandbox: &Sandbox,
) -> BufReader<TcpStream> {
    let request = format!(
        "GET / HTTP/1.1\r\nHost: {}\r\nE2b-Sandbox-Id: {}\r\nE2b-Sandbox-Port: 8000\r\n\
         Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        server.address, sandbox.id
    );
    stream.get_ref().set_read_timeout(Some(PATIENCE)).unwrap();
    stream.get_mut().write_all(request.as_bytes()).unwrap();
    let mut status = String::new();
    stream.read_line(&mut status).unwrap();
    assert_eq!(status, "HTTP/1.1 101 Switching Protocols\r\n");
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0);
    }
    stream
}

/// Sends lines of any length through an upgraded connection, which must come back.
pub(crate) fn echo(stream: &mut BufReader<TcpStream>) {
    for length in [1, 100_000] {
        let sent = format!("{}\n", "x".repeat(length));
        stream.get_mut().write_all(sent.as_bytes()).unwrap();
        let mut returned = String::new();
        stream.read_line(&mut returned).unwrap();
        assert!(returned == sent, "{} bytes of {length}", returned.len());
    }
}
