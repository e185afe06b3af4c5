//! The agent as a separate process, driven by the real client over a unix socket.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agent;

use std::{
    fs,
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    process::Command,
    time::{Duration, Instant},
};

use agent::{Agent, PATIENCE, by_pid, init, is_alive, is_root, refusal, sh, until};
use envd::{
    Blob, CloseStdinRequest, ConnectRequest, Empty, ExecRequest, InitRequest, ListResponse,
    ProcessInput, ProcessSelector, SendInputRequest, SendSignalRequest, Signal,
};

#[test]
fn nothing_but_health_and_init_is_answered_before_init() {
    let agent = Agent::raw();
    let mut client = agent.client();
    client.health().unwrap();
    let refused = client.call::<_, ListResponse>("process.Process/List", &Empty {});
    assert_eq!(refusal(refused.unwrap_err()).0, 503);
    let refused = client.exec(&sh("true"), PATIENCE);
    assert_eq!(refusal(refused.unwrap_err()).0, 503);
    let mut client = agent.client();
    client.init(&InitRequest::default()).unwrap();
    let list: ListResponse = client.call("process.Process/List", &Empty {}).unwrap();
    assert_eq!(list.processes, []);
}

#[test]
fn a_bad_identity_is_refused() {
    let agent = Agent::raw();
    let mut client = agent.client();
    let bad = InitRequest {
        machine_id: Some("x".into()),
        ..InitRequest::default()
    };
    assert_eq!(refusal(client.init(&bad).unwrap_err()).0, 400);
    let answer = client.request("POST", "/init", &[], b"{nonsense").unwrap();
    assert_eq!(answer.status, 400);
    let refused = client.exec(&sh("true"), PATIENCE);
    assert_eq!(refusal(refused.unwrap_err()).0, 503);
}

#[test]
fn a_command_runs_and_the_connection_is_used_again() {
    let agent = Agent::start();
    let mut client = agent.client();
    for code in [0, 3] {
        let script = format!("echo out; echo err >&2; exit {code}");
        let output = client.exec(&sh(&script), PATIENCE).unwrap();
        assert_eq!(
            (output.stdout.as_slice(), output.stderr.as_slice()),
            (&b"out\n"[..], &b"err\n"[..])
        );
        assert_eq!((output.exit_code, output.exited), (code, true));
        assert_eq!(output.status, format!("exit status {code}"));
        assert!(output.first_byte.is_some());
    }
    let silent = client.exec(&sh("true"), PATIENCE).unwrap();
    assert_eq!((silent.exit_code, silent.first_byte), (0, None));
}

#[test]
fn a_process_gets_the_requested_environment() {
    let agent = Agent::raw();
    let mut client = agent.client();
    let mut settings = init();
    settings.env_vars = [("A", "sandbox"), ("B", "sandbox")]
        .map(|(k, v)| (k.into(), v.into()))
        .into();
    client.init(&settings).unwrap();
    let mut request = ExecRequest::new("env", &[]);
    request.envs = [("B".into(), "request".into())].into();
    let output = client.exec(&request, PATIENCE).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines.len(), 7, "{text}");
    assert_eq!(&lines[..2], ["A=sandbox", "B=request"]);
    for name in ["HOME=", "LOGNAME=", "PATH=", "SHELL=", "USER="] {
        assert!(lines.iter().any(|line| line.starts_with(name)), "{name}");
    }
    let envs = client.request("GET", "/envs", &[], b"").unwrap();
    assert_eq!(envs.body, br#"{"A":"sandbox","B":"sandbox"}"#);
}

