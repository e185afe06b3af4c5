//! `process.Process`.

use std::{
    collections::VecDeque,
    ffi::CString,
    fs::OpenOptions,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use api_types::envd::{
    CloseStdinRequest, ConnectCode, ConnectError, ConnectRequest, ListResponse, ProcessConfig,
    ProcessInfo, ProcessSelector, SendInputRequest, SendSignalRequest, Signal, StartRequest, frame,
};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::{epoll::EpollFlags, signal},
    unistd::pipe2,
};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    Core, MAX_ENDED, MAX_RUNNING, Token, Work,
    conn::{Conn, Follow, Phase},
    events::{self, Pipe},
    files,
    http::{self, Head},
    process::{Input, KEEP_END, Output, Process, Stdin},
    route::{Stream, Unary},
    slots::Key,
};
use crate::{
    sys::{SpawnError, SpawnPlan, SpawnStep},
    users::User,
};

/// Where programs are looked for unless somebody says otherwise.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Sign of life on a silent stream when the caller names no period.
const KEEPALIVE: Duration = Duration::from_secs(90);

use ConnectCode::{FailedPrecondition, Internal, InvalidArgument, NotFound, PermissionDenied};
use ConnectCode::{ResourceExhausted, Unauthenticated, Unimplemented};

fn error<T>(code: ConnectCode, message: impl Into<String>) -> Result<T, ConnectError> {
    Err(ConnectError::new(code, message))
}

/// A failed unary call.
pub(crate) fn answer_error(conn: &mut Conn, error: &ConnectError) {
    let body = serde_json::to_vec(error).unwrap_or_default();
    conn.answer(error.code.http_status(), http::JSON, &body);
}

/// The message in a body.
fn message<T: DeserializeOwned>(body: &[u8]) -> Result<T, ConnectError> {
    serde_json::from_slice(body)
        .or_else(|e| error(InvalidArgument, format!("the message cannot be read: {e}")))
}

/// A call that is answered once.
pub(crate) fn unary(
    core: &mut Core,
    key: Key,
    conn: &mut Conn,
    method: Unary,
    head: &Head,
    body: &[u8],
) {
    if head.content_type.split(';').next().map(str::trim) != Some(http::JSON) {
        return conn.error(415, "the content type must be application/json");
    }
    let answer = match method {
        _ if !head.encoding.is_empty() => error(Unimplemented, "compression is not offered"),
        Unary::List => json(&list(core)),
        Unary::SendSignal => message(body).and_then(|m| send_signal(core, &m)),
        Unary::CloseStdin => message(body).and_then(|m| close_stdin(core, &m)),
        Unary::SendInput => match message(body).and_then(|m| send_input(core, key, m)) {
            Ok(()) => {
                conn.phase = Phase::Input;
                return;
            }
            Err(error) => Err(error),
        },
    };
    match answer {
        Ok(answer) => conn.answer(200, http::JSON, &answer),
        Err(error) => answer_error(conn, &error),
    }
}

fn json<T: Serialize>(message: &T) -> Result<Vec<u8>, ConnectError> {
    serde_json::to_vec(message).or_else(|e| error(Internal, e.to_string()))
}

fn list(core: &Core) -> ListResponse {
    let running = core
        .processes
        .iter()
        .filter(|(_, process)| process.is_running());
    let mut processes: Vec<(i32, ProcessInfo)> = running
        .map(|(_, process)| {
            let info = ProcessInfo {
                config: process.config.clone(),
                pid: process.pid.unsigned_abs(),
                tag: process.tag.clone(),
            };
            (process.pid, info)
        })
        .collect();
    processes.sort_by_key(|(pid, _)| *pid);
    ListResponse {
        processes: processes.into_iter().map(|(_, info)| info).collect(),
    }
}

/// Which ends of processes a selector may find.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Included,
    Excluded,
}

fn select(core: &Core, selector: &ProcessSelector, ended: Ended) -> Result<Key, ConnectError> {
    let matches = |process: &Process| match (selector.pid, &selector.tag) {
        (Some(pid), _) => process.pid.unsigned_abs() == pid,
        (None, Some(tag)) => process.tag.as_ref() == Some(tag),
        (None, None) => false,
    };
    let found = core
        .processes
        .iter()
        .filter(|(_, process)| matches(process));
    let found = found.filter(|(_, process)| process.is_running() || ended == Ended::Included);
    // A running one first, else the one that ended last.
    let best = found.max_by_key(|(_, process)| (process.is_running(), process.ended));
    match (best, selector.pid, &selector.tag) {
        (Some((key, _)), _, _) => Ok(key),
        (None, Some(pid), _) => error(NotFound, format!("process with pid {pid} not found")),
        (None, None, Some(tag)) => error(NotFound, format!("process with tag {tag} not found")),
        (None, None, None) => error(InvalidArgument, "neither pid nor tag of a process"),
    }
}

