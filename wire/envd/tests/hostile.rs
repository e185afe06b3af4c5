//! Tests the client against agents that violate the protocol. Each agent is a thread that sends prepared data and
//! counts how many bytes the client accepted.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use envd::{AnswerLimits, ClientError, EnvdClient, ExecRequest, GUEST_TEXT_MAX, frame};

const PATIENCE: Duration = Duration::from_secs(30);
/// Upper limit of the bytes that an agent can send: the client's limit, plus what the socket buffers hold.
const SENT_MAX: u64 = AnswerLimits::CONTROL.received + (1 << 20);
/// Bytes that an agent sends if the client does not close the connection.
const FLOOD: usize = 64 << 20;

/// Connects a client with control-plane limits to an agent that reads a request, sends `answer`, and then repeats
/// `more` as long as the client reads. The thread returns the number of bytes sent.
fn meet(answer: Vec<u8>, more: Vec<u8>) -> (EnvdClient, JoinHandle<u64>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let agent = std::thread::spawn(move || {
        let mut request = [0; 4096];
        assert!(theirs.read(&mut request).unwrap() > 0);
        let mut sent = 0;
        let repeats = FLOOD.checked_div(more.len()).unwrap_or(0);
        for piece in std::iter::once(&answer).chain(std::iter::repeat_n(&more, repeats)) {
            if theirs.write_all(piece).is_err() {
                break;
            }
            sent += u64::try_from(piece.len()).unwrap();
        }
        sent
    });
    let mut client = EnvdClient::over(ours, PATIENCE);
    client.set_limits(AnswerLimits::CONTROL);
    (client, agent)
}

/// Checks that the client ends the call during the agent's flood, with an error that the client produces itself.
#[track_caller]
fn is_stopped(answer: &[u8], more: &[u8], call: impl FnOnce(&mut EnvdClient) -> ClientError) {
    let (mut client, agent) = meet(answer.to_vec(), more.to_vec());
    let error = call(&mut client);
    assert!(matches!(error, ClientError::Protocol(_)), "{error}");
    drop(client);
    let sent = agent.join().unwrap();
    assert!(sent <= SENT_MAX, "{sent} bytes were taken: {error}");
}

fn health(client: &mut EnvdClient) -> ClientError {
    client.health().unwrap_err()
}

fn exec(client: &mut EnvdClient) -> ClientError {
    let request = ExecRequest::new("/bin/true", &[]);
    client.exec(&request, PATIENCE).unwrap_err()
}

