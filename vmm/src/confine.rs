//! Confinement: the privileges that this process drops before it reads its first request. A guest that takes over the
//! VMM has the rights of a user that owns nothing and has no capability. It can open no file by path, start no program,
//! reach no network, signal or trace no other process, and make no page executable.
//!
//! ```text
//! limits         no core dump; limits on descriptors and on file size
//! user           a user and a group for this VM alone, no supplementary groups
//! capabilities   none, and none to regain
//! dumpable       off: processes of the same user cannot trace it or read its files in /proc
//! landlock       nothing by path; no abstract socket and no signal outside this process
//! seccomp        the system calls of a running machine, with checked arguments where they matter; any other kills
//! ```
//! The client opened everything that the VM needs and sends it over the control socket. After confinement the process
//! has those descriptors, KVM through them, and its memory.
//!
//! Another VM uses the TAP after this process exits, so this process must neither reconfigure the TAP nor leave another
//! process with its descriptor. Therefore TUNSETOFFLOAD is the only permitted ioctl that configures a TAP, descriptors
//! cannot be sent, and no process can be forked.

mod filter;
mod search;

use std::{fs::File, io, sync::OnceLock};

use crate::sys;
use caps::{CapSet, CapsHashSet};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetStatus,
    Scope,
};
use nix::{
    sys::{
        prctl,
        resource::{Resource, setrlimit},
    },
    unistd::{Gid, Uid, setgroups, setresgid, setresuid},
};