#[test]
fn failed_starts_report_the_reason() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mut refused = |request: &ExecRequest| {
        let (_, code, message) = refusal(client.exec(request, PATIENCE).unwrap_err());
        (code, message)
    };
    let mut request = sh("true");
    request.cwd = Some("/nowhere".into());
    let (code, message) = refused(&request);
    assert_eq!(code, "invalid_argument");
    assert_eq!(message, "cwd '/nowhere' does not exist");
    let mut request = sh("true");
    request.user = Some("nobody-here".into());
    let (code, message) = refused(&request);
    assert_eq!(
        (code.as_str(), message.as_str()),
        ("unauthenticated", "invalid username: 'nobody-here'")
    );
    let (code, _) = refused(&ExecRequest::new("no-such-program", &[]));
    assert_eq!(code, "invalid_argument");
    let (code, _) = refused(&ExecRequest::new("/etc/passwd", &[]));
    assert_eq!(code, "permission_denied");
    let (code, _) = refused(&ExecRequest::new("", &[]));
    assert_eq!(code, "invalid_argument");
    let (code, _) = refused(&ExecRequest::new("a\0b", &[]));
    assert_eq!(code, "invalid_argument");
    // Failed starts leave no zombies and no entries in the list.
    let list: ListResponse = agent
        .client()
        .call("process.Process/List", &Empty {})
        .unwrap();
    assert_eq!(list.processes, []);
}

#[test]
fn a_killed_process_reports_its_signal() {
    let agent = Agent::start();
    let mut client = agent.client();
    // The grandchild, which holds the pipes, has ended too.
    let mut stream = client
        .start(&sh("echo $$; sleep 1000 & wait"), PATIENCE)
        .unwrap();
    let pid = stream.pid();
    let kill = SendSignalRequest {
        process: by_pid(pid),
        signal: Signal::Kill,
    };
    let _: Empty = agent
        .client()
        .call("process.Process/SendSignal", &kill)
        .unwrap();
    let mut end = None;
    while let Some(event) = stream.next_event().unwrap() {
        end = event.end.or(end);
    }
    let end = end.unwrap();
    assert_eq!(
        (end.exit_code, end.exited, end.status.as_str()),
        (-1, false, "signal: killed")
    );
    let gone = agent
        .client()
        .call::<_, Empty>("process.Process/SendSignal", &kill);
    let (status, code, _) = refusal(gone.unwrap_err());
    assert_eq!((status, code.as_str()), (404, "not_found"));
}

#[test]
fn a_deadline_kills() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mut request = sh("echo $$; sleep 1000");
    request.kill_after = Some(Duration::from_millis(300));
    let mut stream = client.start(&request, PATIENCE).unwrap();
    let pid = stream.pid();
    let error = loop {
        match stream.next_event() {
            Ok(event) => assert!(event.unwrap().end.is_none()),
            Err(error) => break error,
        }
    };
    let (status, code, _) = refusal(error);
    assert_eq!((status, code.as_str()), (200, "deadline_exceeded"));
    until("the kill", || (!is_alive(pid)).then_some(()));
    client.health().unwrap();
}

#[test]
fn a_process_outlives_its_stream_and_its_status_is_kept() {
    let agent = Agent::start();
    let go = agent.path("go");
    let mut request = sh(&format!(
        "while [ ! -e {go} ]; do sleep 0.01; done; echo late; exit 5"
    ));
    request.tag = Some("job".into());
    let pid = {
        let mut client = agent.client();
        client.start(&request, PATIENCE).unwrap().pid()
    };
    let mut client = agent.client();
    let list: ListResponse = client.call("process.Process/List", &Empty {}).unwrap();
    assert_eq!(list.processes.len(), 1);
    assert_eq!(list.processes[0].tag.as_deref(), Some("job"));
    assert_eq!(list.processes[0].config.cmd, "sh");
    let job = ConnectRequest {
        process: ProcessSelector {
            pid: None,
            tag: Some("job".into()),
        },
    };
    for _ in 0..2 {
        // First while the process runs, then after its end.
        let mut client = agent.client();
        let mut stream = client
            .stream("process.Process/Connect", &job, None, None, PATIENCE)
            .unwrap();
        assert_eq!(stream.pid(), pid);
        fs::write(&go, "").unwrap();
        let mut end = None;
        while let Some(event) = stream.next_event().unwrap() {
            end = event.end.or(end);
        }
        assert_eq!(end.unwrap().exit_code, 5);
    }
    let unknown = ConnectRequest { process: by_pid(1) };
    let refused = client.stream("process.Process/Connect", &unknown, None, None, PATIENCE);
    assert_eq!(refusal(refused.err().unwrap()).1, "not_found");
}

