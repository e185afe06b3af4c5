//! A stand-in for `cube-vmm` and the guest agent, for tests of complete runs. It implements the control protocol on
//! standard input and one command of the agent, and runs no guest.
#![expect(
    clippy::unwrap_used,
    reason = "part of the tests: a broken stand-in should stop them"
)]

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
};

use envd::frame as envd_frame;
use model::{StartPhase, Timeline};
use vmm_control::{
    Call, Failure, FailureKind, Reply, Request,
    files::{FileRole, Files},
    frame,
};

/// File of the template that contains the output of all commands, in base64.
const SAYS: &str = model::template_file::STATE;

fn main() {
    let control = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut timeline = Timeline::default();
    timeline.stamp(StartPhase::ProcessStarted, harness::clock::monotonic_ns());
    while let Ok((Call { request, files }, fds)) = frame::receive::<Call>(&control) {
        let mut files = Files::received(&files, fds).unwrap();
        let answer: Result<Reply, Failure> = match request {
            Request::Restore { spec, .. } => match std::fs::read(spec.template.join(SAYS)) {
                Ok(says) => {
                    let socket = files.take(FileRole::Vsock).unwrap();
                    let listener = UnixListener::from(socket);
                    std::thread::spawn(move || agent(&listener, &says));
                    timeline.stamp(StartPhase::MemoryMapped, harness::clock::monotonic_ns());
                    Ok(Reply::Started(timeline.clone()))
                }
                Err(e) => Err(Failure {
                    kind: FailureKind::BadSnapshot,
                    message: e.to_string(),
                }),
            },
            Request::Resume => {
                timeline.stamp(StartPhase::Resumed, harness::clock::monotonic_ns());
                Ok(Reply::Done)
            }
            Request::Identity { identity, .. } => {
                assert_eq!(identity.machine_id.len(), 32);
                timeline.stamp(StartPhase::AgentReady, harness::clock::monotonic_ns());
                Ok(Reply::Started(timeline.clone()))
            }
            other => Err(Failure {
                kind: FailureKind::BadSpec,
                message: format!("the stand-in has no {other:?}"),
            }),
        };
        frame::send(&control, &answer, &[]).unwrap();
    }
}

fn agent(listener: &UnixListener, says: &[u8]) {
    for stream in listener.incoming() {
        let says = says.to_owned();
        std::thread::spawn(move || answer(stream.unwrap(), &says));
    }
}

fn answer(stream: UnixStream, says: &[u8]) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut writer = stream;
    let mut line = String::new();
    reader.read_line(&mut line)?;
    writer.write_all(b"OK 1\n")?;
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    std::io::copy(&mut reader.take(length), &mut std::io::sink())?;
    let says = String::from_utf8_lossy(says);
    let mut body = Vec::new();
    for (flags, message) in [
        (0, r#"{"event":{"start":{"pid":7}}}"#.to_owned()),
        (
            0,
            format!(r#"{{"event":{{"data":{{"stdout":"{says}"}}}}}}"#),
        ),
        (
            0,
            r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#.to_owned(),
        ),
        (envd_frame::END_STREAM, "{}".to_owned()),
    ] {
        envd_frame::encode(flags, message.as_bytes(), &mut body).unwrap();
    }
    write!(
        writer,
        "HTTP/1.1 200 OK\r\ncontent-type: application/connect+json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )?;
    writer.write_all(&body)
}