fn send_signal(core: &mut Core, request: &SendSignalRequest) -> Result<Vec<u8>, ConnectError> {
    let signal = match request.signal {
        Signal::Kill => signal::Signal::SIGKILL,
        Signal::Term => signal::Signal::SIGTERM,
        Signal::Unspecified => return error(InvalidArgument, "no signal to send"),
    };
    let key = select(core, &request.process, Ended::Excluded)?;
    let sent = core
        .processes
        .get_mut(key)
        .map(|process| process.signal(signal));
    core.enqueue(Work::Process(key));
    match sent {
        // Between its last breath and its funeral.
        Some(Ok(()) | Err(Errno::ESRCH)) | None => Ok(b"{}".to_vec()),
        Some(Err(errno)) => error(Internal, format!("error sending signal: {errno}")),
    }
}

fn close_stdin(core: &mut Core, request: &CloseStdinRequest) -> Result<Vec<u8>, ConnectError> {
    let key = select(core, &request.process, Ended::Excluded)?;
    if let Some(process) = core.processes.get_mut(key) {
        process.stdin.closing = true;
    }
    core.enqueue(Work::Process(key));
    Ok(b"{}".to_vec())
}

/// Puts input into the process's queue; the answer is given once it is in the pipe.
fn send_input(core: &mut Core, conn: Key, request: SendInputRequest) -> Result<(), ConnectError> {
    let key = select(core, &request.process, Ended::Excluded)?;
    let bytes = match (request.input.stdin, request.input.pty) {
        (Some(stdin), _) => stdin.0,
        (None, Some(_)) => return error(FailedPrecondition, "the process has no terminal"),
        (None, None) => return error(InvalidArgument, "no input"),
    };
    if let Some(process) = core.processes.get_mut(key) {
        if process.stdin.fd.is_none() || process.stdin.closing {
            return error(FailedPrecondition, "stdin not enabled or closed");
        }
        process.stdin.queue.push_back(Input {
            conn,
            bytes,
            written: 0,
        });
    }
    core.enqueue(Work::Process(key));
    Ok(())
}

/// A call that is answered with a stream.
pub(crate) fn stream(
    core: &mut Core,
    key: Key,
    conn: &mut Conn,
    method: Stream,
    head: &Head,
    body: &[u8],
) {
    if head.content_type != http::CONNECT_JSON {
        return conn.error(415, "the content type must be application/connect+json");
    }
    let body = match only_frame(head, body) {
        Ok(body) => body,
        Err(error) => return conn.refuse_stream(error),
    };
    let process = match method {
        Stream::Start => message(body).and_then(|request| start(core, key, head, request)),
        Stream::Connect => message(body)
            .and_then(|request: ConnectRequest| select(core, &request.process, Ended::Included)),
    };
    match process {
        Ok(process) => follow(core, key, conn, process, method, head),
        Err(error) => conn.refuse_stream(error),
    }
}

/// The message of a request with exactly one.
fn only_frame<'a>(head: &Head, body: &'a [u8]) -> Result<&'a [u8], ConnectError> {
    if !head.encoding.is_empty() {
        return error(Unimplemented, "compression is not offered");
    }
    match frame::decode(body, u32::MAX) {
        Ok(Some((frame, used))) if frame.flags == 0 && used == body.len() => Ok(frame.body),
        Ok(_) => error(InvalidArgument, "the request must be exactly one message"),
        Err(e) => error(InvalidArgument, e.to_string()),
    }
}

/// Lets a connection follow a process: its start now, everything else as it happens.
fn follow(
    core: &mut Core,
    key: Key,
    conn: &mut Conn,
    process_key: Key,
    method: Stream,
    head: &Head,
) {
    let Some(process) = core.processes.get_mut(process_key) else {
        return;
    };
    let now = Instant::now();
    let keepalive = head.keepalive.unwrap_or(KEEPALIVE);
    conn.follow(Follow {
        process: process_key,
        deadline: match method {
            // There it is the process's.
            Stream::Start => None,
            Stream::Connect => head.timeout.and_then(|timeout| now.checked_add(timeout)),
        },
        keepalive,
        next_keepalive: now + keepalive,
    });
    events::push_start(&mut conn.out, process.pid.unsigned_abs());
    match process.is_running() {
        true => process.followers.push(key),
        false => {
            let end = process.status.clone().unwrap_or_default();
            events::push_end(&mut conn.out, &end);
            conn.end_request(super::conn::Rest::Read);
        }
    }
}

