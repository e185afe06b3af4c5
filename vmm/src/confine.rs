//! What this process gives up before guest code runs: capabilities, new privileges, and every system call
//! that a running machine does not make. A guest that takes over the VMM finds no program to start, no
//! network, no other process to trace, no mount, no module, no page of its own making to run.
//!
//! It is done once, when a VM has been built and its files are open. What is left: the descriptors of this
//! VM, files by path with the rights of the user it runs as (snapshots are written by path), and memory.
//!
//! The TAP is used again by another VM when this process is gone, so it must stay as it is and nobody else may have
//! it: of its ioctls one is left, a descriptor cannot be sent away, and no process can be made that outlives this one.

use std::collections::BTreeMap;

use caps::{CapSet, Capability, CapsHashSet};
use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// Why the process could not be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// The kernel keeps capabilities in place.
    #[error("cannot give up capabilities")]
    Capabilities(#[source] caps::errors::CapsError),
    /// The filter cannot be made or installed.
    #[error("cannot install the system call filter (is the kernel built with seccomp filters?)")]
    Filter(#[source] seccompiler::Error),
}

/// System calls of a running machine, whatever their arguments.
const CALLS: [i64; 76] = [
    // The guest runs, and is waited for; with ioctl below.
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_ctl,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_setitimer,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    // Threads of further vCPUs, locks, signals; with clone below.
    libc::SYS_clone3,
    libc::SYS_futex,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_tgkill,
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
    libc::SYS_copy_file_range,
    libc::SYS_sendfile,
    // Control socket and streams of the guest; with socket below. No sendmsg: it can send descriptors.
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_socketpair,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_fcntl,
    libc::SYS_dup,
    libc::SYS_close,
    // Snapshots: a directory made beside its place and renamed; a file alone is linked, to replace nothing.
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_fstat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_getdents64,
    libc::SYS_mkdir,
    libc::SYS_rename,
    libc::SYS_linkat,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_rmdir,
    libc::SYS_readlink,
    libc::SYS_getcwd,
    libc::SYS_getrandom,
    libc::SYS_membarrier,
];

/// Requests of ioctl by the byte that says whose they are (`linux/ioctl.h`): all of KVM's.
const REQUEST_TYPE: u64 = 0xff00;
const KVM_REQUESTS: u64 = 0xae00;
/// Requests of ioctl, one by one: what a stream does not wait for, and what frames the guest's driver takes.
const REQUESTS: [libc::Ioctl; 2] = [libc::FIONBIO, libc::TUNSETOFFLOAD];

/// Calls by which memory could become executable: allowed without that right (argument 2 of both).
const MAPPING_CALLS: [i64; 2] = [libc::SYS_mmap, libc::SYS_mprotect];

/// Gives up what the machine does not need, for good. Threads of further vCPUs are started later and inherit it.
///
/// # Errors
/// See [`ConfineError`]; the process must then not run guest code.
pub(crate) fn confine() -> Result<(), ConfineError> {
    drop_capabilities()?;
    // In this order: under the second one no further filter can be installed.
    for filter in [no_clone3(), filter()] {
        let program = filter.map_err(ConfineError::Filter)?;
        seccompiler::apply_filter(&program).map_err(ConfineError::Filter)?;
    }
    Ok(())
}

/// Gives up all capabilities of the calling thread but the one that lets a snapshot be written into a
/// directory of another user.
///
/// # Errors
/// See [`ConfineError`].
fn drop_capabilities() -> Result<(), ConfineError> {
    let kept = Capability::CAP_DAC_OVERRIDE;
    let held = caps::has_cap(None, CapSet::Permitted, kept).map_err(ConfineError::Capabilities)?;
    let keep: CapsHashSet = held.then_some(kept).into_iter().collect();
    let empty = CapsHashSet::new();
    let sets = [
        (CapSet::Inheritable, &empty),
        (CapSet::Effective, &keep),
        (CapSet::Permitted, &keep),
    ];
    for (set, left) in sets {
        caps::set(None, set, left).map_err(ConfineError::Capabilities)?;
    }
    Ok(())
}

/// A filter cannot see what clone3 is to make. Without it the C library uses clone.
fn no_clone3() -> Result<BpfProgram, seccompiler::Error> {
    let filter = SeccompFilter::new(
        [(libc::SYS_clone3, Vec::new())].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS.unsigned_abs()),
        TargetArch::x86_64,
    )?;
    Ok(BpfProgram::try_from(filter)?)
}

