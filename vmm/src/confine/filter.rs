//! The seccomp filter: it allows the system calls of a running VM and kills the process at any other.
//!
//! ```text
//! by number      binary search    allowed · absent · checked · fatal
//! by arguments   seccompiler's program, for checked calls only
//! ```
//! When a filter is installed, the kernel runs it once for every system call number, to cache the numbers that are
//! always allowed. With seccompiler's linear chain of comparisons this adds a quarter of a millisecond to each start;
//! [`super::search`] replaces the chain with a binary search.

use std::collections::BTreeMap;

use jail::filter::{
    BpfProgram, CheckedCalls, SeccompAction, bits, checked, equals, has, is_null,
    own_memory_and_threads,
};
use nix::libc;

use super::{
    ConfineError,
    search::{self, CallPolicy},
};

/// System calls that are allowed with any arguments.
const CALLS: [i64; 54] = [
    // Running the guest and waiting; see also ioctl below.
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_setitimer,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    // Threads of further vCPUs, locks, signals; see also clone and tgkill below.
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
    // Disks, the console, and the memory of the register page.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_lseek,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    // The control socket and vsock streams; see also socketpair and sendto below. sendmsg is missing because it can
    // send descriptors.
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_close,
    // File lengths, random numbers, barriers.
    libc::SYS_fstat,
    libc::SYS_getrandom,
    libc::SYS_membarrier,
];

/// Mask of the type byte of an ioctl request (`linux/ioctl.h`). All requests with KVM's type are allowed.
const REQUEST_TYPE: u64 = 0xff00;
const KVM_REQUESTS: u64 = 0xae00;
/// Other allowed ioctl requests: set a socket's non-blocking mode, read a TAP's flags, set a TAP's offloads.
const REQUESTS: [libc::Ioctl; 3] = [libc::FIONBIO, libc::TUNGETIFF, libc::TUNSETOFFLOAD];

/// Allowed fcntl commands: duplicate a descriptor, read its flags (debug builds do), read and set its status flags, and
/// choose the thread that its readiness signals. The last is F_SETOWN_EX (15), which the libc crate lacks; the kernel
/// checks the signal against this user's permissions.
const FILE_COMMANDS: [i32; 5] = [
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    15,
];

/// Calls whose arguments are behind a pointer, which a filter cannot check. They fail with ENOSYS, as on an older
/// kernel: instead of clone3 the C library then uses clone, and it does without file metadata.
const ABSENT: [i64; 3] = [libc::SYS_clone3, libc::SYS_statx, libc::SYS_newfstatat];

/// Makes the filter.
pub(super) fn compile() -> Result<BpfProgram, ConfineError> {
    let rules = checked(checked_calls()).map_err(ConfineError::Filter)?;
    let policies = policies(rules.keys().copied());
    let (matching, others) = (SeccompAction::Allow, SeccompAction::KillProcess);
    let program = jail::filter::compile(rules, matching, others).map_err(ConfineError::Filter)?;
    search::before(program, &policies).ok_or(ConfineError::Jumps)
}

fn policies(checked: impl Iterator<Item = i64>) -> BTreeMap<i64, CallPolicy> {
    let allowed = CALLS.into_iter().map(|call| (call, CallPolicy::Allowed));
    let absent = ABSENT.into_iter().map(|call| (call, CallPolicy::Absent));
    let checked = checked.map(|call| (call, CallPolicy::Checked));
    allowed.chain(absent).chain(checked).collect()
}

/// Calls that are allowed with some arguments.
fn checked_calls() -> CheckedCalls {
    let thread = bits(libc::CLONE_THREAD);
    let mut requests: Vec<_> = REQUESTS.map(|request| vec![equals(1, request)]).into();
    requests.push(vec![has(1, REQUEST_TYPE, KVM_REQUESTS)]);
    let mut calls = own_memory_and_threads();
    calls.extend([
        (libc::SYS_ioctl, requests),
        (libc::SYS_clone, vec![vec![has(0, thread, thread)]]),
        (
            libc::SYS_fcntl,
            FILE_COMMANDS
                .map(|command| vec![equals(1, bits(command))])
                .into(),
        ),
        // socket(2) is not needed, because sockets arrive over the control socket. A socket pair connects this process
        // only to itself.
        (
            libc::SYS_socketpair,
            vec![vec![equals(0, bits(libc::AF_UNIX))]],
        ),
        // Only the timeouts of the control socket. Other options, such as attaching a BPF filter, are forbidden.
        (
            libc::SYS_setsockopt,
            [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO]
                .map(|option| vec![equals(1, bits(libc::SOL_SOCKET)), equals(2, bits(option))])
                .into(),
        ),
        // Only to the connected peer.
        (libc::SYS_sendto, vec![vec![is_null(4)]]),
        // Naming the thread of a further vCPU.
        (
            libc::SYS_prctl,
            vec![vec![equals(0, bits(libc::PR_SET_NAME))]],
        ),
    ]);
    calls
}