/// Starts a process; it stays when the caller goes.
fn start(
    core: &mut Core,
    starter: Key,
    head: &Head,
    request: StartRequest,
) -> Result<Key, ConnectError> {
    if request.pty.is_some() {
        return error(Unimplemented, "terminals are not offered");
    }
    let Some(config) = request.process.filter(|config| !config.cmd.is_empty()) else {
        return error(InvalidArgument, "no command to run");
    };
    forget(core, Instant::now())?;
    let name = head
        .user
        .as_ref()
        .unwrap_or(&core.settings.default_user)
        .clone();
    let Some(user) = core.users.find(&name) else {
        return error(Unauthenticated, format!("invalid username: '{name}'"));
    };
    let with_stdin = request.stdin.unwrap_or(true);
    let pipes = make_pipes(core, with_stdin)
        .or_else(|errno| error(ResourceExhausted, format!("cannot make pipes: {errno}")))?;
    let pid = spawn(core, &config, &user, &pipes)?;
    let deadline = head
        .timeout
        .and_then(|timeout| Instant::now().checked_add(timeout));
    let process = Process {
        pid,
        config,
        tag: request.tag,
        stdin: Stdin {
            fd: pipes.stdin.map(|(_, ours)| ours),
            writable: true,
            closing: false,
            queue: VecDeque::new(),
        },
        outputs: [
            (Pipe::Stdout, pipes.stdout.0),
            (Pipe::Stderr, pipes.stderr.0),
        ]
        .map(|(pipe, fd)| Output {
            pipe,
            fd: Some(fd),
            readable: false,
        }),
        followers: Vec::new(),
        starter,
        deadline,
        cut: false,
        status: None,
        ended: None,
    };
    watch(core, process)
}

/// Puts a process into the table and its pipes into the poller.
fn watch(core: &mut Core, process: Process) -> Result<Key, ConnectError> {
    let key = core.processes.next_key();
    let mut watched = Ok(());
    for (place, output) in process.outputs.iter().enumerate() {
        if let Some(fd) = &output.fd {
            watched = watched.and(core.watch(fd, Token::Output(key, place), EpollFlags::EPOLLIN));
        }
    }
    if let Some(fd) = &process.stdin.fd {
        watched = watched.and(core.watch(fd, Token::Stdin(key), EpollFlags::EPOLLOUT));
    }
    let key = core.processes.insert(process);
    if let Err(errno) = watched {
        if let Some(process) = core.processes.get_mut(key) {
            // It goes on to its end like any other.
            let _ = process.signal(signal::Signal::SIGKILL);
        }
        return error(
            ResourceExhausted,
            format!("cannot watch the process: {errno}"),
        );
    }
    Ok(key)
}

/// Makes room in the table: ends that were kept long enough, then the oldest of too many.
fn forget(core: &mut Core, now: Instant) -> Result<(), ConnectError> {
    let mut ended: Vec<(Instant, Key)> = core
        .processes
        .iter()
        .filter_map(|(key, p)| Some((p.ended?, key)))
        .collect();
    let running = core.processes.len() - ended.len();
    if running >= MAX_RUNNING {
        return error(
            ResourceExhausted,
            format!("{running} processes are running"),
        );
    }
    ended.sort_unstable_by_key(|(at, _)| *at);
    let surplus = ended.len().saturating_sub(MAX_ENDED);
    for (place, (at, key)) in ended.into_iter().enumerate() {
        if place < surplus || now.saturating_duration_since(at) > KEEP_END {
            core.processes.remove(key);
        }
    }
    Ok(())
}

/// Standard streams: the process's end and ours.
struct Pipes {
    /// Absent when it reads from /dev/null.
    stdin: Option<(OwnedFd, OwnedFd)>,
    /// Ours and the process's.
    stdout: (OwnedFd, OwnedFd),
    stderr: (OwnedFd, OwnedFd),
}

fn make_pipes(core: &mut Core, with_stdin: bool) -> Result<Pipes, Errno> {
    if core.null.is_none() {
        let null = OpenOptions::new().read(true).open("/dev/null");
        let null = null.map_err(|e| Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO)))?;
        core.null = Some(null.into());
    }
    let make = || pipe2(OFlag::O_CLOEXEC);
    let pipes = Pipes {
        stdin: if with_stdin { Some(make()?) } else { None },
        stdout: make()?,
        stderr: make()?,
    };
    let stdin = pipes.stdin.as_ref().map(|(_, ours)| ours);
    for ours in [&pipes.stdout.0, &pipes.stderr.0].into_iter().chain(stdin) {
        // Only our end: the process must find its standard streams blocking.
        fcntl(ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    }
    Ok(pipes)
}