#[test]
fn a_stream_ends_at_its_deadline_and_the_process_continues() {
    let agent = Agent::start();
    let mut starter = agent.client();
    let running = starter.start(&sh("sleep 1000"), PATIENCE).unwrap();
    let pid = running.pid();
    let mut client = agent.client();
    let request = ConnectRequest {
        process: by_pid(pid),
    };
    let soon = Some(Duration::from_millis(100));
    let mut stream = client
        .stream("process.Process/Connect", &request, None, soon, PATIENCE)
        .unwrap();
    let (_, code, _) = refusal(stream.next_event().unwrap_err());
    assert_eq!(code, "deadline_exceeded");
    assert!(is_alive(pid));
}

#[test]
fn input_of_any_length_reaches_the_process() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mut request = ExecRequest::new("sh", &["-c", "sleep 0.2; wc -c"]);
    request.stdin = Some(true);
    let mut stream = client.start(&request, PATIENCE).unwrap();
    let process = by_pid(stream.pid());
    let mut other = agent.client();
    // Twice the capacity of a pipe.
    let input = SendInputRequest {
        process: process.clone(),
        input: ProcessInput {
            stdin: Some(Blob(vec![b'x'; 128 << 10])),
            pty: None,
        },
    };
    let _: Empty = other.call("process.Process/SendInput", &input).unwrap();
    let _: Empty = other.call("process.Process/SendInput", &input).unwrap();
    let close = CloseStdinRequest {
        process: process.clone(),
    };
    let _: Empty = other.call("process.Process/CloseStdin", &close).unwrap();
    let mut stdout = Vec::new();
    while let Some(event) = stream.next_event().unwrap() {
        stdout.extend(event.data.and_then(|d| d.stdout).unwrap_or_default().0);
    }
    assert_eq!(
        String::from_utf8(stdout).unwrap().trim(),
        (256 << 10).to_string()
    );
    let late = other.call::<_, Empty>("process.Process/SendInput", &input);
    assert_eq!(refusal(late.unwrap_err()).0, 404);
}

#[test]
fn input_without_a_reader_is_refused() {
    let agent = Agent::start();
    let mut client = agent.client();
    let stream = client.start(&sh("sleep 1000"), PATIENCE).unwrap();
    let input = SendInputRequest {
        process: by_pid(stream.pid()),
        input: ProcessInput {
            stdin: Some(Blob(b"x".to_vec())),
            pty: None,
        },
    };
    let refused = agent
        .client()
        .call::<_, Empty>("process.Process/SendInput", &input);
    assert_eq!(refusal(refused.unwrap_err()).1, "failed_precondition");
}

#[test]
fn standard_input_is_empty_unless_requested() {
    let agent = Agent::start();
    let output = agent
        .client()
        .exec(&ExecRequest::new("cat", &[]), PATIENCE)
        .unwrap();
    assert_eq!((output.exit_code, output.stdout), (0, Vec::new()));
}

#[test]
fn large_output_arrives_complete() {
    let agent = Agent::start();
    let request = sh("head -c 67108864 /dev/zero; echo end >&2");
    let output = agent
        .client()
        .exec(&request, Duration::from_secs(120))
        .unwrap();
    assert_eq!(output.stdout.len(), 64 << 20);
    assert!(output.stdout.iter().all(|b| *b == 0));
    assert_eq!(output.stderr, b"end\n");
    assert!(agent.peak_kib() < 16 << 10, "{} KiB", agent.peak_kib());
}

