//! Processes on terminals.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agent;

use agent::{Agent, PATIENCE, by_pid, is_alive, is_root, refusal, until};
use envd::{
    Blob, Empty, EndEvent, EnvdClient, ExecStream, ProcessConfig, ProcessInput, Pty, PtySize,
    SendInputRequest, SendSignalRequest, Signal, StartRequest, UpdateRequest,
};

fn size(cols: u32, rows: u32) -> Option<Pty> {
    Some(Pty {
        size: Some(PtySize { cols, rows }),
    })
}

fn on_terminal(script: &str) -> StartRequest {
    StartRequest {
        process: Some(ProcessConfig {
            cmd: "sh".into(),
            args: vec!["-c".into(), script.into()],
            envs: [("TERM".into(), "xterm-256color".into())].into(),
            cwd: None,
        }),
        pty: size(91, 17),
        ..StartRequest::default()
    }
}

fn start<'a>(client: &'a mut EnvdClient, request: &StartRequest) -> ExecStream<'a> {
    client
        .stream("process.Process/Start", request, None, None, PATIENCE)
        .unwrap()
}

/// Reads the whole output, and the end event.
fn collect(stream: &mut ExecStream<'_>) -> (String, EndEvent) {
    let (mut output, mut end) = (Vec::new(), None);
    while let Some(event) = stream.next_event().unwrap() {
        if let Some(data) = event.data {
            assert_eq!((data.stdout, data.stderr), (None, None));
            let pty = data.pty.unwrap_or_default().0;
            assert!(pty.len() <= 16 << 10, "{} bytes in one piece", pty.len());
            output.extend(pty);
        }
        end = event.end.or(end);
    }
    (String::from_utf8(output).unwrap(), end.unwrap())
}

/// Reads until the output ends with that text.
fn read_until(stream: &mut ExecStream<'_>, wanted: &str) -> String {
    let mut output = String::new();
    while !output.ends_with(wanted) {
        let event = stream.next_event().unwrap().expect(&output);
        let pty = event.data.and_then(|data| data.pty).unwrap_or_default().0;
        output.push_str(&String::from_utf8(pty).unwrap());
    }
    output
}

fn send(agent: &Agent, pid: u32, input: ProcessInput) -> Result<(), envd::ClientError> {
    let process = by_pid(pid);
    let request = SendInputRequest { process, input };
    let sent = agent
        .client()
        .call::<_, Empty>("process.Process/SendInput", &request);
    sent.map(|_| ())
}

fn keys(text: &str) -> ProcessInput {
    ProcessInput {
        stdin: None,
        pty: Some(Blob(text.as_bytes().to_vec())),
    }
}

#[test]
fn a_process_gets_its_own_terminal() {
    let agent = Agent::start();
    let mut client = agent.client();
    let script = "tty; stty size; echo $TERM; ps -o pid=,sid=,tpgid= -p $$ 2>/dev/null || true; \
                  echo to-tty > /dev/tty; echo to-err >&2; exit 3";
    let mut stream = start(&mut client, &on_terminal(script));
    let pid = stream.pid();
    let (output, end) = collect(&mut stream);
    let lines: Vec<&str> = output.lines().collect();
    assert!(lines[0].starts_with("/dev/pts/"), "{output}");
    assert_eq!(lines[1], "17 91");
    assert_eq!(lines[2], "xterm-256color");
    assert!(output.ends_with("to-tty\r\nto-err\r\n"), "{output}");
    if let [_, _, _, ids, _, _] = lines[..] {
        let leader = format!("{pid} {pid} {pid}");
        let ids = ids.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(ids, leader);
    }
    assert_eq!((end.exit_code, end.exited), (3, true));
}

#[test]
fn keys_are_echoed_and_generate_signals() {
    let agent = Agent::start();
    let mut client = agent.client();
    let script = "trap 'echo caught; exit 7' INT; echo ready; read line; echo \"got $line\"; \
                  while :; do sleep 0.05; done";
    let mut stream = start(&mut client, &on_terminal(script));
    let pid = stream.pid();
    read_until(&mut stream, "ready\r\n");
    send(&agent, pid, keys("ab\x7fc\r")).unwrap();
    let output = read_until(&mut stream, "got ac\r\n");
    assert!(output.starts_with("ab\x08 \x08c\r\n"), "{output:?}");
    send(&agent, pid, keys("\x03")).unwrap();
    let (output, end) = collect(&mut stream);
    assert!(output.ends_with("caught\r\n"), "{output:?}");
    assert_eq!(end.exit_code, 7);
}

#[test]
fn a_new_size_is_signalled_to_the_foreground() {
    let agent = Agent::start();
    let mut client = agent.client();
    let script = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.05; done";
    let mut stream = start(&mut client, &on_terminal(script));
    let update = |process, pty| {
        let request = UpdateRequest { process, pty };
        let updated = agent
            .client()
            .call::<_, Empty>("process.Process/Update", &request);
        updated.map_err(|error| refusal(error).1)
    };
    let process = by_pid(stream.pid());
    read_until(&mut stream, "ready\r\n");
    // An update without a size does nothing; an invalid size is refused.
    update(process.clone(), None).unwrap();
    let refused = update(process.clone(), size(1 << 16, 1)).unwrap_err();
    assert_eq!(refused, "invalid_argument");
    update(process.clone(), size(132, 43)).unwrap();
    let (output, _) = collect(&mut stream);
    assert_eq!(output, "43 132\r\n");
    assert_eq!(
        update(process, size(1, 1)).unwrap_err(),
        "not_found",
        "its end is known"
    );
}