/// Reasons why the process could not be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    #[error("cannot close inherited descriptors")]
    Descriptors(#[source] io::Error),
    #[error("cannot set the process's limits")]
    Limits(#[source] nix::Error),
    /// The process is not root, or the id is not usable.
    #[error("cannot become user {user}")]
    User {
        /// The user and group id.
        user: u32,
        #[source]
        source: nix::Error,
    },
    #[error("cannot open /proc/self/pagemap")]
    Pagemap(#[source] io::Error),
    #[error("cannot drop capabilities")]
    Capabilities(#[source] caps::errors::CapsError),
    #[error("cannot make the process undumpable")]
    Dumpable(#[source] nix::Error),
    #[error("cannot apply the Landlock ruleset")]
    Landlock(#[source] landlock::RulesetError),
    #[error("cannot install the seccomp filter (is the kernel built with CONFIG_SECCOMP_FILTER?)")]
    Filter(#[source] seccompiler::Error),
    /// A jump in the filter is longer than 255 instructions: the list of system calls is too long (a bug).
    #[error("the seccomp filter has a jump that is too long")]
    Jumps,
}

/// Limit on open descriptors: more than the vsock device's streams and pending clients and the VM's own files need.
const DESCRIPTORS: u64 = 1024;
/// Limit on a file's size in bytes: more than the largest VM's memory file or any template's layer.
const FILE_BYTES: u64 = 64 << 30;

/// The layers of the confinement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layer {
    Limits,
    User,
    Capabilities,
    Dumpable,
    Landlock,
    Seccomp,
}

impl Layer {
    /// The order in which the layers are applied. Most layers need a capability or system call that a later one
    /// removes.
    const ALL: [Self; 6] = [
        Self::Limits,
        Self::User,
        Self::Capabilities,
        Self::Dumpable,
        Self::Landlock,
        Self::Seccomp,
    ];

    fn apply(self, user: Option<u32>) -> Result<(), ConfineError> {
        match self {
            Self::Limits => limit(),
            Self::User => user.map_or(Ok(()), become_user),
            Self::Capabilities => drop_capabilities(),
            Self::Dumpable => make_undumpable(),
            Self::Landlock => restrict_paths(),
            Self::Seccomp => filter::install(),
        }
    }

    /// Whether to apply the layer. Only builds for the confinement prover can leave one out.
    #[cfg(not(feature = "weaken"))]
    fn wanted(self) -> bool {
        true
    }

    /// Whether to apply the layer: the confinement prover lists the layers to apply in CUBE_VMM_LAYERS, separated by
    /// commas. If the variable is not set, all layers are applied.
    #[cfg(feature = "weaken")]
    fn wanted(self) -> bool {
        let name = match self {
            Self::Limits => "limits",
            Self::User => "uid",
            Self::Capabilities => "capabilities",
            Self::Dumpable => "dumpable",
            Self::Landlock => "landlock",
            Self::Seccomp => "seccomp",
        };
        std::env::var("CUBE_VMM_LAYERS").map_or(true, |list| list.split(',').any(|l| l == name))
    }
}

/// The open /proc/self/pagemap, see [`pagemap`].
static PAGEMAP: OnceLock<File> = OnceLock::new();

/// This process's /proc/self/pagemap. [`confine`] opens it first, because a confined process cannot open it; an
/// unconfined process opens it here.
///
/// # Errors
/// Returns an error if the file cannot be opened.
pub(crate) fn pagemap() -> io::Result<&'static File> {
    match PAGEMAP.get() {
        Some(file) => Ok(file),
        None => {
            let file = File::open("/proc/self/pagemap")?;
            Ok(PAGEMAP.get_or_init(|| file))
        }
    }
}

/// Closes all inherited descriptors except standard input, output and error. Must be called before the process opens
/// any file.
///
/// # Errors
/// Returns [`ConfineError::Descriptors`] if the kernel has no close_range (before Linux 5.9).
pub fn close_inherited() -> Result<(), ConfineError> {
    sys::close_inherited().map_err(ConfineError::Descriptors)
}

/// Permanently drops the privileges that the machine does not need. If `user` is given, the process takes that user id
/// and the group id with the same number. The process must have only one thread; the threads of further vCPUs start
/// later and inherit the confinement.
///
/// # Errors
/// Returns [`ConfineError`] for the step that failed. The process must then exit.
pub fn confine(user: Option<u32>) -> Result<(), ConfineError> {
    if Layer::Capabilities.wanted() {
        keep_only_what_changes_users()?;
    }
    // Opened without capabilities: with CAP_SYS_ADMIN the file would reveal the physical addresses of the pages.
    pagemap().map_err(ConfineError::Pagemap)?;
    Layer::ALL
        .into_iter()
        .filter(|layer| layer.wanted())
        .try_for_each(|layer| layer.apply(user))
}

fn limit() -> Result<(), ConfineError> {
    let limits = [
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_NOFILE, DESCRIPTORS),
        (Resource::RLIMIT_FSIZE, FILE_BYTES),
    ];
    limits
        .into_iter()
        .try_for_each(|(limit, value)| setrlimit(limit, value, value))
        .map_err(ConfineError::Limits)
}

fn become_user(user: u32) -> Result<(), ConfineError> {
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    setgroups(&[])
        .and_then(|()| setresgid(gid, gid, gid))
        .and_then(|()| setresuid(uid, uid, uid))
        .map_err(|source| ConfineError::User { user, source })
}

/// Drops all effective capabilities except those that the next steps need, and, with CAP_SETPCAP, empties the bounding
/// set.
fn keep_only_what_changes_users() -> Result<(), ConfineError> {
    let needed = [
        caps::Capability::CAP_SETUID,
        caps::Capability::CAP_SETGID,
        caps::Capability::CAP_SETPCAP,
    ];
    let held = caps::read(None, CapSet::Permitted).map_err(ConfineError::Capabilities)?;
    let keep: CapsHashSet = needed.into_iter().filter(|c| held.contains(c)).collect();
    if keep.contains(&caps::Capability::CAP_SETPCAP) {
        // With an empty bounding set no capability can be regained, not even by a program with file capabilities.
        caps::clear(None, CapSet::Bounding).map_err(ConfineError::Capabilities)?;
    }
    caps::set(None, CapSet::Effective, &keep).map_err(ConfineError::Capabilities)
}

fn drop_capabilities() -> Result<(), ConfineError> {
    for set in [
        CapSet::Ambient,
        CapSet::Inheritable,
        CapSet::Effective,
        CapSet::Permitted,
    ] {
        caps::clear(None, set).map_err(ConfineError::Capabilities)?;
    }
    Ok(())
}

fn make_undumpable() -> Result<(), ConfineError> {
    prctl::set_dumpable(false).map_err(ConfineError::Dumpable)
}

/// Applies a ruleset that allows nothing. A kernel with an older Landlock, or none, enforces only part of the ruleset.
/// This is logged and not an error, because the user, the dumpable flag and the seccomp filter enforce the same
/// restrictions.
fn restrict_paths() -> Result<(), ConfineError> {
    let abi = ABI::V6;
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(abi)))
        .and_then(|rules| rules.scope(Scope::from_all(abi)))
        .and_then(|rules| rules.create())
        .and_then(|rules| rules.restrict_self())
        .map_err(ConfineError::Landlock)?;
    if status.ruleset != RulesetStatus::FullyEnforced {
        eprintln!(
            "cube-vmm: this kernel enforces the Landlock ruleset only in part ({:?}); user, capabilities and seccomp filter are in force",
            status.ruleset
        );
    }
    Ok(())
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

    use nix::libc;
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

    /// Environment variable that names the action for the child process below.
    const ATTEMPT: &str = "CUBE_VMM_TEST_ATTEMPT";

    /// Does nothing unless the test below started this process.
    #[test]
    fn child_that_tries_a_forbidden_action() {
        let Ok(attempt) = std::env::var(ATTEMPT) else {
            return;
        };
        confine(None).unwrap();
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
            // isatty(3) issues TCGETS, an ioctl that is not allowed.
            "request" => drop(std::io::stdin().is_terminal()),
            "descriptor" => send_descriptor(),
            "file" => drop(File::open("/dev/null")),
            "connection" => drop(UnixStream::connect("/nowhere")),
            "signal" => drop(nix::sys::signal::kill(nix::unistd::getppid(), None)),
            "lock" => drop(nix::fcntl::fcntl(
                std::io::stdin(),
                nix::fcntl::FcntlArg::F_SETLK(&libc::flock {
                    l_type: 0,
                    l_whence: 0,
                    l_start: 0,
                    l_len: 0,
                    l_pid: 0,
                }),
            )),
            other => panic!("unknown attempt {other}"),
        }
    }

    fn send_descriptor() {
        let (near, _far) = UnixStream::pair().unwrap();
        let (socket, message) = (near.as_raw_fd(), [IoSlice::new(b"x")]);
        let rights = [ControlMessage::ScmRights(&[socket])];
        let _killed_before = sendmsg::<()>(socket, &message, &rights, MsgFlags::empty(), None);
    }

    #[test]
    fn a_forbidden_system_call_kills_the_process() {
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
            "file",
            "connection",
            "signal",
            "lock",
        ] {
            assert_eq!(run(attempt).signal(), Some(libc::SIGSYS), "{attempt}");
        }
    }
}