fn frames(messages: &[(u8, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (flags, message) in messages {
        frame::encode(*flags, message.as_bytes(), &mut bytes).unwrap();
    }
    bytes
}

fn whole_stream() -> Vec<u8> {
    frames(&[
        (0, r#"{"event":{"start":{"pid":7}}}"#),
        (0, r#"{"event":{"end":{"exited":true}}}"#),
        (frame::END_STREAM, "{}"),
    ])
}

const OK: &[u8] = b"HTTP/1.1 200 OK\r\n";

#[test]
fn endless_bodies_end_the_call() {
    let zeros = [0; 16 << 10];
    let announced = [OK, b"Content-Length: 10737418240\r\n\r\n"].concat();
    is_stopped(&announced, &zeros, health);
    is_stopped(&[OK, b"\r\n"].concat(), &zeros, health);
    let chunked = [OK, b"Transfer-Encoding: chunked\r\n\r\n"].concat();
    let chunk = [b"4000\r\n".as_slice(), &zeros, b"\r\n"].concat();
    is_stopped(&chunked, &chunk, health);
    // Small chunks with long extensions: little body, much framing.
    let padded = [b"1;".as_slice(), &[b'x'; 900], b"\r\n.\r\n"].concat();
    is_stopped(&chunked, &padded, health);
}

#[test]
fn endless_heads_end_the_call() {
    is_stopped(OK, b"X-More: and more\r\n", health);
    is_stopped(b"", b"HTTP/1.1 100 Continue\r\n\r\n", health);
    is_stopped(b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", health);
}

#[test]
fn endless_streams_end_the_call() {
    let head = [OK, b"\r\n"].concat();
    let start = [head, frames(&[(0, r#"{"event":{"start":{"pid":7}}}"#)])].concat();
    let output = frames(&[(0, r#"{"event":{"data":{"stdout":"YWJj"}}}"#)]);
    is_stopped(&start, &output, exec);
    let keepalive = frames(&[(0, r#"{"event":{"keepalive":{}}}"#)]);
    is_stopped(&start, &keepalive, exec);
    let long = frame::header(0, 1 << 30);
    is_stopped(&[start, long.to_vec()].concat(), &[b' '; 4096], exec);
}

#[test]
fn data_after_the_end_of_a_stream_ends_the_call() {
    let stream = whole_stream();
    let until_close = [OK, b"\r\n", &stream].concat();
    is_stopped(&until_close, &[0; 16 << 10], exec);
    let length = format!("Content-Length: {}\r\n\r\n", stream.len() + 10);
    let too_long = [OK, length.as_bytes(), &stream].concat();
    is_stopped(&too_long, b"0123456789", exec);
    let size = format!("Transfer-Encoding: chunked\r\n\r\n{:x}\r\n", stream.len());
    let chunked = [OK, size.as_bytes(), &stream, b"\r\n"].concat();
    is_stopped(&chunked, b"1\r\n.\r\n", exec);
    // A stream whose last frame is the end of the body is valid.
    let whole = [chunked, b"0\r\n\r\n".to_vec()].concat();
    let (mut client, _agent) = meet(whole, Vec::new());
    let done = client.exec(&ExecRequest::new("/bin/true", &[]), PATIENCE);
    assert!(done.unwrap().exited);
    client.into_stream().unwrap();
}

#[test]
fn an_answer_with_an_ambiguous_length_is_refused() {
    for fields in [
        "Content-Length: 1\r\nContent-Length: 2",
        "Content-Length: 1\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip",
        "Content-Length: +1",
        "Content-Length: 1, 1",
        "Content-Length: 99999999999999999999999",
    ] {
        is_stopped(&[OK, fields.as_bytes(), b"\r\n\r\n"].concat(), b"1", health);
    }
}

#[test]
fn a_slow_answer_ends_at_the_deadline() {
    const BOUND: Duration = Duration::from_millis(300);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let agent = std::thread::spawn(move || {
        theirs.write_all(b"HTTP/1.1 200 OK\r\nX: ").unwrap();
        while theirs.write_all(b"y").is_ok() {
            std::thread::park_timeout(Duration::from_millis(20));
        }
    });
    let begun = Instant::now();
    let mut client = EnvdClient::over(ours, BOUND);
    let error = client.raw(b"GET / HTTP/1.1\r\n\r\n").unwrap_err();
    assert!(matches!(error, ClientError::Timeout(_)), "{error}");
    assert!(begun.elapsed() < PATIENCE);
    drop(client);
    agent.join().unwrap();
}

#[test]
fn text_of_an_agent_is_sanitized() {
    let message = format!("\\n2026-01-01 ERROR forged\\u001b[2J{}", "x".repeat(40_000));
    let plain = format!(r#"{{"code":500,"message":"{message}"}}"#);
    let rpc = format!(r#"{{"code":"internal","message":"{message}"}}"#);
    for body in [plain, rpc] {
        let length = format!("HTTP/1.1 500 No\r\nContent-Length: {}\r\n\r\n", body.len());
        let (mut client, _agent) = meet([length.as_bytes(), body.as_bytes()].concat(), Vec::new());
        let error = client.health().unwrap_err();
        let ClientError::Refused { message, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(message.chars().count(), GUEST_TEXT_MAX);
        assert!(
            message.starts_with("\\n2026-01-01 ERROR forged\\u{1b}[2J"),
            "{message}"
        );
        assert!(!error.to_string().contains(char::is_control));
    }
    // Quotes in error messages of the JSON parser are sanitized too.
    let nonsense = format!("[\"\u{1b}[2J{}\"]", "x".repeat(4000));
    let length = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
        nonsense.len()
    );
    let (mut client, _agent) = meet([length, nonsense].concat().into_bytes(), Vec::new());
    let error = client.metrics().unwrap_err().to_string();
    assert!(
        error.len() < 2 * GUEST_TEXT_MAX && !error.contains(char::is_control),
        "{error}"
    );
}
