//! The jail: what this process gives up before it reads its first request. A guest that takes over the VMM has
//! the rights of a user that owns nothing, without a capability; it finds no file by path, no program to start,
//! no network, no other process to signal or trace, no page of its own making to run.
//!
//! ```text
//! limits         no core dump, so many descriptors, files of so many bytes
//! user           a user and group of this VM's own, no further group
//! capabilities   none, nor any to regain
//! dumpable       nobody of the same user may trace it or open what /proc has of it
//! landlock       nothing by path; no abstract socket and no signal beyond this process
//! seccomp        the system calls of a running machine, with arguments where they matter; any other kills
//! ```
//! All that the VM needs was opened by the client and comes over the control socket. What is left is those
//! descriptors, KVM by way of them, and memory.
//!
//! The TAP is used again by another VM when this process is gone, so it must stay as it is and nobody else may have
//! it: of its ioctls one is left, a descriptor cannot be sent away, and no process can be made that outlives this one.

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

/// Why the process could not be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// What was inherited.
    #[error("cannot close inherited descriptors")]
    Descriptors(#[source] io::Error),
    /// A limit.
    #[error("cannot set the process's limits")]
    Limits(#[source] nix::Error),
    /// Not root, or an unusable number.
    #[error("cannot become user {user}")]
    User {
        /// The user and group that was asked for.
        user: u32,
        /// The cause.
        #[source]
        source: nix::Error,
    },
    /// The list of this process's own pages.
    #[error("cannot open /proc/self/pagemap")]
    Pagemap(#[source] io::Error),
    /// The kernel keeps capabilities in place.
    #[error("cannot give up capabilities")]
    Capabilities(#[source] caps::errors::CapsError),
    /// The kernel refuses prctl.
    #[error("cannot make the process undumpable")]
    Dumpable(#[source] nix::Error),
    /// The kernel knows Landlock and refuses the rules.
    #[error("cannot install Landlock's rules")]
    Landlock(#[source] landlock::RulesetError),
    /// The filter cannot be made or installed.
    #[error("cannot install the system call filter (is the kernel built with seccomp filters?)")]
    Filter(#[source] seccompiler::Error),
    /// The list of system calls is too long for its filter (a bug).
    #[error("the system call filter has jumps that are too long")]
    Jumps,
}

/// Streams of the vsock device, clients that have not asked yet, and the VM's own files are fewer.
const DESCRIPTORS: u64 = 1024;
/// Larger than the memory file of the largest VM, and than any layer that a template has.
const FILE_BYTES: u64 = 64 << 30;

/// The layers, one by one.
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
    /// In the order in which they are applied: each needs rights that a later one takes.
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

    /// Whether this process gets it: always, but in the prover's builds.
    #[cfg(not(feature = "weaken"))]
    fn wanted(self) -> bool {
        true
    }

    /// Whether this process gets it, as the prover says.
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

/// This process's list of its own pages; see [`pagemap`].
static PAGEMAP: OnceLock<File> = OnceLock::new();

/// What /proc/self/pagemap says of this process. A confined process cannot open it any more and has it open.
///
/// # Errors
/// It cannot be opened.
pub(crate) fn pagemap() -> io::Result<&'static File> {
    match PAGEMAP.get() {
        Some(file) => Ok(file),
        None => {
            let file = File::open("/proc/self/pagemap")?;
            Ok(PAGEMAP.get_or_init(|| file))
        }
    }
}

/// Closes what whoever started this process had open beside standard input, output and error. To be called before
/// anything is opened.
///
/// # Errors
/// The kernel has no close_range (before Linux 5.9).
pub fn close_inherited() -> Result<(), ConfineError> {
    sys::close_inherited().map_err(ConfineError::Descriptors)
}

/// Gives up what the machine does not need, for good, and becomes `user` and the group of the same number if it
/// is given. The process must have one thread; threads of further vCPUs are started later and inherit it all.
///
/// # Errors
/// See [`ConfineError`]; the process must then not go on.
pub fn confine(user: Option<u32>) -> Result<(), ConfineError> {
    if Layer::Capabilities.wanted() {
        keep_only_what_changes_users()?;
    }
    // Without capabilities: with them it would tell where in the host's memory the pages lie.
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

/// Gives up all capabilities in force but those that the next steps need.
fn keep_only_what_changes_users() -> Result<(), ConfineError> {
    let needed = [
        caps::Capability::CAP_SETUID,
        caps::Capability::CAP_SETGID,
        caps::Capability::CAP_SETPCAP,
    ];
    let held = caps::read(None, CapSet::Permitted).map_err(ConfineError::Capabilities)?;
    let keep: CapsHashSet = needed.into_iter().filter(|c| held.contains(c)).collect();
    if keep.contains(&caps::Capability::CAP_SETPCAP) {
        // None can be regained, not even by a program with a file capability.
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

/// Rules that allow nothing. A kernel that knows less of Landlock, or nothing, gives less of it; then that is
/// said once, for the layers above and below hold the same on their own.
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
            "cube-vmm: this kernel applies Landlock {:?}; the other layers of the jail are in force",
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

    /// Which forbidden thing the child below tries.
    const ATTEMPT: &str = "CUBE_VMM_TEST_ATTEMPT";

    /// Does nothing unless it was started by the test after it.
    #[test]
    fn child_that_tries_something_forbidden() {
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
            // TCGETS, on whatever descriptor.
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
            "file",
            "connection",
            "signal",
            "lock",
        ] {
            assert_eq!(run(attempt).signal(), Some(libc::SIGSYS), "{attempt}");
        }
    }
}
