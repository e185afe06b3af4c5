//! `cube-bench quick` against a stand-in of a server with E2B's API.
#![expect(
    clippy::unwrap_used,
    reason = "a stand-in that cannot be started should stop the test"
)]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::{Command, Output},
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use harness::{record, report::document::Document};

/// Every other sandbox comes from a warm slot.
static CREATED: AtomicU32 = AtomicU32::new(0);

/// Messages of a command that prints `ok`, in Connect's framing: flags, length, JSON.
fn output() -> Vec<u8> {
    let messages = [
        (0, r#"{"event":{"start":{"pid":7}}}"#),
        (0, r#"{"event":{"data":{"stdout":"b2sK"}}}"#),
        (
            0,
            r#"{"event":{"end":{"exitCode":0,"exited":true,"status":"exit status 0"}}}"#,
        ),
        (2, "{}"),
    ];
    let frame = |(flags, text): (u8, &str)| {
        let length = u32::try_from(text.len()).unwrap().to_be_bytes();
        [&[flags], &length[..], text.as_bytes()].concat()
    };
    messages.map(frame).concat()
}

/// Status, header and body of an answer.
fn answer(head: &str, body: &str) -> (&'static str, &'static str, Vec<u8>) {
    let created =
        br#"{"sandboxID":"i1","templateID":"base","clientID":"c","envdVersion":"0.6.13"}"#;
    let line = head.lines().next().unwrap_or_default();
    if line.starts_with("POST /v2/sandboxes ") {
        if !body.contains("\"base\"") {
            return ("404 Not Found", "", b"no such template".to_vec());
        }
        let origin = match CREATED.fetch_add(1, Ordering::Relaxed) % 2 {
            0 => "x-cube-start: warm\r\n",
            _ => "x-cube-start: restored\r\n",
        };
        return ("201 Created", origin, created.to_vec());
    }
    if line.starts_with("POST /process.Process/Start ") {
        return (
            "200 OK",
            "content-type: application/connect+json\r\n",
            output(),
        );
    }
    if line.starts_with("DELETE ") {
        return ("204 No Content", "", Vec::new());
    }
    ("200 OK", "server: stand-in/1\r\n", Vec::new())
}

fn serve(stream: TcpStream) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head)? == 0 {
                return Ok(());
            }
        }
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
        reader.read_exact(&mut body)?;
        let (status, header, body) = answer(&head, &String::from_utf8_lossy(&body));
        let length = body.len();
        let head = format!("HTTP/1.1 {status}\r\n{header}content-length: {length}\r\n\r\n");
        reader
            .get_mut()
            .write_all(&[head.as_bytes(), &body].concat())?;
    }
}

fn quick(url: &str, dir: &std::path::Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_cube-bench"))
        .env("E2B_API_KEY", "e2b_0000")
        .args(["quick", url, "--set", "rounds=4", "--results"])
        .arg(dir.join("results"))
        .arg("--run-root")
        .arg(dir.join("run"))
        .output()
        .unwrap()
}

#[test]
fn the_table_has_a_cell_for_each_origin_and_says_what_was_not_measured() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || serve(stream));
        }
    });
    let stage = tempfile::Builder::new()
        .prefix("hq")
        .tempdir_in("/tmp")
        .unwrap();
    let output = quick(&url, stage.path());
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}{errors}");
    let row = |name: &str| {
        text.lines()
            .find(|line| line.trim().starts_with(name))
            .unwrap()
    };
    // 24 measured starts, half of each origin: enough for P50, and too few for P95.
    for name in ["create answered", "+ echo"] {
        assert_eq!(row(name).matches("/ n/a (12)").count(), 2, "{text}");
    }
    assert!(text.contains("no such template"), "{text}");
    assert!(text.contains(&format!("round trip to {url}: ")), "{text}");
    let dir = stage.path().join("results/quick-probe");
    assert!(record::read_record(&dir).unwrap().chain.is_some());
    let report = std::fs::read(dir.join("report.json")).unwrap();
    let d: Document = serde_json::from_slice(&report).unwrap();
    assert_eq!(d.target.unwrap().software.as_deref(), Some("stand-in/1"));
    assert!(!d.host.binaries.contains_key("cube-vmm"));
}

#[test]
fn an_endpoint_that_does_not_respond_is_unreachable() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let stage = tempfile::Builder::new()
        .prefix("hq")
        .tempdir_in("/tmp")
        .unwrap();
    let output = quick(&url, stage.path());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{errors}");
    assert!(errors.contains(&format!("no response to GET {url}/health: ")));
}