#[test]
fn a_slow_reader_blocks_the_process_instead_of_filling_memory() {
    let agent = Agent::start();
    let progress = agent.path("progress");
    let script = format!(
        "i=0; while [ $i -lt 4096 ]; do head -c 65536 /dev/zero; i=$((i+1)); echo $i > {progress}; done"
    );
    let mut client = agent.client();
    let mut stream = client
        .start(&sh(&script), Duration::from_secs(120))
        .unwrap();
    let read = || -> u32 {
        let text = fs::read_to_string(&progress).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    };
    // The writer is blocked: the count stays the same for a while.
    let (mut last, mut since) = (0, Instant::now());
    until("the stop", || {
        let now = read();
        if now != last || now == 0 {
            (last, since) = (now, Instant::now());
        }
        (since.elapsed() > Duration::from_millis(300)).then_some(())
    });
    assert!(last < 64, "{last} pieces of 64 KiB went somewhere");
    // Other clients are served in the meantime, and reading unblocks the writer.
    agent.client().health().unwrap();
    let mut got = 0;
    while got < 16 << 20 {
        let event = stream.next_event().unwrap().unwrap();
        got += event
            .data
            .and_then(|d| d.stdout)
            .unwrap_or_default()
            .0
            .len();
    }
    until("going on", || (read() > last).then_some(()));
    assert!(agent.peak_kib() < 16 << 10, "{} KiB", agent.peak_kib());
}

#[test]
fn output_without_a_reader_is_dropped() {
    let agent = Agent::start();
    let done = agent.path("done");
    {
        let mut client = agent.client();
        let script = format!("head -c 10000000 /dev/zero; echo > {done}");
        client.start(&sh(&script), PATIENCE).unwrap();
    }
    until("the end", || fs::metadata(&done).ok());
}

#[test]
fn the_access_token_is_required() {
    let agent = Agent::raw();
    let mut client = agent.client();
    let mut settings = init();
    settings.access_token = Some("secret".into());
    client.init(&settings).unwrap();
    client.health().unwrap();
    let refused = client.exec(&sh("true"), PATIENCE).unwrap_err();
    let (status, _, message) = refusal(refused);
    assert_eq!(status, 401);
    assert!(message.starts_with("unauthorized access"), "{message}");
    let mut client = agent.client();
    client.set_access_token(Some("secret!".into()));
    assert_eq!(
        refusal(client.read_file("/etc/passwd", None).unwrap_err()).0,
        401
    );
    client.set_access_token(Some("secret".into()));
    client.exec(&sh("true"), PATIENCE).unwrap();
}

#[test]
fn files_are_written_and_read() {
    let agent = Agent::start();
    let mut client = agent.client();
    let path = agent.path("a dir/ü/file");
    for size in [0_usize, 1, 100_000, 8 << 20] {
        let bytes: Vec<u8> = (0..size).map(|i| u8::try_from(i % 251).unwrap()).collect();
        client.write_file(&path, &bytes, None).unwrap();
        assert_eq!(client.read_file(&path, None).unwrap(), bytes);
    }
    // A file that reports size zero.
    let version = client.read_file("/proc/version", None).unwrap();
    assert!(version.starts_with(b"Linux"));
    let status = |error| refusal(error).0;
    assert_eq!(
        status(client.read_file(&agent.path("none"), None).unwrap_err()),
        404
    );
    assert_eq!(status(client.read_file("/etc", None).unwrap_err()), 400);
    assert_eq!(
        status(client.read_file("/dev/zero", None).unwrap_err()),
        400
    );
    assert_eq!(
        status(
            client
                .read_file("/etc/passwd", Some("nobody-here"))
                .unwrap_err()
        ),
        401
    );
    let fifo = agent.path("fifo");
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    assert_eq!(status(client.read_file(&fifo, None).unwrap_err()), 400);
    assert_eq!(
        status(client.write_file(&fifo, b"x", None).unwrap_err()),
        400
    );
    assert_eq!(
        status(agent.client().write_file("/etc", b"x", None).unwrap_err()),
        400
    );
    assert!(agent.peak_kib() < 16 << 10, "{} KiB", agent.peak_kib());
}

