//! Watching directories: `WatchDir`, and `CreateWatcher` with `GetWatcherEvents`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agent;

use std::{
    fs,
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    time::Duration,
};

use EventType::{Chmod, Create, Remove, Rename, Write as Written};
use agent::{Agent, PATIENCE, refusal, sh, until};
use envd::{
    ChunkedDecoder, ClientError, CreateWatcherResponse, Decoded, Empty, EndStream, EnvdClient,
    EventType, FilesystemEvent, GetWatcherEventsResponse, WatchDirRequest, WatchDirResponse,
    WatcherRequest, frame,
};

fn request(path: &str) -> WatchDirRequest {
    WatchDirRequest {
        path: path.into(),
        ..WatchDirRequest::default()
    }
}

fn create(client: &mut EnvdClient, request: &WatchDirRequest) -> Result<String, ClientError> {
    let answer: CreateWatcherResponse =
        client.call("filesystem.Filesystem/CreateWatcher", request)?;
    Ok(answer.watcher_id)
}

fn events(client: &mut EnvdClient, id: &str) -> Result<Vec<FilesystemEvent>, ClientError> {
    let watcher_id = id.to_owned();
    let request = WatcherRequest { watcher_id };
    let answer: GetWatcherEventsResponse =
        client.call("filesystem.Filesystem/GetWatcherEvents", &request)?;
    Ok(answer.events)
}

fn remove(client: &mut EnvdClient, id: &str) -> Result<Empty, ClientError> {
    let watcher_id = id.to_owned();
    let request = WatcherRequest { watcher_id };
    client.call("filesystem.Filesystem/RemoveWatcher", &request)
}

fn told(events: &[FilesystemEvent]) -> Vec<(&str, EventType)> {
    events.iter().map(|e| (e.name.as_str(), e.kind)).collect()
}

/// A `WatchDir` call as it comes over the wire.
struct Stream {
    socket: UnixStream,
    /// Received bytes that are not yet decoded.
    raw: Vec<u8>,
    decoder: ChunkedDecoder,
    /// Decoded bytes of messages.
    body: Vec<u8>,
}

#[derive(Debug, PartialEq)]
enum Message {
    Event(Box<WatchDirResponse>),
    End(EndStream),
}

