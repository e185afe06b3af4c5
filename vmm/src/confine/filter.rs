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

use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

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

/// Calls that can make memory executable. They are allowed without PROT_EXEC (argument 2 of both).
const MAPPING_CALLS: [i64; 2] = [libc::SYS_mmap, libc::SYS_mprotect];

/// Calls whose arguments are behind a pointer, which a filter cannot check. They fail with ENOSYS, as on an older
/// kernel: instead of clone3 the C library then uses clone, and it does without file metadata.
const ABSENT: [i64; 3] = [libc::SYS_clone3, libc::SYS_statx, libc::SYS_newfstatat];

/// Installs the filter for this thread and all threads that it starts.
pub(super) fn install() -> Result<(), ConfineError> {
    let rules = argument_rules().map_err(ConfineError::Filter)?;
    let policies = policies(rules.keys().copied());
    let program = by_arguments(rules).map_err(ConfineError::Filter)?;
    let program = search::before(program, &policies).ok_or(ConfineError::Jumps)?;
    seccompiler::apply_filter(&program).map_err(ConfineError::Filter)
}

fn policies(checked: impl Iterator<Item = i64>) -> BTreeMap<i64, CallPolicy> {
    let allowed = CALLS.into_iter().map(|call| (call, CallPolicy::Allowed));
    let absent = ABSENT.into_iter().map(|call| (call, CallPolicy::Absent));
    let checked = checked.map(|call| (call, CallPolicy::Checked));
    allowed.chain(absent).chain(checked).collect()
}

fn by_arguments(rules: BTreeMap<i64, Vec<SeccompRule>>) -> Result<BpfProgram, seccompiler::Error> {
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        TargetArch::x86_64,
    )?;
    Ok(BpfProgram::try_from(filter)?)
}

/// Rules for the arguments of checked calls.
fn argument_rules() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::Error> {
    let mut rules = BTreeMap::new();
    let any_of = |argument, values: &[u64]| -> Result<Vec<SeccompRule>, seccompiler::Error> {
        let rule = |value: &u64| only_if(argument, SeccompCmpOp::Eq, *value);
        values.iter().map(rule).collect()
    };
    let executable = u64::from(libc::PROT_EXEC.unsigned_abs());
    for call in MAPPING_CALLS {
        rules.insert(
            call,
            vec![only_if(2, SeccompCmpOp::MaskedEq(executable), 0)?],
        );
    }
    let mut requests = any_of(1, &REQUESTS)?;
    requests.push(only_if(
        1,
        SeccompCmpOp::MaskedEq(REQUEST_TYPE),
        KVM_REQUESTS,
    )?);
    rules.insert(libc::SYS_ioctl, requests);
    let thread = u64::from(libc::CLONE_THREAD.unsigned_abs());
    rules.insert(
        libc::SYS_clone,
        vec![only_if(0, SeccompCmpOp::MaskedEq(thread), thread)?],
    );
    // Signals may go only to threads of this process.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, any_of(0, &[own])?);
    let commands = FILE_COMMANDS.map(|command| u64::from(command.unsigned_abs()));
    rules.insert(libc::SYS_fcntl, any_of(1, &commands)?);
    // socket(2) is not needed, because sockets arrive over the control socket. A socket pair connects this process only
    // to itself.
    let unix = u64::from(libc::AF_UNIX.unsigned_abs());
    rules.insert(libc::SYS_socketpair, any_of(0, &[unix])?);
    // Only the timeouts of the control socket. Other options, such as attaching a BPF filter, are forbidden.
    rules.insert(libc::SYS_setsockopt, timeouts()?);
    // sendto may send only to the connected peer: the address must be null.
    rules.insert(libc::SYS_sendto, only_if_null(4)?);
    // Naming the thread of a further vCPU.
    let set_name = u64::from(libc::PR_SET_NAME.unsigned_abs());
    rules.insert(libc::SYS_prctl, any_of(0, &[set_name])?);
    Ok(rules)
}

/// The two options that set a socket's timeouts.
fn timeouts() -> Result<Vec<SeccompRule>, seccompiler::Error> {
    let equal = |argument, value: i32| {
        let value = u64::from(value.unsigned_abs());
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
    };
    let rule = |option| {
        let conditions = vec![equal(1, libc::SOL_SOCKET)?, equal(2, option)?];
        Ok(SeccompRule::new(conditions)?)
    };
    [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO]
        .into_iter()
        .map(rule)
        .collect()
}

/// Allows a call if its pointer argument is null.
fn only_if_null(argument: u8) -> Result<Vec<SeccompRule>, seccompiler::Error> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    Ok(vec![SeccompRule::new(vec![condition])?])
}

/// Allows a call if the lower 32 bits of its argument match.
fn only_if(
    argument: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompRule, seccompiler::Error> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}
