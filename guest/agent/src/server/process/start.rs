//! `process.Process/Start`: from a request to a running process in the table.
//!
//! Every check comes before the process is created, so a failed check leaves nothing behind. If a new process cannot be
//! polled, it is killed. A process may outlive the connection that started it.

use std::{
    ffi::CString,
    fs::OpenOptions,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Instant,
};

use envd::{
    ConnectCode::{
        Internal, InvalidArgument, PermissionDenied, ResourceExhausted, Unauthenticated,
    },
    ConnectError, ProcessConfig, Pty, StartRequest,
};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::{epoll::EpollFlags, signal},
    unistd::pipe2,
};

use transport::Key;

use super::{
    super::{
        core::{Core, Source},
        files::path,
        head::Head,
        message::error,
    },
    child::{KEEP_END, Output, Process, Stdin},
    events::Pipe,
    terminal::{self, Size},
};
use crate::{
    sys::{SpawnError, SpawnPlan, SpawnStep, StandardStreams},
    users::User,
};

/// Largest number of running processes.
const MAX_RUNNING: usize = 1024;
/// Largest number of ended processes whose status is kept. Beyond it, the oldest are forgotten before [`KEEP_END`] has
/// passed.
const MAX_ENDED: usize = 1024;
/// `PATH` of a process unless the sandbox's variables or the caller set one.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Starts a process. Returns its key in the table.
pub(crate) fn start(
    core: &mut Core,
    starter: Key,
    head: &Head,
    request: StartRequest,
) -> Result<Key, ConnectError> {
    let Some(config) = request.process.filter(|config| !config.cmd.is_empty()) else {
        return error(InvalidArgument, "no command to run");
    };
    forget(core, Instant::now())?;
    let name = head
        .fields
        .user
        .as_ref()
        .unwrap_or(&core.settings.default_user)
        .clone();
    let Some(user) = core.users.find(&name) else {
        return error(Unauthenticated, format!("invalid username: '{name}'"));
    };
    let streams = match request.pty {
        Some(pty) => make_terminal(&pty, &user)?,
        None => make_pipes(core, request.stdin.unwrap_or(true)).or_else(no_streams)?,
    };
    let pid = spawn(core, &config, &user, &streams)?;
    let deadline = head
        .fields
        .timeout
        .and_then(|timeout| Instant::now().checked_add(timeout));
    let process = Process {
        pid,
        config,
        tag: request.tag,
        stdin: Stdin::new(streams.input),
        outputs: streams.outputs,
        followers: Vec::new(),
        starter,
        deadline,
        cut: false,
        status: None,
        ended: None,
    };
    insert(core, process)
}

/// Adds a process to the table and its descriptors to the poller. If the latter fails, the process is killed.
fn insert(core: &mut Core, process: Process) -> Result<Key, ConnectError> {
    let key = core.processes.next_key();
    let mut watched = Ok(());
    let sources = [Source::Stdout, Source::Stderr];
    for (source, output) in sources.into_iter().zip(&process.outputs) {
        if let Some(fd) = &output.fd {
            let added = core.io.watch(fd, source.token(key), EpollFlags::EPOLLIN);
            watched = watched.and(added);
        }
    }
    if let Some(fd) = &process.stdin.fd {
        let token = Source::Stdin.token(key);
        watched = watched.and(core.io.watch(fd, token, EpollFlags::EPOLLOUT));
    }
    let key = core.processes.insert(process);
    if let Err(errno) = watched {
        if let Some(process) = core.processes.get_mut(key) {
            // It is reaped like any other process.
            let _ = process.signal(signal::Signal::SIGKILL);
        }
        return error(
            ResourceExhausted,
            format!("cannot watch the process: {errno}"),
        );
    }
    Ok(key)
}

/// Removes ended processes from the table: those older than [`KEEP_END`], and the oldest beyond [`MAX_ENDED`].
///
/// # Errors
/// Returns `ResourceExhausted` if [`MAX_RUNNING`] processes are running.
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

/// Standard streams of a process that has not been started yet.
struct Streams {
    theirs: Theirs,
    /// The agent's end of its input; `None` if it reads from /dev/null.
    input: Option<OwnedFd>,
    outputs: [Output; 2],
}