impl Stream {
    fn open(agent: &Agent, request: &WatchDirRequest, headers: &str) -> Self {
        let mut socket = UnixStream::connect(&agent.socket).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let json = serde_json::to_vec(request).unwrap();
        let mut body = Vec::new();
        frame::encode(0, &json, &mut body).unwrap();
        let head = format!(
            "POST /filesystem.Filesystem/WatchDir HTTP/1.1\r\n{headers}\
             content-type: application/connect+json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        socket
            .write_all(&[head.as_bytes(), &body].concat())
            .unwrap();
        let mut stream = Self {
            socket,
            raw: Vec::new(),
            decoder: ChunkedDecoder::default(),
            body: Vec::new(),
        };
        let end = loop {
            let end = stream.raw.windows(4).position(|w| w == b"\r\n\r\n");
            match end {
                Some(end) => break end + 4,
                None => stream.receive(),
            }
        };
        let head = String::from_utf8(stream.raw.drain(..end).collect()).unwrap();
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(
            head.contains("\r\ncontent-type: application/connect+json\r\n"),
            "{head}"
        );
        stream
    }

    /// Starts a call and reads its first message.
    fn start(agent: &Agent, request: &WatchDirRequest) -> Self {
        let mut stream = Self::open(agent, request, "");
        let start = Some(Empty {});
        let wanted = WatchDirResponse {
            start,
            ..WatchDirResponse::default()
        };
        assert_eq!(stream.next(), Message::Event(Box::new(wanted)));
        stream
    }

    fn receive(&mut self) {
        let mut bytes = [0; 65_536];
        let n = self.socket.read(&mut bytes).unwrap();
        assert!(n > 0, "the connection ended");
        self.raw.extend_from_slice(&bytes[..n]);
    }

    fn next(&mut self) -> Message {
        loop {
            if let Some((frame, used)) = frame::decode(&self.body, u32::MAX).unwrap() {
                let message = match frame.flags {
                    0 => Message::Event(Box::new(serde_json::from_slice(frame.body).unwrap())),
                    _ => Message::End(serde_json::from_slice(frame.body).unwrap()),
                };
                self.body.drain(..used);
                return message;
            }
            let mut input = self.raw.as_slice();
            let decoded = match self.decoder.step(&mut input).unwrap() {
                Decoded::Data(data) => Some(data.to_vec()),
                Decoded::End => panic!("the stream ended without saying so"),
                Decoded::More => None,
            };
            let used = self.raw.len() - input.len();
            self.raw.drain(..used);
            match decoded {
                Some(data) => self.body.extend(data),
                None => self.receive(),
            }
        }
    }

    fn event(&mut self) -> FilesystemEvent {
        match self.next() {
            Message::Event(message) => message.filesystem.expect("a change"),
            Message::End(end) => panic!("the stream ended: {end:?}"),
        }
    }

    /// Reads changes up to the first one of that name and kind.
    fn until(&mut self, name: &str, kind: EventType) -> Vec<FilesystemEvent> {
        let mut seen = Vec::new();
        loop {
            seen.push(self.event());
            let last = seen.last().unwrap();
            if last.name == name && last.kind == kind {
                return seen;
            }
        }
    }

    fn end(&mut self) -> EndStream {
        loop {
            if let Message::End(end) = self.next() {
                return end;
            }
        }
    }
}

fn inotify_instances(agent: &Agent) -> usize {
    let fds = fs::read_dir(format!("/proc/{}/fd", agent.child.id())).unwrap();
    let targets = fds.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    let inotify = targets.filter(|target| target.to_string_lossy().contains("inotify"));
    inotify.count()
}

#[test]
fn a_new_file_has_events_for_create_chown_and_write() {
    let agent = Agent::start();
    let mut client = agent.client();
    let dir = agent.path("watched");
    fs::create_dir(&dir).unwrap();
    let id = create(&mut client, &request(&dir)).unwrap();
    let mut stream = Stream::start(&agent, &request(&dir));
    assert_eq!(events(&mut client, &id).unwrap(), []);
    let file = format!("{dir}/f");
    // Larger than one read.
    client
        .write_file(&file, &vec![b'x'; 1 << 20], None)
        .unwrap();
    let wanted = [("f", Create), ("f", Chmod), ("f", Written)];
    let mut seen = events(&mut client, &id).unwrap();
    // Writes that are read one by one are reported one by one.
    seen.dedup();
    assert_eq!(told(&seen), wanted);
    assert_eq!(
        told(&[stream.event(), stream.event(), stream.event()]),
        wanted
    );
    // Small files have exactly these events.
    let small = format!("{dir}/g");
    client.write_file(&small, b"x", None).unwrap();
    let wanted = [("g", Create), ("g", Chmod), ("g", Written)];
    assert_eq!(told(&events(&mut client, &id).unwrap()), wanted);
    client.write_file(&small, b"y", None).unwrap();
    let wanted = [("g", Chmod), ("g", Written)];
    assert_eq!(told(&events(&mut client, &id).unwrap()), wanted);
    // Fetched events are not repeated.
    assert_eq!(events(&mut client, &id).unwrap(), []);
    fs::rename(&file, format!("{dir}/h")).unwrap();
    fs::remove_file(format!("{dir}/h")).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).unwrap();
    let wanted = [("f", Rename), ("h", Create), ("h", Remove), (".", Chmod)];
    assert_eq!(told(&events(&mut client, &id).unwrap()), wanted);
    let seen = stream.until(".", Chmod);
    assert_eq!(told(&seen[seen.len() - 4..]), wanted);
    // The connection of a unary call can be used again; that of the stream cannot.
    client.health().unwrap();
}

#[test]
fn new_directories_of_a_tree_are_watched() {
    let agent = Agent::start();
    let mut client = agent.client();
    let dir = agent.path("watched");
    fs::create_dir_all(format!("{dir}/old/deep")).unwrap();
    let recursive = WatchDirRequest {
        recursive: true,
        ..request(&dir)
    };
    let id = create(&mut client, &recursive).unwrap();
    let flat = create(&mut client, &request(&dir)).unwrap();
    let mut stream = Stream::start(&agent, &recursive);
    fs::write(format!("{dir}/old/deep/f"), "").unwrap();
    fs::create_dir_all(format!("{dir}/new/deep")).unwrap();
    let seen = stream.until("new/deep", Create);
    let wanted = [
        ("old/deep/f", Create),
        ("new", Create),
        ("new/deep", Create),
    ];
    assert_eq!(told(&seen), wanted);
    // Both watch the new directories by now: further changes are reported as they happen.
    assert_eq!(told(&events(&mut client, &id).unwrap()), wanted);
    fs::write(format!("{dir}/new/deep/f"), "x").unwrap();
    let wanted = [("new/deep/f", Create), ("new/deep/f", Written)];
    assert_eq!(told(&stream.until("new/deep/f", Written)), wanted);
    assert_eq!(told(&events(&mut client, &id).unwrap()), wanted);
    assert_eq!(
        told(&events(&mut client, &flat).unwrap()),
        [("new", Create)]
    );
}

