//! `process.Process` beyond a command and its output: input, exit statuses, deadlines, many streams at once.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agent;

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    thread,
    time::Duration,
};

use agent::{Agent, PATIENCE, by_pid, init, is_alive, refusal, sh, until};
use envd::{
    Blob, ClientError, CloseStdinRequest, ConnectRequest, Empty, ExecRequest, ExecStream,
    ListResponse, ProcessInput, ProcessSelector, SendInputRequest, StreamInputRequest,
};

fn stdin(bytes: &[u8]) -> ProcessInput {
    ProcessInput {
        stdin: Some(Blob(bytes.to_vec())),
        pty: None,
    }
}

fn reading(script: &str) -> ExecRequest {
    ExecRequest {
        stdin: Some(true),
        ..sh(script)
    }
}

/// Reads the whole standard output, and the exit code.
fn collect(stream: &mut ExecStream<'_>) -> (Vec<u8>, i32) {
    let (mut stdout, mut end) = (Vec::new(), None);
    while let Some(event) = stream.next_event().unwrap() {
        stdout.extend(event.data.and_then(|d| d.stdout).unwrap_or_default().0);
        end = event.end.or(end);
    }
    (stdout, end.unwrap().exit_code)
}

fn code(result: Result<(), ClientError>) -> String {
    refusal(result.unwrap_err()).1
}

#[test]
fn a_stream_of_input_arrives_in_order() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mut stream = client.start(&reading("sleep 0.1; cat"), PATIENCE).unwrap();
    let process = by_pid(stream.pid());
    // Many small messages, then some larger than a pipe.
    let small = (0..500_usize).map(|n| vec![u8::try_from(n % 251).unwrap(); 7]);
    let large = (0..5).map(|n| vec![n; 300_000]);
    let pieces: Vec<Vec<u8>> = small.chain(large).collect();
    let (output, code) = thread::scope(|scope| {
        let reading = scope.spawn(|| collect(&mut stream));
        let mut other = agent.client();
        // Twice, on one connection.
        for half in pieces.chunks(400) {
            let mut input = other.stream_input(&process, None, PATIENCE).unwrap();
            for piece in half {
                input.send(stdin(piece)).unwrap();
            }
            let keepalive = StreamInputRequest {
                keepalive: Some(Empty {}),
                ..StreamInputRequest::default()
            };
            input.message(&keepalive).unwrap();
            input.finish().unwrap();
        }
        // The end of a stream does not close the input.
        let last = SendInputRequest {
            process: process.clone(),
            input: stdin(b"last"),
        };
        let _: Empty = other.call("process.Process/SendInput", &last).unwrap();
        let close = CloseStdinRequest {
            process: process.clone(),
        };
        let _: Empty = other.call("process.Process/CloseStdin", &close).unwrap();
        reading.join().unwrap()
    });
    let expected = [pieces.concat(), b"last".to_vec()].concat();
    assert_eq!(code, 0);
    assert!(output == expected, "{} bytes", output.len());
}

#[test]
fn unread_input_blocks_its_sender() {
    let agent = Agent::start();
    let mut client = agent.client();
    let stream = client.start(&reading("sleep 1000"), PATIENCE).unwrap();
    let process = by_pid(stream.pid());
    let mut other = agent.client();
    let mut input = other
        .stream_input(&process, None, Duration::from_millis(500))
        .unwrap();
    let piece = stdin(&[0; 64 << 10]);
    let stopped = (0..1000).find_map(|_| input.send(piece.clone()).err());
    assert!(
        matches!(stopped, Some(ClientError::Timeout(_))),
        "{stopped:?}"
    );
    assert!(agent.peak_kib() < 16 << 10, "{} KiB", agent.peak_kib());
    agent.client().health().unwrap();
}