/// The process's ends of its standard streams.
enum Theirs {
    Pipes {
        /// `None` if it reads from /dev/null.
        stdin: Option<OwnedFd>,
        stdout: OwnedFd,
        stderr: OwnedFd,
    },
    Terminal(OwnedFd),
}

fn no_streams<T>(errno: Errno) -> Result<T, ConnectError> {
    error(
        ResourceExhausted,
        format!("cannot make standard streams: {errno}"),
    )
}

fn make_pipes(core: &mut Core, with_stdin: bool) -> Result<Streams, Errno> {
    if core.null.is_none() {
        let null = OpenOptions::new().read(true).open("/dev/null");
        let null = null.map_err(|e| Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO)))?;
        core.null = Some(null.into());
    }
    let make = || pipe2(OFlag::O_CLOEXEC);
    let (stdin, input) = if with_stdin {
        make().map(|(theirs, ours)| (Some(theirs), Some(ours)))?
    } else {
        (None, None)
    };
    let (out, stdout) = make()?;
    let (err, stderr) = make()?;
    for ours in [&out, &err].into_iter().chain(&input) {
        // Only the agent's end: programs expect blocking standard streams.
        fcntl(ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    }
    Ok(Streams {
        theirs: Theirs::Pipes {
            stdin,
            stdout,
            stderr,
        },
        input,
        outputs: [
            Output::new(Pipe::Stdout, Some(out)),
            Output::new(Pipe::Stderr, Some(err)),
        ],
    })
}

#[cold]
#[inline(never)]
fn make_terminal(pty: &Pty, user: &User) -> Result<Streams, ConnectError> {
    let size = Size::check(pty.size.unwrap_or_default())?;
    let (ours, theirs) = terminal::open(size, user).or_else(no_streams)?;
    // Input and output are closed at different times, so each has its own descriptor.
    let input = ours
        .try_clone()
        .or_else(|e| no_streams(Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO))))?;
    Ok(Streams {
        theirs: Theirs::Terminal(theirs),
        input: Some(input),
        outputs: [
            Output::new(Pipe::Pty, Some(ours)),
            Output::new(Pipe::Stderr, None),
        ],
    })
}

impl Theirs {
    fn plan<'a>(&'a self, null: Option<&'a OwnedFd>) -> Option<StandardStreams<'a>> {
        Some(match self {
            Self::Pipes {
                stdin,
                stdout,
                stderr,
            } => {
                let stdin: BorrowedFd<'_> = stdin.as_ref().or(null)?.as_fd();
                StandardStreams::Separate([stdin, stdout.as_fd(), stderr.as_fd()])
            }
            Self::Terminal(terminal) => StandardStreams::Terminal(terminal.as_fd()),
        })
    }
}

fn spawn(
    core: &mut Core,
    config: &ProcessConfig,
    user: &User,
    streams: &Streams,
) -> Result<i32, ConnectError> {
    let environment = environment(core, config, user)?;
    let search = environment.iter().rev().find(|(name, _)| name == "PATH");
    let programs = programs(&config.cmd, search.map_or("", |(_, value)| value))?;
    let mut arguments = vec![c_string(&config.cmd)?];
    for argument in &config.args {
        arguments.push(c_string(argument)?);
    }
    let mut settings = Vec::with_capacity(environment.len());
    for (name, value) in &environment {
        settings.push(c_string(&format!("{name}={value}"))?);
    }
    let cwd = working_directory(core, config, user)?;
    let Some(stdio) = streams.theirs.plan(core.null.as_ref()) else {
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
        stdio,
        credentials: me.is_root().then_some(&user.credentials),
    };
    core.spawner
        .spawn(&plan)
        .map_err(|failed| explain(failed, &config.cmd, &cwd))
}

#[cold]
#[inline(never)]
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

/// Name and value of every variable. The request overrides the sandbox's variables, which override the defaults.
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
        ("SHELL", &user.shell),
    ];
    let text = |(name, value): (&'_ String, &'_ String)| (name.clone(), value.clone());
    let sandbox = core.environment();
    let given = sandbox.iter().chain(&config.envs).map(text);
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

/// The paths to try for a command: the command itself if it contains a slash, otherwise one in each directory of
/// `PATH`.
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
    let full = path::resolve(wanted, &user.home, &user.home)
        .or_else(|e| error(InvalidArgument, e.message))?;
    c_string(&full.to_string_lossy())
}
