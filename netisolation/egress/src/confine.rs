//! Before the proxy reads a byte of a guest, it gives up its user, its capabilities, all files, and every system call
//! except those of a runtime with threads, of TCP connections, and of the control socket.

use jail::{
    Identity, Jail, JailError, Network,
    filter::{
        self, BpfProgram, CheckedCalls, SeccompAction, any, bits, checked, compile, equals, has,
        is_null, own_memory_and_threads,
    },
};
use nix::{
    libc,
    sys::resource::{Resource, getrlimit},
};

use crate::proxy::accept::HEADROOM;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfineError {
    #[error("cannot read the limit on open descriptors")]
    Limits(#[source] nix::Error),
    #[error("cannot make the seccomp filter")]
    Filter(#[from] filter::Error),
    #[error(transparent)]
    Jail(#[from] JailError),
}

/// System calls that are allowed with any arguments.
const CALLS: [i64; 42] = [
    // Data, on descriptors that are open. sendmsg is missing because it can send descriptors, recvmsg because it can get them.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_shutdown,
    libc::SYS_close,
    libc::SYS_fstat,
    // Connections; see also socket, setsockopt and sendto below.
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_getsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    // Waiting and time.
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_poll,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    // Threads, locks, signals; see also clone and tgkill below.
    libc::SYS_futex,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Memory; see also mmap and mprotect below.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_getrandom,
];

/// Calls of libraries that fail, and that they do without. No file can be opened in any case; without clone3, the C library
/// uses clone.
const FAILING: [(i32, &[i64]); 2] = [
    (
        libc::ENOSYS,
        &[libc::SYS_clone3, libc::SYS_statx, libc::SYS_newfstatat],
    ),
    (libc::EACCES, &[libc::SYS_open, libc::SYS_openat]),
];

/// Options that can be set on sockets: level and name.
const SOCKET_OPTIONS: [(i32, i32); 2] = [
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::SOL_SOCKET, libc::SO_LINGER),
];

/// Bits of a socket's type without its flags (`linux/net.h`, `SOCK_TYPE_MASK`).
const SOCKET_TYPE: u64 = 0xf;

/// Commands of fcntl: duplicate a descriptor, read and set its flags.
const FILE_COMMANDS: [i32; 5] = [
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
];

/// Confines this process, which must have one thread. Returns the limit for open descriptors.
///
/// # Errors
/// Returns the step that failed. The process must then exit.
pub(crate) fn confine(identity: Option<Identity>) -> Result<u64, ConfineError> {
    let (_, descriptors) = getrlimit(Resource::RLIMIT_NOFILE).map_err(ConfineError::Limits)?;
    let jail = Jail {
        limits: &[(Resource::RLIMIT_NOFILE, descriptors, descriptors)],
        identity,
        network: Network::Connections,
        filters: &filters()?,
    };
    jail.enter()?;
    Ok(descriptors)
}

/// A call that is on no list ends the process: it runs code that is not its own.
fn filters() -> Result<Vec<BpfProgram>, filter::Error> {
    let mut filters = Vec::new();
    let mut rules = any(CALLS);
    for (errno, calls) in FAILING {
        let calls = any(calls.iter().copied());
        rules.extend(calls.clone());
        let fails = SeccompAction::Errno(errno.unsigned_abs());
        filters.push(compile(calls, fails, SeccompAction::Allow)?);
    }
    rules.extend(checked(checked_calls())?);
    let kills = SeccompAction::KillProcess;
    filters.push(compile(rules, SeccompAction::Allow, kills)?);
    Ok(filters)
}

/// Calls that are allowed with some arguments.
fn checked_calls() -> CheckedCalls {
    let is = |argument, value| equals(argument, bits(value));
    let thread = bits(libc::CLONE_THREAD);
    let stream = has(1, SOCKET_TYPE, bits(libc::SOCK_STREAM));
    let families = [libc::AF_INET, libc::AF_INET6];
    let mut calls = own_memory_and_threads();
    calls.extend([
        (libc::SYS_clone, vec![vec![has(0, thread, thread)]]),
        (
            libc::SYS_fcntl,
            FILE_COMMANDS.map(|command| vec![is(1, command)]).into(),
        ),
        // Non-blocking mode.
        (libc::SYS_ioctl, vec![vec![equals(1, libc::FIONBIO)]]),
        // The runtime's own pair, for signals. One of datagrams could connect again, to a path.
        (
            libc::SYS_socketpair,
            vec![vec![is(0, libc::AF_UNIX), stream.clone()]],
        ),
        // Names of threads.
        (libc::SYS_prctl, vec![vec![is(0, libc::PR_SET_NAME)]]),
        // SCTP has stream sockets, too, whose connections the cgroup's programs do not judge.
        (
            libc::SYS_socket,
            families
                .into_iter()
                .flat_map(|family| [0, libc::IPPROTO_TCP].map(|protocol| (family, protocol)))
                .map(|(family, protocol)| vec![is(0, family), stream.clone(), is(2, protocol)])
                .collect(),
        ),
        (
            libc::SYS_setsockopt,
            SOCKET_OPTIONS
                .map(|(level, name)| vec![is(1, level), is(2, name)])
                .into(),
        ),
        // Only to the connected peer: with an address, sendto can connect (TCP Fast Open).
        (libc::SYS_sendto, vec![vec![is_null(4)]]),
    ]);
    calls
}

/// The limit for connections, each of which needs two descriptors.
pub(crate) fn connections(wanted: u32, descriptors: u64) -> u32 {
    let others = 64 + u64::from(HEADROOM);
    let possible = descriptors.saturating_sub(others) / 2;
    let possible = u32::try_from(possible).unwrap_or(u32::MAX);
    if possible < wanted {
        tracing::warn!(
            "the limit of {descriptors} open files allows {possible} connections, not {wanted}: raise LimitNOFILE"
        );
    }
    wanted.min(possible)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        net::{TcpListener, TcpStream, UdpSocket},
        os::unix::{
            net::{UnixDatagram, UnixStream},
            process::ExitStatusExt,
        },
        process::{Command, ExitStatus},
    };

    use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

    use super::*;

    /// Names the action for the child process below.
    const ATTEMPT: &str = "CUBE_EGRESS_TEST_ATTEMPT";

    /// Does nothing unless the test below started this process.
    #[test]
    fn child_that_tries_an_action() {
        let Ok(attempt) = std::env::var(ATTEMPT) else {
            return;
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        confine(None).unwrap();
        match attempt.as_str() {
            "connection" => {
                let stream = TcpStream::connect(address).unwrap();
                stream.set_nodelay(true).unwrap();
                assert!(
                    std::thread::spawn(move || listener.accept().is_ok())
                        .join()
                        .unwrap()
                );
            }
            // Refused, but without an end of the process.
            "file" => drop(File::open("/dev/null").unwrap_err()),
            "program" => drop(Command::new("/bin/true").spawn()),
            "udp" => drop(UdpSocket::bind("127.0.0.1:0")),
            "protocol" => drop(socket(
                AddressFamily::Inet,
                SockType::Stream,
                SockFlag::empty(),
                SockProtocol::Raw,
            )),
            "datagrams" => drop(UnixDatagram::pair()),
            "listener" => drop(TcpListener::bind("127.0.0.1:0")),
            "path" => drop(UnixStream::connect("/nowhere")),
            "signal" => drop(nix::sys::signal::kill(nix::unistd::getppid(), None)),
            "name" => drop(std::fs::remove_file("/nowhere")),
            "option" => drop(nix::sys::socket::setsockopt(
                &listener,
                nix::sys::socket::sockopt::ReuseAddr,
                &true,
            )),
            "memory" => drop(nix::sys::memfd::memfd_create(
                c"x",
                nix::sys::memfd::MFdFlags::empty(),
            )),
            other => panic!("unknown attempt {other}"),
        }
    }

    #[test]
    fn a_system_call_that_is_not_on_the_list_kills_the_proxy() {
        let own = std::env::current_exe().unwrap();
        let run = |attempt: &str| -> ExitStatus {
            Command::new(&own)
                .args(["child_that_tries_an_action", "--test-threads=1"])
                .env(ATTEMPT, attempt)
                .status()
                .unwrap()
        };
        for attempt in ["connection", "file"] {
            assert!(run(attempt).success(), "{attempt}");
        }
        for attempt in [
            "program",
            "udp",
            "protocol",
            "datagrams",
            "listener",
            "path",
            "signal",
            "name",
            "option",
            "memory",
        ] {
            let status = run(attempt);
            assert_eq!(status.signal(), Some(libc::SIGSYS), "{attempt}: {status}");
        }
    }
}