#[test]
fn chunked_uploads_are_read_and_trailers_ignored() {
    let agent = Agent::start();
    let path = agent.path("chunked");
    let request = format!(
        "POST /files?path={path} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\
         content-type: application/octet-stream\r\n\r\n\
         5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nSome: trailer\r\n\r\n"
    );
    let mut client = agent.client();
    assert_eq!(client.raw(request.as_bytes()).unwrap().status, 200);
    assert_eq!(fs::read(&path).unwrap(), b"hello world");
    client.health().unwrap();
    // With `Expect: 100-continue`.
    let request = format!(
        "POST /files?path={path} HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    );
    let mut stream = UnixStream::connect(&agent.socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"ok").unwrap();
    let mut answer = [0; 15];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200 OK");
    assert_eq!(fs::read(&path).unwrap(), b"ok");
}

#[test]
fn root_starts_processes_as_any_user() {
    if !is_root() {
        return;
    }
    let agent = Agent::start();
    let mut client = agent.client();
    let mut request = sh("id -un; id -g; id -G; echo $HOME; umask");
    request.user = Some("daemon".into());
    let output = client.exec(&request, PATIENCE).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        text, "daemon\n1\n1\n/usr/sbin\n0022\n",
        "{:?}",
        output.stderr
    );
    // The user's permissions apply to the working directory and the program.
    let private = agent.path("private");
    fs::create_dir(&private).unwrap();
    fs::set_permissions(&private, fs::Permissions::from_mode(0o700)).unwrap();
    request.cwd = Some(private);
    let refused = client.exec(&request, PATIENCE).unwrap_err();
    assert_eq!(refusal(refused).1, "permission_denied");
    // Files belong to the named user.
    let path = agent.path("x/y");
    client.write_file(&path, b"", Some("daemon")).unwrap();
    use std::os::unix::fs::MetadataExt;
    for path in [path, agent.path("x")] {
        let metadata = fs::metadata(path).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (1, 1));
    }
}

#[test]
fn children_start_with_clean_signals() {
    let agent = Agent::start();
    let request = sh("grep -E 'Sig(Blk|Ign)' /proc/self/status; ls /proc/self/fd | wc -l");
    let output = agent.client().exec(&request, PATIENCE).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], "SigBlk:\t0000000000000000");
    let ignored = u64::from_str_radix(lines[1].trim_start_matches("SigIgn:\t"), 16).unwrap();
    let broken_pipe = 1 << 12;
    assert_eq!(ignored & broken_pipe, 0, "{text}");
    // Standard streams, and the directory that `ls` reads.
    assert_eq!(lines[2], "4");
}

