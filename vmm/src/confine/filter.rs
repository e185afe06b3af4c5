//! The system calls of a running machine, and the filter that ends the process at any other.
//!
//! ```text
//! by number      search     allowed · absent · judged · the process ends
//! by arguments   seccompiler's program, for those that are judged
//! ```
//! The kernel runs a new filter once for each system call number there is, to remember which are always allowed. A
//! chain of comparisons, as seccompiler makes, costs a start a quarter of a millisecond for that; see [`super::search`].

use std::collections::BTreeMap;

use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use super::{
    ConfineError,
    search::{self, Verdict},
};

/// System calls of a running machine, whatever their arguments.
const CALLS: [i64; 54] = [
    // The guest runs, and is waited for; with ioctl below.
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
    // Threads of further vCPUs, locks, signals; with clone and tgkill below.
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
    // Memory; with mmap and mprotect below.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    // Disks, console, the register page's memory.
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
    // Control socket and streams of the guest; with socketpair and sendto below. No sendmsg: it can send
    // descriptors.
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_close,
    // What an open file is, random numbers, and the rest of a process's life.
    libc::SYS_fstat,
    libc::SYS_getrandom,
    libc::SYS_membarrier,
];

/// Requests of ioctl by the byte that says whose they are (`linux/ioctl.h`): all of KVM's.
const REQUEST_TYPE: u64 = 0xff00;
const KVM_REQUESTS: u64 = 0xae00;
/// Requests of ioctl, one by one: what a stream does not wait for, what a TAP is, and what frames the guest's
/// driver takes.
const REQUESTS: [libc::Ioctl; 3] = [libc::FIONBIO, libc::TUNGETIFF, libc::TUNSETOFFLOAD];

/// Commands of fcntl: a copy of a descriptor, its flags (debug builds look at them), whether it blocks, and whom its
/// readiness kicks. The last is F_SETOWN_EX, which the C library's headers lack; the kernel sends the signal with
/// this user's rights.
const FILE_COMMANDS: [i32; 5] = [
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    15,
];

/// Calls by which memory could become executable: allowed without that right (argument 2 of both).
const MAPPING_CALLS: [i64; 2] = [libc::SYS_mmap, libc::SYS_mprotect];

/// Calls that a filter cannot judge, because what they do is behind a pointer. They are as absent as on an older
/// kernel: the C library then uses clone, and does without a file's metadata.
const ABSENT: [i64; 3] = [libc::SYS_clone3, libc::SYS_statx, libc::SYS_newfstatat];

/// Installs the filter, for this thread and those that it starts.
pub(super) fn install() -> Result<(), ConfineError> {
    let judged = judged().map_err(ConfineError::Filter)?;
    let verdicts = verdicts(judged.keys().copied());
    let program = by_arguments(judged).map_err(ConfineError::Filter)?;
    let program = search::before(program, &verdicts).ok_or(ConfineError::Jumps)?;
    seccompiler::apply_filter(&program).map_err(ConfineError::Filter)
}

fn verdicts(judged: impl Iterator<Item = i64>) -> BTreeMap<i64, Verdict> {
    let allowed = CALLS.into_iter().map(|call| (call, Verdict::Allowed));
    let absent = ABSENT.into_iter().map(|call| (call, Verdict::Absent));
    let judged = judged.map(|call| (call, Verdict::Judged));
    allowed.chain(absent).chain(judged).collect()
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

/// What the arguments of a call must be.
fn judged() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::Error> {
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
    // Signals to this process's own threads alone.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, any_of(0, &[own])?);
    let commands = FILE_COMMANDS.map(|command| u64::from(command.unsigned_abs()));
    rules.insert(libc::SYS_fcntl, any_of(1, &commands)?);
    // Sockets come over the control socket; a pair is a stream whose other end is this process's own.
    let unix = u64::from(libc::AF_UNIX.unsigned_abs());
    rules.insert(libc::SYS_socketpair, any_of(0, &[unix])?);
    // How long the control socket waits, and no filter of the kernel's own.
    rules.insert(libc::SYS_setsockopt, timeouts()?);
    // To whoever the socket is connected to, and nobody else.
    rules.insert(libc::SYS_sendto, only_if_null(4)?);
    // A further vCPU's thread has a name.
    let set_name = u64::from(libc::PR_SET_NAME.unsigned_abs());
    rules.insert(libc::SYS_prctl, any_of(0, &[set_name])?);
    Ok(rules)
}

/// The two options by which a socket gets deadlines.
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

/// Allows a call if its argument, a pointer, is null.
fn only_if_null(argument: u8) -> Result<Vec<SeccompRule>, seccompiler::Error> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    Ok(vec![SeccompRule::new(vec![condition])?])
}

/// Allows a call if its argument compares to the value, as 32 bits.
fn only_if(
    argument: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompRule, seccompiler::Error> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}
