//! Runs programs on the host with a timeout and bounded output.

use std::{
    io::{self, Read},
    os::{fd::AsFd, unix::process::CommandExt},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

use testbed::leftovers;

use super::{Output, host_process::sys};
use crate::event::{Failure, FailureCause};

/// Maximum output of a program in bytes, for standard output and standard error each.
const MAX_OUTPUT: usize = 4 << 20;
const POLL: Duration = Duration::from_micros(200);

/// Runs a program in its own process group and waits until its output has ended and it has exited. Failure messages
/// begin with `who`.
///
/// # Errors
/// Returns [`FailureCause::Spawn`] if it cannot be started, [`FailureCause::Timeout`] if it does not end in time, and
/// [`FailureCause::Exec`] if it writes too much. In the last two cases, its process group is killed.
pub(super) fn output(
    command: &mut Command,
    timeout: Duration,
    who: &str,
) -> Result<Output, Failure> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|e| failed(who, FailureCause::Spawn, &format!("{program}: {e}")))?;
    let answer = collect(&mut child, timeout, who);
    if answer.is_err() {
        end_group(&mut child);
    }
    answer
}

/// Kills the process group that `child` leads, and waits for the child.
pub(super) fn end_group(child: &mut Child) {
    if let Ok(pid) = i32::try_from(child.id()) {
        // Fails only if the group has ended in the meantime.
        let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
    }
    let _ = child.wait();
}

/// Waits until a child has exited; `None` if it has not at the deadline.
pub(super) fn wait_until(child: &mut Child, deadline: Instant) -> io::Result<Option<ExitStatus>> {
    let exited = sys::pidfd(child)?;
    let mut fds = [PollFd::new(exited.as_fd(), PollFlags::POLLIN)];
    if ready_until(&mut fds, deadline)? {
        child.wait().map(Some)
    } else {
        Ok(None)
    }
}

/// Waits until a process, which need not be a child, has ended or is a zombie. Returns false at the deadline.
pub(super) fn await_end(pid: u32, deadline: Instant) -> bool {
    while !leftovers::is_zombie(pid) {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(POLL);
    }
    true
}

/// Waits until one of the descriptors is ready. Returns false at the deadline.
pub(super) fn ready_until(fds: &mut [PollFd<'_>], deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let bound = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(fds, bound) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            // A timeout is rounded down to milliseconds.
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(e) => return Err(e.into()),
        }
    }
}

fn collect(child: &mut Child, timeout: Duration, who: &str) -> Result<Output, Failure> {
    let io = |e: io::Error| failed(who, FailureCause::Exec, &e.to_string());
    let late = || {
        failed(
            who,
            FailureCause::Timeout,
            "the command did not end in time",
        )
    };
    let deadline = Instant::now() + timeout;
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let (Some(mut out), Some(mut err)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(failed(who, FailureCause::Exec, "the command has no pipes"));
    };
    let mut is_open = [true, true];
    while is_open != [false, false] {
        let events = |open| {
            if open {
                PollFlags::POLLIN
            } else {
                PollFlags::empty()
            }
        };
        let mut fds = [
            PollFd::new(out.as_fd(), events(is_open[0])),
            PollFd::new(err.as_fd(), events(is_open[1])),
        ];
        // A closed pipe reports POLLHUP forever, so it is no longer polled.
        let polled = match is_open {
            [true, false] => &mut fds[..1],
            [false, true] => &mut fds[1..],
            _ => &mut fds[..],
        };
        if !ready_until(polled, deadline).map_err(io)? {
            return Err(late());
        }
        let ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|r| !r.is_empty());
        let (out_ready, err_ready) = (ready(&fds[0]), ready(&fds[1]));
        if is_open[0] && out_ready {
            is_open[0] = take(&mut out, &mut stdout).map_err(io)?;
        }
        if is_open[1] && err_ready {
            is_open[1] = take(&mut err, &mut stderr).map_err(io)?;
        }
    }
    let status = wait_until(child, deadline).map_err(io)?.ok_or_else(late)?;
    Ok(Output {
        status: status.code(),
        stdout,
        stderr,
    })
}

/// Reads the available bytes. Returns whether the pipe is still open.
fn take(pipe: &mut impl Read, into: &mut Vec<u8>) -> io::Result<bool> {
    let mut chunk = [0; 4096];
    let n = pipe.read(&mut chunk)?;
    into.extend_from_slice(&chunk[..n]);
    if into.len() > MAX_OUTPUT {
        return Err(io::Error::other(format!(
            "the command wrote more than {MAX_OUTPUT} bytes"
        )));
    }
    Ok(n > 0)
}

pub(super) fn failed(who: &str, cause: FailureCause, message: &str) -> Failure {
    Failure {
        cause,
        message: format!("{who}: {message}"),
    }
}
