//! What the proxy gives up before it reads a byte of a guest: its user, its capabilities, all files, and every system call
//! but those of a runtime with threads, of TCP connections, and of the control socket.

use std::collections::BTreeMap;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, Scope,
};
use nix::{
    libc,
    sys::{
        prctl,
        resource::{Resource, getrlimit, setrlimit},
    },
    unistd::{Gid, Uid, setgroups, setresgid, setresuid},
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use crate::proxy::accept::HEADROOM;

/// The user and group that the process changes to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) user: u32,
    pub(crate) group: u32,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfineError {
    #[error("user and group 0 would keep the rights of root: give others")]
    Root,
    #[error("cannot set a resource limit")]
    Limits(#[source] nix::Error),
    #[error("cannot change the user")]
    User(#[source] nix::Error),
    #[error("cannot restrict the process with Landlock")]
    Landlock(#[source] landlock::RulesetError),
    #[error("cannot install the seccomp filter")]
    Filter(#[source] seccompiler::Error),
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
    setrlimit(Resource::RLIMIT_CORE, 0, 0).map_err(ConfineError::Limits)?;
    let (_, descriptors) = getrlimit(Resource::RLIMIT_NOFILE).map_err(ConfineError::Limits)?;
    setrlimit(Resource::RLIMIT_NOFILE, descriptors, descriptors).map_err(ConfineError::Limits)?;
    if let Some(Identity { user, group }) = identity {
        if user == 0 || group == 0 {
            return Err(ConfineError::Root);
        }
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
        // Root that changes all its user ids to others loses every capability (capabilities(7)).
        setgroups(&[])
            .and_then(|()| setresgid(group, group, group))
            .and_then(|()| setresuid(user, user, user))
            .map_err(ConfineError::User)?;
    }
    prctl::set_no_new_privs().map_err(ConfineError::User)?;
    // Other processes of the same user cannot read the memory, which has secrets.
    prctl::set_dumpable(false).map_err(ConfineError::User)?;
    let abi = ABI::V6;
    // Connections to servers are the proxy's work, so of the network only `bind` is restricted. A kernel without Landlock
    // enforces most of this with the user and the filter.
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))
        .and_then(|rules| rules.handle_access(AccessNet::BindTcp))
        .and_then(|rules| rules.scope(Scope::from_all(abi)))
        .and_then(|rules| rules.create())
        .and_then(|rules| rules.restrict_self())
        .map_err(ConfineError::Landlock)?;
    filter().map_err(ConfineError::Filter)?;
    Ok(descriptors)
}

/// Any other call ends the process: it runs code that is not its own.
fn filter() -> Result<(), seccompiler::Error> {
    // Of several filters, the strictest one decides.
    for (errno, calls) in FAILING {
        let calls = calls.iter().map(|call| (*call, Vec::new()));
        let fails = SeccompAction::Errno(errno.unsigned_abs());
        install(calls.collect(), fails, SeccompAction::Allow)?;
    }
    install(rules()?, SeccompAction::Allow, SeccompAction::KillProcess)
}

fn install(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    matching: SeccompAction,
    others: SeccompAction,
) -> Result<(), seccompiler::Error> {
    let filter = SeccompFilter::new(rules, others, matching, TargetArch::x86_64)?;
    seccompiler::apply_filter(&BpfProgram::try_from(filter)?)
}

fn rules() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::Error> {
    let failing = FAILING
        .into_iter()
        .flat_map(|(_, calls)| calls.iter().copied());
    let any = CALLS.into_iter().chain(failing);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = any.map(|call| (call, Vec::new())).collect();
    for (call, alternatives) in checked() {
        let alternatives = alternatives.into_iter().map(|arguments| {
            let conditions = arguments.into_iter().map(|(argument, operator, value)| {
                SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
            });
            Ok(SeccompRule::new(conditions.collect::<Result<_, _>>()?)?)
        });
        let alternatives = alternatives.collect::<Result<_, seccompiler::Error>>()?;
        rules.insert(call, alternatives);
    }
    // Only to the connected peer: with an address, sendto can connect (TCP Fast Open).
    let no_address = SeccompCondition::new(4, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    rules.insert(libc::SYS_sendto, vec![SeccompRule::new(vec![no_address])?]);
    Ok(rules)
}

/// A condition for the lower 32 bits of an argument.
type Argument = (u8, SeccompCmpOp, u64);

/// Calls that are allowed with some arguments: all conditions of an alternative must hold.
fn checked() -> Vec<(i64, Vec<Vec<Argument>>)> {
    let bits = |value: i32| u64::from(value.unsigned_abs());
    let is = |argument, value| (argument, SeccompCmpOp::Eq, bits(value));
    let has = |argument, mask, value| (argument, SeccompCmpOp::MaskedEq(mask), value);
    let thread = bits(libc::CLONE_THREAD);
    let not_executable = || vec![vec![has(2, bits(libc::PROT_EXEC), 0)]];
    let stream = has(1, SOCKET_TYPE, bits(libc::SOCK_STREAM));
    let families = [libc::AF_INET, libc::AF_INET6];
    vec![
        (libc::SYS_mmap, not_executable()),
        (libc::SYS_mprotect, not_executable()),
        (libc::SYS_clone, vec![vec![has(0, thread, thread)]]),
        // abort(3): signals may go only to threads of this process.
        (
            libc::SYS_tgkill,
            vec![vec![(0, SeccompCmpOp::Eq, std::process::id().into())]],
        ),
        (
            libc::SYS_fcntl,
            FILE_COMMANDS.map(|command| vec![is(1, command)]).into(),
        ),
        // Non-blocking mode.
        (
            libc::SYS_ioctl,
            vec![vec![(1, SeccompCmpOp::Eq, libc::FIONBIO)]],
        ),
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
    ]
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
