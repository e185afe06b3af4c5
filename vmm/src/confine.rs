//! Confinement: the privileges that this process drops before it reads its first request. A guest that takes over the
//! VMM has the rights of a user that owns nothing and has no capability. It can open no file by path, start no program,
//! reach no network, signal or trace no other process, and make no page executable.
//!
//! Its layers are those of [`jail`], with a user and a group for this VM alone. The seccomp filter allows the system calls
//! of a running machine, with checked arguments where they matter; any other kills.
//!
//! The client opened everything that the VM needs and sends it over the control socket. After confinement the process
//! has those descriptors, KVM through them, and its memory.
//!
//! Another VM uses the TAP after this process exits, so this process must neither reconfigure the TAP nor leave another
//! process with its descriptor. Therefore TUNSETOFFLOAD is the only permitted ioctl that configures a TAP, descriptors
//! cannot be sent, and no process can be forked.

mod filter;
mod search;

use std::{fs::File, io, sync::OnceLock};

use jail::{Identity, Jail, JailError, Layer, Network, RulesetStatus};
use nix::sys::resource::Resource;

use crate::sys;

/// Reasons why the process could not be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    #[error("cannot close inherited descriptors")]
    Descriptors(#[source] io::Error),
    #[error("cannot open /proc/self/pagemap")]
    Pagemap(#[source] io::Error),
    #[error("cannot make the seccomp filter")]
    Filter(#[source] jail::filter::Error),
    /// A jump in the filter is longer than 255 instructions: the list of system calls is too long (a bug).
    #[error("the seccomp filter has a jump that is too long")]
    Jumps,
    #[error(transparent)]
    Jail(#[from] JailError),
}

/// Limit on open descriptors: more than the vsock device's streams and pending clients and the VM's own files need.
const DESCRIPTORS: u64 = 1024;
/// Limit on a file's size in bytes: more than the largest VM's memory file or any template's layer.
const FILE_BYTES: u64 = 64 << 30;

/// Whether to apply a layer. Only builds for the confinement prover can leave one out.
#[cfg(not(feature = "weaken"))]
fn wanted(_: Layer) -> bool {
    true
}

/// Whether to apply a layer: the confinement prover lists the layers to apply in CUBE_VMM_LAYERS, separated by commas. If
/// the variable is not set, all layers are applied.
#[cfg(feature = "weaken")]
fn wanted(layer: Layer) -> bool {
    let name = match layer {
        Layer::Limits => "limits",
        Layer::User => "uid",
        Layer::Capabilities => "capabilities",
        Layer::Dumpable => "dumpable",
        Layer::Landlock => "landlock",
        Layer::Seccomp => "seccomp",
    };
    std::env::var("CUBE_VMM_LAYERS").map_or(true, |list| list.split(',').any(|l| l == name))
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
    if wanted(Layer::Capabilities) {
        jail::keep_only_what_changes_users()?;
    }
    // Opened without capabilities: with CAP_SYS_ADMIN the file would reveal the physical addresses of the pages.
    pagemap().map_err(ConfineError::Pagemap)?;
    let jail = Jail {
        limits: &[
            (Resource::RLIMIT_NOFILE, DESCRIPTORS, DESCRIPTORS),
            (Resource::RLIMIT_FSIZE, FILE_BYTES, FILE_BYTES),
        ],
        identity: user.map(|user| Identity { user, group: user }),
        network: Network::Nothing,
        filters: &[filter::compile()?],
    };
    let landlock = jail.enter_layers(wanted)?;
    if landlock != RulesetStatus::FullyEnforced {
        eprintln!(
            "cube-vmm: this kernel enforces the Landlock ruleset only in part ({landlock:?}); user, capabilities and seccomp filter are in force"
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
