//! Network namespaces that act as a host and an outside network for one command, and disappear when it ends.
//!
//! ```text
//! this process, its server and VMs            namespace "outside"
//! up0 192.0.2.2 ───────── veth ───────────    out0 192.0.2.1
//! TAPs of sandboxes                           lo: every address of some blocks
//! ```
//! The real host stays unchanged, no matter how the command ends.

mod plain;
mod sys;

use std::{fs, fs::File, io, net::Ipv4Addr, os::fd::AsRawFd, process::Command, thread};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
    unistd::gettid,
};

pub use plain::PlainNetwork;
pub use sys::open_tap;

/// Name of the uplink.
pub const UPLINK: &str = "up0";
/// Name of the uplink's other end, in the outside namespace.
pub const OUTSIDE: &str = "out0";
/// Address of the uplink.
pub const HOST4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

/// A failed step of creating namespaces or configuring their networks.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot {step}; this needs root, namespaces, a bpffs and the program {program} ({package})"
)]
pub struct WorldError {
    step: String,
    program: &'static str,
    package: &'static str,
    #[source]
    source: io::Error,
}

pub fn failed(step: impl Into<String>) -> impl FnOnce(io::Error) -> WorldError {
    failed_with("ip", "package iproute2", step)
}

/// Like [`failed`], but for a step that needs a program other than `ip`.
pub fn failed_with(
    program: &'static str,
    package: &'static str,
    step: impl Into<String>,
) -> impl FnOnce(io::Error) -> WorldError {
    let step = step.into();
    move |source| WorldError {
        step,
        program,
        package,
        source,
    }
}

/// A network namespace. It exists while this file is open, even if it contains no process.
#[derive(Debug)]
pub struct Namespace(File);

impl Namespace {
    /// Creates a namespace and brings its loopback interface up.
    ///
    /// # Errors
    /// Returns an error if the process may not create namespaces, or if `ip` is missing or fails.
    pub fn new() -> Result<Self, WorldError> {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET)?;
            ip("link set lo up")?;
            File::open("/proc/thread-self/ns/net")
        };
        thread::scope(|scope| scope.spawn(make).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            .map(Self)
            .map_err(failed("create a network namespace"))
    }

    /// Path of the namespace. Programs can use it while this process runs and this file is open.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Moves an interface of the current namespace here.
    ///
    /// # Errors
    /// Returns an error if `ip` fails.
    pub fn adopt(&self, interface: &str) -> io::Result<()> {
        ip(&format!("link set {interface} netns {}", self.path()))
    }

    /// Runs `work` on a new thread in the namespace.
    ///
    /// # Errors
    /// Returns an error if the thread cannot enter the namespace, or if `work` fails.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        let work = || {
            setns(&self.0, CloneFlags::CLONE_NEWNET)?;
            work()
        };
        thread::scope(|scope| scope.spawn(work).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Moves this process permanently into a new network namespace and a new mount namespace. Its only uplink leads to the
/// returned namespace, which accepts traffic to every address in `blocks` (IPv4 or IPv6) as local. The process must
/// have only one thread, because other threads would stay behind.
///
/// # Errors
/// Returns a [`WorldError`] that names the step that failed.
pub fn enter<'a>(blocks: impl IntoIterator<Item = &'a str>) -> Result<Namespace, WorldError> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)
        .map_err(io::Error::from)
        .map_err(failed("enter a new network namespace"))?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .map_err(io::Error::from)
        .map_err(failed("make mounts private"))?;
    // Pinned BPF objects disappear with the last process in the namespace.
    mount(
        Some("bpf"),
        "/sys/fs/bpf",
        Some("bpf"),
        MsFlags::empty(),
        none,
    )
    .map_err(io::Error::from)
    .map_err(failed("mount a bpffs at /sys/fs/bpf"))?;
    let outside = Namespace::new()?;
    build_outside(&outside, blocks)?;
    let lines = format!(
        "link set lo up\n\
         address add {HOST4}/29 dev {UPLINK}\n\
         address add 2001:db8:1::2/64 dev {UPLINK} nodad\n\
         link set {UPLINK} up\n\
         route add default via 192.0.2.1\n\
         route add default via 2001:db8:1::1\n"
    );
    ip(&lines).map_err(failed("configure the namespace of the host"))?;
    Ok(outside)
}

/// Moves this process permanently into a new network namespace that has only a loopback interface. Needs no external
/// program. The process must have only one thread, because other threads would stay behind.
///
/// # Errors
/// Returns a [`WorldError`] if the namespace cannot be created or its loopback interface cannot be brought up.
pub fn alone() -> Result<(), WorldError> {
    unshare(CloneFlags::CLONE_NEWNET)
        .map_err(io::Error::from)
        .and_then(|()| sys::loopback_up())
        .map_err(failed("enter a new network namespace"))
}

fn build_outside<'a>(
    outside: &Namespace,
    blocks: impl IntoIterator<Item = &'a str>,
) -> Result<(), WorldError> {
    let host = gettid();
    let mut lines = format!(
        "link add {OUTSIDE} type veth peer name {UPLINK} netns {host}\n\
         address add 192.0.2.1/29 dev {OUTSIDE}\n\
         address add 2001:db8:1::1/64 dev {OUTSIDE} nodad\n\
         link set {OUTSIDE} up\n"
    );
    for block in blocks {
        lines += &format!("route add local {block} dev lo\n");
    }
    outside
        .within(|| {
            ip(&lines)?;
            settings(&[
                ("ipv4/conf/all/rp_filter", "0"),
                ("ipv4/conf/default/rp_filter", "0"),
                // Lets servers listen on IPv6 addresses that are routed here but not assigned to an interface.
                ("ipv6/ip_nonlocal_bind", "1"),
            ])
        })
        .map_err(failed("configure the outside namespace"))
}

/// Writes each value to its file below /proc/sys/net, in the namespace of this thread.
pub fn settings(values: &[(&str, &str)]) -> io::Result<()> {
    values
        .iter()
        .try_for_each(|(name, value)| fs::write(format!("/proc/sys/net/{name}"), value))
}

/// Runs `ip` once for each line, with the words of the line as arguments, in the namespace of this thread. Stops at the
/// first error.
pub fn ip(lines: &str) -> io::Result<()> {
    lines.lines().try_for_each(|line| run("ip", line))
}

/// Runs a program with the words of a line as its arguments, in the namespace of this thread.
pub fn run(program: &str, line: &str) -> io::Result<()> {
    let done = Command::new(program)
        .args(line.split_whitespace())
        .output()?;
    if done.status.success() {
        Ok(())
    } else {
        let stderr = String::from_utf8_lossy(&done.stderr);
        Err(io::Error::other(format!(
            "{program} {line}: {}",
            stderr.trim()
        )))
    }
}