#[test]
fn hostile_requests_are_refused_without_side_effects() {
    let agent = Agent::start();
    let huge = format!("GET /health HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(1 << 20));
    let many = format!("GET /health HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(100));
    let json = "content-type: application/json\r\n";
    let cases: [(u16, String); 12] = [
        (431, huge),
        (431, many),
        (400, "\x01\x02\x03\r\n\r\n".into()),
        (400, "GET /health HTTP/9.9\r\n\r\n".into()),
        (404, "GET /nothing HTTP/1.1\r\n\r\n".into()),
        (405, "DELETE /files HTTP/1.1\r\n\r\n".into()),
        (413, "POST /init HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n".into()),
        (400, "POST /init HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n".into()),
        (400, "POST /init HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n".into()),
        (400, format!("POST /init HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n{}", "a: b\r\n".repeat(500))),
        (415, "POST /process.Process/List HTTP/1.1\r\ncontent-length: 0\r\n\r\n".into()),
        (501, format!("POST /filesystem.Filesystem/Chmod HTTP/1.1\r\n{json}content-length: 2\r\n\r\n{{}}")),
    ];
    for (status, request) in cases {
        let answer = agent.client().raw(request.as_bytes()).unwrap();
        assert_eq!(answer.status, status, "{:.60}", request);
        assert!(answer.body.starts_with(b"{\"code\":"), "{:.60}", request);
    }
    // A chunked body above the limit is refused before its end.
    let mut stream = UnixStream::connect(&agent.socket).unwrap();
    stream
        .write_all(b"POST /init HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        .unwrap();
    let chunk = [b"10000\r\n".as_slice(), &[b' '; 65536], b"\r\n"].concat();
    let refused = (0..1000).any(|_| stream.write_all(&chunk).is_err());
    assert!(refused);
    agent.client().health().unwrap();
    assert!(agent.peak_kib() < 24 << 10, "{} KiB", agent.peak_kib());
}

#[test]
fn bad_frames_end_the_stream_with_an_error() {
    let agent = Agent::start();
    let mut client = agent.client();
    let good = br#"{"process":{"cmd":"true"}}"#;
    let framed =
        |flags: u8, len: u32, body: &[u8]| [&[flags][..], &len.to_be_bytes(), body].concat();
    let cases = [
        ("invalid_argument", Vec::new()),
        ("invalid_argument", framed(1, 26, good)),
        ("invalid_argument", framed(0, u32::MAX, good)),
        ("invalid_argument", framed(0, 25, good)),
        ("invalid_argument", framed(2, 26, good)),
        ("invalid_argument", framed(0, 2, b"[]")),
        ("invalid_argument", framed(0, 2, b"{}")),
        (
            "invalid_argument",
            framed(
                0,
                56,
                br#"{"process":{"cmd":"true"},"pty":{"size":{"cols":65536}}}"#,
            ),
        ),
    ];
    for (code, body) in cases {
        let headers = [("content-type", "application/connect+json")];
        let answer = client
            .request("POST", "/process.Process/Start", &headers, &body)
            .unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(
            answer.header("content-type"),
            Some("application/connect+json")
        );
        assert_eq!(answer.body.first(), Some(&2), "{code}");
        let text = String::from_utf8_lossy(&answer.body[5..]).into_owned();
        assert!(text.contains(&format!("\"code\":\"{code}\"")), "{text}");
    }
}

#[test]
fn keepalives_are_sent_on_silent_streams() {
    let agent = Agent::start();
    let mut stream = UnixStream::connect(&agent.socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let body = br#"{"process":{"cmd":"sleep","args":["1000"]},"stdin":false}"#;
    let head = format!(
        "POST /process.Process/Start HTTP/1.1\r\ncontent-type: application/connect+json\r\n\
         keepalive-ping-interval: 1\r\ncontent-length: {}\r\n\r\n",
        body.len() + 5
    );
    let frame = [
        &[0][..],
        &u32::try_from(body.len()).unwrap().to_be_bytes(),
        body,
    ]
    .concat();
    stream
        .write_all(&[head.as_bytes(), &frame].concat())
        .unwrap();
    let mut seen = Vec::new();
    until("a keepalive", || {
        let mut bytes = [0; 4096];
        let n = stream.read(&mut bytes).unwrap();
        seen.extend_from_slice(&bytes[..n]);
        String::from_utf8_lossy(&seen)
            .contains(r#"{"event":{"keepalive":{}}}"#)
            .then_some(())
    });
}

#[test]
fn a_burst_of_connections_is_served() {
    let agent = Agent::start();
    let mut idle: Vec<_> = (0..300).map(|_| agent.client()).collect();
    let workers: Vec<_> = (0..16)
        .map(|n| {
            let mut client = agent.client();
            std::thread::spawn(move || {
                let output = client.exec(&sh(&format!("echo {n}")), PATIENCE).unwrap();
                assert_eq!(output.stdout, format!("{n}\n").as_bytes());
            })
        })
        .collect();
    workers
        .into_iter()
        .for_each(|worker| worker.join().unwrap());
    // The newest idle connection was kept.
    idle.last_mut().unwrap().health().unwrap();
}

#[test]
fn sigterm_ends_the_agent_and_its_processes() {
    let mut agent = Agent::start();
    let mut client = agent.client();
    let pid = client.start(&sh("sleep 1000"), PATIENCE).unwrap().pid();
    let agent_pid = agent.child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-TERM", &agent_pid])
            .status()
            .unwrap()
            .success()
    );
    let status = until("the end", || agent.child.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
    until("the kill", || (!is_alive(pid)).then_some(()));
}

#[test]
fn wrong_arguments_print_the_usage() {
    let output = Command::new(env!("CARGO_BIN_EXE_guest-agent"))
        .arg("--bad")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("usage"));
}