fn spawn(
    core: &mut Core,
    config: &ProcessConfig,
    user: &User,
    pipes: &Pipes,
) -> Result<i32, ConnectError> {
    let environment = environment(core, config, user)?;
    let path = environment.iter().rev().find(|(name, _)| name == "PATH");
    let programs = programs(&config.cmd, path.map_or("", |(_, value)| value))?;
    let mut arguments = vec![c_string(&config.cmd)?];
    for argument in &config.args {
        arguments.push(c_string(argument)?);
    }
    let mut settings = Vec::with_capacity(environment.len());
    for (name, value) in &environment {
        settings.push(c_string(&format!("{name}={value}"))?);
    }
    let cwd = working_directory(core, config, user)?;
    let stdin = pipes
        .stdin
        .as_ref()
        .map(|(theirs, _)| theirs)
        .or(core.null.as_ref());
    let Some(stdin) = stdin else {
        return error(Internal, "no standard input");
    };
    let me = nix::unistd::geteuid();
    let is_me = me.as_raw() == user.credentials.uid;
    if !me.is_root() && !is_me {
        return error(PermissionDenied, format!("cannot become '{}'", user.name));
    }
    let plan = SpawnPlan {
        programs: &programs,
        arguments: &arguments,
        environment: &settings,
        cwd: &cwd,
        stdio: [
            stdin.as_fd(),
            pipes.stdout.1.as_fd(),
            pipes.stderr.1.as_fd(),
        ],
        credentials: me.is_root().then_some(&user.credentials),
    };
    core.spawner
        .spawn(&plan)
        .map_err(|failed| explain(failed, &config.cmd, &cwd))
}

fn explain(failed: SpawnError, cmd: &str, cwd: &CString) -> ConnectError {
    let SpawnError { step, errno } = failed;
    let cwd = cwd.to_string_lossy();
    let reason = errno.desc();
    let (code, message) = match (step, errno) {
        (SpawnStep::Cwd, Errno::ENOENT | Errno::ENOTDIR) => {
            (InvalidArgument, format!("cwd '{cwd}' does not exist"))
        }
        (SpawnStep::Cwd, _) => (PermissionDenied, format!("cwd '{cwd}': {reason}")),
        (SpawnStep::Exec, Errno::ENOENT) => (
            InvalidArgument,
            format!("'{cmd}': executable file not found"),
        ),
        (SpawnStep::Exec, Errno::EACCES) => (PermissionDenied, format!("'{cmd}': {reason}")),
        (SpawnStep::Exec, _) => (InvalidArgument, format!("cannot run '{cmd}': {reason}")),
        (SpawnStep::Clone, _) => (
            ResourceExhausted,
            format!("cannot make a process: {reason}"),
        ),
        (SpawnStep::Prepare | SpawnStep::User, _) => {
            (Internal, format!("cannot prepare '{cmd}': {reason}"))
        }
    };
    ConnectError::new(code, message)
}

fn c_string(text: &str) -> Result<CString, ConnectError> {
    CString::new(text).or_else(|_| error(InvalidArgument, "a zero byte in a command"))
}

/// Name and value of every variable; later ones win.
fn environment(
    core: &Core,
    config: &ProcessConfig,
    user: &User,
) -> Result<Vec<(String, String)>, ConnectError> {
    let own = [
        ("PATH", PATH),
        ("HOME", &user.home),
        ("USER", &user.name),
        ("LOGNAME", &user.name),
    ];
    let text = |(name, value): (&'_ String, &'_ String)| (name.clone(), value.clone());
    let given = core.settings.env_vars.iter().chain(&config.envs).map(text);
    let mut environment: Vec<(String, String)> = Vec::new();
    for (name, value) in own
        .map(|(n, v)| (n.to_owned(), v.to_owned()))
        .into_iter()
        .chain(given)
    {
        if name.is_empty() || name.contains('=') {
            return error(InvalidArgument, format!("'{name}' cannot name a variable"));
        }
        environment.retain(|(other, _)| *other != name);
        environment.push((name, value));
    }
    Ok(environment)
}

/// The paths that a command may mean, as a shell looks for it.
fn programs(cmd: &str, path: &str) -> Result<Vec<CString>, ConnectError> {
    if cmd.contains('/') {
        return Ok(vec![c_string(cmd)?]);
    }
    let dirs = path.split(':').filter(|dir| !dir.is_empty());
    dirs.map(|dir| c_string(&format!("{dir}/{cmd}"))).collect()
}

fn working_directory(
    core: &Core,
    config: &ProcessConfig,
    user: &User,
) -> Result<CString, ConnectError> {
    let wanted = config.cwd.as_deref().filter(|cwd| !cwd.is_empty());
    let default = Some(core.settings.default_workdir.as_str()).filter(|cwd| !cwd.is_empty());
    let wanted = wanted.or(default).unwrap_or(&user.home);
    let wanted = if wanted.is_empty() { "/" } else { wanted };
    let full = files::resolve(wanted, &user.home, &user.home)
        .or_else(|e| error(InvalidArgument, e.message))?;
    c_string(&full.to_string_lossy())
}