fn filter() -> Result<BpfProgram, seccompiler::Error> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        CALLS.iter().map(|call| (*call, Vec::new())).collect();
    let executable = u64::from(libc::PROT_EXEC.unsigned_abs());
    for call in MAPPING_CALLS {
        rules.insert(
            call,
            vec![only_if(2, SeccompCmpOp::MaskedEq(executable), 0)?],
        );
    }
    let of_kvm = only_if(1, SeccompCmpOp::MaskedEq(REQUEST_TYPE), KVM_REQUESTS);
    let requests = REQUESTS.iter().map(|r| only_if(1, SeccompCmpOp::Eq, *r));
    let requests = requests.chain([of_kvm]).collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_ioctl, requests);
    let thread = u64::from(libc::CLONE_THREAD.unsigned_abs());
    rules.insert(
        libc::SYS_clone,
        vec![only_if(0, SeccompCmpOp::MaskedEq(thread), thread)?],
    );
    // A guest's stream to the host ends at a unix socket; there is no other family.
    let unix = u64::from(libc::AF_UNIX.unsigned_abs());
    rules.insert(libc::SYS_socket, vec![only_if(0, SeccompCmpOp::Eq, unix)?]);
    // A further vCPU's thread has a name.
    let set_name = u64::from(libc::PR_SET_NAME.unsigned_abs());
    rules.insert(
        libc::SYS_prctl,
        vec![only_if(0, SeccompCmpOp::Eq, set_name)?],
    );
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        TargetArch::x86_64,
    )?;
    Ok(BpfProgram::try_from(filter)?)
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{IoSlice, IsTerminal},
        os::{
            fd::AsRawFd,
            unix::{
                net::UnixStream,
                process::{CommandExt, ExitStatusExt},
            },
        },
        process::{Command, ExitStatus},
    };

    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

    /// Which forbidden thing the child below tries.
    const ATTEMPT: &str = "CUBE_VMM_TEST_ATTEMPT";

    /// Does nothing unless it was started by the test after it.
    #[test]
    fn child_that_tries_something_forbidden() {
        let Ok(attempt) = std::env::var(ATTEMPT) else {
            return;
        };
        confine().unwrap();
        match attempt.as_str() {
            "nothing" => {
                let thread = std::thread::Builder::new().name("vcpu1".into());
                thread.spawn(|| {}).unwrap().join().unwrap();
                let (near, _far) = UnixStream::pair().unwrap();
                near.set_nonblocking(true).unwrap();
            }
            "program" => drop(Command::new("/bin/true").exec()),
            "network" => drop(std::net::UdpSocket::bind("127.0.0.1:0")),
            "mount" => drop(nix::mount::umount("/nowhere")),
            "process" => drop(Command::new("/bin/true").status()),
            // TCGETS, on whatever descriptor.
            "request" => drop(std::io::stdin().is_terminal()),
            "descriptor" => send_descriptor(),
            other => panic!("unknown attempt {other}"),
        }
    }

    fn send_descriptor() {
        let (near, _far) = UnixStream::pair().unwrap();
        let (socket, message) = (near.as_raw_fd(), [IoSlice::new(b"x")]);
        let rights = [ControlMessage::ScmRights(&[socket])];
        let _never = sendmsg::<()>(socket, &message, &rights, MsgFlags::empty(), None);
    }

    #[test]
    fn what_a_machine_does_not_need_ends_the_process() {
        let own = std::env::current_exe().unwrap();
        let run = |attempt: &str| -> ExitStatus {
            Command::new(&own)
                .args(["child_that_tries", "--test-threads=1"])
                .env(ATTEMPT, attempt)
                .status()
                .unwrap()
        };
        assert!(run("nothing").success());
        for attempt in [
            "program",
            "network",
            "mount",
            "request",
            "process",
            "descriptor",
        ] {
            assert_eq!(run(attempt).signal(), Some(libc::SIGSYS), "{attempt}");
        }
    }
}
