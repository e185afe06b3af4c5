//! Calls with binary messages.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agent;

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use agent::{Agent, PATIENCE};
use envd::{EntryInfo, EventResponse, ListDirResponse, frame, proto};

const UNARY: (&str, &str) = ("content-type", "application/proto");
const STREAM: (&str, &str) = ("content-type", "application/connect+proto");

fn request(path: &str, json: &str) -> Vec<u8> {
    let method = proto::method(path).unwrap();
    method.request.from_json(json.as_bytes()).unwrap()
}

fn answer(path: &str, bytes: &[u8]) -> String {
    let method = proto::method(path).unwrap();
    String::from_utf8(method.response.to_json(bytes).unwrap()).unwrap()
}

/// Makes a unary call. Returns the status, and the message as JSON or the error's text.
fn call(agent: &Agent, path: &str, json: &str) -> (u16, String) {
    let mut client = agent.client();
    let body = request(path, json);
    let got = client.request("POST", path, &[UNARY], &body).unwrap();
    // The connection stays usable, in either codec.
    client.health().unwrap();
    match got.header("content-type") {
        Some("application/proto") => (got.status, answer(path, &got.body)),
        Some("application/json") => (got.status, String::from_utf8(got.body).unwrap()),
        other => panic!("{other:?}"),
    }
}

/// The messages of a stream as JSON, and its last frame.
fn frames(path: &str, mut body: &[u8]) -> (Vec<String>, String) {
    let mut messages = Vec::new();
    while let Some((frame, used)) = frame::decode(body, 1 << 20).unwrap() {
        if frame.flags == frame::END_STREAM {
            return (messages, String::from_utf8(frame.body.to_vec()).unwrap());
        }
        messages.push(answer(path, frame.body));
        body = &body[used..];
    }
    panic!("no end in {messages:?}");
}

fn framed(message: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    frame::encode(0, message, &mut body).unwrap();
    body
}

const START: &str = "/process.Process/Start";

#[test]
fn a_command_runs() {
    let agent = Agent::start();
    let mut client = agent.client();
    let json = r#"{"process":{"cmd":"sh","args":["-c","echo $A; echo err >&2; exit 3"],
                   "envs":{"A":"b"},"cwd":"/"},"stdin":false}"#;
    for _ in 0..2 {
        let body = framed(&request(START, json));
        let got = client.request("POST", START, &[STREAM], &body).unwrap();
        assert_eq!(got.status, 200);
        assert_eq!(
            got.header("content-type"),
            Some("application/connect+proto")
        );
        let (messages, end) = frames(START, &got.body);
        assert_eq!(end, "{}");
        let (mut stdout, mut stderr, mut last) = (Vec::new(), Vec::new(), None);
        for (place, message) in messages.iter().enumerate() {
            let event: EventResponse = serde_json::from_str(message).unwrap();
            assert_eq!(event.event.start.is_some(), place == 0, "{message}");
            let data = event.event.data.unwrap_or_default();
            stdout.extend(data.stdout.unwrap_or_default().0);
            stderr.extend(data.stderr.unwrap_or_default().0);
            last = event.event.end;
        }
        assert_eq!((stdout, stderr), (b"b\n".to_vec(), b"err\n".to_vec()));
        let last = last.unwrap();
        assert_eq!((last.exit_code, last.exited), (3, true));
    }
    // JSON works on the same connection.
    assert_eq!(
        client
            .exec(&agent::sh("exit 2"), PATIENCE)
            .unwrap()
            .exit_code,
        2
    );
}

