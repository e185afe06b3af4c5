//! What the proxy gives up before it reads a byte of a guest: its user, its capabilities, all files, and every system call
//! that only a program in other hands would make.

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
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

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

/// System calls that the proxy never makes after its start. An attempt ends the process: the code is not its own any more.
const FORBIDDEN: [i64; 41] = [
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_open,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_open_by_handle_at,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_rename,
    libc::SYS_renameat2,
    libc::SYS_mkdir,
    libc::SYS_link,
    libc::SYS_symlink,
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

fn filter() -> Result<(), seccompiler::Error> {
    let rules: BTreeMap<i64, _> = FORBIDDEN.map(|call| (call, Vec::new())).into();
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::KillProcess,
        TargetArch::x86_64,
    )?;
    let program = BpfProgram::try_from(filter)?;
    seccompiler::apply_filter(&program)
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
