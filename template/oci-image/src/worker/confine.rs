//! Drops a worker's privileges before it reads a layer: it cannot open files, start programs, access the network or
//! signal processes. It keeps its descriptors and a bounded share of memory and CPU.

use std::collections::BTreeMap;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, Scope,
};
use nix::{
    libc,
    sys::{
        prctl,
        resource::{Resource, setrlimit},
    },
    unistd::{Gid, Uid, geteuid, setgroups, setresgid, setresuid},
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
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
    #[error("cannot limit the converter")]
    Limits(#[source] nix::Error),
    #[error("cannot change the converter's user")]
    User(#[source] nix::Error),
    #[error("cannot restrict the converter with Landlock")]
    Landlock(#[source] landlock::RulesetError),
    #[error("cannot install the converter's seccomp filter")]
    Filter(#[source] seccompiler::Error),
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
    // The signal at the soft CPU limit identifies the reason. It is never sent for another reason.
    let cpu = resources.cpu_seconds;
    for (limit, soft, hard) in [
        (Resource::RLIMIT_CORE, 0, 0),
        (Resource::RLIMIT_AS, resources.memory, resources.memory),
        (Resource::RLIMIT_CPU, cpu, cpu.saturating_add(1)),
    ] {
        setrlimit(limit, soft, hard).map_err(ConfineError::Limits)?;
    }
    if geteuid().is_root() {
        let (uid, gid) = (Uid::from_raw(USER), Gid::from_raw(USER));
        setgroups(&[])
            .and_then(|()| setresgid(gid, gid, gid))
            .and_then(|()| setresuid(uid, uid, uid))
            .map_err(ConfineError::User)?;
    }
    prctl::set_dumpable(false).map_err(ConfineError::User)?;
    let abi = ABI::V6;
    // Without Landlock in the kernel, user and filter enforce the same.
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(abi)))
        .and_then(|rules| rules.scope(Scope::from_all(abi)))
        .and_then(|rules| rules.create())
        .and_then(|rules| rules.restrict_self())
        .map_err(ConfineError::Landlock)?;
    filter().map_err(ConfineError::Filter)
}

fn filter() -> Result<(), seccompiler::Error> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    rules.extend(CALLS.map(|call| (call, Vec::new())));
    let only = |argument, operator, value| {
        let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?;
        Ok::<_, seccompiler::Error>(vec![SeccompRule::new(vec![condition])?])
    };
    // No executable memory.
    let executable = u64::from(libc::PROT_EXEC.unsigned_abs());
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, only(2, SeccompCmpOp::MaskedEq(executable), 0)?);
    }
    // For abort(3), after a failed allocation.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, only(0, SeccompCmpOp::Eq, own)?);
    // For the length of a descriptor's file. Landlock would reject a path.
    let empty = u64::from(libc::AT_EMPTY_PATH.unsigned_abs());
    rules.insert(
        libc::SYS_statx,
        only(2, SeccompCmpOp::MaskedEq(empty), empty)?,
    );
    let duplicate = u64::from(libc::F_DUPFD_CLOEXEC.unsigned_abs());
    let flags = u64::from(libc::F_GETFD.unsigned_abs());
    let mut commands = only(1, SeccompCmpOp::Eq, duplicate)?;
    commands.extend(only(1, SeccompCmpOp::Eq, flags)?);
    rules.insert(libc::SYS_fcntl, commands);
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        TargetArch::x86_64,
    )?;
    let program = BpfProgram::try_from(filter)?;
    seccompiler::apply_filter(&program)
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