#[test]
fn calls_are_answered_in_their_codec_and_errors_as_json() {
    let agent = Agent::start();
    let mut starter = agent.client();
    let mut waiting = agent::sh("read x; echo $x");
    waiting.stdin = Some(true);
    waiting.tag = Some("t".into());
    let mut stream = starter.start(&waiting, PATIENCE).unwrap();
    let pid = stream.pid();
    let (status, text) = call(&agent, "/process.Process/List", "{}");
    assert_eq!(status, 200);
    assert!(text.contains(&format!(r#""pid":{pid}"#)), "{text}");
    assert!(
        text.contains(r#""args":["-c","read x; echo $x"]"#),
        "{text}"
    );
    // Answered once the process has taken the input.
    let input = r#"{"process":{"tag":"t"},"input":{"stdin":"aGkK"}}"#;
    let sent = call(&agent, "/process.Process/SendInput", input);
    assert_eq!(sent, (200, "{}".to_owned()));
    while stream.next_event().unwrap().is_some() {}
    let signal = r#"{"process":{"tag":"t"},"signal":"SIGNAL_SIGKILL"}"#;
    let (status, text) = call(&agent, "/process.Process/SendSignal", signal);
    assert_eq!(status, 404);
    assert!(text.starts_with(r#"{"code":"not_found""#), "{text}");
    let (status, text) = call(&agent, "/filesystem.Filesystem/Stat", r#"{"path":"/etc"}"#);
    assert_eq!(status, 200);
    assert!(text.contains(r#""type":"FILE_TYPE_DIRECTORY""#), "{text}");
    let json = r#"{"path":"/etc","depth":1}"#;
    let (_, text) = call(&agent, "/filesystem.Filesystem/ListDir", json);
    let list: ListDirResponse = serde_json::from_str(&text).unwrap();
    let is_passwd = |entry: &EntryInfo| entry.name == "passwd" && entry.size > 0;
    assert!(list.entries.iter().any(is_passwd), "{text}");
}

#[test]
fn streams_of_input_are_read() {
    let agent = Agent::start();
    let mut starter = agent.client();
    let mut waiting = agent::sh("read x; echo $x");
    waiting.stdin = Some(true);
    let mut stream = starter.start(&waiting, PATIENCE).unwrap();
    let path = "/process.Process/StreamInput";
    let pid = stream.pid();
    let start = format!(r#"{{"start":{{"process":{{"pid":{pid}}}}}}}"#);
    let parts = [
        start.as_str(),
        r#"{"keepalive":{}}"#,
        r#"{"data":{"input":{"stdin":"aGkK"}}}"#,
    ];
    let body: Vec<u8> = parts
        .iter()
        .flat_map(|p| framed(&request(path, p)))
        .collect();
    let got = agent
        .client()
        .request("POST", path, &[STREAM], &body)
        .unwrap();
    let (messages, end) = frames(path, &got.body);
    assert_eq!((messages, end.as_str()), (vec!["{}".to_owned()], "{}"));
    let data = stream.next_event().unwrap().unwrap().data.unwrap();
    assert_eq!(data.stdout.unwrap().0, b"hi\n");
}

#[test]
fn malformed_messages_are_refused() {
    let agent = Agent::start();
    let mut client = agent.client();
    let path = "/process.Process/SendSignal";
    let got = client.request("POST", path, &[UNARY], b"\x0a\x7f").unwrap();
    assert_eq!(got.status, 400);
    assert_eq!(got.header("content-type"), Some("application/json"));
    assert!(got.body.starts_with(br#"{"code":"invalid_argument""#));
    let body = framed(b"\x0a\x7f");
    let got = client.request("POST", START, &[STREAM], &body).unwrap();
    let (messages, end) = frames(START, &got.body);
    assert!(messages.is_empty());
    assert!(end.contains(r#""code":"invalid_argument""#), "{end}");
    // Unknown calls, and content types of the other kind of call.
    let unknown = "/process.Process/Nothing";
    let got = client.request("POST", unknown, &[UNARY], b"").unwrap();
    assert_eq!(got.status, 501);
    let got = client.request("POST", unknown, &[STREAM], b"").unwrap();
    assert_eq!(
        (got.status, got.header("content-type")),
        (200, Some("application/connect+proto"))
    );
    let got = client.request("POST", START, &[UNARY], b"").unwrap();
    assert_eq!(got.status, 415);
    let got = client.request("POST", path, &[STREAM], b"").unwrap();
    assert_eq!(got.status, 415);
}

#[test]
fn keepalives_use_the_codec_of_the_call() {
    let agent = Agent::start();
    let mut stream = UnixStream::connect(&agent.socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let json = r#"{"process":{"cmd":"sleep","args":["1000"]},"stdin":false}"#;
    let body = framed(&request(START, json));
    let head = format!(
        "POST {START} HTTP/1.1\r\ncontent-type: application/connect+proto\r\n\
         keepalive-ping-interval: 1\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream
        .write_all(&[head.as_bytes(), &body].concat())
        .unwrap();
    let mut seen = Vec::new();
    // A chunk of nine bytes: a frame around { event: { keepalive: {} } }.
    let wanted = b"9\r\n\0\0\0\0\x04\x0a\x02\x22\x00\r\n";
    agent::until("a keepalive", || {
        let mut bytes = [0; 4096];
        let n = stream.read(&mut bytes).unwrap();
        seen.extend_from_slice(&bytes[..n]);
        seen.windows(wanted.len())
            .any(|w| w == wanted)
            .then_some(())
    });
}