#[test]
fn bad_streams_of_input_are_refused() {
    let agent = Agent::start();
    let mut client = agent.client();
    let stream = client.start(&reading("cat > /dev/null"), PATIENCE).unwrap();
    let process = by_pid(stream.pid());
    let mut other = agent.client();
    let nobody = other.stream_input(&by_pid(1), None, PATIENCE).unwrap();
    assert_eq!(code(nobody.finish()), "not_found");
    let mut other = agent.client();
    let mut twice = other.stream_input(&process, None, PATIENCE).unwrap();
    let start = ConnectRequest {
        process: process.clone(),
    };
    twice
        .message(&StreamInputRequest {
            start: Some(start),
            ..StreamInputRequest::default()
        })
        .unwrap();
    // Refused at once, before the end of the request.
    assert_eq!(code(twice.answer()), "invalid_argument");
    let mut other = agent.client();
    let mut wrong = other.stream_input(&process, None, PATIENCE).unwrap();
    wrong
        .send(ProcessInput {
            stdin: None,
            pty: Some(Blob(b"x".to_vec())),
        })
        .unwrap();
    assert_eq!(code(wrong.finish()), "failed_precondition");
    // A stream whose first message selects no process, an incomplete message, a message that is too long, an
    // end-of-stream frame.
    let data = br#"{"data":{"input":{"stdin":"eA=="}}}"#;
    let framed = |flags: u8, len: usize, body: &[u8]| {
        [
            &[flags][..],
            &u32::try_from(len).unwrap().to_be_bytes(),
            body,
        ]
        .concat()
    };
    let cases = [
        framed(0, data.len(), data),
        framed(0, 100, b"{"),
        framed(0, 5 << 20, b"{"),
        framed(2, 2, b"{}"),
        framed(1, 2, b"{}"),
        framed(0, 2, b"xx"),
        vec![0, 0],
    ];
    for body in cases {
        let headers = [("content-type", "application/connect+json")];
        let answer = agent
            .client()
            .request("POST", "/process.Process/StreamInput", &headers, &body)
            .unwrap();
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        assert_eq!(answer.status, 200);
        assert!(text.contains(r#""code":"invalid_argument""#), "{text}");
    }
    // An empty stream is accepted.
    let headers = [("content-type", "application/connect+json")];
    let mut client = agent.client();
    let answer = client.request("POST", "/process.Process/StreamInput", &headers, b"");
    let answer = answer.unwrap();
    assert_eq!(answer.body, b"\0\0\0\0\x02{}\x02\0\0\0\x02{}");
    client.health().unwrap();
    let json = [("content-type", "application/json")];
    let answer = client.request("POST", "/process.Process/StreamInput", &json, b"");
    assert_eq!(answer.unwrap().status, 415);
}

#[test]
fn input_fails_when_its_process_ends() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mut stream = client.start(&reading("read line"), PATIENCE).unwrap();
    let process = by_pid(stream.pid());
    let mut other = agent.client();
    let mut input = other.stream_input(&process, None, PATIENCE).unwrap();
    input.send(stdin(b"line\n")).unwrap();
    assert_eq!(collect(&mut stream).1, 0);
    input.send(stdin(b"late\n")).unwrap();
    assert_eq!(code(input.answer()), "failed_precondition");
}

#[test]
fn input_that_waits_too_long_is_withdrawn() {
    let agent = Agent::start();
    let mut client = agent.client();
    let go = agent.path("go");
    let script = format!("while [ ! -e {go} ]; do sleep 0.01; done; head -c 65540; echo; cat");
    let mut stream = client.start(&reading(&script), PATIENCE).unwrap();
    let process = by_pid(stream.pid());
    // More than the pipe holds: the rest waits in the queue.
    let mut other = agent.client();
    let soon = Some(Duration::from_millis(100));
    let mut input = other.stream_input(&process, soon, PATIENCE).unwrap();
    input.send(stdin(&[b'x'; 100_000])).unwrap();
    assert_eq!(code(input.answer()), "deadline_exceeded");
    let body = serde_json::to_vec(&SendInputRequest {
        process: process.clone(),
        input: stdin(&[b'y'; 10]),
    })
    .unwrap();
    let headers = [
        ("content-type", "application/json"),
        ("connect-timeout-ms", "100"),
    ];
    let mut other = agent.client();
    let answer = other.request("POST", "/process.Process/SendInput", &headers, &body);
    let answer = answer.unwrap();
    assert_eq!(answer.status, 504);
    assert!(answer.body.starts_with(br#"{"code":"deadline_exceeded""#));
    fs::write(&go, "").unwrap();
    // The process gets the bytes that were already in the pipe at the timeout, and then the later input.
    let last = SendInputRequest {
        process: process.clone(),
        input: stdin(b"zzzzz"),
    };
    let _: Empty = other.call("process.Process/SendInput", &last).unwrap();
    let close = CloseStdinRequest { process };
    let _: Empty = other.call("process.Process/CloseStdin", &close).unwrap();
    let (output, _) = collect(&mut stream);
    assert!(!output.contains(&b'y'));
    assert!(output.len() <= (64 << 10) + 6, "{}", output.len());
    assert_eq!(output.last(), Some(&b'z'));
}

#[test]
fn absent_stdin_is_a_pipe_and_false_is_not() {
    let agent = Agent::start();
    let mut client = agent.client();
    let script = "readlink /proc/self/fd/0";
    for (stdin, expected) in [
        (None, "pipe:"),
        (Some(true), "pipe:"),
        (Some(false), "/dev/null"),
    ] {
        let request = ExecRequest {
            stdin,
            ..sh(script)
        };
        let output = client.exec(&request, PATIENCE).unwrap();
        assert!(output.stdout.starts_with(expected.as_bytes()), "{stdin:?}");
    }
}

#[test]
fn the_login_environment_can_be_overridden() {
    let agent = Agent::raw();
    let mut client = agent.client();
    let mut settings = init();
    settings.env_vars = [("SHELL", "sandbox"), ("LANG", "sandbox")]
        .map(|(k, v)| (k.into(), v.into()))
        .into();
    client.init(&settings).unwrap();
    let mut request = sh("echo $USER:$LOGNAME:$HOME:$SHELL:$LANG:${PATH:+path}");
    request.user = Some("root".into());
    if nix::unistd::geteuid().is_root() {
        request.envs = [("LANG".into(), "request".into())].into();
        let output = client.exec(&request, PATIENCE).unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text, "root:root:/root:sandbox:request:path\n");
    }
    request.envs = [("A=B".into(), "x".into())].into();
    assert_eq!(
        code(client.exec(&request, PATIENCE).map(|_| ())),
        "invalid_argument"
    );
}

#[test]
fn real_time_signals_end_a_process_too() {
    let agent = Agent::start();
    let mut client = agent.client();
    let output = client.exec(&sh("kill -34 $$"), PATIENCE).unwrap();
    assert_eq!((output.exit_code, output.exited), (-1, false));
    assert_eq!(output.status, "signal: signal 34");
    // The ends of other processes are still noticed afterwards.
    let script = "for i in 1 2 3; do sh -c 'kill -40 $$'; done; exit 2";
    let output = client.exec(&sh(script), PATIENCE).unwrap();
    assert_eq!(output.exit_code, 2);
}

#[test]
fn an_exit_status_can_be_fetched_later_by_pid_and_tag() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mut request = sh("exit 9");
    request.tag = Some("job".into());
    let pid = client.exec(&request, PATIENCE).unwrap().pid;
    // Of two processes with the same tag, the later one is selected.
    let mut later = sh("sleep 1000");
    later.tag = Some("job".into());
    let mut starter = agent.client();
    let running = starter.start(&later, PATIENCE).unwrap().pid();
    let by_tag = ProcessSelector {
        pid: None,
        tag: Some("job".into()),
    };
    let follow = |process: ProcessSelector| {
        let mut client = agent.client();
        let request = ConnectRequest { process };
        let soon = Some(Duration::from_millis(100));
        let mut stream = client
            .stream("process.Process/Connect", &request, None, soon, PATIENCE)
            .unwrap();
        let pid = stream.pid();
        let end = stream.next_event().map(|event| event.and_then(|e| e.end));
        (pid, end.map(|end| end.map(|end| end.exit_code)))
    };
    let (found, end) = follow(by_pid(pid));
    assert_eq!((found, end.unwrap()), (pid, Some(9)));
    let (found, end) = follow(by_tag);
    assert_eq!(found, running);
    assert_eq!(refusal(end.unwrap_err()).1, "deadline_exceeded");
    let list: ListResponse = client.call("process.Process/List", &Empty {}).unwrap();
    let pids: Vec<u32> = list.processes.iter().map(|p| p.pid).collect();
    assert_eq!(pids, [running]);
}

#[test]
fn a_zero_timeout_is_none_and_a_deadline_outlives_its_stream() {
    let agent = Agent::start();
    let start = |timeout: &str, script: &str| {
        let json = format!(r#"{{"process":{{"cmd":"sh","args":["-c","{script}"]}}}}"#);
        let mut stream = UnixStream::connect(&agent.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = format!(
            "POST /process.Process/Start HTTP/1.1\r\ncontent-type: application/connect+json\r\n\
             {timeout}content-length: {}\r\n\r\n\0",
            json.len() + 5
        );
        let length = u32::try_from(json.len()).unwrap().to_be_bytes();
        let request = [head.as_bytes(), &length, json.as_bytes()].concat();
        stream.write_all(&request).unwrap();
        stream
    };
    let read = |mut stream: UnixStream| {
        let mut seen = String::new();
        let mut bytes = [0; 4096];
        while !seen.ends_with("0\r\n\r\n") {
            let n = stream.read(&mut bytes).unwrap();
            assert!(n > 0, "{seen}");
            seen.push_str(&String::from_utf8_lossy(&bytes[..n]));
        }
        seen
    };
    for unlimited in ["", "connect-timeout-ms: 0\r\n"] {
        let seen = read(start(unlimited, "sleep 0.1; exit 6"));
        assert!(seen.contains(r#""exitCode":6"#), "{seen}");
    }
    let seen = read(start("connect-timeout-ms: 100\r\n", "sleep 1000"));
    assert!(seen.contains(r#""code":"deadline_exceeded""#), "{seen}");
    // The caller disconnects; its deadline still applies to the process.
    let pids = agent.path("pid");
    drop(start(
        "connect-timeout-ms: 300\r\n",
        &format!("echo $$ > {pids}; sleep 1000"),
    ));
    let pid: u32 = until("the start", || {
        fs::read_to_string(&pids).ok()?.trim().parse().ok()
    });
    until("the kill", || (!is_alive(pid)).then_some(()));
}

#[test]
fn two_hundred_streams_are_served_while_one_floods() {
    let agent = Agent::start();
    let mut flood = agent.client();
    let flooding = thread::spawn(move || {
        // Endless output, read as fast as it arrives.
        let mut stream = flood
            .start(&sh("exec cat /dev/zero"), PATIENCE * 6)
            .unwrap();
        let mut bytes = 0;
        while let Ok(Some(event)) = stream.next_event() {
            bytes += event
                .data
                .map_or(0, |d| d.stdout.unwrap_or_default().0.len());
        }
        bytes
    });
    let mut clients: Vec<_> = (0..200).map(|_| agent.client()).collect();
    let mut streams: Vec<_> = clients
        .iter_mut()
        .map(|client| {
            let script = "while read line; do echo $line; done";
            client.start(&reading(script), PATIENCE * 6).unwrap()
        })
        .collect();
    let mut other = agent.client();
    for round in 0..3 {
        let word = format!("{round}\n").into_bytes();
        for stream in &streams {
            let request = SendInputRequest {
                process: by_pid(stream.pid()),
                input: stdin(&word),
            };
            let _: Empty = other.call("process.Process/SendInput", &request).unwrap();
        }
        for stream in &mut streams {
            let event = stream.next_event().unwrap().unwrap();
            assert_eq!(event.data.unwrap().stdout.unwrap().0, word);
        }
    }
    for stream in &mut streams {
        let close = CloseStdinRequest {
            process: by_pid(stream.pid()),
        };
        let _: Empty = other.call("process.Process/CloseStdin", &close).unwrap();
        assert_eq!(collect(stream), (Vec::new(), 0));
    }
    assert!(agent.peak_kib() < 32 << 10, "{} KiB", agent.peak_kib());
    drop(agent);
    assert!(flooding.join().unwrap() > 0);
}

#[test]
fn metrics_report_usage() {
    let agent = Agent::raw();
    let mut settings = init();
    settings.access_token = Some("secret".into());
    agent.client().init(&settings).unwrap();
    assert_eq!(refusal(agent.client().metrics().unwrap_err()).0, 401);
    let mut client = agent.client();
    client.set_access_token(Some("secret".into()));
    let first = client.metrics().unwrap();
    let cpus = thread::available_parallelism().unwrap().get();
    assert!(
        usize::try_from(first.cpu_count).unwrap() >= cpus,
        "{first:?}"
    );
    assert!(first.mem_used > 0 && first.mem_used < first.mem_total);
    assert!(first.mem_cache < first.mem_total);
    assert_eq!(first.mem_total_mib, first.mem_total >> 20);
    assert!(first.disk_used <= first.disk_total && first.disk_total > 0);
    let now = std::time::SystemTime::now();
    let now = now.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    assert!(now.abs_diff(first.ts) < 60, "{} and {now}", first.ts);
    // One busy processor is visible, whatever the load of the machine. The busy process ends by itself if this test is
    // aborted.
    let spin = sh("exec timeout 30 sh -c 'while :; do :; done'");
    let busy = client.start(&spin, PATIENCE).unwrap();
    let pid = busy.pid();
    let mut other = agent.client();
    other.set_access_token(Some("secret".into()));
    until("use", || {
        (other.metrics().unwrap().cpu_used_pct > 5.0).then_some(())
    });
    assert!(is_alive(pid));
    let answer = other.request("GET", "/metrics", &[], b"").unwrap();
    let text = String::from_utf8(answer.body).unwrap();
    for key in [
        "ts",
        "cpu_count",
        "cpu_used_pct",
        "mem_total",
        "mem_used",
        "mem_cache",
    ] {
        assert!(text.contains(&format!("\"{key}\":")), "{text}");
    }
    // Only a guest has a layer to freeze. Tests with VMs cover the rest.
    let refused = other.freeze().unwrap_err();
    assert!(
        matches!(refused, ClientError::Refused { status: 501, .. }),
        "{refused:?}"
    );
    other.thaw().unwrap();
}
