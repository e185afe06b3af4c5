//! Drops a worker's privileges before it reads a layer: it cannot open files, start programs, access the network or
//! signal processes. It keeps its descriptors and a bounded share of memory and CPU.

use jail::{
    Identity, Jail, JailError, Network,
    filter::{self, BpfProgram, SeccompAction, any, bits, checked, equals, has},
};
use nix::{libc, sys::resource::Resource, unistd::geteuid};
use serde::{Deserialize, Serialize};

/// The user of workers whose server is root. No other program uses this id, and it owns nothing.
const USER: u32 = 99_999;

/// Resource limits of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Bytes of address space.
    pub memory: u64,
    pub cpu_seconds: u64,
    pub deadline_seconds: u64,
}

impl Default for Resources {
    fn default() -> Self {
        Self {
            memory: 4 << 30,
            cpu_seconds: 900,
            deadline_seconds: 1800,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfineError {
    #[error("cannot confine the converter")]
    Jail(#[from] JailError),
    #[error("cannot make the converter's seccomp filter")]
    Filter(#[from] filter::Error),
}

/// System calls that are allowed with any arguments: on open descriptors, on the worker's memory, and to exit.
const CALLS: [i64; 31] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_close,
    // sendmsg on the socket to the client. The worker has no other socket.
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_clock_gettime,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_poll,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_sched_getaffinity,
];

/// Confines this process, which must be single-threaded.
///
/// # Errors
/// Returns an error that names the failed step. The process must then exit.
pub(crate) fn confine(resources: &Resources) -> Result<(), ConfineError> {
    let cpu = resources.cpu_seconds;
    let jail = Jail {
        limits: &[
            (Resource::RLIMIT_AS, resources.memory, resources.memory),
            // The signal at the soft limit identifies the reason. It is never sent for another reason.
            (Resource::RLIMIT_CPU, cpu, cpu.saturating_add(1)),
        ],
        identity: geteuid().is_root().then_some(Identity {
            user: USER,
            group: USER,
        }),
        network: Network::Nothing,
        filters: &[filter()?],
    };
    jail.enter()?;
    Ok(())
}

fn filter() -> Result<BpfProgram, filter::Error> {
    let empty = bits(libc::AT_EMPTY_PATH);
    let mut calls = filter::own_memory_and_threads();
    calls.extend([
        // For the length of a descriptor's file. Landlock would reject a path.
        (libc::SYS_statx, vec![vec![has(2, empty, empty)]]),
        (
            libc::SYS_fcntl,
            [libc::F_DUPFD_CLOEXEC, libc::F_GETFD]
                .map(|command| vec![equals(1, bits(command))])
                .into(),
        ),
    ]);
    let mut rules = any(CALLS);
    rules.extend(checked(calls)?);
    filter::compile(rules, SeccompAction::Allow, SeccompAction::KillProcess)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        net::UdpSocket,
        os::unix::{net::UnixStream, process::ExitStatusExt},
        process::{Command, ExitStatus},
    };

    use super::*;

    /// Selects the action of the child process below.
    const ATTEMPT: &str = "CUBE_IMAGE_TEST_ATTEMPT";

    /// Does nothing unless the test below started this process.
    #[test]
    fn child_that_tries_a_forbidden_action() {
        let Ok(attempt) = std::env::var(ATTEMPT) else {
            return;
        };
        let file = tempfile::tempfile().unwrap();
        // Filters apply to the thread that installs them; the test's thread is not the first one.
        confine(&Resources::default()).unwrap();
        match attempt.as_str() {
            "nothing" => {
                file.set_len(10).unwrap();
                assert_eq!(file.try_clone().unwrap().metadata().unwrap().len(), 10);
                drop(vec![1_u8; 64 << 20]);
            }
            "file" => drop(File::open("/dev/null")),
            "program" => drop(Command::new("/bin/true").spawn()),
            "network" => drop(UdpSocket::bind("127.0.0.1:0")),
            "connection" => drop(UnixStream::connect("/nowhere")),
            "pair" => drop(UnixStream::pair()),
            "thread" => drop(std::thread::Builder::new().spawn(|| {})),
            "signal" => drop(nix::sys::signal::kill(nix::unistd::getppid(), None)),
            "name" => drop(std::fs::remove_file("/nowhere")),
            other => panic!("unknown attempt {other}"),
        }
    }

    #[test]
    fn a_forbidden_system_call_kills_the_converter() {
        let own = std::env::current_exe().unwrap();
        let run = |attempt: &str| -> ExitStatus {
            Command::new(&own)
                .args(["child_that_tries_a_forbidden_action", "--test-threads=1"])
                .env(ATTEMPT, attempt)
                .status()
                .unwrap()
        };
        assert!(run("nothing").success());
        for attempt in [
            "file",
            "program",
            "network",
            "connection",
            "pair",
            "thread",
            "signal",
            "name",
        ] {
            let status = run(attempt);
            assert_eq!(status.signal(), Some(libc::SIGSYS), "{attempt}: {status}");
        }
    }
}