#[test]
fn events_describe_entries_on_request() {
    let agent = Agent::start();
    let mut client = agent.client();
    let dir = agent.path("watched");
    fs::create_dir(&dir).unwrap();
    let detailed = WatchDirRequest {
        include_entry: true,
        ..request(&dir)
    };
    let id = create(&mut client, &detailed).unwrap();
    let file = format!("{dir}/f");
    let headers = [
        ("content-type", "application/octet-stream"),
        ("x-metadata-k", "v"),
    ];
    let target = format!("/files?path={file}");
    let written = client.request("POST", &target, &headers, b"hello").unwrap();
    let has_metadata = String::from_utf8_lossy(&written.body).contains("metadata");
    let seen = events(&mut client, &id).unwrap();
    for event in &seen {
        let entry = event.entry.as_ref().unwrap();
        assert_eq!(
            (entry.name.as_str(), entry.path.as_str()),
            ("f", file.as_str())
        );
    }
    let entry = seen.last().unwrap().entry.as_ref().unwrap();
    assert_eq!(
        (entry.size, entry.metadata.len()),
        (5, usize::from(has_metadata))
    );
    // Another entry with that name is not the removed one.
    fs::remove_file(&file).unwrap();
    fs::write(&file, "other").unwrap();
    let seen = events(&mut client, &id).unwrap();
    let removed = seen.iter().find(|e| e.kind == Remove).unwrap();
    assert_eq!(removed.entry, None);
    assert!(seen.iter().any(|e| e.kind == Create && e.entry.is_some()));
    // Removed before it was examined.
    fs::write(format!("{dir}/brief"), "").unwrap();
    fs::remove_file(format!("{dir}/brief")).unwrap();
    let seen = events(&mut client, &id).unwrap();
    assert!(told(&seen).contains(&("brief", Create)));
}

#[test]
fn unwatchable_paths_are_refused() {
    let agent = Agent::start();
    let mut client = agent.client();
    let file = agent.path("f");
    fs::write(&file, "").unwrap();
    let none = agent.path("none");
    for (path, status, code) in [
        (none.as_str(), 404, "not_found"),
        (file.as_str(), 400, "invalid_argument"),
        ("~x", 400, "invalid_argument"),
    ] {
        let refused = refusal(create(&mut client, &request(path)).unwrap_err());
        assert_eq!((refused.0, refused.1.as_str()), (status, code), "{path}");
        let mut stream = Stream::open(&agent, &request(path), "");
        let error = stream.end().error.unwrap();
        let error = serde_json::to_string(&error.code).unwrap();
        assert_eq!(error.trim_matches('"'), code, "{path}");
    }
    for id in ["", "w1"] {
        let (status, code, message) = refusal(events(&mut client, id).unwrap_err());
        assert_eq!((status, code.as_str()), (404, "not_found"));
        assert_eq!(message, format!("watcher with id {id} not found"));
        assert_eq!(refusal(remove(&mut client, id).unwrap_err()).1, "not_found");
    }
    assert_eq!(inotify_instances(&agent), 0);
}

#[test]
fn watchers_end_without_leftovers() {
    let agent = Agent::start();
    let mut client = agent.client();
    let dir = agent.path("watched");
    fs::create_dir(&dir).unwrap();
    let id = create(&mut client, &request(&dir)).unwrap();
    let stream = Stream::start(&agent, &request(&dir));
    assert_eq!(inotify_instances(&agent), 2);
    remove(&mut client, &id).unwrap();
    assert_eq!(
        refusal(events(&mut client, &id).unwrap_err()).1,
        "not_found"
    );
    drop(stream);
    until("the end of the stream's watcher", || {
        (inotify_instances(&agent) == 0).then_some(())
    });
    // A deadline ends the stream; the connection stays open.
    let soon = "connect-timeout-ms: 100\r\n";
    let mut stream = Stream::open(&agent, &request(&dir), soon);
    let error = stream.end().error.unwrap();
    assert_eq!(error.code, envd::ConnectCode::DeadlineExceeded);
    assert_eq!(inotify_instances(&agent), 0);
    let health = b"GET /health HTTP/1.1\r\n\r\n";
    stream.socket.write_all(health).unwrap();
    until("an answer", || {
        let mut bytes = [0; 1024];
        let n = stream.socket.read(&mut bytes).unwrap();
        stream.raw.extend_from_slice(&bytes[..n]);
        String::from_utf8_lossy(&stream.raw)
            .contains("204 No Content")
            .then_some(())
    });
    // Removing the directory is reported; its watcher stays until it is removed too.
    let id = create(&mut client, &request(&dir)).unwrap();
    fs::remove_dir(&dir).unwrap();
    assert_eq!(told(&events(&mut client, &id).unwrap()), [(".", Remove)]);
    fs::create_dir(&dir).unwrap();
    assert_eq!(events(&mut client, &id).unwrap(), []);
    remove(&mut client, &id).unwrap();
}