#[test]
fn input_must_match_the_kind_of_process() {
    let agent = Agent::start();
    let mut with = agent.client();
    let on_terminal = start(&mut with, &on_terminal("sleep 1000"));
    let stdin = ProcessInput {
        stdin: Some(Blob(b"x".to_vec())),
        pty: None,
    };
    let pid = on_terminal.pid();
    let refused = send(&agent, pid, stdin).unwrap_err();
    assert_eq!(refusal(refused).1, "failed_precondition");
    let close = envd::CloseStdinRequest {
        process: by_pid(pid),
    };
    let refused = agent
        .client()
        .call::<_, Empty>("process.Process/CloseStdin", &close);
    assert_eq!(refusal(refused.unwrap_err()).1, "failed_precondition");
    let mut without = agent.client();
    let mut piped = agent::sh("sleep 1000");
    piped.stdin = Some(true);
    let piped = without.start(&piped, PATIENCE).unwrap();
    let refused = send(&agent, piped.pid(), keys("x")).unwrap_err();
    assert_eq!(refusal(refused).1, "failed_precondition");
    let update = UpdateRequest {
        process: by_pid(piped.pid()),
        pty: size(1, 1),
    };
    let refused = agent
        .client()
        .call::<_, Empty>("process.Process/Update", &update);
    assert_eq!(refusal(refused.unwrap_err()).1, "failed_precondition");
}

#[test]
fn large_output_arrives_complete_before_the_end() {
    let agent = Agent::start();
    let mut client = agent.client();
    let request = on_terminal("stty -opost; seq 200000");
    let (output, end) = collect(&mut start(&mut client, &request));
    assert_eq!(end.exit_code, 0);
    let expected: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
    assert!(output == expected, "{} bytes", output.len());
}

#[test]
fn the_end_of_the_leader_hangs_up_its_session() {
    let agent = Agent::start();
    let mut client = agent.client();
    // Two descendants: one in the leader's group, which gets SIGHUP, and one that ignores SIGHUP and holds the terminal
    // open.
    let script = "sleep 1000 & echo $!; (trap '' HUP; exec sleep 1001) & echo $!; \
                  while [ $(cat /proc/$!/comm) != sleep ]; do :; done; exit 0";
    let (output, end) = collect(&mut start(&mut client, &on_terminal(script)));
    assert_eq!(end.exit_code, 0);
    let pids: Vec<u32> = output.lines().map(|line| line.parse().unwrap()).collect();
    until("the hang-up", || (!is_alive(pids[0])).then_some(()));
    assert!(is_alive(pids[1]));
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(i32::try_from(pids[1]).unwrap()),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
}

#[test]
fn a_killed_process_on_a_terminal_reports_its_signal() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mut stream = start(&mut client, &on_terminal("echo ready; exec sleep 1000"));
    read_until(&mut stream, "ready\r\n");
    let kill = SendSignalRequest {
        process: by_pid(stream.pid()),
        signal: Signal::Kill,
    };
    let _: Empty = agent
        .client()
        .call("process.Process/SendSignal", &kill)
        .unwrap();
    let (_, end) = collect(&mut stream);
    assert_eq!((end.exit_code, end.status.as_str()), (-1, "signal: killed"));
}

#[test]
fn an_interactive_login_shell_has_job_control() {
    let agent = Agent::start();
    let mut client = agent.client();
    let mut request = on_terminal("");
    request.process = Some(ProcessConfig {
        cmd: "/bin/bash".into(),
        args: vec!["-i".into(), "-l".into()],
        envs: [("PS1", "> "), ("TERM", "dumb"), ("LC_ALL", "C.UTF-8")]
            .map(|(k, v)| (k.into(), v.into()))
            .into(),
        cwd: None,
    });
    let mut stream = start(&mut client, &request);
    let pid = stream.pid();
    // The job prints a word once it is in the foreground; the echo of its line does not contain that word.
    send(&agent, pid, keys("sh -c 'echo j\"o\"b; exec sleep 1000'\n")).unwrap();
    read_until(&mut stream, "job\r\n");
    // Interrupting the job does not end the shell.
    send(&agent, pid, keys("\x03")).unwrap();
    send(&agent, pid, keys("echo interrupted $?; exit 4\n")).unwrap();
    let (output, end) = collect(&mut stream);
    assert!(!output.contains("no job control"), "{output}");
    assert!(output.contains("interrupted 130"), "{output}");
    assert_eq!(end.exit_code, 4);
}

#[test]
fn a_terminal_belongs_to_its_user() {
    if !is_root() {
        return;
    }
    let agent = Agent::start();
    let mut client = agent.client();
    let request = on_terminal("stat -c %U $(tty); echo reopened > $(tty)");
    let mut stream = client
        .stream(
            "process.Process/Start",
            &request,
            Some("daemon"),
            None,
            PATIENCE,
        )
        .unwrap();
    let (output, _) = collect(&mut stream);
    assert_eq!(output, "daemon\r\nreopened\r\n");
}
