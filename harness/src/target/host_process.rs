//! The baseline: the command runs as a process of the host, with its standard output in a pipe and its standard error
//! discarded.
//!
//! There is no create step. Its time is a lower bound for any sandbox on this host at that moment.

mod sys;

use std::{
    io::Read,
    os::fd::{AsFd, BorrowedFd},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use model::{StartPhase, Timeline};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use super::{CloneId, Output, PageCache, Sandbox, Target};
use crate::{
    account, clock,
    event::{Failure, FailureCause},
    scenario::ExecSpec,
};

/// The target of baseline rounds. `create` starts nothing.
#[derive(Clone, Copy, Debug)]
pub struct HostProcess;

impl Target for HostProcess {
    fn create(&self, _: CloneId, timeline: &mut Timeline) -> Result<Box<dyn Sandbox>, Failure> {
        timeline.stamp(StartPhase::Replied, clock::monotonic_ns());
        Ok(Box::new(Self))
    }

    fn cpu_ns(&self) -> Option<u64> {
        account::children_cpu_ns()
    }

    fn prepare_cache(&self, _: PageCache) -> std::io::Result<()> {
        Ok(())
    }
}

impl Sandbox for HostProcess {
    fn exec(&mut self, command: &ExecSpec) -> Result<Output, Failure> {
        let Some(program) = command.argv.first() else {
            let why = format!(
                "cannot run {}: the host has no interpreter",
                command.describe()
            );
            return Err(failed(FailureCause::Exec, &why));
        };
        let mut child = Command::new(program)
            .args(&command.argv[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| failed(FailureCause::Spawn, &format!("{program}: {e}")))?;
        let answer = wait(&mut child, command.timeout);
        if answer.is_err() {
            // Fails only if the process has ended in the meantime.
            let _ = child.kill();
            let _ = child.wait();
        }
        answer
    }

    fn write_file(&mut self, path: &str, _: &[u8]) -> Result<(), Failure> {
        Err(failed(
            FailureCause::Exec,
            &format!("cannot write {path}: the baseline writes no files to the host"),
        ))
    }

    fn set_network(&mut self, _: &serde_json::Value) -> Result<(), Failure> {
        Err(failed(
            FailureCause::Network,
            "host processes have no network policy",
        ))
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    fn kill(self: Box<Self>) -> Result<(), Failure> {
        Ok(())
    }
}

/// Reads the output to its end and waits until the process has ended, for `timeout` in total. A process can close
/// its output and continue to run.
fn wait(child: &mut Child, timeout: Duration) -> Result<Output, Failure> {
    let io = |e: std::io::Error| failed(FailureCause::Exec, &e.to_string());
    let deadline = Instant::now() + timeout;
    let mut stdout = Vec::new();
    if let Some(mut pipe) = child.stdout.take() {
        let mut chunk = [0; 4096];
        loop {
            await_readable(pipe.as_fd(), deadline)?;
            match pipe.read(&mut chunk).map_err(io)? {
                0 => break,
                n => stdout.extend_from_slice(&chunk[..n]),
            }
        }
    }
    await_readable(sys::pidfd(child).map_err(io)?.as_fd(), deadline)?;
    let status = child.wait().map_err(io)?.code();
    Ok(Output {
        status,
        stdout,
        stderr: Vec::new(),
    })
}

fn await_readable(fd: BorrowedFd<'_>, deadline: Instant) -> Result<(), Failure> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let bound = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], bound) {
            Ok(0) if Instant::now() >= deadline => {
                let why = "the command did not end in time";
                return Err(failed(FailureCause::Timeout, why));
            }
            // A timeout is rounded down to milliseconds.
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(e) => return Err(failed(FailureCause::Exec, &e.to_string())),
        }
    }
}

fn failed(cause: FailureCause, message: &str) -> Failure {
    Failure {
        cause,
        message: format!("host process: {message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::exec_and_compare;

    fn spec(argv: &[&str], expect: &str, timeout: Duration) -> ExecSpec {
        ExecSpec {
            argv: argv.iter().map(|s| (*s).to_owned()).collect(),
            cell: None,
            language: None,
            user: "root".into(),
            expect_stdout: expect.into(),
            timeout,
        }
    }

    #[test]
    fn output_is_compared_and_a_hanging_command_times_out() {
        let long = Duration::from_secs(20);
        let cause = |argv: &[&str], expect, timeout| {
            exec_and_compare(&mut HostProcess, &spec(argv, expect, timeout)).map_err(|f| f.cause)
        };
        assert_eq!(cause(&["echo", "ok"], "ok\n", long), Ok(()));
        assert_eq!(
            cause(&["echo", "ok"], "no\n", long),
            Err(FailureCause::WrongOutput)
        );
        assert_eq!(cause(&["false"], "", long), Err(FailureCause::WrongOutput));
        assert_eq!(cause(&["/no/such"], "", long), Err(FailureCause::Spawn));
        let short = Duration::from_millis(20);
        assert_eq!(
            cause(&["sleep", "30"], "", short),
            Err(FailureCause::Timeout)
        );
        let closes_its_output = ["sh", "-c", "exec >&-; sleep 30"];
        assert_eq!(
            cause(&closes_its_output, "", short),
            Err(FailureCause::Timeout)
        );
    }
}