#[test]
fn the_number_of_watchers_is_limited() {
    let agent = Agent::start();
    let mut client = agent.client();
    let dir = agent.path("watched");
    fs::create_dir(&dir).unwrap();
    let ids: Vec<String> = (0..64)
        .map(|_| create(&mut client, &request(&dir)).unwrap())
        .collect();
    let refused = refusal(create(&mut client, &request(&dir)).unwrap_err());
    assert_eq!((refused.0, refused.1.as_str()), (429, "resource_exhausted"));
    remove(&mut client, &ids[7]).unwrap();
    let id = create(&mut client, &request(&dir)).unwrap();
    fs::write(format!("{dir}/f"), "").unwrap();
    for id in [&ids[0], &ids[63], &id] {
        assert_eq!(told(&events(&mut client, id).unwrap()), [("f", Create)]);
    }
}

#[test]
fn keepalives_are_sent_without_changes() {
    let agent = Agent::start();
    let dir = agent.path("watched");
    fs::create_dir(&dir).unwrap();
    let mut stream = Stream::open(&agent, &request(&dir), "keepalive-ping-interval: 1\r\n");
    stream.next();
    let keepalive = Some(Empty {});
    let wanted = WatchDirResponse {
        keepalive,
        ..WatchDirResponse::default()
    };
    assert_eq!(stream.next(), Message::Event(Box::new(wanted)));
}

#[test]
fn a_slow_reader_loses_no_changes_silently() {
    let agent = Agent::start();
    let dir = agent.path("watched");
    fs::create_dir(&dir).unwrap();
    let mut stream = Stream::start(&agent, &request(&dir));
    // Without a reader, changes beyond the connection wait in the kernel.
    let some = 8000;
    for n in 0..some {
        fs::write(format!("{dir}/{n}-{}", "n".repeat(200)), "").unwrap();
    }
    for n in 0..some {
        let event = stream.event();
        assert_eq!(event.kind, Create);
        assert!(event.name.starts_with(&format!("{n}-")), "{}", event.name);
    }
    assert!(agent.peak_kib() < 16 << 10, "{} KiB", agent.peak_kib());
    // Beyond the queue of the kernel, the stream ends with an error instead of a gap.
    let output = agent.client().exec(
        &sh(&format!(
            "cd {dir}; i=0; while [ $i -lt 60000 ]; do echo > a$i; i=$((i+1)); done"
        )),
        Duration::from_secs(120),
    );
    assert_eq!(output.unwrap().exit_code, 0);
    let error = stream.end().error.unwrap();
    assert_eq!(error.code, envd::ConnectCode::DataLoss);
    assert_eq!(inotify_instances(&agent), 0);
}

#[test]
fn a_forgotten_watcher_fails_instead_of_filling_memory() {
    let agent = Agent::start();
    let mut client = agent.client();
    let dir = agent.path("watched");
    fs::create_dir(&dir).unwrap();
    let id = create(&mut client, &request(&dir)).unwrap();
    let script = format!("cd {dir}; i=0; while [ $i -lt 60000 ]; do echo > a$i; i=$((i+1)); done");
    let output = client.exec(&sh(&script), Duration::from_secs(120)).unwrap();
    assert_eq!(output.exit_code, 0);
    let (status, code, _) = refusal(events(&mut client, &id).unwrap_err());
    assert_eq!((status, code.as_str()), (500, "data_loss"));
    assert_eq!(inotify_instances(&agent), 0);
    assert!(agent.peak_kib() < 24 << 10, "{} KiB", agent.peak_kib());
    remove(&mut client, &id).unwrap();
}
